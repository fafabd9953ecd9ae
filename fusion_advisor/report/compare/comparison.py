"""Two runs side by side: what differs, what of it is more than noise, and whether they may be compared at all.

A run enters as one of its states: the eager step, the step with the kept rewrites, or the step under torch.compile. Two times of
different runs are never said to differ unless both 95 % intervals, read at their worst, differ by more than either run's own
A/A noise: another day or another process moves milliseconds that a single run's interval knows nothing of. Ratios within one run
do not have that flaw, so the gates judge those by default (:mod:`fusion_advisor.report.compare.gate_rules`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fusion_advisor import units
from fusion_advisor.records import COMPILED, Gate, Report, Status, StepProfile, Timing
from fusion_advisor.report import baseline_rows, clocks, shared_rows
from fusion_advisor.report.compare.rewrites import RewriteChange, rewrite_changes
from fusion_advisor.report.compare.scaling import Scaling, rank_count, scaling
from fusion_advisor.report.headline import kept_count

COMPARE_SCHEMA = "fusion-advisor-compare/1"
TRACE_TOLERANCE_SHARE = 0.02
"""A single traced step has no interval; below this share of the larger side its rows count as unchanged."""

State = Literal["eager", "applied", "compile"]
Verdict = Literal["faster", "slower", "less", "more", "unchanged", "only in A", "only in B", "not compared"]
"""``less`` and ``more`` are of one traced step, which says nothing of the next: only what has an interval is faster or slower."""
STATES: tuple[State, ...] = ("eager", "applied", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs, in the state that is compared."""

    run_id: str
    model_id: str
    state: State
    context: str
    """Model, device, dtype and shapes in one line."""
    command: str
    noise_share: float | None
    kept: int
    """Rewrites in place."""
    numerics: str
    """Error of the whole model's outputs against the oracle; empty where nothing was applied or checked."""
    is_checked: bool
    """Whether the numbers of this state are known: the eager step's are by definition."""
    wrong: tuple[str, ...]
    """Failed checks of the numbers, in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact about the runs that is not the same."""

    name: str
    a: str
    b: str
    is_obstacle: bool
    """Whether times must not be compared across it; otherwise it is only worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """One time on both sides; None where a side has none."""

    group: str
    """``step``, ``category``, ``kernel`` or ``chain``."""
    name: str
    a_ns: int | None
    b_ns: int | None
    delta_ns: int
    """B minus A, a missing side counted as nothing: negative is a gain."""
    delta_ci_ns: tuple[int, int] | None = None
    """Widest range that both 95 % intervals allow; None for a single traced step."""
    a_ci_ns: tuple[int, int] | None = None
    b_ci_ns: tuple[int, int] | None = None
    a_count: int | None = None
    """Launches in the step (of a chain: of all its sites)."""
    b_count: int | None = None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CountChange:
    """Launches or bytes on both sides."""

    name: str
    unit: Literal["launches", "bytes"]
    a: int
    b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """A state's speed over the eager step of its own run; of the eager step itself exactly 1."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that the views of a comparison show."""

    a: Side
    b: Side
    clock: Literal["wall time", "device time", "none"]
    """How the first step row and both speedups were measured."""
    differences: tuple[Difference, ...]
    steps: tuple[TimeChange, ...]
    counts: tuple[CountChange, ...]
    a_speedup: Speedup | None
    b_speedup: Speedup | None
    changes: tuple[TimeChange, ...]
    """Categories, kernels and chains, by how much they changed."""
    rewrites: tuple[RewriteChange, ...]
    caveats: tuple[str, ...]
    scaling: Scaling | None = None
    """Over ranks; None where both runs had one process."""
    gates: tuple[Gate, ...] = ()

    @property
    def obstacles(self) -> tuple[Difference, ...]:
        """Reasons against comparing the times."""
        return tuple(row for row in self.differences if row.is_obstacle)


def state_step(report: Report, state: State) -> StepProfile | None:
    """Return a run's step in one of its states, ``compile`` in torch.compile's fastest mode; None where the run has none."""
    if state != "compile":
        return report.before if state == "eager" else report.after
    steps = [row.step for row in report.baselines if row.name.startswith(COMPILED) and row.step is not None]
    return min((step for step in steps if step.wall), key=lambda step: step.wall.median_ns if step.wall else 0, default=None)


def default_state(report: Report) -> State:
    """The rewritten step where there is one, else the eager one."""
    return "eager" if report.after is None else "applied"


