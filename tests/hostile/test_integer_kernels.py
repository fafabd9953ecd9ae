"""Integers that overflow, and floats that no integer holds: C++ kernels give what eager gives on the same kind of CPU."""

from __future__ import annotations

import platform
import shutil

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.triton.backend import TritonBackend
from tests.kernel_cases.cpp_at_once import build_all
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
INTEGERS = {name: getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8")}
FLOATS = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
NUMBERS = [
    float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e19, -1e19, 2.0**63, -(2.0**63), 2.0**31, -(2.0**31), 2.0**31 - 1,
    3e9 + 1, -3e9 - 7, 2.0**40 + 2.0**17 + 5, 70001.0, 300.0, -300.5, -1.5, -0.5, 0.0, -0.0, 255.9,
]  # fmt: skip
OVERFLOWING = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "neg": lambda x, y: -x + 0 * y,
    "abs": lambda x, y: x.abs() + 0 * y, "square": lambda x, y: x.square() + y, "cube": lambda x, y: x**3 + 0 * y,
    "sum": lambda x, y: (x + y).sum(-1), "where": lambda x, y: torch.where(x > y, x - y, y - x),
    "to_int8": lambda x, y: (x + y).to(torch.int8), "to_int32": lambda x, y: (x * y).to(torch.int32),
}  # fmt: skip


def _pair(dtype):
    info = torch.iinfo(dtype)
    ends = torch.tensor([info.min, info.max, 0, 1, info.max - 1, info.min + 1, 2, 5], dtype=dtype)
    return [ends.repeat_interleave(8).view(8, 8).contiguous(), ends.repeat(8).view(8, 8).contiguous()]


def _conversion(wanted):
    return lambda x: x.to(wanted)


def _cases():
    found = {}
    for source, dtype in FLOATS.items():
        for target, wanted in INTEGERS.items():
            x = torch.tensor(NUMBERS, dtype=torch.float64).to(dtype)
            found[f"{source} to {target}"] = (_conversion(wanted), [x])
    for source, dtype in INTEGERS.items():
        for name, function in OVERFLOWING.items():
            found[f"{name} of {source}"] = (function, _pair(dtype))
    return found


CASES = _cases()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Case → what the C++ kernel gives."""
    folder = tmp_path_factory.mktemp("integers")
    programs = {name: lower_function(function, *given) for name, (function, given) in CASES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        render = CppBackend().render
        rendered = {k: render(one.program, HEADER, tuning=Tuning(), fast_math=False) for k, (one, _) in programs.items()}
        built = build_all(list(rendered.values()), folder)
    found = {}
    for name, (one, ops) in programs.items():
        at, given = [op.index for op in ops if op.role not in ("op", "output")], CASES[name][1]
        meta = ops[one.outputs[0]].outputs[0]
        output = torch.full(meta.shape, 3).to(getattr(torch, meta.dtype))
        built[rendered[name].entry].bind(one.program)(*(given[at.index(root)] for root in one.inputs), output)
        found[name] = output
    return found


@pytest.mark.skipif(shutil.which("g++") is None or platform.machine() != "x86_64", reason="other CPUs convert to other integers")
@pytest.mark.parametrize("name", CASES)
def test_cpp_gives_what_eager_gives(results, name):
    function, given = CASES[name]
    assert torch.equal(results[name], function(*given))


def test_sums_that_cannot_overflow_are_written_as_sums():
    x = torch.arange(12).view(3, 4)
    for function, is_wrapped in ((lambda x: x + 3, True), (lambda x: x.to(torch.int32).to(torch.int64) + 3, False)):
        lowered, _ = lower_function(function, x)
        source = CppBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False).source
        assert ("fa_wrapping_add(x[i], int64_t{3})" in source) == is_wrapped


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [TritonBackend, CudaBackend])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_what_its_eager_gives(backend, name, tmp_path):
    function, given = CASES[name]
    given = [tensor.cuda() for tensor in given]
    lowered, ops = lower_function(function, *given)
    rendered = backend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    at = [op.index for op in ops if op.role not in ("op", "output")]
    meta = ops[lowered.outputs[0]].outputs[0]
    output = torch.full(meta.shape, 3).to(getattr(torch, meta.dtype)).cuda()
    kernel = backend().build(rendered, tmp_path / f"kernel{rendered.suffix}")
    kernel.bind(lowered.program)(*(given[at.index(root)] for root in lowered.inputs), output)
    assert torch.equal(output, function(*given))
