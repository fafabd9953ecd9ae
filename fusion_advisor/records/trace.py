"""Records of trace files without their models: of one, and of a fleet."""

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
class TraceRank:
    """One rank's trace of several; compute, communication, waiting and idle add up to its span."""

    rank: int
    trace: str
    """Name of its file."""
    device: str
    span_ns: int
    compute_ns: int
    communication_ns: int
    """Only a collective ran, and all ranks had come to it."""
    waiting_ns: int
    """Only a collective ran, and another rank had not come to it."""
    idle_ns: int
    hidden_ns: int
    """A collective and compute ran at once; part of compute_ns."""
    collectives: int


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
    ranks: tuple[TraceRank, ...] = ()
    """Of a folder with a trace for each rank, whose counts and times all other fields sum up; empty for one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """A trace file, before it is read."""

    url: str
    """As fsspec opens it; a plain path for a local file."""
    size_bytes: int
    version: str
    """Changes with the file: its modification time or its ETag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChain:
    """A chain of one trace, times of the whole trace."""

    ops: str
    """Op names in order, joined by `` → ``."""
    kernel: str
    """The library kernel that computes it; empty where none does, or only a part of it."""
    sites: int
    launches: int
    device_ns: int
    saving_low_ns: int | None
    saving_ns: int | None
    saving_high_ns: int | None
    """What one kernel per site would save; None where the trace does not tell bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """Device time of one class of kernels."""

    category: str
    kernels: int
    device_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePart:
    """One trace, reduced where it was read."""

    digest: str
    """SHA-256 of the file's bytes."""
    url: str
    size_bytes: int
    version: str
    json_bytes: int
    error_code: str = ""
    error: str = ""
    """Why the trace could not be ranked; everything below is then empty."""
    job: str = ""
    model: str = ""
    rank: int = 0
    world_size: int = 1
    gpu: str = ""
    versions: str = ""
    """``torch 2.11; CUDA 13000``, as far as the trace tells."""
    taken_at_ns: int = 0
    """Since 1970; 0 where the trace has no date."""
    steps: int = 0
    read_share: float = 1.0
    """Share of the trace's time that was ranked; below 1 where its events would not have fitted into memory."""
    launches: int = 0
    span_ns: int = 0
    """From the first to the last kernel, all steps and devices."""
    compute_ns: int = 0
    """At least one kernel ran that is no collective."""
    communication_ns: int = 0
    """Only collectives ran."""
    collectives_ns: tuple[int, ...] = ()
    """Duration of each collective, in order. The k-th collective is the same on every rank; the shortest is the transfer."""
    has_shapes: bool = False
    classes: tuple[ClassTime, ...] = ()
    chains: tuple[FleetChain, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its bounds, in GPU-hours."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLink:
    """A trace that a row comes from."""

    url: str
    job: str
    gpu_hours: float
    """Of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRow:
    """One chain over the fleet."""

    ops: str
    kernel: str
    jobs: int
    traces: int
    launches: int
    gpu_hours: float
    share: float
    """Of all GPU-hours."""
    saving: Interval | None
    """None where no trace of it has shapes."""
    saving_share_known: float
    """Share of the chain's time whose traces have shapes; the saving is of this part alone."""
    links: tuple[TraceLink, ...]
    """Traces with the most of it, largest first."""
    models: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A job, a model, a kind of GPU or a day."""

    name: str
    jobs: int
    traces: int
    gpu_hours: float
    chains_share: float
    saving: Interval | None
    idle_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank of a job: shares of its time, which sum to 1."""

    job: str
    rank: int
    traces: int
    span_ns: int
    compute_share: float
    transfer_share: float
    """In collectives, for as long as the fastest rank took."""
    waiting_share: float
    """In collectives, for longer than the fastest rank: waiting for others."""
    idle_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTrace:
    """A trace that could not be ranked."""

    url: str
    code: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """The ranking over all traces."""

    tool: str
    patterns: tuple[str, ...]
    traces: int
    """Ranked; equal files count once."""
    same: int
    """Files whose content another file has too."""
    failed: tuple[FailedTrace, ...]
    jobs: int
    gpu_hours: float
    is_weighted: bool
    """GPU-hours come from --weights; otherwise they are the traces' own device time."""
    unweighted_jobs: tuple[str, ...]
    """Jobs of the traces that --weights does not name; they count nothing."""
    sampled: int
    """Traces of which only some steps were ranked."""
    coverage: tuple[tuple[str, float], ...]
    """(where the time goes, share), all shares sum to 1: chains, gemm, attention …, communication, idle."""
    chains: tuple[ChainRow, ...]
    chains_left_out: int
    by_job: tuple[GroupRow, ...]
    by_model: tuple[GroupRow, ...]
    by_gpu: tuple[GroupRow, ...]
    by_day: tuple[GroupRow, ...]
    """Empty unless traces of two days or more have dates."""
    ranks: tuple[RankRow, ...]
    """Of jobs with more than one rank, the most skewed job first."""
    launch_bound: tuple[GroupRow, ...]
    """Jobs whose GPUs idle for more than 20 % of the time."""
