"""Whether rewrites go together: a graph pass may lay a tensor out differently than a kernel of ours was verified for.

Every kernel refuses such a tensor when it is called. That is found out here, before anything is timed, and the rewrite that
causes it is left out with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.fuse.decide.keep_rule import Candidate
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.records import Status


def layout_refusals(bench: Bench, candidates: Sequence[Candidate]) -> dict[str, Verdict]:
    """Run the step once with all rewrites; where a kernel refuses a tensor, add them one by one and leave out each that does.

    Args:
        bench: what its step moves on is put back first.
        candidates: in the order of trying; an earlier one stays where it does not go together with a later one.

    Returns:
        By id the verdict of each that is left out; nearly always none.
    """
    if not candidates or _refusal(bench, candidates) is None:
        return {}
    stay: list[Candidate] = []
    refused = {}
    for candidate in candidates:
        reason = _refusal(bench, [*stay, candidate])
        if reason is None:
            stay.append(candidate)
        else:
            refused[candidate.id] = Verdict(
                id=candidate.id, status=Status.NOT_REPLACED, reason=reason, delta_ns=0, interval_ns=(0, 0), is_timed=False
            )
    return refused


def _refusal(bench: Bench, candidates: Sequence[Candidate]) -> str | None:
    fusions = [candidate.fusion for candidate in candidates if candidate.fusion is not None]
    variant = bench.build(fusions, [candidate.graph_pass for candidate in candidates if candidate.graph_pass])
    bench.live.written.rewind()
    try:
        bench.run(variant)
    except LayoutChanged as change:
        return f"a value inside the model is laid out differently with it than when it was traced ({change})"
    return None
