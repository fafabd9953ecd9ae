"""``torch.compile(model, backend="fusion_advisor", dynamic=True)``: one graph with open sizes, decided at its first call's sizes.

Dynamo keeps the guards on sizes and traces again where one fails. In between, kernels of ours are bound to each sizes when they
first come: nothing is traced, lowered or compiled. What paid at the first call's sizes runs at all of them; ``fa.apply`` with
``shapes`` decides at several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.shapes.decide_at import decide_at
from fusion_advisor.fuse.shapes.pieces import Box, Piece
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece, all_sized, build
from fusion_advisor.records import ModelCheck, SizeRange
from fusion_advisor.runtime.environment import measure_bandwidth
from fusion_advisor.runtime.torch_internals import symbolic_sizes

Call = Callable[..., Any]

MOST = 8192
"""The largest size for which kernels are looked at where dynamo knows no bound: wider rows take a kernel of another form."""
_BUDGET_S = 3.0


def optimise_open(
    opened: OpenCapture,
    options: ApplyOptions,
    *,
    check: Callable[[Region, Call], ModelCheck] = check_region,
    instruments: Instruments = MEASURED,
) -> Call:
    """Find, check and choose what pays in a graph with open sizes, at the sizes of its first call.

    Args:
        opened: the graph, with the tensors of a call; nothing writes to them.
        options: of the run.
        check: compares the graph's results with a more precise run.
        instruments: measure, and decide what stays.

    Returns:
        The rewritten graph, which serves all sizes that dynamo's guards admit.

    Raises:
        NothingServes: the original graph has to run; the text says why.
    """
    region = opened.region
    given = tuple(region.example_args)
    device = next(value.device for value in given if isinstance(value, torch.Tensor))
    bandwidth = options.bandwidth or measure_bandwidth(device)
    work = Workpiece(Piece(box=_box(opened), opened=opened))
    decided = decide_at(
        opened, given, options, bandwidth, instruments, Progress(), budget_s=_BUDGET_S,
        only=lambda name: name not in work.by_one_size,
    )  # fmt: skip
    if not decided.fusions and not decided.passes:
        return region.original.forward
    fusions, _ = all_sized(work, decided.fusions)
    work.forget_records()
    try:
        module = build(work, fusions, decided.passes)
    except LooksAtSizes as error:
        raise NothingServes(f"{error} decides by one size") from error
    found = check(decided.region, module.forward)
    if not found.is_passed:
        raise NothingServes(
            f"the graph's results as a whole are too far from {found.oracle}: relative error {found.fused_rel_l2:.2e}, "
            f"eager's own {found.eager_rel_l2:.2e}; the limit is: {found.limit}"
        )
    return _for_these_numbers(module.forward, region.original.forward, dict(opened.numbers))


def _for_these_numbers(ours: Call, original: Call, numbers: dict[int, float]) -> Call:
    """Return a call that runs the original graph where a Python float of the model's is another one than was written in."""
    if not numbers:
        return ours

    def call(*args: Any) -> Any:
        if all(args[slot].item() == number for slot, number in numbers.items()):
            return ours(*args)
        return original(*args)

    return call


class NothingServes(Exception):
    """The original graph has to run; the text says why."""


def _box(opened: OpenCapture) -> Box:
    found = []
    for symbol, name in opened.names.items():
        least, most = symbolic_sizes.range_of(opened.environment, symbol)
        least = max(least, 2)
        found.append(SizeRange(name=name, least=least, most=min(most, MOST) if most >= least else MOST))
    return tuple(found)
