"""Profiles of whole steps, before and after, and of the other ways to run them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_advisor.records.run import Timing


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
    """Backends of scaled_dot_product_attention: (``cudnn``, ``flash``, ``efficient`` or ``math``, kernels, ns), largest first."""
    timeline: Timeline | None = None
    """None in reports that were written before it was kept."""


EAGER, OURS, OURS_COMPILED, COMPILED = "eager", "ours", "ours + torch.compile", "torch.compile "
"""Names of baselines; those of torch.compile's modes begin with the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Loss and gradients of one way to run a training step, and how far they are from the truth beside eager's own."""

    oracle: str
    """``float64``, ``float32``: the same step in that dtype. ``eager``: where none fits. ``other random numbers``: the step draws
    some, which each way draws in its own order; then errors are distances from eager's step of one seed, and eager's own are
    those of its steps of other seeds."""
    loss: float
    eager_loss: float
    gradients: int
    """How many were compared."""
    rel_l2: float
    """Root mean square of all gradients' relative errors."""
    eager_rel_l2: float
    worst: str
    """Name of the gradient whose error is the largest multiple of eager's own."""
    worst_rel_l2: float
    worst_eager_rel_l2: float
    reason: str = ""
    """Why it is wrong; empty where it is not."""

    @property
    def is_passed(self) -> bool:
        """Whether loss and gradients are within the limits."""
        return not self.reason


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
    with_optimizer: Timing | None = None
    """Of a training step: the same with a step of fused AdamW behind it, in the same rounds; None where it was not timed."""
    optimizer_peak_bytes: int = 0
    """As the step's peak memory, with AdamW's step behind it and without AdamW's state; 0 on a CPU."""
    check: StepCheck | None = None
    """Of a training step."""

    @property
    def is_right(self) -> bool:
        """Whether nothing tells that it computes something else than eager does."""
        return self.check is None or self.check.is_passed


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """From a saved plan to the first fused step, in a process in which the model lies ready and eager has run."""

    phases_s: tuple[tuple[str, float], ...]
    """Seconds by phase, in order; together they are the whole."""
    build_s: float
    """Time to compile the kernels when they were first built; not part of the whole, because compilers cache their results."""

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


GRADIENT = "gradient of "
"""Begins the name of an output that is a parameter's or an input's gradient."""


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
    eager_argmax_agreement: float | None = None
    """As ``argmax_agreement`` between eager and the oracle: what eager's own rounding changes; None where the oracle is eager."""
    eager_top5_agreement: float | None = None
    """As ``top5_agreement`` between eager and the oracle."""
    nonfinite_mismatches: int
    limit: str
    is_passed: bool
    worst: str = ""
    """Name of the output that the errors are of: it comes nearest to its limit. Empty in reports that were written before."""

    @property
    def gradients(self) -> int:
        """How many of the outputs are gradients."""
        return sum(name.startswith(GRADIENT) for name in self.outputs)


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
class HeldMemory:
    """Tensors of one origin that are alive at the moment when a training step holds most memory."""

    kind: str
    """``activation`` (made by the forward pass), ``gradient`` (of a parameter: it outlives the step) or ``working`` (all other
    memory of the backward pass)."""
    op: str
    """That made them, as the profiler names it; empty for what was made outside every op, a fused kernel's result."""
    module: str
    """Whose forward op it is or belongs to: ``model.layers.*.mlp``; empty where the trace does not tell."""
    tensors: int
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory that a training step holds from its first op to its last, above what was allocated when it began.

    The figures are the allocator's own, recorded while one step ran under the profiler; weights, inputs and the optimizer's state
    are not in them.
    """

    label: str
    """``eager`` or ``fused``."""
    at_share: tuple[float, ...]
    """Moments in order, as shares of the recorded step's time; the one with the peak is among them."""
    activation_bytes: tuple[int, ...]
    """Alive at each moment, made by the forward pass."""
    gradient_bytes: tuple[int, ...]
    """Likewise, gradients of parameters."""
    working_bytes: tuple[int, ...]
    """Likewise, what else the backward pass made."""
    backward_share: float
    """When the backward pass began."""
    peak_share: float
    """When most was held."""
    peak_bytes: int
    holders: tuple[HeldMemory, ...]
    """At the peak, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Ops of the forward pass of which a memory budget has the backward pass compute results again."""

    op: str
    """``addmm``, ``gelu``."""
    module: str
    """``transformer.h.*.mlp``; empty at the top level."""
    ops: int
    """How many of them run again."""
    saved_bytes: int
    """Of their results, what the forward pass keeps no longer, less what it keeps in place of others: then it is negative."""
    again_ns: int
    """What the ones that run again take in the traced forward pass; 0 where none was traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTime:
    """A step of an optimizer over copies of the trained parameters."""

    change: str
    """How it is made: ``torch.optim.AdamW(model.parameters(), fused=True)``."""
    step_ns: int
    """Median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Parts of a training step, and the work that a step does."""

    forward_before_ns: int
    """Median of the eager forward pass with its loss, timed by itself."""
    backward_before_ns: int
    """Median of the eager step, timed in turn with its forward pass, less that."""
    forward_after_ns: int = 0
    """As before, ours; 0 where nothing of ours runs."""
    backward_after_ns: int = 0
    method: str = ""
    """Of the clock, as in :class:`Timing`."""
    optimizer: tuple[OptimizerTime, ...] = ()
    """AdamW as torch makes it by default, then in the other ways it offers; empty where it was not timed."""
    optimizer_note: str = ""
    """Why it was not timed."""
    state_bytes: int = 0
    """That fused AdamW keeps of the trained parameters between steps; 0 where no step with it was timed."""
    tokens: int = 0
    """Labels or inputs of a step by number: rows times positions of a language model, rows of everything else."""
    token_word: str = ""
    """``tokens`` or ``samples``."""
    flops: int = 0
    """Of the eager step's matrix products, convolutions and attention, both passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training step by its parts: kernel time of the traced step."""

    loss: str
    """Start of the backward pass, in words."""
    forward_ns: int
    """The loss included."""
    backward_ns: int
    modules: tuple[ModuleTime, ...]
    """Most expensive first; together they are the whole step."""
    parts: StepParts | None = None
    """Of a run that timed them."""
    memory: tuple[StepMemory, ...] = ()
    """Of the eager step and of ours, where one was recorded."""
    recomputed: tuple[Recomputed, ...] = ()
    """With a memory budget, largest saving first."""

    def eager_alone(self) -> Training:
        """Return the record without what it holds of our step."""
        parts = None if self.parts is None else replace(self.parts, forward_after_ns=0, backward_after_ns=0)
        return replace(self, parts=parts, memory=self.memory[:1], recomputed=())


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
