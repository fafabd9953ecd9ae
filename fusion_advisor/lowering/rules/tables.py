"""How single ATen ops become IR values: the rule tables that ``lower`` works from, gathered.

Adding an op is one entry in one of the tables. A rule is given the op and the index of the wanted element, asks the lowering for
the elements of its arguments and returns the number of the result; a view's rule only rewrites the index.
"""

from __future__ import annotations

from fusion_advisor.ir.affine_index import Index
from fusion_advisor.ir.dtypes import DTYPES, FLOATS, INTEGERS, CannotLower, compute_dtype
from fusion_advisor.lowering.builder.builder import RuleTables
from fusion_advisor.lowering.rules.backward import BACKWARD, ROWS_BACKWARD
from fusion_advisor.lowering.rules.gather import GATHERS, GROUPED
from fusion_advisor.lowering.rules.norm_backward import RESULTS
from fusion_advisor.lowering.rules.pointwise import POINTWISE as _FORWARD
from fusion_advisor.lowering.rules.reduction import SPECIAL as _ROWS
from fusion_advisor.lowering.rules.resample import RESAMPLED
from fusion_advisor.lowering.rules.scatter import rows_of, scattered, written_shape
from fusion_advisor.lowering.rules.shift import SHIFTED
from fusion_advisor.lowering.rules.view import RESHAPES, VIEWS, piece_rule, repeat_rule
from fusion_advisor.lowering.rules.window import WINDOWED

__all__ = [
    "DTYPES", "FLOATS", "INTEGERS", "LOWERABLE", "POINTWISE", "RESHAPES", "RULES", "SPECIAL", "VIEWS", "CannotLower", "Index",
    "compute_dtype", "piece_rule", "repeat_rule",
]  # fmt: skip

POINTWISE = {**_FORWARD, **BACKWARD}
SPECIAL = {**_ROWS, **ROWS_BACKWARD, **GATHERS, **GROUPED, **RESAMPLED, **SHIFTED, **WINDOWED}
LOWERABLE = frozenset(POINTWISE) | frozenset(SPECIAL) | frozenset(VIEWS) | RESHAPES | frozenset(RESULTS) | {"repeat_interleave"}
"""Base names of the ATen ops that some kernel can compute."""
RULES = RuleTables(
    pointwise=POINTWISE,
    special=SPECIAL,
    results=RESULTS,
    views=VIEWS,
    reshapes=RESHAPES,
    views_too=frozenset(VIEWS) | RESHAPES | {"repeat_interleave"},
    piece=piece_rule,
    repeat=repeat_rule,
    scattered=scattered,
    rows_of=rows_of,
    written_shape=written_shape,
)
"""What the builder asks."""
