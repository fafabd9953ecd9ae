"""Clocks, temperature, power and throttle reasons of one device, from the driver's own library; nothing is ever changed.

torch reads the same through a package that is mostly not installed; NVML itself comes with the driver. Signatures and bits are
those of ``nvml.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusion_advisor.records import ClockSample

_LIBRARY = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2
"""``nvmlClockType_t``."""
_ON_DIE = 0
"""``NVML_TEMPERATURE_GPU``."""
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
    """The driver's library cannot be asked; the message says why."""


class Device:
    """One device, while the library is open."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> ClockSample:
        """Ask for everything; what must be seen while kernels run comes first."""
        sm = self._number(ctypes.c_uint, ("nvmlDeviceGetClockInfo",), _SM)
        # The first name is the newer one of the same question.
        bits = self._number(
            ctypes.c_ulonglong, ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        )
        return ClockSample(
            sm_mhz=sm,
            memory_mhz=self._number(ctypes.c_uint, ("nvmlDeviceGetClockInfo",), _MEMORY),
            temperature_c=self._number(ctypes.c_uint, ("nvmlDeviceGetTemperature",), _ON_DIE),
            power_mw=self._number(ctypes.c_uint, ("nvmlDeviceGetPowerUsage",)),
            power_limit_mw=self._number(ctypes.c_uint, ("nvmlDeviceGetEnforcedPowerLimit",)),
            reasons=None if bits is None else reasons(bits),
        )

    def _number(self, kind: type[ctypes.c_uint | ctypes.c_ulonglong], names: tuple[str, ...], *which: int) -> int | None:
        """Return the answer to one question; None where the library or the device does not know it."""
        for name in names:
            ask = getattr(self._library, name, None)
            value = kind()
            if ask is not None and ask(self._handle, *which, ctypes.byref(value)) == 0:
                return int(value.value)
        return None


def reasons(bits: int) -> tuple[str, ...]:
    """Return the names of a mask's bits; a bit that has none here by its number."""
    set_bits = [at for at in range(bits.bit_length()) if bits >> at & 1]
    return tuple(_REASONS[at] if at < len(_REASONS) else f"{1 << at:#x}" for at in set_bits)


@contextmanager
def opened(uuid: str, library: Any = None) -> Iterator[Device]:
    """Open the library for one device.

    Args:
        uuid: the device's, without NVML's prefix: numbers differ between CUDA and NVML (``CUDA_VISIBLE_DEVICES``).
        library: loaded from the system where left out.

    Raises:
        NoNvml: it is not there, does not start, or does not know the device.
    """
    if library is None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise NoNvml(f"{_LIBRARY}, which comes with the driver, cannot be loaded here") from error
    if code := library.nvmlInit_v2():
        raise NoNvml(f"NVML did not start (error {code})")
    try:
        handle = ctypes.c_void_p()
        names = (f"{prefix}-{uuid}".encode() for prefix in ("GPU", "MIG"))
        if all(code := library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) for name in names):
            raise NoNvml(f"NVML does not know this device (error {code})")
        yield Device(library, handle)
    finally:
        library.nvmlShutdown()
