"""Whether another profiler watches this process: the device's counters serve one at a time."""

from __future__ import annotations

from collections.abc import Mapping

_MARKS = {
    "nsys": ("NSYS_PROFILING_SESSION_ID",),
    "ncu": ("NV_NSIGHT_INJECTION_PORT_BASE", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE"),
}
"""Variables that each tool gives to the process that it starts."""


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
