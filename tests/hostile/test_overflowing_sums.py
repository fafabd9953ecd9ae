"""Sums and squares near the largest number: where eager is right, ours is.

On the CPU eager's std sums squares that fp32 cannot hold in fp64.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn import functional

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.verify.special_inputs import perturbing
from tests.kernel_cases.cpp_at_once import build_all
from tests.kernel_cases.lowered import lower_function

FUNCTIONS = {"std": lambda x: x.std(-1), "norm": lambda x: x.norm(dim=-1)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
@pytest.mark.parametrize("scale", [1.0, 3e19, 1e30, 1e-30])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_of_large_or_small_numbers(name, scale, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * scale
    lowered, _ = lower_function(FUNCTIONS[name], x)
    header = Header(title="case", summary="a test", origin="a test")
    rendered = CppBackend().render(lowered.program, header, tuning=Tuning(), fast_math=False)
    got = torch.empty(4)
    CppBackend().build(rendered, tmp_path / "case.cpp").bind(lowered.program)(x, got)
    torch.testing.assert_close(got.double(), FUNCTIONS[name](x.double()), rtol=1e-6, atol=0.0)


WIDTH = 40
ROW_FUNCTIONS = {
    "layer_norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x: functional.rms_norm(x, (WIDTH,), None, 1e-6),
    "group_norm": lambda x: functional.group_norm(x.view(-1, 5, 8), 5), "std": lambda x: x.std(-1), "var": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1), "softmax": lambda x: torch.softmax(x, -1), "mean": lambda x: x.mean(-1),
    "log_softmax": lambda x: functional.log_softmax(x, -1), "logsumexp": lambda x: torch.logsumexp(x, -1),
    "sum": lambda x: x.sum(-1),
    "rms_by_hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(dtype):
    """Rows with the largest numbers: all, two, one, of both signs, in halves, and around the square root of the largest."""
    largest = torch.finfo(dtype).max * 0.88
    made = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signs = torch.where(torch.arange(WIDTH) % 2 == 0, 1.0, -1.0).double()
    made[0], made[1], made[2] = largest, -largest, signs * largest
    made[3, 3] = made[4, 3] = made[5, 5] = made[5, 6] = largest
    made[4, 17] = -largest
    made[6] = made[6].sign() * largest
    made[7] = torch.where(torch.arange(WIDTH) < WIDTH // 2, largest, -largest)
    made[8], made[9], made[10] = made[8] * largest / 5, largest / WIDTH, made[10] * largest / 50
    for row, power in ((11, 0.5), (12, 0.5), (13, 0.75)):
        made[row] *= largest**power * (8 if row == 12 else 1)
    made[14], made[15] = largest / 2, largest**0.5
    return made.to(dtype)


@pytest.fixture(scope="module")
def near_the_largest(tmp_path_factory):
    """(function, dtype) → what the C++ kernel gives of :func:`rows`."""
    folder, header = tmp_path_factory.mktemp("largest"), Header(title="case", summary="a test", origin="a test")
    lowered = {(name, dtype): lower_function(ROW_FUNCTIONS[name], rows(dtype))[0] for name in ROW_FUNCTIONS for dtype in DTYPES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        render = CppBackend().render
        rendered = {key: render(one.program, header, tuning=Tuning(), fast_math=False) for key, one in lowered.items()}
        built = build_all(list(rendered.values()), folder)
    found = {}
    for (name, dtype), one in lowered.items():
        found[name, dtype] = torch.empty_like(ROW_FUNCTIONS[name](rows(dtype)))
        built[rendered[name, dtype].entry].bind(one.program)(rows(dtype), found[name, dtype])
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_where_eager_is_right_near_the_largest_number_ours_is(near_the_largest, name, dtype):
    x, function = rows(dtype), ROW_FUNCTIONS[name]
    exact, moved = function(x.double()), function(perturbing(1)(x))
    truth = exact.to(dtype).double()
    sides = [side.double().reshape(16, -1) for side in (near_the_largest[name, dtype], function(x), truth, exact, moved)]
    ours, theirs, truth, exact, moved = sides
    size = truth.abs().where(truth.isfinite(), 0.0).amax(-1, keepdim=True)
    own = (theirs - truth).abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    noise = (moved - exact).abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    unit = torch.finfo(dtype).eps * size

    def is_right(side, limit):
        return (side == truth) | (side.isnan() & truth.isnan()) | ((side - truth).abs() <= limit)

    wrong = is_right(theirs, 4 * unit) & ~is_right(ours, torch.maximum(torch.maximum(1.5 * own, 4 * unit), 2 * noise))
    assert not wrong.any(), [(ours[place].item(), theirs[place].item()) for place in map(tuple, wrong.nonzero()[:3].tolist())]
