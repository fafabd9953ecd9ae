"""The CPU figure that the project stands on: GPT-2's GELU, eight ATen ops against one C++ kernel, in one run.

Only ratios measured within one process are asserted, on the best of interleaved rounds: a neighbour on the machine slows a round,
never speeds it up. Marked ``serial``: two of these at once would measure each other.
"""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.library.build import backend
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.patterns import lower_reference
from fusion_advisor.library.source import Header, Tuning
from fusion_advisor.timing.measure import interleave

SHAPE = (1, 1024, 3072)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """transformers' NewGELUActivation: eight ops."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.serial
def test_one_kernel_is_six_times_faster_than_eight_ops_and_near_torch_compile(tmp_path):
    kernel = load_kernel("gelu_tanh")
    _, reference = kernel.references[0]
    lowered = next(lower_reference(kernel.spec, reference, {"R": SHAPE[1], "C": SHAPE[2]}))
    header = Header(title="gelu_tanh", summary="", origin="")
    cpp = backend("cpp")
    rendered = cpp.render(lowered.program, header, tuning=Tuning(), fast_math=False)
    launch = cpp.build(rendered, tmp_path / "gelu.cpp").bind(lowered.program)
    x = torch.randn(SHAPE)

    def fused() -> torch.Tensor:
        out = torch.empty_like(x)
        launch(x, out)
        return out

    compiled = torch.compile(gelu_new, dynamic=False)
    torch.testing.assert_close(fused(), gelu_new(x))
    torch.testing.assert_close(compiled(x), gelu_new(x))
    with torch.no_grad():
        candidates = [lambda: gelu_new(x), lambda: compiled(x), fused]
        times = interleave(candidates, rounds=60, budget_s=6.0, on_cuda=False, least=20)
    eager_ns, compiled_ns, fused_ns = (min(series) for series in times)
    print(f"eager {eager_ns / 1e6:.2f} ms, torch.compile {compiled_ns / 1e6:.2f} ms, fused {fused_ns / 1e6:.2f} ms")  # noqa: T201
    assert eager_ns >= 6.0 * fused_ns
    assert fused_ns <= 1.2 * compiled_ns
