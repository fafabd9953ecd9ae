"""What Triton's interpreter needs to be given instead of what a GPU is given.

The interpreter of Triton 3.6 to 3.9 cuts a bfloat16 off where a GPU rounds it to nearest even (``cast_impl`` passes no rounding
mode). A kernel that rounds inside then has twice the error. Integers are computed as on a GPU, so there the rounding is done on
the bits.
"""

from __future__ import annotations

import os
from dataclasses import replace

from fusion_advisor.codegen.common.interface import Rendered

_BY_CONVERSION = "    return (x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)\n"
_BY_BITS = """\
    bits = x.to(tl.uint32, bitcast=True)  # Triton's interpreter cuts off: rounded to nearest even by hand
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
"""


def is_interpreted() -> bool:
    """Whether Triton was asked to interpret: it reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def for_interpreter(rendered: Rendered) -> Rendered:
    """Return a Triton kernel whose roundings to bfloat16 come out in the interpreter as on a GPU."""
    return replace(
        rendered,
        source=rendered.source.replace(_BY_CONVERSION, _BY_BITS),
        text=rendered.text.replace(_BY_CONVERSION, _BY_BITS),  # the interpreter reads a function's text from its file
    )
