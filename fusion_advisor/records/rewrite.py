"""Rewrites: kernels, their numbers, their verdicts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from fusion_advisor.records.run import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch parameters of a tile kernel; None leaves the backend's own choice."""

    block_cols: int | None = None
    """Columns of a tile; in CUDA kernels, of a pack at most."""
    block_rows: int | None = None
    """Rows of a tile; in CUDA kernels that walk rows in parts, rows under way on a multiprocessor."""
    num_warps: int | None = None
    packs: int | None = None
    """CUDA only: 16-byte packs of a thread; unlike a number of warps it suits rows of any width."""
    cluster: int | None = field(default=None, repr=False)  # kernels without clusters are named after the rest of the repr
    """CUDA only, from compute capability 9.0 on: blocks that share a row; the row then stays in their registers."""


class Status(enum.StrEnum):
    """Verdict on a rewrite. A timing may exist only where numbers passed."""

    PLANNED = "planned"
    KEPT = "kept"
    WITHIN_NOISE = "within noise"
    TOO_LITTLE = "too little"
    """Faster for certain, by less than the least gain that was asked for."""
    UNDECIDED = "undecided"
    """The noise was larger than every gain that was expected; nothing is known of the rewrite's time."""
    SLOWER = "slower"
    WRONG_NUMBERS = "wrong numbers"
    BUILD_FAILED = "build failed"
    NOT_MATCHED = "not matched"
    NOT_REPLACED = "not replaced"
    ABSORBED = "absorbed"
    """It was kept, and then a kernel that computes more took its place."""


class RewriteStage(enum.StrEnum):
    """When a rewrite that replaces no chain is judged, in order."""

    PASS = "pass"
    """Before the fusions, in the step."""
    ON_TOP = "on top"
    """On top of the fusions, in the step."""
    CALL = "call"
    """Last, by the wall time of the whole call."""


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
    """Error of the fused kernel against a higher-precision oracle, and the original ops' own error."""

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
    """Inputs of the check: ``the site's own tensors; random ×3``."""
    fused_ulps: tuple[int, ...] = ()
    """Elements by distance from the oracle rounded to their own dtype, in the bins of :data:`ULP_ENDS`; what is NaN or infinite
    on either side is in none. Empty for integers and in reports that were written before they were counted."""
    eager_ulps: tuple[int, ...] = ()
    """The same of the original ops."""
    faults: tuple[str, ...] = ()
    """Faults shown by special values, a second call or guarded memory, one sentence each; any fault refuses the kernel."""
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
    """Effect of a fusion on the live model: the answer to "it silently did nothing"."""

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
    """Block sizes and warps of its launch and how they were chosen, in words."""
    parameters: Tuning = field(default_factory=Tuning)
    """The launch parameters that were asked for; a saved plan renders the kernel with them again."""
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
    """device_ns of the chain, less the share of it that its kernel took of the ops' time alone, plus the launches that go away ×
    the step's own cost of one (``Report.launch_cost_ns``). Of a linear's kernel, which has no chain: what the ops and kernels in
    its place took alone beyond what it did, all sites in a row; None where they cannot run so."""
    predicted_low_ns: int | None = None
    """Nine of ten savings are measured from here … None in reports that were written before predictions had intervals."""
    predicted_high_ns: int | None = None
    """… to here."""
    timed_with: tuple[str, ...] = ()
    """Ids of the rewrites that were timed in the step together with it; ``step_delta_ns`` is then its share of their change."""
    is_timed_alone: bool = False
    """Whether ``step_delta_ns`` comes from its own times alone: the step was not timed with it, or its noise hides the change."""
    original_source: tuple[tuple[int, str], ...] = ()
    """Lines of the model's own source around the chain: (line number, text)."""
    kernel_bytes: int | None = None
    """Bytes that its kernel moves at one site, weights included; None where its chain has the figure."""
    implausible: str = ""
    """Why the times of one site alone, measured again and again, cannot be right and are left out; empty where they may be."""
    training_pass: str = ""
    """``forward`` or ``backward`` in a training step; empty in any other."""

    def __post_init__(self) -> None:
        passed = self.numerics is not None and self.numerics.is_passed
        if (self.chain_after is not None or self.step_delta_ns is not None) and not passed:
            raise ValueError(f"{self.id}: a timing may exist only where numbers passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRewrite:
    """One rewrite that replaces no chain: constant folding, attention masks, merged GEMMs, the CUDA graph around the step."""

    id: str
    """A stable word, ``merge-gemms``: the only key."""
    name: str
    """Its title, for people."""
    status: Status
    reason: str
    sites: int
    step_delta_ns: int | None = None
    step_delta_ci_ns: tuple[int, int] | None = None
    held_bytes: int = 0
    """Memory that stays occupied while the rewrite is in place: folded constants, copies of merged weights, a graph's pool."""
    saved_bytes: int = 0
    """Memory that a training step takes less at its peak with the rewrite, by the lifetimes of its tensors. Where an option would
    have to allow the rewrite: what it would spare at least."""
    predicted_saving_ns: int | None = None
    """What the launches that it takes away were expected to cost; of the CUDA graph what a step launch by launch takes beyond the
    device's own time and a call of the graph; of rewrites of GEMMs what they save alone. None where no figure of the run says."""
    predicted_low_ns: int | None = None
    """Nine of ten savings are measured from here … None in reports that were written before predictions had intervals."""
    predicted_high_ns: int | None = None
    """… to here."""
    timed_with: tuple[str, ...] = ()
    """As a fusion's."""
    is_timed_alone: bool = False
    """As a fusion's."""
    rendered: tuple[RenderedKernel, ...] = ()
    """Kernels that it put in: copies of what a GEMM reads and gives."""
    stage: RewriteStage = RewriteStage.PASS
    """When it was judged."""
    training_pass: str = ""
    """``forward`` or ``backward`` in a training step, whose rows end in that word; empty in any other."""


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
    """The observation, with its figures."""
    change: str
    """One line of code, or one sentence where no line does it."""
    gain_ns: int
    """Device time of one step that it would save."""
    is_measured: bool
    """False: ``gain_ns`` is an upper bound."""
    share: float
    """gain_ns over the captured step's device time."""
    spared_bytes: int = 0
    """Memory of a step that it would spare at least, where it costs memory and no time: ``gain_ns`` is 0 then."""
