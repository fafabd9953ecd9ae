"""FA2xx: devices, compilers and libraries of this machine."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


class NoCudaDevice(AdvisorError):
    """``--device cuda`` where PyTorch sees no such device."""

    code = "FA201"
    message = "no CUDA device{index} is visible to PyTorch"
    note = "{reason}"
    hint = "{advice}   (`report` works without a GPU; without --device the CPU is used)"
    exit_code = 3


class NoCompiler(AdvisorError):
    """apply on a CPU where there is no C++ compiler."""

    code = "FA203"
    message = "there is no C++ compiler, and kernels for a CPU are C++"
    note = "nothing was measured"
    hint = "install g++ (`apt install g++`) or clang++, or set CXX to a compiler; `fusion-advisor doctor` says what it finds"
    exit_code = 3


class MissingExtra(AdvisorError):
    """A command whose libraries are not installed."""

    code = "FA205"
    message = "`{command}` needs {library}, which is not installed"
    hint = "pip install 'fusion-advisor[{extra}]'"
    exit_code = 3
