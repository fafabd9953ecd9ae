"""The report of a run: everything above."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_advisor.records.chain import Chain, Match, NoMatch
from fusion_advisor.records.rewrite import Finding, FrozenValue, Fusion, GraphRewrite, Tolerance
from fusion_advisor.records.run import Bandwidth, DataQuality, Environment, RankRun, Timing, TooBusy, Workload
from fusion_advisor.records.shapes import ShapeRanges
from fusion_advisor.records.step import Baseline, Gate, GenerationCheck, LaunchVerdict, ModelCheck, StepProfile, Training, WarmUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The truth of a run; views compute nothing."""

    run_id: str
    config_hash: str
    status: str
    """``profiled``, ``applied``, ``dry run``, ``interrupted`` or ``failed``."""
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
    """Changes that need no kernel of ours."""
    model_check: ModelCheck | None = None
    tolerance: Tolerance | None = None
    """Set by ``--rtol`` and ``--atol``; None: eager's own error is the limit."""
    frozen: tuple[FrozenValue, ...] = ()
    """Values frozen under ``--freeze``; empty: the fused model follows every write to a weight or a buffer."""
    keep: str = "paying"
    """``verified``: what stays has passed its checks and was not chosen by time."""
    effort: str = "usual"
    """``quick``: rewrites were chosen by their own times, without A/A; ``thorough``: each was timed in the step by itself."""
    is_exact: bool = False
    """Set by ``--exact``."""
    noise_share: float | None = None
    """A/A: half-width of the interval of a step compared with itself, over the step."""
    too_busy: TooBusy | None = None
    """Set where the noise hid every gain that was expected; then nothing was kept, and nothing is known."""
    step_before: Timing | None = None
    """The keep rule's own measurement: the captured step without any rewrite …"""
    step_after: Timing | None = None
    """… and with all kept ones, interleaved with it."""
    baseline: str = "eager"
    """Baseline of the headline: ``eager``, ``compile`` or ``both``."""
    baselines: tuple[Baseline, ...] = ()
    """The same step run in other ways, where that was measured; shown also where they are the faster ones."""
    warm_up: WarmUp | None = None
    """Of a plan that was kept."""
    call_overhead: Timing | None = None
    """Host time of a fused call whose graphs return at once: its signature, dynamo's guards, the checks of the model."""
    launch_cost_ns: int = 0
    """The captured step less the sum of its kernels, per launch: time that a launch adds to its kernel in this run; at
    most what the smallest kernel takes with its launch."""
    copy_cost_share: float = 1.0
    """In reports of before steps were timed after rests: what the step took longer for a nanosecond of copies in it, measured at
    the device's power limit. What memory-bound kernels save was expected to count for so much."""
    short_launch_cost_share: float = 1.0
    """As that, for launches of the smallest kernel."""
    generation: GenerationCheck | None = None
    """The whole call of ``generate``; the rest of the report then is of its decode step."""
    training: Training | None = None
    """Of phase ``train``: the eager step by its modules. A profile of it has no chains."""
    ranks: RankRun | None = None
    """Where torchrun started several processes; its report is written by rank 0."""
    shapes: ShapeRanges | None = None
    """Of ``--shapes``: the ranges of sizes that are served, and what was decided in them."""
    launch_verdict: LaunchVerdict | None = None
    """None on a CPU."""
    gates: tuple[Gate, ...] = ()
    """Judged ``--fail-on`` rules."""
    remembered_from: str = ""
    """Run whose chains, traced steps and verdicts this report repeats; empty: all of it was measured in this run."""
    durations_s: tuple[tuple[str, float], ...] = ()
    """Seconds per phase of the run."""
    answer_s: float | None = None
    """Seconds from the loaded model until ours was timed against eager: other ways to run the step come after. None where
    nothing of ours was."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """How it was measured, in sentences."""
    folder: str = ""
    """Directory that holds the run, as it was named. Empty in older reports, and where a program kept none."""

    def __repr__(self) -> str:
        """One line: the whole holds every raw time."""
        return f"<Report {self.run_id}: {self.workload.model_id!r}, {self.status}, {len(self.chains)} chains>"
