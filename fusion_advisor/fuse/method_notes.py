"""How the figures of a report were measured, in sentences."""

from __future__ import annotations

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.timing.host_timer import CPU_TIME
from fusion_advisor.timing.interleaving import TURN_S


def method_notes(decision: Decision, options: ApplyOptions, bench: Bench) -> tuple[str, ...]:
    """Return how rewrites were timed and chosen.

    Args:
        decision: of the step's timing.
        options: the keep rule's thresholds.
        bench: the live capture.
    """
    how = {
        "cuda_graph": "replays of a CUDA graph of the captured step",
        "cuda_events": "CUDA events around the captured step (it could not be recorded into a CUDA graph)",
        "wall": "wall time of the captured step",
        CPU_TIME: "CPU time of the captured step's busiest thread, which other programs on the machine do not move",
    }[decision.method]
    rounds = len(decision.before.times_ns)
    in_parts = (
        "The call runs Python of the model's own between its captured graphs: verdicts on single rewrites time the graphs alone, "
        "one after the other; the headline times the whole call, and what was kept stays only if that is measurably faster."
    )
    rest = decision.before.rest
    at_limit = (
        "The device's power limit holds the step down where it runs again and again. Single rewrites were timed where it does "
        f"not: the device rested {rest:g} times as long as each run took ahead of the next one. Wall times are of both: of steps "
        f"that run for {TURN_S} s at their turn (the mean of the middle half of them), and of single ones after such a rest."
    )
    if not options.is_timed:
        return (
            "What stays was not chosen by time (--keep verified): every rewrite whose numbers pass stays, faster or slower. "
            f"The times are of a few runs and decide nothing: {how}.",
            f"{len(bench.live.regions)} captured graph(s), run {len(bench.live.in_order())} time(s) in a step.",
        )
    if options.effort == "quick":
        return (
            "Rewrites were chosen by their own times (--quick), and the step was timed for a moment, with all of them against "
            f"none: {how}. "
            "No A/A shows how far the step differs from itself: a gain of a few percent may be none.",
            f"{len(bench.live.regions)} captured graph(s), run {len(bench.live.in_order())} time(s) in a step.",
        )
    return (
        f"Each rewrite was timed on top of the ones before it, interleaved: {how}; {rounds} rounds in the confirmation.",
        *([at_limit] if rest else []),
        f"A rewrite is kept when its whole {options.confidence:.0%} interval saves more than {options.min_gain:.1%} of the step "
        f"that it is put on, and more than the A/A noise ({decision.noise_share:.2%} of it). Several that are faster for "
        "certain, but each too little, are timed as one, by the same rule.",
        f"{len(bench.live.regions)} captured graph(s), run {len(bench.live.in_order())} time(s) in a step.",
        *([] if bench.live.is_whole() else [in_parts]),
    )


def which_step(traced: int) -> str:
    """Say which of the traced steps is shown.

    Args:
        traced: how many were.
    """
    return "the only one traced" if traced == 1 else f"the median of {traced} that were traced"


def written_notes(written: Written) -> tuple[str, ...]:
    """Say what repeating a step that writes (to a KV cache, say) means for the figures.

    Args:
        written: what a call changes outside its result.
    """
    notes = []
    if written.tensors or written.made:
        total = len(written.tensors) + len(written.made)
        notes.append(f"A step writes to {total} tensors among its inputs; what moves on is put back before every run, untimed.")
    counts = sorted({name for _, name, value in written.attributes if type(value) is int})
    if counts:
        notes.append(
            f"A step counts in Python ({', '.join(counts)}), so that each position is a call of its own: what is fused here "
            "holds for this position only."
        )
    return tuple(notes)
