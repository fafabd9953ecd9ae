"""The trial of padding for a piece of a range: inputs at some sizes, the verification of the plan, the clock, and its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor import units
from fusion_advisor.capture.sizes.one_size import runnable_at
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.shapes.decide_at import example_args
from fusion_advisor.fuse.shapes.padding import PadForm, listed
from fusion_advisor.fuse.shapes.pieces import Box, Served
from fusion_advisor.fuse.shapes.proved_sizes import ProvedSizes
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall
from fusion_advisor.fuse.shapes.show_padding import Given, Judge, Pays, ShownPadding, show_padding
from fusion_advisor.fuse.shapes.time_calls import time_calls
from fusion_advisor.records import Timing
from fusion_advisor.timing.interleaving import CannotRecord, recorded

_SHARE = 1 / 3
"""Of the seconds that were spent on a piece before."""
_LEAST_S = 3.0
_TIMED_S = 0.5
"""For both ways at a point: a graph of larger sizes that pays saves a good part of a call."""
_NEW_ADDRESSES = "each call makes new tensors of its cache, at addresses that no CUDA graph knows"
_MAKES_CACHE = "each call makes a cache, which tells how many tokens it holds"


def tried_padding(
    ranged: RangedCall, opened: OpenCapture, box: Box, points: Sequence[Served], proved: ProvedSizes, instruments: Instruments, *,
    spent_s: float, share: float = _SHARE, most_s: float = math.inf, is_timed: bool = False, names: Sequence[str] | None = None,
) -> ShownPadding:  # fmt: skip
    """Find out which proved sizes of a piece are rounded up, so that calls of several shapes share a CUDA graph.

    Args:
        ranged: the calls.
        opened: the piece's graph.
        box: its sizes.
        points: what runs near which sizes.
        proved: of which sizes it was proved that padding changes nothing.
        instruments: measure and record.
        spent_s: seconds that the piece has taken so far.
        share: of them that the trial gets; it gets three seconds at least.
        most_s: that it gets in any case.
        is_timed: ask the clock too, on a GPU.
        names: of the sizes that a saved plan pads; None: all that are proved.
    """
    if not ranged.may_pad:
        wanted = [one.name for one in box if one.least < one.most] if any(point.module is not None for point in points) else []
        reason = _MAKES_CACHE if ranged.may_record else _NEW_ADDRESSES
        return ShownPadding(refused=tuple((name, reason) for name in wanted))
    given, judge = trial_of(ranged, opened)
    pays = faster_than_launches(instruments) if is_timed else None
    budget_s = max(0.0, min(max(_LEAST_S, share * spent_s), most_s))
    return show_padding(
        opened, box, points, proved, given, judge, pays, names=names, budget_s=budget_s
    )  # fmt: skip


def trial_of(ranged: RangedCall, opened: OpenCapture) -> tuple[Given, Judge]:
    """Return what makes inputs of a piece's graph, and what judges a run in its place.

    Args:
        ranged: the calls.
        opened: the piece's graph; it writes to nothing that it is given.
    """

    def given(sizes: Sizes) -> Sequence[Any]:
        args, kwargs = ranged.at(sizes)
        return example_args(opened, args, kwargs)

    def judge(args: Sequence[Any], run: Callable[..., Any]) -> str:
        check = check_region(runnable_at(opened, args), run)
        return "" if check.is_passed else f"relative error {check.fused_rel_l2:.2e}; the limit is: {check.limit}"

    return given, judge


def faster_than_launches(instruments: Instruments, time_ways: Callable[..., Sequence[Timing]] = time_calls) -> Pays:
    """Return what times a graph of larger sizes, with the copies around it, against the launches of the call itself.

    Args:
        instruments: measure and record.
        time_ways: as :func:`time_calls`.
    """

    def pays(module: GraphModule, args: Sequence[Any], form: PadForm, sizes: Sizes, larger: Sizes) -> str:
        try:
            return _why_slower(instruments, time_ways, module, args, form, sizes, larger)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the graph is freed by now; its pool is given back only when this is asked for

    return pays


def _why_slower(
    instruments: Instruments, time_ways: Callable[..., Sequence[Timing]], module: GraphModule, args: Sequence[Any],
    form: PadForm, sizes: Sizes, larger: Sizes,
) -> str:  # fmt: skip
    given = form.pad(args, larger)
    assert given is not None  # what cannot be padded is not timed
    found: list[Any] = []

    def step() -> None:
        found[:] = [module.forward(*given)]

    try:
        replay = (instruments.record or recorded)(step)
    except CannotRecord as error:
        return f"it cannot be recorded: {error}"

    def padded(*inputs: Any) -> Any:
        fresh = form.pad(inputs, larger)
        assert fresh is not None
        for slot in form.inputs:
            given[slot].copy_(fresh[slot])
        replay()
        return form.cut(_copied(found[0]), sizes)

    ways = [module.forward, padded]
    plain, ours = time_ways(ways, tuple(args), {}, instruments, on_cuda=True, budget_s=_TIMED_S)
    if ours.ci_high_ns < plain.ci_low_ns:
        return ""
    return f"its launches take {units.duration(plain.median_ns)}, the larger graph {units.duration(ours.median_ns)}"


def _copied(results: Any) -> Any:
    """Return results as a caller gets them: in memory of its own."""
    values = [value.clone() if isinstance(value, torch.Tensor) else value for value in listed(results)]
    return type(results)(values) if isinstance(results, tuple | list) else values[0]
