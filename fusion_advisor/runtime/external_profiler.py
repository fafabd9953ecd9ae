"""Nsight Systems and Nsight Compute: marks what they record, and detects whether they are attached to this process.

The device's counters serve one profiler at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

_MARKS = {
    "nsys": ("NSYS_PROFILING_SESSION_ID",),
    "ncu": ("NV_NSIGHT_INJECTION_PORT_BASE", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE"),
}
"""Variables that each tool gives to the process that it starts."""
NVTX_DOMAIN = "fusion_advisor"
BASELINE_RANGE = "fa:baseline"
"""The NVTX range around the timed runs of the original step."""


def nsys_profile(*, on_cuda: bool) -> str:
    """Return what goes before a command with ``--nvtx``, so that nsys records the timed runs of its original step.

    On a CPU there is no ``cudaProfilerStart`` to wait for: nsys would record nothing. There it waits for the NVTX range, which it
    does for registered strings alone; ours are.
    """
    if on_cuda:
        return "nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop"
    region = f"--nvtx-capture={BASELINE_RANGE}@{NVTX_DOMAIN}"
    return f"nsys profile --trace=nvtx --capture-range=nvtx {region} --capture-range-end=stop"


def attached_profiler(variables: Mapping[str, str]) -> str:
    """Return ``nsys`` or ``ncu`` where the process was started under it; empty where under neither.

    Args:
        variables: the process's environment.
    """
    return next((tool for tool, names in _MARKS.items() if any(variables.get(name) for name in names)), "")


def recorded_by(tool: str, runs: int, step: str) -> str:
    """Say what the tool's own recording holds, for the error that ends such a run."""
    region = f"the {runs} timed runs of the {step}, between cudaProfilerStart and cudaProfilerStop"
    return f"{tool} holds the device's counters; its own recording has {region}"
