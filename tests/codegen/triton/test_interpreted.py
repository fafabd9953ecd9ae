"""The interpreter cuts a bfloat16 off: what it is given rounds by hand, and the helper that it replaces is the one printed."""

from __future__ import annotations

import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend
from fusion_advisor.codegen.triton.interpreted import for_interpreter
from tests.kernel_cases.lowered import lower_function


def test_the_rounding_that_is_printed_is_the_one_that_is_replaced():
    lowered, _ = lower_function(lambda x: torch.ceil(x * 1.5), torch.randn(64, dtype=torch.bfloat16))
    header = Header(title="case", summary="", origin="a test")
    rendered = TritonBackend().render(lowered.program, header, tuning=Tuning(), fast_math=False)
    assert "round_bf16(x * 1.5)" in rendered.source
    given = for_interpreter(rendered).source
    assert "0x7FFF" in given
    assert "x.to(tl.bfloat16)" not in given
