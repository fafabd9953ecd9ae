"""Records of the workload, the machine and the timing."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records.graph import TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload: a model, its inputs and how they were made."""

    model_id: str
    phase: str
    dtype: str
    device: str
    batch: int
    seq_len: int
    """Tokens, or image patches' source size for vision models; 0 where it does not apply."""
    seed: int
    revision: str = ""
    weights: str = "random"
    """``hub``, ``local``, ``random`` or ``user`` (a factory or a live model made them)."""
    layers: int | None = None
    """Set when the layer count was cut for a quick look."""
    total_layers: int | None = None
    inputs: tuple[tuple[str, TensorMeta], ...] = ()
    parameter_bytes: int = 0
    parameter_count: int = 0
    context: int = 0
    """Tokens in the KV cache before the step (decode); 0 where there is no cache."""
    new_tokens: int = 0
    """Tokens made by ``generate``; 0 for a single step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine. Host names, users and variables are left out on purpose."""

    device_name: str
    device_kind: str
    """``cuda`` or ``cpu``."""
    capability: str = ""
    """``9.0``; empty on a CPU."""
    device_memory_bytes: int = 0
    python: str = ""
    torch: str = ""
    triton: str = ""
    transformers: str = ""
    cuda: str = ""
    driver: str = ""
    compiler: str = ""
    os: str = ""
    cores: int = 0
    tool: str = ""
    """fusion-advisor's own version."""
    commit: str = ""
    """Of the checkout that it runs from, with ``, changed`` where tracked files were; empty where it is installed."""
    templates: str = ""
    """The first 12 digits of the SHA-256 of its templates and kernels."""
    container: str = ""
    """``docker``, ``podman`` or ``kubernetes``; empty where none shows itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """NVML's readings of the device at one moment; None where NVML gives no value."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    """Milliwatts; on recent devices the mean of the last second."""
    power_limit_mw: int | None = None
    """Milliwatts, of the limit in force."""
    reasons: tuple[str, ...] | None = None
    """Why the clock is not higher, in NVML's words: ``sw_power_cap``, ``hw_thermal_slowdown``, ``gpu_idle`` …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The device's state while steps ran on it, read between timed runs, never within one."""

    samples: tuple[ClockSample, ...] = ()
    missing: str = ""
    """Why there are no samples."""

    @property
    def sm_mhz(self) -> int | None:
        """Median of the samples' SM clocks; None where none was read."""
        known = sorted(sample.sm_mhz for sample in self.samples if sample.sm_mhz is not None)
        return known[len(known) // 2] if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Repeated measurements of one thing; ``times_ns`` keeps them all."""

    times_ns: tuple[int, ...]
    median_ns: int
    ci_low_ns: int
    ci_high_ns: int
    """95 % interval of the median, from order statistics."""
    method: str
    """``wall``, ``cuda_graph`` or ``cuda_events``."""
    clocks: Clocks | None = None
    """None on a CPU, where they were not looked for, and in reports that were written before they were."""
    rest: float = 0.0
    """Idle time before each run, as a multiple of the previous run, so that the power limit does not throttle it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """What wanted the cores when a run could not tell what pays."""

    load_average: float
    """Of the last minute, this run included."""
    cores: int
    """Cores that this process may use."""
    busiest: tuple[tuple[str, float], ...] = ()
    """(program, cores that it used), the busiest others first."""
    wait_policy: str = ""
    """``OMP_WAIT_POLICY`` of this process; empty where it is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooBusy:
    """The noise hid every gain that was expected: no verdict on time."""

    noise_share: float
    """A/A noise over the step."""
    step_ns: int
    """The step without any rewrite."""
    expected_ns: int
    """The largest gain that was expected; 0 where none was."""
    load: MachineLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """What one rank's device did in a traced step of a run on several ranks."""

    rank: int
    device: str
    compute_ns: int
    communication_ns: int
    """Ops between ranks, each counted as on the rank that came to it last."""
    waiting_ns: int
    """The rest of these ops: the rank came earlier than the last one."""
    idle_ns: int
    """Nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """A run on several ranks."""

    way: str
    """``tensor parallel``: the ranks share each step. ``replicas``: each rank runs a whole model."""
    rows: tuple[RankTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Ceilings measured on this device in this run."""

    copy_bytes_per_s: int
    """A large copy, counting bytes read plus bytes written."""
    launch_ns: int
    """The smallest kernel's duration (CPU: the smallest op's)."""
    read_bytes_per_s: int = 0
    """A large sum, which only reads; 0 where it was not measured (on a CPU, in older reports)."""
    write_bytes_per_s: int = 0
    """A large fill, which only writes; 0 where it was not measured."""
    triad_bytes_per_s: int = 0
    """A large addition of two tensors into a third; 0 where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A place where dynamo split the model, or a part it could not capture."""

    reason: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataQuality:
    """Whether the trace can be trusted; every figure is checked before a share is printed."""

    launches: int
    kernels: int
    joined_share: float
    """Share of captured device time that is joined to an op, a module path and a source line."""
    eager_device_ns: int
    captured_device_ns: int
    reconciliation: str
    """One sentence: what makes the captured step's device time differ from eager's."""
    graph_breaks: tuple[GraphBreak, ...] = ()
    warnings: tuple[str, ...] = ()
