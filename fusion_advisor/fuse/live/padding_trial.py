"""What a trial of padding needs of a range's calls: inputs at some sizes, the verification of the plan, and the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fusion_advisor import units
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.shapes.decide_at import example_args
from fusion_advisor.fuse.shapes.padding import PadForm
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall
from fusion_advisor.fuse.shapes.show_padding import Given, Judge, Pays
from fusion_advisor.fuse.shapes.time_calls import time_calls
from fusion_advisor.timing.interleaving import CannotRecord, recorded


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
        check = check_region(at_one_size(opened, args).regions[0], run)
        return "" if check.is_passed else f"relative error {check.fused_rel_l2:.2e}; the limit is: {check.limit}"

    return given, judge


def faster_than_launches(instruments: Instruments) -> Pays:
    """Return what times a graph of larger sizes, with the copies around it, against the launches of the call itself.

    Args:
        instruments: measure and record.
    """

    def pays(module: GraphModule, args: Sequence[Any], form: PadForm, sizes: Sizes, larger: Sizes) -> str:
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
            return form.cut(found[0], sizes)

        plain, ours = time_calls([module.forward, padded], tuple(args), {}, instruments, on_cuda=True)
        if ours.ci_high_ns < plain.ci_low_ns:
            return ""
        return f"its launches take {units.duration(plain.median_ns)}, the larger graph {units.duration(ours.median_ns)}"

    return pays
