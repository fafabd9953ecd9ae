"""What a trial of padding needs of a range's calls: inputs at some sizes, and the verification that the plan passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.shapes.decide_at import example_args
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall
from fusion_advisor.fuse.shapes.show_padding import Given, Judge


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