def compare(a: Report, b: Report, a_state: State, b_state: State) -> Comparison:
    """Compare two states; both must exist (:func:`state_step`)."""
    differences = tuple(_differences(a, b))
    is_blocked = any(row.is_obstacle for row in differences)
    a_step, b_step = state_step(a, a_state), state_step(b, b_state)
    if a_step is None or b_step is None:
        raise ValueError("a state that is compared must have been measured")
    noise = max(a.noise_share or 0.0, b.noise_share or 0.0)
    clock = _clock(a, b, a_step, b_step)
    steps = _steps(a, b, a_step, b_step, noise=noise, is_blocked=is_blocked)
    changes = [
        *_changes("category", _by_category(a_step), _by_category(b_step), noise, is_blocked=is_blocked),
        *_changes("kernel", _by_kernel(a_step), _by_kernel(b_step), noise, is_blocked=is_blocked),
    ]
    if a_state == b_state == "eager":
        changes += _changes("chain", _by_chain(a), _by_chain(b), noise, is_blocked=is_blocked)
    weight = _larger_ns if is_blocked else _delta_ns
    changes.sort(key=lambda row: (-weight(row), row.group, row.name))
    return Comparison(
        a=_side(a, a_state),
        b=_side(b, b_state),
        clock=clock,
        differences=differences,
        steps=tuple(steps),
        counts=tuple(_counts(a_step, b_step)),
        a_speedup=speedup(a, a_state, clock),
        b_speedup=speedup(b, b_state, clock),
        changes=tuple(changes),
        rewrites=tuple(
            rewrite_changes(a if a_state == "applied" else None, b if b_state == "applied" else None, is_blocked=is_blocked)
        ),
        caveats=tuple(
            dict.fromkeys(
                (
                    *shared_rows.caveats(a),
                    *shared_rows.caveats(b),
                    *(() if is_blocked else (*_drift(a, b, noise), *_clocks(a_step, b_step))),
                )
            )
        ),
        scaling=None if is_blocked else scaling(a, b, a_step, b_step),
    )


def speedup(report: Report, state: State, clock: str) -> Speedup | None:
    """Return a state's speed over its own run's eager step; None where either was not measured with that clock."""
    step = state_step(report, state)
    if step is None:
        return None
    if state == "eager" or (state == "applied" and shared_rows.is_unchanged(report)):
        return Speedup(ratio=1.0, low=1.0, high=1.0)
    before, after = _timing(report.before, clock), _timing(step, clock)
    if before is None or after is None:
        return None
    ratio, low, high = shared_rows.speedup_bounds(before, after)
    return Speedup(ratio=ratio, low=low, high=high)


def regression(a: Speedup, b: Speedup) -> tuple[float, float, float]:
    """Return by which share B's step takes longer than A's, each measured in its own eager step; with the widest range."""
    return a.ratio / b.ratio - 1, a.low / b.high - 1, a.high / b.low - 1


def _side(report: Report, state: State) -> Side:
    check = report.model_check
    numerics = ""
    if state == "applied" and check is not None:
        sign = "✓" if check.is_passed else "✗"
        numerics = f"{sign} relative L2 {units.error(check.fused_rel_l2)}, eager's own {units.error(check.eager_rel_l2)}"
    wrong = shared_rows.reasons([*report.rewrites, *report.fusions], Status.WRONG_NUMBERS)
    if check is not None and not check.is_passed:
        wrong.append(f"the whole model's outputs are outside the limit: {check.limit}")
    return Side(
        run_id=report.run_id,
        model_id=report.workload.model_id,
        state=state,
        context=shared_rows.context_line(report),
        command=report.command,
        noise_share=report.noise_share,
        kept=kept_count(report) if state == "applied" else 0,
        numerics=numerics,
        is_checked=state == "eager" or (state == "applied" and (check is not None or shared_rows.is_unchanged(report))),
        wrong=tuple(wrong) if state == "applied" else (),
    )


def _differences(a: Report, b: Report) -> Iterable[Difference]:
    x, y = a.workload, b.workload
    e, f = a.environment, b.environment
    facts = (
        ("device", e.device_name, f.device_name, True),
        ("model", x.model_id, y.model_id, True),
        ("dtype", x.dtype, y.dtype, True),
        ("phase", x.phase, y.phase, True),
        ("batch", x.batch, y.batch, True),
        ("sequence length", x.seq_len, y.seq_len, True),
        ("cached tokens", x.context, y.context, True),
        ("new tokens", x.new_tokens, y.new_tokens, True),
        ("layers", x.layers or "all", y.layers or "all", True),
        ("ranks", rank_count(a), rank_count(b), False),
        ("revision", x.revision[:12], y.revision[:12], False),
        ("torch", e.torch, f.torch, False),
        ("triton", e.triton, f.triton, False),
        ("transformers", e.transformers, f.transformers, False),
        ("CUDA", e.cuda, f.cuda, False),
        ("driver", e.driver, f.driver, False),
        ("compiler", e.compiler, f.compiler, False),
        ("fusion-advisor", e.tool, f.tool, False),
        ("its commit", e.commit, f.commit, False),
        ("its templates and kernels", e.templates, f.templates, False),
    )
    for name, left, right, is_obstacle in facts:
        if left != right:
            yield Difference(name=name, a=str(left), b=str(right), is_obstacle=is_obstacle)


def _clocks(a: StepProfile, b: StepProfile) -> tuple[str, ...]:
    sides = (step.wall.clocks if step.wall is not None else None for step in (a, b))
    sentence = clocks.difference("A", next(sides), "B", next(sides))
    return (sentence,) if sentence else ()


def _timing(step: StepProfile, clock: str) -> Timing | None:
    return step.wall if clock == "wall time" else step.device if clock == "device time" else None


