"""The records that flow between stages: frozen, keyword-only, units in every numeric name.

One direction only: ``capture`` makes a :class:`Capture`, ``chains`` turns it into :class:`Chain` rows, ``library`` answers each
row with a :class:`Match` or a :class:`NoMatch`, ``fuse`` turns those into :class:`Fusion` rows with an outcome, ``report``
shows a :class:`Report`. Nothing here imports torch or anything else of ours, so every record can be read on a laptop; a report
alone finds its notebook view by itself, when one asks for it.

Units: ``_ns`` is an integer number of nanoseconds, ``_bytes`` an integer number of bytes, ``share`` a fraction from 0 to 1,
``speedup`` before divided by after.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Layout of one tensor value; ``stride`` and ``offset`` count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``, ``int64``, ``bool``."""
    offset: int = 0
    device: str = "cpu"
    """Device type only (``cpu``, ``cuda``): a plan is not tied to a device index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """An argument that is the value of another op."""

    index: int
    """:attr:`OpNode.index` of the producer."""


Arg = Ref | int | float | bool | str | None | tuple["Arg", ...]
"""What an op's argument may be; lists become tuples, dtypes become ``dtype:float32``, devices ``device:cuda``."""


class OpClass(enum.StrEnum):
    """What an op is to the advisor; decided by what it computes and aliases, never by a kernel's name."""

    INPUT = "input"
    VIEW = "view"
    """Runs no kernel: its value aliases one of its inputs."""
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    """A reduction or a normalisation along trailing dims (sum, mean, softmax, layer_norm …)."""
    GEMM = "gemm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    MEMORY = "memory"
    """Moves data without arithmetic: copy, cat, gather, embedding, index_copy_."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One ATen op of a captured graph, or one of the graph's inputs."""

    index: int
    """Position in :attr:`Capture.ops`; unique over all regions."""
    region: int
    """Which captured graph it belongs to: 0 unless dynamo broke the graph."""
    target: str
    """``aten.mul.Tensor``; for an input its qualified name (``model.layers.0.mlp.weight``, ``input_ids``)."""
    op_class: OpClass
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    alias_of: int | None = None
    """Index of the op that owns the storage this value lies in (a view, an in-place result); None when it owns its storage."""
    mutates: tuple[int, ...] = ()
    """Indices of the ops whose storage this op writes into."""
    role: str = "op"
    """``op``, ``input``, ``parameter``, ``buffer``, ``constant`` or ``output``."""
    module_path: str = ""
    """``model.layers.0.mlp.act_fn``; empty at the top level."""
    source_file: str = ""
    """Path relative to site-packages or the working directory."""
    source_line: int = 0
    source_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One device kernel (on a CPU: one ATen op call that computes), joined to the op that launched it."""

    kernel_name: str
    op_index: int | None
    """None: the kernel could not be joined to an op."""
    duration_ns: int
    start_ns: int = 0
    """Since the first kernel of the step."""
    stream: int = 0
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    category: str = "other"
    """An :class:`OpClass` value, or ``fused`` for one of our kernels."""
    call_start_ns: int = 0
    """Start of the call that launched it, on ``start_ns``'s clock: mostly negative or ahead of the kernel."""
    call_ns: int = 0
    """How long that call took; 0 where none was seen (a CPU op runs in its own call)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What was run: a model, its inputs and how they were made."""

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
    """Where it was run. Host names, users and variables are left out on purpose."""

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
    """Of the checkout that it runs from, ``, changed`` behind it where tracked files were; empty where it is installed."""
    templates: str = ""
    """The first 12 digits of the SHA-256 of its templates and kernels."""
    container: str = ""
    """``docker``, ``podman`` or ``kubernetes``; empty where none shows itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """What NVML said of the device at one moment; None where it does not say."""

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
    """For so many times as long as the last run the device was idle ahead of each, so that its power limit held none down."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Everything that was seen; enough to find, rank, match and plan with no GPU (``capture.json``)."""

    workload: Workload
    environment: Environment
    ops: tuple[OpNode, ...]
    launches: tuple[Launch, ...]
    """The captured step, op by op: shares come from these."""
    eager_launches: tuple[Launch, ...]
    """The eager step: totals and categories only (``op_index`` is None)."""
    eager_step: Timing
    bandwidth: Bandwidth
    quality: DataQuality
    region_runs: tuple[int, ...] = ()
    """How often a step runs each captured graph; empty: once each."""

    def runs_of(self, op: OpNode) -> int:
        """Return how often a step runs an op."""
        return self.region_runs[op.region] if self.region_runs else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place where a chain occurs."""

    op_indices: tuple[int, ...]
    """In topological order; views that only glue the chain together are included."""
    module_path: str
    source_file: str
    source_line: int
    source_text: str
    device_ns: int
    """Of all its runs in a step."""
    runs: int = 1
    """How often a step runs it: layers with a graph break in them share one graph, and this place in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Equal op chains of different layers, folded into one row."""

    id: str
    """``C1`` … in rank order."""
    ops: tuple[str, ...]
    """Short op names of one site: ``mul``, ``pow``, ``tanh`` …, views left out."""
    sites: tuple[Site, ...]
    launches: int
    """Kernels of all runs of all sites together."""
    device_ns: int
    share: float
    """Of the captured step's device time."""
    moved_bytes: int
    """What the unfused ops read and write, all runs of all sites together."""
    floor_bytes: int
    """Each outer input read once, each outer output written once, all runs of all sites together."""
    floor_ns: int
    """floor_bytes over the measured copy bandwidth, plus one smallest launch for each run of each site."""
    saving_bound_ns: int
    """device_ns − floor_ns: an upper bound, not additive between chains."""
    is_reduction: bool
    dtype: str
    shape: tuple[int, ...]
    """Iteration shape of one site."""

    @property
    def runs(self) -> int:
        """How often a step runs the chain, at all sites together."""
        return sum(site.runs for site in self.sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A kernel for a chain."""

    chain_id: str
    kernel: str
    """Library kernel's name, or ``generated`` name derived from the chain (``mul_pow_tanh_1a2b``)."""
    is_library: bool
    variant: str = ""
    """Which reference of the kernel matched."""
    constants: tuple[tuple[str, float], ...] = ()
    """Constants bound from the graph, e.g. ``("eps", 1e-06)``."""
    operands: tuple[str, ...] = ()
    """What the kernel calls the chain's operands, in the launch's order; empty where they have no names of a kernel's."""
    named_values: tuple[tuple[int, str], ...] = ()
    """The chain's values that are constants of the kernel, counted through its loop nests, and their names."""
    source: str = ""
    """Where the kernel's idea comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMatch:
    """Why a chain gets no kernel; the reason reaches the report."""

    chain_id: str
    code: str
    """``FA6xx``, explained by ``fusion-advisor explain``."""
    reason: str


class Status(enum.StrEnum):
    """What became of a rewrite. A timing may exist only where numbers passed."""

    PLANNED = "planned"
    KEPT = "kept"
    WITHIN_NOISE = "within noise"
    TOO_LITTLE = "too little"
    """Faster for certain, by less than the least gain that was asked for."""
    SLOWER = "slower"
    WRONG_NUMBERS = "wrong numbers"
    BUILD_FAILED = "build failed"
    NOT_MATCHED = "not matched"
    NOT_REPLACED = "not replaced"
    ABSORBED = "absorbed"
    """It was kept, and then a kernel that computes more took its place."""


ULP_ENDS = (0, 1, 2, 4, 16, 256)
"""Upper ends of the bins in which distances are counted, in units in the last place; a last bin holds all beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A limit on errors that the user set, in place of the one that eager's own error sets."""

    rtol: float
    """Times the oracle's magnitude …"""
    atol: float
    """… and this much more."""

    def __str__(self) -> str:
        return f"|error| ≤ {self.atol:g} + {self.rtol:g} × |oracle| for every element (--atol, --rtol)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Error of the fused kernel against a higher-precision oracle, beside the original ops' own error."""

    oracle: str
    """``float64`` or ``float32``."""
    fused_max_abs: float
    eager_max_abs: float
    fused_rel_l2: float
    """‖out − oracle‖ / ‖oracle‖."""
    eager_rel_l2: float
    elements: int
    limit: str
    """The rule in words, with its figures."""
    is_passed: bool
    nonfinite_mismatches: int = 0
    """Positions where exactly one of fused and oracle is NaN or Inf."""
    inputs: str = ""
    """What was tried: ``the site's own tensors; random ×3``."""
    fused_ulps: tuple[int, ...] = ()
    """Elements by distance from the oracle rounded to their own dtype, in the bins of :data:`ULP_ENDS`; what is NaN or infinite
    on either side is in none. Empty for integers and in reports that were written before they were counted."""
    eager_ulps: tuple[int, ...] = ()
    """The same of the original ops."""
    faults: tuple[str, ...] = ()
    """What special values, a second call or guarded memory showed, one sentence each; any of them refuses the kernel."""
    declared: tuple[str, ...] = ()
    """Differences from the original ops on special values that do not refuse it, one sentence each."""
    bit_equal_elements: int = 0
    """Of ``elements``, how many have eager's own bits; a NaN answers any NaN. 0 in reports that were written before."""
    differs_by: str = ""
    """With --exact: why others differ, as far as the kernel's ops tell."""

    @property
    def is_bit_equal(self) -> bool:
        """Whether every element that was compared has eager's bits."""
        return 0 < self.elements == self.bit_equal_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a fusion did to the live model: the answer to "it silently did nothing"."""

    sites_found: int
    sites_matched: int
    sites_replaced: int
    launches_before: int
    launches_after: int
    """Seen in the after-trace under the kernel's name; 0 where nothing was kept."""
    refusals: tuple[str, ...] = ()
    """One sentence for each site that was found and not replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedKernel:
    """A kernel's source as it was built."""

    name: str
    """Entry point, ``fa_<kernel>_<hash>``."""
    backend: str
    """``triton``, ``cuda`` or ``cpp``."""
    path: str
    """Relative to the run directory."""
    source: str
    origin: str
    """``library: gelu_tanh`` or ``generated from the chain``."""
    build_ns: int = 0
    tuning: str = ""
    fast_math: bool = False
    """Whether it may approximate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """One rewrite of kind "chain": from its plan to its verdict."""

    id: str
    """``F1`` …"""
    chain_id: str
    kernel: str
    status: Status
    reason: str
    """Why this status, in one sentence."""
    receipt: Receipt
    rendered: tuple[RenderedKernel, ...] = ()
    numerics: Numerics | None = None
    chain_before: Timing | None = None
    """One site: the original ops, alone."""
    chain_after: Timing | None = None
    """One site: the fused kernel, alone."""
    step_delta_ns: int | None = None
    """Measured, cumulative: the step with this rewrite minus the step before it. Negative is a gain."""
    step_delta_ci_ns: tuple[int, int] | None = None
    predicted_saving_ns: int | None = 0
    """device_ns of the chain, plus its launches × the step's own cost of one (``Report.launch_cost_ns``), minus what its kernel
    took alone × sites. Of a linear's kernel, which has no chain: what the ops and kernels that it stands in for took alone beyond
    what it did, all sites in a row; None where they cannot run so."""
    original_source: tuple[tuple[int, str], ...] = ()
    """Lines of the model's own source around the chain: (line number, text)."""
    kernel_bytes: int | None = None
    """What its kernel has to move at one site, weights among it; None where its chain tells."""

    def __post_init__(self) -> None:
        passed = self.numerics is not None and self.numerics.is_passed
        if (self.chain_after is not None or self.step_delta_ns is not None) and not passed:
            raise ValueError(f"{self.id}: a timing may exist only where numbers passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRewrite:
    """One rewrite that replaces no chain: constant folding, attention masks, merged GEMMs, the CUDA graph around the step."""

    id: str
    """``R1`` …"""
    name: str
    status: Status
    reason: str
    sites: int
    step_delta_ns: int | None = None
    step_delta_ci_ns: tuple[int, int] | None = None
    held_bytes: int = 0
    """Memory that stays occupied while the rewrite is in place: folded constants, copies of merged weights, a graph's pool."""
    predicted_saving_ns: int | None = None
    """What the launches that it takes away were expected to cost; of the CUDA graph what a step launch by launch takes beyond the
    device's own time; of rewrites of GEMMs what they save alone. None where no figure of the run says."""
    rendered: tuple[RenderedKernel, ...] = ()
    """Kernels that it put in: copies of what a GEMM reads and gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenValue:
    """A value made of weights and buffers once, under ``--freeze``: no write to them is seen that torch does not count."""

    name: str
    """In the graph's code."""
    sources: tuple[str, ...]
    """Qualified names of the weights and buffers."""
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that costs time and needs no kernel of ours to mend: a setting, a built-in, a mask."""

    id: str
    """``N1`` …, by gain."""
    title: str
    reason: str
    """What was seen, with its figures."""
    change: str
    """One line of code, or one sentence where no line does it."""
    gain_ns: int
    """Device time of one step that it would save."""
    is_measured: bool
    """False: ``gain_ns`` is an upper bound."""
    share: float
    """gain_ns over the captured step's device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each kernel of one traced step ran, in order of start: lists of one length, one entry for each launch.

    The profiler slows the host down, so gaps between kernels are somewhat longer here than in a step that is not watched.
    """

    kernel: tuple[int, ...]
    """Position of the kernel in :attr:`StepProfile.kernels`."""
    start_ns: tuple[int, ...]
    """Since the first kernel of the step."""
    duration_ns: tuple[int, ...]
    call_start_ns: tuple[int, ...] = ()
    """Start of the launching call on the same clock; empty where no calls were seen (on a CPU)."""
    call_ns: tuple[int, ...] = ()
    """How long the launching call took; empty with ``call_start_ns``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One side of the comparison."""

    label: str
    """``eager``, ``captured`` or ``fused``."""
    device_ns: int
    """Sum of raw kernel events of one step."""
    launches: int
    categories: tuple[tuple[str, int, int], ...]
    """(category, kernels, ns), largest first."""
    kernels: tuple[tuple[str, str, int, int], ...]
    """(kernel name, category, count, ns), largest first."""
    wall: Timing | None = None
    """Un-profiled wall time of the step as the user calls it."""
    rested: Timing | None = None
    """As that, of single runs after rests; only where the power limit holds steps down that run again and again."""
    device: Timing | None = None
    """Un-profiled device time of the step (CUDA graph replay); None on a CPU."""
    peak_memory_bytes: int = 0
    attention: tuple[tuple[str, int, int], ...] = ()
    """What ran scaled_dot_product_attention: (``cudnn``, ``flash``, ``efficient`` or ``math``, kernels, ns), largest first."""
    timeline: Timeline | None = None
    """None in reports that were written before it was kept."""


EAGER, OURS, OURS_COMPILED, COMPILED = "eager", "ours", "ours + torch.compile", "torch.compile "
"""Names of baselines; those of torch.compile's modes begin with the last one."""
GRAPHED = "CUDA graph around the step"
"""Name of the rewrite that is judged by wall time."""
NARROWED, MERGED = "rows that nobody reads are not computed", "linears that read one input run as one GEMM"
EPILOGUE = "activations run in the GEMM that they follow"
ON_TOP = (NARROWED, MERGED, EPILOGUE)
"""Names of the rewrites that are judged on top of the fusions, in that order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One way to run the step, timed in turn with all others of its table."""

    name: str
    """``eager``, ``torch.compile reduce-overhead``, ``ours`` …"""
    step: StepProfile | None = None
    """With its wall time and its peak memory; None where it could not be run."""
    first_call_s: float | None = None
    """Seconds until it gave its first result, in a process that has run the eager model."""
    note: str = ""
    """Why there are no figures, or what they hold for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """From a saved plan to the first fused step, in a process in which the model lies ready and eager has run."""

    phases_s: tuple[tuple[str, float], ...]
    """Seconds by phase, in order; together they are the whole."""
    build_s: float
    """What compiling the kernels took when they were first built; not part of the whole, for compilers keep what they made."""

    @property
    def seconds(self) -> float:
        """The whole."""
        return sum(taken for _, taken in self.phases_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVerdict:
    """Whether the eager step waits for its launches, and the wall time that no remedy can beat."""

    wall_ns: int
    """Median of un-profiled runs."""
    busy_ns: int
    """Time of one step in which at least one kernel ran."""
    idle_ns: int
    """wall − busy: launch gaps, and the host's work before the first kernel."""
    launches: int
    launches_fused: int
    """Left when every chain that has a kernel is one launch."""
    limit_share: float
    """Idle share above which a step is called launch-bound."""
    is_launch_bound: bool
    graph_floor_ns: int
    """A CUDA graph alone: the kernels stay as they are."""
    fusion_floor_ns: int
    """Fusion alone: kernels at their byte floors, and in a launch-bound step the host's cost of the launches that are left."""
    both_floor_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """Whole-model numerics: fused and eager outputs against a higher-precision run of the original."""

    oracle: str
    """``float64 copy``, ``float32 copy``, or ``eager`` where no copy fits."""
    outputs: tuple[str, ...]
    fused_rel_l2: float
    eager_rel_l2: float
    fused_max_abs: float
    eager_max_abs: float
    fused_vs_eager_max_abs: float
    cosine: float
    argmax_agreement: float | None
    """Share of positions where fused and eager choose the same token; None for non-logits."""
    top5_agreement: float | None = None
    """Share of positions where their five likeliest tokens are the same five, in any order; None as above."""
    nonfinite_mismatches: int
    limit: str
    is_passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCheck:
    """A whole call of ``generate``, eager and fused: its two steps, its time, its tokens."""

    prompt_tokens: int
    new_tokens: int
    prefill_before_ns: int
    """Median wall time of the eager prefill step."""
    decode_before_ns: int
    """Median wall time of the first eager decode step."""
    before: Timing
    """Wall time of the eager call."""
    prefill_after_ns: int = 0
    """0 where the prefill was left as it was, or not applied to."""
    decode_after_ns: int = 0
    after: Timing | None = None
    """Wall time of the fused call; None where nothing was applied."""
    original_calls: int = 0
    """Steps of one fused call that ran the original ops."""
    first_divergence: int | None = None
    """Number of the first new token (from 0) that is not eager's; None when all are."""
    logit_gap: float | None = None
    """Eager's logit of its own token there minus that of the other one."""

    @property
    def is_same(self) -> bool:
        """Whether all tokens are eager's."""
        return self.first_divergence is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """Kernels of a training step that serve one module, or the same module of several layers."""

    path: str
    """``model.layers.*.mlp.act_fn``; empty for what belongs to no submodule."""
    modules: int
    """How many modules the row stands for."""
    launches: int
    forward_ns: int
    """Kernel time of the forward pass, all of them together."""
    backward_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training step by its parts: kernel time of the traced step."""

    loss: str
    """What the backward pass begins at, in words."""
    forward_ns: int
    """The loss included."""
    backward_ns: int
    modules: tuple[ModuleTime, ...]
    """Dearest first; together they are the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A limit that ends the command with exit code 10 when a figure is past it."""

    rule: str
    """As it was asked for: ``speedup<1.05``, ``regression>2%``, ``step>15ms``, ``numerics``."""
    state: str
    """``passed``, ``failed``, or ``not judged`` where the figure was not measured."""
    reason: str
    """One sentence with the figures."""
    unit: str = ""
    """Of the figures below: ``ratio``, ``share`` or ``ns``; empty for numerics."""
    limit: float | None = None
    value: float | None = None
    ci: tuple[float, float] | None = None
    """Fails only if the whole interval is past the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The truth of a run; views compute nothing."""

    run_id: str
    config_hash: str
    status: str
    """``profiled``, ``applied``, ``interrupted`` or ``failed``."""
    command: str
    workload: Workload
    environment: Environment
    quality: DataQuality
    bandwidth: Bandwidth
    before: StepProfile
    captured: StepProfile | None
    after: StepProfile | None
    chains: tuple[Chain, ...]
    answers: tuple[Match | NoMatch, ...]
    fusions: tuple[Fusion, ...] = ()
    rewrites: tuple[GraphRewrite, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What would be faster without any kernel of ours."""
    model_check: ModelCheck | None = None
    tolerance: Tolerance | None = None
    """Set by ``--rtol`` and ``--atol``; None: eager's own error is the limit."""
    frozen: tuple[FrozenValue, ...] = ()
    """What is held under the contract of ``--freeze``; empty: the fused model follows every write to a weight or a buffer."""
    keep: str = "paying"
    """``verified``: what stays has passed its checks and was not chosen by time."""
    is_exact: bool = False
    """Set by ``--exact``."""
    noise_share: float | None = None
    """A/A: half-width of the interval of a step compared with itself, over the step."""
    step_before: Timing | None = None
    """The keep rule's own measurement: the captured step without any rewrite …"""
    step_after: Timing | None = None
    """… and with all kept ones, interleaved with it."""
    baseline: str = "eager"
    """What the headline compares with: ``eager``, ``compile`` or ``both``."""
    baselines: tuple[Baseline, ...] = ()
    """The same step run in other ways, where that was measured; shown also where they are the faster ones."""
    warm_up: WarmUp | None = None
    """Of a plan that was kept."""
    launch_cost_ns: int = 0
    """The captured step less the sum of its kernels, per launch: what a launch costs beside its kernel, as this run timed it; at
    most what the smallest kernel takes with its launch."""
    copy_cost_share: float = 1.0
    """In reports of before steps were timed after rests: what the step took longer for a nanosecond of copies in it, measured at
    the device's power limit. What memory-bound kernels save was expected to count for so much."""
    short_launch_cost_share: float = 1.0
    """As that, for launches of the smallest kernel."""
    generation: GenerationCheck | None = None
    """The whole call of ``generate``; the rest of the report then is of its decode step."""
    training: Training | None = None
    """Of phase ``train``: then there are no chains, for nothing is fused."""
    launch_verdict: LaunchVerdict | None = None
    """None on a CPU."""
    gates: tuple[Gate, ...] = ()
    """What ``--fail-on`` asked for, judged."""
    durations_s: tuple[tuple[str, float], ...] = ()
    """Seconds per phase of the run."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """How it was measured, in sentences."""

    def to_frame(self, name: str | None = None) -> pandas.DataFrame:
        """Return the report's rows as a pandas frame; whole numbers are ``Int64``, and NA is what was not measured.

        Args:
            name: ``rewrites``, ``chains``, ``sites``, ``kernels``, ``categories``, ``steps``, ``baselines`` or ``modules``; when
                left out, the table that the terminal prints: rewrites where any was tried, modules of a training step, else
                chains. Units are in the columns' names.

        Raises:
            UsageError: there is no such table.
        """
        from fusion_advisor.report.html.notebook import to_frame

        return to_frame(self, name)

    def __repr__(self) -> str:
        """One line: the whole holds every raw time."""
        return f"<Report {self.run_id}: {self.workload.model_id!r}, {self.status}, {len(self.chains)} chains>"

    def _repr_html_(self, *notes: str) -> str:
        """What Jupyter shows; ``notes`` are sentences that the report does not know."""
        from fusion_advisor.report.html.notebook import to_html

        return to_html(self, *notes)


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
    """Where kernels overlap, the time counts for the one that began first."""
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
    """What one kernel per site must move at least, all sites together; None where the trace does not tell."""
    kernel: str = ""
    """The library kernel whose ops have these names; a hint and no match, for a trace shows no data flow."""
    is_whole: bool = True
    """False: the library kernel's ops are only a part of the chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """What a trace of torch.profiler tells without the model."""

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
    """What this trace cannot tell, one sentence each."""
    warnings: tuple[str, ...] = ()
