"""Clocks, temperature, power and throttle reasons of one device, read through nvidia-ml-py; nothing is ever changed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusion_advisor.records import ClockSample

_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
"""``nvmlClocksEventReason…`` by bit."""


class NoNvml(Exception):
    """NVML cannot be asked; the message says why."""


class Device:
    """One device, while the library is open."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> ClockSample:
        """Ask for all values; the two that change as soon as kernels end come first."""
        library = self._library
        sm = self._number(("nvmlDeviceGetClockInfo",), library.NVML_CLOCK_SM)
        # The first name is the newer one of the same question.
        bits = self._number(("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"))
        return ClockSample(
            sm_mhz=sm,
            memory_mhz=self._number(("nvmlDeviceGetClockInfo",), library.NVML_CLOCK_MEM),
            temperature_c=self._number(("nvmlDeviceGetTemperature",), library.NVML_TEMPERATURE_GPU),
            power_mw=self._number(("nvmlDeviceGetPowerUsage",)),
            power_limit_mw=self._number(("nvmlDeviceGetEnforcedPowerLimit",)),
            reasons=None if bits is None else reasons(bits),
        )

    def _number(self, names: tuple[str, ...], *which: int) -> int | None:
        """Return the answer to one question; None where the library, the driver or the device does not know it."""
        for name in names:
            ask = getattr(self._library, name, None)
            if ask is None:
                continue
            try:
                return int(ask(self._handle, *which))
            except self._library.NVMLError:
                continue
        return None


def reasons(bits: int) -> tuple[str, ...]:
    """Return the names of a mask's bits; a bit that has none here by its number."""
    set_bits = [at for at in range(bits.bit_length()) if bits >> at & 1]
    return tuple(_REASONS[at] if at < len(_REASONS) else f"{1 << at:#x}" for at in set_bits)


@contextmanager
def opened(uuid: str, library: Any = None) -> Iterator[Device]:
    """Open NVML for one device.

    Args:
        uuid: the device's, without NVML's prefix: numbers differ between CUDA and NVML (``CUDA_VISIBLE_DEVICES``).
        library: nvidia-ml-py's module, or a stand-in for it in a test.

    Raises:
        NoNvml: it is not there, does not start, or does not know the device.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError as error:
            raise NoNvml("nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NoNvml(f"NVML did not start ({error})") from error
    try:
        yield Device(library, _handle(library, uuid))
    finally:
        library.nvmlShutdown()


def _handle(library: Any, uuid: str) -> Any:
    """Find a device, or a part of a device (MIG).

    Raises:
        NoNvml: NVML does not know it.
    """
    said: Exception | None = None
    for prefix in ("GPU", "MIG"):
        try:
            return library.nvmlDeviceGetHandleByUUID(f"{prefix}-{uuid}")
        except library.NVMLError as error:
            said = error
    raise NoNvml(f"NVML does not know this device ({said})") from said