def _clock(a: Report, b: Report, a_step: StepProfile, b_step: StepProfile) -> Literal["wall time", "device time", "none"]:
    measured = (a.before, b.before, a_step, b_step)
    if all(step.wall is not None for step in measured):
        return "wall time"
    return "device time" if all(step.device is not None for step in measured) else "none"


def _steps(
    a: Report, b: Report, a_step: StepProfile, b_step: StepProfile, *, noise: float, is_blocked: bool
) -> Iterable[TimeChange]:
    step_label = baseline_rows.step_label
    pairs = [(step_label(a_step.wall), a_step.wall, b_step.wall), ("Step, device only", a_step.device, b_step.device)]
    if a.run_id != b.run_id and (a_step is not a.before or b_step is not b.before):
        pairs += [(f"Eager s{step_label(a.before.wall)[1:]}", a.before.wall, b.before.wall)]
    for name, left, right in pairs:
        if left is None or right is None:
            continue
        low, high = right.ci_low_ns - left.ci_high_ns, right.ci_high_ns - left.ci_low_ns
        threshold = noise * left.median_ns
        verdict: Verdict = "faster" if high < -threshold else "slower" if low > threshold else "unchanged"
        yield TimeChange(
            group="step",
            name=name,
            a_ns=left.median_ns,
            b_ns=right.median_ns,
            delta_ns=right.median_ns - left.median_ns,
            delta_ci_ns=(low, high),
            a_ci_ns=(left.ci_low_ns, left.ci_high_ns),
            b_ci_ns=(right.ci_low_ns, right.ci_high_ns),
            verdict="not compared" if is_blocked else verdict,
        )
    if a_step.device_ns or b_step.device_ns:
        row = _change("step", "Kernel time, one traced step", (0, a_step.device_ns), (0, b_step.device_ns), noise)
        yield _blocked(row) if is_blocked else row


def _counts(a: StepProfile, b: StepProfile) -> Iterable[CountChange]:
    if a.launches or b.launches:
        yield CountChange(name="Kernel launches", unit="launches", a=a.launches, b=b.launches)
    if a.peak_memory_bytes and b.peak_memory_bytes:
        yield CountChange(name="Peak memory", unit="bytes", a=a.peak_memory_bytes, b=b.peak_memory_bytes)


def _by_category(step: StepProfile) -> dict[str, tuple[int, int]]:
    return {name: (count, ns) for name, count, ns in step.categories}


def _by_kernel(step: StepProfile) -> dict[str, tuple[int, int]]:
    return {name: (count, ns) for name, _, count, ns in step.kernels}


def _by_chain(report: Report) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for chain in report.chains:
        name = " → ".join(chain.ops)
        count, ns = found.get(name, (0, 0))
        found[name] = (count + chain.launches, ns + chain.device_ns)
    return found


def _changes(
    group: str, a: dict[str, tuple[int, int]], b: dict[str, tuple[int, int]], noise: float, *, is_blocked: bool
) -> Iterable[TimeChange]:
    for name in dict.fromkeys((*a, *b)):
        row = _change(group, name, a.get(name), b.get(name), noise)
        yield _blocked(row) if is_blocked else row


def _change(group: str, name: str, a: tuple[int, int] | None, b: tuple[int, int] | None, noise: float) -> TimeChange:
    (a_count, a_ns), (b_count, b_ns) = a or (None, None), b or (None, None)
    delta_ns = (b_ns or 0) - (a_ns or 0)
    tolerance_ns = max(TRACE_TOLERANCE_SHARE, noise) * max(a_ns or 0, b_ns or 0)
    verdict: Verdict
    if a is None:
        verdict = "only in B"
    elif b is None:
        verdict = "only in A"
    elif abs(delta_ns) <= tolerance_ns:
        verdict = "unchanged"
    else:
        verdict = "less" if delta_ns < 0 else "more"
    return TimeChange(
        group=group, name=name, a_ns=a_ns, b_ns=b_ns, delta_ns=delta_ns, a_count=a_count, b_count=b_count, verdict=verdict
    )


def _blocked(row: TimeChange) -> TimeChange:
    return replace(row, verdict="not compared")


def _delta_ns(row: TimeChange) -> int:
    return abs(row.delta_ns)


def _larger_ns(row: TimeChange) -> int:
    return max(row.a_ns or 0, row.b_ns or 0)


def _drift(a: Report, b: Report, noise: float) -> Iterable[str]:
    """The control: the same eager step, measured in both runs, should take the same time."""
    if a.before.wall is None or b.before.wall is None or a.run_id == b.run_id or rank_count(a) != rank_count(b):
        return
    left, right = a.before.wall, b.before.wall
    threshold = max(noise, TRACE_TOLERANCE_SHARE) * left.median_ns
    if right.ci_low_ns - left.ci_high_ns > threshold or right.ci_high_ns - left.ci_low_ns < -threshold:
        yield (
            f"The eager step itself changed by {units.relative_change(left.median_ns, right.median_ns)} between the runs: "
            "compare the speedups over each run's own eager step rather than the times."
        )
