"""Finds by bisection the rewrite that makes the whole model's numbers wrong, with the number check only, and drops it by name.

Every rewrite has passed its own check by then, on its own tensors. In the model it can still be wrong: a later layer has other
numbers than the first one, whose tensors were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, BuiltLinear
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.records import ModelCheck, Report, Status, Tolerance
from fusion_advisor.workload.load import LoadedWorkload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One rewrite that can be left out: a graph pass, a fusion, or a linear's kernel."""

    id: str
    graph_pass: str = ""
    fusion: BuiltFusion | None = None
    linear: BuiltLinear | None = None


def find_guilty(suspects: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T] | None:
    """Return what must go so that the rest passes; None where even nothing of it does not pass.

    Each round finds, in about log2(n) checks, two neighbouring prefixes of which the shorter one passes and the longer one does
    not: the last of the longer one goes. Nothing is assumed about how rewrites work together.

    Args:
        suspects: in the order in which they are stacked; all of them together do not pass.
        passes: whether some of them, in that order, do.
    """
    if not passes(()):
        return None
    guilty: list[T] = []
    rest = list(suspects)
    while rest:
        good, bad = 0, len(rest)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if passes(rest[:middle]) else (good, middle)
        guilty.append(rest.pop(bad - 1))
        if passes(rest):
            break
    return guilty


def suspects_of(report: Report, built: Sequence[BuiltFusion], linears: Sequence[BuiltLinear]) -> list[Suspect]:
    """Return the kept rewrites of a report, in the order in which they are stacked."""
    return [
        *(Suspect(id=name, graph_pass=name) for name in kept_passes(report.rewrites)),
        *(Suspect(id=one.planned.id, fusion=one) for one in built),
        *(Suspect(id=one.id, linear=one) for one in linears),
    ]


def guilty_in(
    loaded: LoadedWorkload,
    bench: Bench,
    suspects: Sequence[Suspect],
    eager: Callable[[], Any],
    *,
    tolerance: Tolerance | None,
    check_model: Callable[..., ModelCheck] = check_whole_model,
) -> list[Suspect] | None:
    """Return the rewrites without which the whole model's numbers pass; None where they fail without any.

    Args:
        loaded: the model and its inputs.
        bench: the live capture.
        suspects: all that was kept, in order.
        eager: the original call.
        tolerance: the user's limit instead of eager's own error.
        check_model: compares a whole model's numbers.
    """

    def passes(chosen: Sequence[Suspect]) -> bool:
        variant = bench.build(
            [one.fusion for one in chosen if one.fusion is not None],
            [one.graph_pass for one in chosen if one.graph_pass],
            [one.linear for one in chosen if one.linear is not None],
        )
        model = FusedModel(loaded.model, bench.live.regions, variant.modules, loaded.args, loaded.kwargs)
        with torch.no_grad():
            check = check_model(
                loaded, eager, lambda: model.dispatch(*loaded.args, **loaded.kwargs), bench.live.written, tolerance=tolerance
            )
        return check.is_passed

    return find_guilty(suspects, passes)


def without(report: Report, guilty: Sequence[Suspect], placed: Sequence[str], *, why: str) -> Report:
    """Return a report in which guilty rewrites are out, by name.

    Args:
        report: of what was kept.
        guilty: what goes.
        placed: ids of the fusions that stand in the model now: one that a dropped linear had taken in is back.
        why: where the model's numbers failed with all of them.
    """
    names = {one.id for one in guilty}
    reason = f"right alone, and wrong in the whole model, whose numbers pass without it (found by bisection): {why}"

    def judged(row: Any) -> Any:
        if row.id in names:
            return replace(row, status=Status.WRONG_NUMBERS, reason=reason)
        if row.status is Status.ABSORBED and row.id in placed:
            return replace(row, status=Status.KEPT, reason="the larger kernel that took it in was dropped")
        return row

    words = f"the whole model's numbers did not pass with {', '.join(sorted(names))} ({why}): dropped, the rest stays"
    return replace(
        report,
        fusions=tuple(map(judged, report.fusions)),
        rewrites=tuple(map(judged, report.rewrites)),
        warnings=(*report.warnings, words),
    )
