"""The run in one sentence: the verdict at the head of every view, and its caveats."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import Fusion, GraphRewrite, Match, Report, Status, Timing, TooBusy
from fusion_advisor.report import baseline_rows, first_screen, shared_rows
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.report.shapes import sentences
from fusion_advisor.report.training import rows as training


@dataclass(frozen=True, slots=True)
class Headline:
    """The run in one sentence, and its caveats."""

    tone: str
    text: str
    points: tuple[str, ...]


def kept_count(report: Report) -> int:
    """How many rewrites of either kind stayed in the model."""
    statuses = [fusion.status for fusion in report.fusions] + [rewrite.status for rewrite in report.rewrites]
    return statuses.count(Status.KEPT)


def is_reverted(report: Report) -> bool:
    """Whether a step with rewrites was measured and the model then given back: the step after is not what the user has."""
    is_measured = report.status == "applied" and report.after is not None and not baseline_rows.is_unchanged(report)
    return is_measured and bool(report.fusions or report.rewrites) and not kept_count(report)


def headline(report: Report) -> Headline:
    """The verdict: bad news first, then what was gained, then what was found."""
    tone, text = _result(report)
    points = first_screen.against_others(report)
    if report.fusions or report.rewrites:
        tried = len(report.fusions) + len(report.rewrites)
        if report.status != "dry run":
            remembered = f", remembered from run {report.remembered_from}" if report.remembered_from else ""
            points.append(f"{kept_count(report)} of {plural(tried, 'rewrite')} kept{remembered}")
    if report.model_check is not None:
        passed = report.model_check.is_passed
        whose = "the limit" if report.tolerance is None else "--rtol and --atol"
        points.append(f"numerics {'✓ within' if passed else '✗ outside'} {whose} ({report.model_check.oracle} as oracle)")
        points += [line] if (line := training.gradient_line(report.model_check)) else []
    elif report.after is not None and not baseline_rows.is_unchanged(report):
        points.append("whole-model numerics were not checked")
    if report.shapes is not None:
        points.append(sentences.summary(report.shapes))
    if failed := [gate.rule for gate in report.gates if gate.state == "failed"]:
        return Headline("loss", f"Gate failed: {', '.join(failed)}. {text}", tuple(points))
    if report.model_check is not None and not report.model_check.is_passed:
        return Headline("loss", f"The numbers changed. {text}", tuple(points))
    if report.status == "failed":
        return Headline("loss", f"The run failed. {text}", tuple(points))
    if report.status == "dry run":
        built = sum(fusion.status is Status.PLANNED for fusion in report.fusions)
        did = f"Dry run: {built} of {plural(len(report.fusions), 'kernel')} built and right in its numbers"
        return Headline("plain", f"{did}; the step was not timed, and the model is as it was. {text}", tuple(points))
    if report.status == "interrupted":
        return Headline("warn", f"The run was interrupted. {text}", tuple(points))
    return Headline(tone, text, tuple(points))


def _result(report: Report) -> tuple[str, str]:
    if training.is_profile(report):
        return "plain", training.profile_sentence(report)
    better = baseline_rows.faster_compile(report)
    if better is not None:
        mode, wall = better
        own, (_, text) = baseline_rows.own_wall(report), _compared_with(report)
        ours = "" if own is None or baseline_rows.is_unchanged(report) else f", ours takes {units.duration(own.median_ns)}"
        step = f"{units.duration(wall.median_ns)} per step ({shared_rows.clock_word(wall)})"
        return "warn", f"Just use torch.compile ({mode}): {step}{ours}. {text}"
    return _compared_with(report)


def _compared_with(report: Report) -> tuple[str, str]:
    """The sentence on the step, against what the run was asked to compare with; that is named in any case."""
    pair = shared_rows.step_pair(report)
    if pair is None:
        with_kernel = {answer.chain_id for answer in report.answers if isinstance(answer, Match)}
        if not report.chains:
            return "plain", "No chain of pointwise or reduction ops was found that could be fused."
        inside = sum(chain.share for chain in report.chains)
        matched = sum(chain.share for chain in report.chains if chain.id in with_kernel)
        text = (
            f"{units.share(inside)} of {shared_rows.device_word(report)} time is in "
            f"{plural(len(report.chains), 'fusible chain')}; "
            f"{len(with_kernel)} of them, {units.share(matched)}, have a kernel."
        )
        return "plain", text
    what, before, after = pair
    if report.too_busy is not None:
        return "warn", f"Could not tell: this machine is too busy. {why_busy(report.too_busy)}"
    if baseline_rows.is_unchanged(report):
        return "plain", f"Nothing paid, so the model was left as it was: {units.duration(before.median_ns)} per step ({what})."
    against_eager = _kept_by_itself(report, _against(report, "eager", "", what, before, after))
    if is_reverted(report):
        return "warn", f"The model was left as it was. The step with all rewrites: {_lowered(against_eager[1])}"
    if report.baseline == "eager":
        return against_eager
    compiled = baseline_rows.best_compile(report)
    if compiled is None or what == "device time":
        return against_eager[0], f"{against_eager[1]} There is no time of torch.compile to compare with."
    against_compile = _against(report, "torch.compile", f" ({compiled[0]})", what, compiled[1], after)
    if report.baseline == "compile":
        return against_compile
    tones = {against_eager[0], against_compile[0]}
    tone = next(tone for tone in ("loss", "warn", "gain") if tone in tones)
    return tone, f"{against_eager[1]} {against_compile[1]}"


def _kept_by_itself(report: Report, found: tuple[str, str]) -> tuple[str, str]:
    """Say what the kept rewrites save by their own times where the whole step's noise hides it: both statements are true."""
    if found[0] != "warn" or not kept_count(report):
        return found
    rows: list[Fusion | GraphRewrite] = [*report.fusions, *report.rewrites]
    saved_ns = -sum(row.step_delta_ns or 0 for row in rows if row.status is Status.KEPT)
    if saved_ns <= 0:
        return found
    whole = found[1].removeprefix("No measurable difference from eager: ")
    return "warn", (
        f"The kept rewrites save {units.duration(saved_ns)} per step, each measured by itself; the whole step varies too "
        f"much to show their sum: {whole}"
    )


def why_busy(found: TooBusy) -> str:
    """Say what hid the gains, in sentences: the noise, what wanted the cores, and what to do."""
    expected = f"; the largest expected gain is {units.duration(found.expected_ns)}" if found.expected_ns else ""
    load = found.load
    names = ", ".join(f"{visible(name, 40)} {cores:.1f} cores" for name, cores in load.busiest)
    policy = (
        "OMP_WAIT_POLICY is PASSIVE: waiting threads sleep."
        if load.wait_policy.upper() == "PASSIVE"
        else "Set OMP_WAIT_POLICY=PASSIVE before Python starts, so that waiting threads sleep."
    )
    return (
        f"The same step timed twice differs by {units.duration(found.noise_share * found.step_ns)} "
        f"({units.share(found.noise_share)}){expected}. Load average {load.load_average:.1f} on {load.cores} cores"
        f"{f'; other programs: {names}' if names else ''}. {policy}"
    )


def _against(report: Report, rival: str, mode: str, what: str, before: Timing, after: Timing) -> tuple[str, str]:
    tone, words = first_screen.compared(before, after, f"{rival}{mode}")
    times = f"{units.duration(before.median_ns)} → {units.duration(after.median_ns)} per {training.step_word(report)} ({what})"
    return tone, f"{words[0].upper()}{words[1:]}: {times}."


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
