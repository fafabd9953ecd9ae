"""Programs as functions of sizes that vary, for kernels that serve all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.ir.program import Program
from tests.kernel_cases import programs as p
from tests.kernel_cases.lowered import lower_function


@dataclass(frozen=True, kw_only=True)
class OpenCase:
    """``at`` makes the program; a kernel is rendered for ``rendered`` (its sizes first) and launched at ``launched``.

    ``opened`` are the integers that vary, ``multiples`` those of them that stay multiples of 16.
    """

    at: Callable[..., Program]
    rendered: tuple[tuple[int, ...], ...]
    launched: tuple[tuple[int, ...], ...]
    opened: str
    multiples: str = ""
    tuning: Tuning = Tuning()  # noqa: RUF009  # frozen


def group_norm(channels=4):
    """Rows whose columns are divided by the size of a channel, which varies."""

    def at(batch, area):
        given = torch.randn(batch, channels, area), torch.randn(channels), torch.randn(channels)
        return lower_function(lambda x, w, b: torch.nn.functional.group_norm(x, 2, w, b), *given)[0].program

    return at


def two_ropes(batch, seq):
    """Queries of six heads and keys of two in one launch."""
    keys = p.renamed(p.rope(batch, 2, seq, 16), x="k", out="k_out")
    return p.siblings(p.rope(batch, 6, seq, 16), keys)


CASES = {
    "flat": OpenCase(
        at=lambda size: p.gelu_tanh((size,)), rendered=((1000,), (13,)), launched=((1000,), (13,), (1,), (2048,), (4099,)),
        opened="size",
    ),
    "bias": OpenCase(
        at=p.bias_gelu_erf, rendered=((5, 24), (7, 33)), launched=((5, 24), (7, 33), (2, 2), (33, 160), (3, 1200)),
        opened="rows cols x_stride0 out_stride0",
    ),
    "rope": OpenCase(
        at=lambda batch, seq: p.rope(batch, 3, seq, 16), rendered=((2, 5), (3, 7)), launched=((2, 5), (3, 7), (1, 2), (2, 70)),
        opened="rows x_stride0 cos_stride0 sin_stride0 out_stride0 out_stride1",
        multiples="x_stride0 cos_stride0 sin_stride0 out_stride0 out_stride1",
    ),
    "heads": OpenCase(
        at=lambda batch, heads: p.rope(batch, heads, 5, 16), rendered=((2, 3), (3, 5)), launched=((2, 3), (3, 5), (2, 11)),
        opened="size1 x_stride0 x_stride2 out_stride0", multiples="x_stride0 x_stride2 out_stride0",
    ),
    "pairs": OpenCase(
        at=lambda batch, seq: p.rope_pairs(batch, 3, seq, 6), rendered=((2, 5), (3, 7)), launched=((2, 5), (3, 16), (2, 40)),
        opened="rows x_stride0 cos_stride0 sin_stride0 out_stride0",
    ),
    "two_ropes": OpenCase(
        at=two_ropes, rendered=((2, 5), (3, 7)), launched=((2, 5), (3, 7), (1, 2), (2, 70)),
        opened="start_of_2 rows_of_1 x_stride0_of_1 cos_stride0_of_1 sin_stride0_of_1 out_stride0_of_1 out_stride1_of_1 "
        "rows_of_2 k_stride0_of_2 cos_stride0_of_2 sin_stride0_of_2 k_out_stride0_of_2 k_out_stride1_of_2",
        multiples="x_stride0_of_1 cos_stride0_of_1 sin_stride0_of_1 out_stride0_of_1 out_stride1_of_1 "
        "k_stride0_of_2 cos_stride0_of_2 sin_stride0_of_2 k_out_stride0_of_2 k_out_stride1_of_2",
    ),
    "softmax": OpenCase(
        at=p.softmax, rendered=((5, 24), (7, 33)), launched=((5, 24), (7, 33), (2, 2), (20, 64), (3, 1200)),
        opened="rows cols x_stride0 out_stride0",
    ),
    "rmsnorm": OpenCase(
        at=lambda rows: p.rmsnorm(rows, 48), rendered=((5,), (7,)), launched=((5,), (1,), (32,), (600,)), opened="rows",
    ),
    "split": OpenCase(
        at=lambda rows, cols: p.swiglu(rows, cols, is_split=True), rendered=((5, 24), (7, 33)),
        launched=((5, 24), (7, 33), (3, 64)), opened="rows cols x_stride0 x_offset out_stride0",
    ),
    "looped": OpenCase(
        at=p.softmax, rendered=((3, 40), (2, 77)), launched=((3, 40), (2, 77), (3, 64), (2, 33)),
        opened="rows cols x_stride0 out_stride0", tuning=Tuning(block_cols=32),
    ),
    "group_norm": OpenCase(
        at=group_norm(), rendered=((2, 35), (3, 21)), launched=((2, 35), (3, 21), (2, 64), (2, 5)),
        opened="rows cols x_stride0 x_stride1 x2_extent out_stride0 out_stride1",
    ),
    "looped_group_norm": OpenCase(
        at=group_norm(), rendered=((2, 35), (3, 42)), launched=((2, 35), (3, 42), (2, 64), (2, 33)),
        opened="rows cols x_stride0 x_stride1 x2_extent out_stride0 out_stride1", tuning=Tuning(block_cols=32),
    ),
}  # fmt: skip
