"""Records of a trace file without its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceKernel:
    """All launches of one kernel from one op, in a trace that was made elsewhere."""

    name: str
    op: str
    """Short name of the op that launched it; read off the kernel's name where the trace links none."""
    category: str
    """As in :attr:`Launch.category`."""
    count: int
    device_ns: int
    """Overlapping time counts for the kernel that began first."""
    share: float
    """Of the time in which the device was busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChain:
    """Pointwise and reduction kernels that a trace repeats in one order; whether one kernel may replace them is not known."""

    id: str
    """``C1`` … in rank order."""
    ops: tuple[str, ...]
    """Short op names of one site; ``[gemm]`` where a matrix multiplication runs in between."""
    kernels: tuple[str, ...]
    """Kernel names of the first site, in order, matrix multiplications left out."""
    sites: int
    """In the whole trace, all steps together."""
    launches: int
    device_ns: int
    share: float
    saving_bound_ns: int | None
    """Upper bound, all sites together; None where the trace does not tell the bytes."""
    floor_bytes: int | None
    """Least bytes that one kernel per site moves, all sites together; None where the trace has no shapes."""
    kernel: str = ""
    """The library kernel whose ops have these names; a hint and no match, for a trace shows no data flow."""
    is_whole: bool = True
    """False: the library kernel's ops are only a part of the chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Findings from a torch.profiler trace without the model."""

    trace: str
    """The file, as it was named."""
    device_kind: str
    """``cuda``, or ``cpu`` where the trace shows no device work."""
    device_names: tuple[str, ...]
    tool: str
    events: int
    steps: int
    """Marked in the trace; 0: it has no steps."""
    launches: int
    """Calls that launch one kernel."""
    kernels: int
    """Kernels, copies and fills; on a CPU the op calls that compute."""
    span_ns: int
    """From the first to the last of them, less the time between steps."""
    busy_ns: int
    """Time in which at least one of them ran."""
    joined_share: float
    """Share of busy_ns whose op the trace tells."""
    has_shapes: bool
    categories: tuple[tuple[str, int, int], ...]
    """(category, kernels, ns), largest first."""
    ranked: tuple[TraceKernel, ...]
    """Largest first."""
    ranked_left_out: int
    """Kernels beyond ``--top``."""
    chains: tuple[TraceChain, ...]
    chains_left_out: int
    """Repeated chains beyond ``--top``; those below ``--min-share`` are not looked for."""
    searched_share: float
    """Share of the pointwise and reduction time in which repeats were looked for."""
    bytes_per_s: int | None
    """Fastest rate of any pointwise kernel in the trace whose bytes are known; what the bounds are reckoned with."""
    unknown: tuple[str, ...]
    """Limits of this trace, one sentence each."""
    warnings: tuple[str, ...] = ()
