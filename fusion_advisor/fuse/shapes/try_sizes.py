"""Asks the original model whether it takes the sizes of a range, so that a size that it refuses is an error with its name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion_advisor.capture.sizes.open_capture import Sizes, call_tensors, sizes_of
from fusion_advisor.errors import SizeRejected
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall
from fusion_advisor.records import SizeRange
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.workload.device import is_out_of_memory
from fusion_advisor.workload.load import LoadedWorkload

REFUSALS = (RuntimeError, IndexError, ValueError, AssertionError)
"""What a model raises where it refuses a size."""


def try_ends(loaded: LoadedWorkload, call: RangedCall) -> None:
    """Call the model at both ends of each range: with the smallest other sizes, or the example's where it refuses these.

    Args:
        loaded: the model.
        call: with its ranges.

    Raises:
        SizeRejected: it refuses one of them.
    """
    others = {one.name: one.least for one in call.ranges}
    takes_least = _refusal(loaded, call, others) is None
    if not takes_least:
        others |= sizes_of(call_tensors(call.args, call.kwargs), call.dims) or {}
    for one in call.ranges:
        for size in (one.most,) if takes_least else (one.most, one.least):
            error = _refusal(loaded, call, {**others, one.name: size})
            if error is not None:
                raise _rejected(loaded, call, one, size, others, error) from error


def refuse_sizes(loaded: LoadedWorkload, call: RangedCall, sizes: Sizes) -> None:
    """Say which size the model refuses, where a capture at some sizes has failed for that reason.

    Args:
        loaded: the model.
        call: with its ranges.
        sizes: at which it was captured.

    Raises:
        SizeRejected: the original model raises at these sizes too.
    """
    error = _refusal(loaded, call, sizes)
    if error is None:
        return
    own = {**sizes, **(sizes_of(call_tensors(call.args, call.kwargs), call.dims) or {})}
    alone = (one for one in call.ranges if _refusal(loaded, call, {**own, one.name: sizes[one.name]}) is not None)
    first = next(alone, call.ranges[0])
    raise _rejected(loaded, call, first, sizes[first.name], sizes, error) from error


def _refusal(loaded: LoadedWorkload, call: RangedCall, sizes: Sizes) -> Exception | None:
    """Return what the model raises at some sizes; None where it takes them, or has no memory for them."""
    args, kwargs = call.at(sizes)
    try:
        with torch.no_grad():
            module_call.original_call(loaded.model)(*args, **kwargs)
    except REFUSALS as error:
        return None if is_out_of_memory(error) else error
    return None


def _rejected(
    loaded: LoadedWorkload, call: RangedCall, one: SizeRange, size: int, others: Mapping[str, int], error: Exception
) -> SizeRejected:
    """Return the error for a size, with the nearest size towards the other end of the range that the model takes."""
    step = -1 if size > one.least else 1
    end = one.least + step if step < 0 else one.most + step
    good, bad = end, size
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        is_good = _refusal(loaded, call, {**others, one.name: middle}) is None
        good, bad = (middle, bad) if is_good else (good, middle)
    which = "largest" if step < 0 else "smallest"
    nearest = f"the {which} that it takes is {good}" if good != end else f"it takes no {one.name} from {one.least} on"
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return SizeRejected(model_id=loaded.record.model_id, name=one.name, size=size, cause=cause, largest=nearest)
