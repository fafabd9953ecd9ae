"""NVML through a module of our own that answers as nvidia-ml-py does; the real one where there is a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from fusion_advisor.records import ClockSample
from fusion_advisor.timing import nvml

UUID = "0b6e0b1c-9a3c-4b3e-8f5a-000000000007"
OLD_REASONS, NEW_REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetCurrentClocksEventReasons"
HANDLE = object()


class Refusal(Exception):
    """What nvidia-ml-py raises for every error of NVML."""


class Library:
    """Knows one device. A name in ``answers`` that maps to None is refused, a name left out is one that the module lacks."""

    NVMLError = Refusal
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, answers, *, prefix="GPU-", refusal=""):
        self._answers = answers
        self._name = f"{prefix}{UUID}"
        self._refusal = refusal
        self.open = 0
        self.asked = []

    def nvmlInit(self):
        if self._refusal:
            raise Refusal(self._refusal)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name):
        if name != self._name:
            raise Refusal("Not Found")
        return HANDLE

    def __getattr__(self, name):
        answers = self.__dict__["_answers"]
        if name not in {key if isinstance(key, str) else key[0] for key in answers}:
            raise AttributeError(name)

        def ask(handle, *which):
            assert handle is HANDLE
            self.asked.append(name)
            value = answers[(name, *which) if which else name]
            if value is None:
                raise Refusal("Not Supported")
            return value

        return ask


def answers(**more):
    return {
        ("nvmlDeviceGetClockInfo", 1): 1980,
        ("nvmlDeviceGetClockInfo", 2): 3201,
        ("nvmlDeviceGetTemperature", 0): 47,
        "nvmlDeviceGetPowerUsage": 512_345,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        NEW_REASONS: 0x4 | 0x40,
        **more,
    }


def test_everything_is_read():
    library = Library(answers())
    with nvml.opened(UUID, library) as device:
        assert library.open == 1
        assert device.read() == ClockSample(
            sm_mhz=1980,
            memory_mhz=3201,
            temperature_c=47,
            power_mw=512_345,
            power_limit_mw=700_000,
            reasons=("sw_power_cap", "hw_thermal_slowdown"),
        )
    assert library.open == 0
    assert library.asked[:2] == ["nvmlDeviceGetClockInfo", NEW_REASONS]  # what changes when kernels end comes first


def test_only_questions_are_asked():
    library = Library(answers())
    with nvml.opened(UUID, library) as device:
        device.read()
    assert library.asked and all(name.startswith("nvmlDeviceGet") for name in library.asked)


def test_an_older_driver_calls_the_reasons_otherwise():
    known = answers(**{OLD_REASONS: 0x20})
    del known[NEW_REASONS]
    with nvml.opened(UUID, Library(known)) as device:
        assert device.read().reasons == ("sw_thermal_slowdown",)


def test_what_a_device_does_not_say_is_none_and_the_rest_stays():
    refusing = answers(nvmlDeviceGetPowerUsage=None, **{NEW_REASONS: None})
    with nvml.opened(UUID, Library(refusing)) as device:
        sample = device.read()
    assert (sample.power_mw, sample.reasons, sample.sm_mhz) == (None, None, 1980)


def test_a_part_of_a_device_is_found_too():
    with nvml.opened(UUID, Library(answers(), prefix="MIG-")) as device:
        assert device.read().sm_mhz == 1980


def test_why_nothing_can_be_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(nvml.NoNvml, match="pip install nvidia-ml-py"), nvml.opened(UUID):
        pass
    silent = Library({}, refusal="Driver Not Loaded")
    with pytest.raises(nvml.NoNvml, match=r"did not start \(Driver Not Loaded\)"), nvml.opened(UUID, silent):
        pass
    library = Library(answers())
    with pytest.raises(nvml.NoNvml, match=r"does not know this device \(Not Found\)"), nvml.opened("another", library):
        pass
    assert library.open == 0


def test_an_exception_of_the_caller_s_own_is_passed_on_and_the_library_closed():
    library = Library(answers())
    with pytest.raises(ZeroDivisionError), nvml.opened(UUID, library):
        raise ZeroDivisionError
    assert library.open == 0


def test_nvidia_ml_py_has_what_is_asked_of_it():
    import pynvml

    names = ["nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByUUID", "NVMLError", "NVML_CLOCK_SM", "NVML_CLOCK_MEM"]
    names += ["NVML_TEMPERATURE_GPU", NEW_REASONS, *(key if isinstance(key, str) else key[0] for key in answers())]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    if not torch.cuda.is_available():
        with pytest.raises(nvml.NoNvml, match="did not start"), nvml.opened(UUID):
            pass


def test_the_names_of_bits_are_nvidia_s():
    import pynvml

    for at, name in enumerate(nvml._REASONS):
        assert getattr(pynvml, f"nvmlClocksEventReason{name.title().replace('_', '')}") == 1 << at


def test_bits_by_name_and_unknown_ones_by_number():
    assert nvml.reasons(0) == ()
    assert nvml.reasons(0x1 | 0x8 | 0x80 | 0x200) == ("gpu_idle", "hw_slowdown", "hw_power_brake_slowdown", "0x200")


@pytest.mark.gpu
def test_the_device_here_answers():
    work = torch.randn(8192, 8192, device="cuda")
    with nvml.opened(str(torch.cuda.get_device_properties(0).uuid)) as device:
        for _ in range(20):
            work @ work
        sample = device.read()
    torch.cuda.synchronize()
    assert sample.sm_mhz is not None and 200 < sample.sm_mhz < 4000
    assert sample.temperature_c is not None and 10 < sample.temperature_c < 110
    assert sample.power_mw is not None and sample.power_limit_mw is not None
    assert 20_000 < sample.power_mw < 1.5 * sample.power_limit_mw
    assert sample.reasons is not None and "gpu_idle" not in sample.reasons
