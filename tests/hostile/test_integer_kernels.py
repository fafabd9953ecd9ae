"""Integers that overflow, and floats that no integer holds: C++ kernels give what eager gives on the same kind of CPU."""

from __future__ import annotations

import platform
import re
import shutil
from dataclasses import replace

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.triton.backend import TritonBackend, assembly_for
from fusion_advisor.lowering.lower import lower
from tests.kernel_cases.cpp_at_once import build_all
from tests.kernel_cases.cuda_on_host import Launch, run_all
from tests.kernel_cases.lowered import lower_function, records

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


_INT32 = _conversion(torch.int32)


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


def _result(lowered, ops, given):
    """What a kernel is called with: its inputs, and where it writes."""
    at, meta = [op.index for op in ops if op.role not in ("op", "output")], ops[lowered.outputs[0]].outputs[0]
    output = torch.full(meta.shape, 3, device=given[0].device).to(getattr(torch, meta.dtype))
    return [given[at.index(root)] for root in lowered.inputs], output


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
        arguments, output = _result(one, ops, CASES[name][1])
        built[rendered[name].entry].bind(one.program)(*arguments, output)
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles CUDA C++ for the host, and there is no g++")
def test_cuda_computes_without_a_signed_overflow(tmp_path, capfd):
    launches, names = [], [name for name in CASES if " of " in name]
    for name in names:
        given = CASES[name][1]
        lowered, ops = lower_function(CASES[name][0], *given)
        rendered = CudaBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        arguments, output = _result(lowered, ops, given)
        launches.append(Launch(rendered=rendered, program=lowered.program, inputs=arguments, outputs=(output,)))
    run_all(launches, tmp_path, flags=("-fsanitize=signed-integer-overflow",))
    assert "runtime error" not in capfd.readouterr().err
    for name, launch in zip(names, launches, strict=True):
        function, given = CASES[name]
        assert torch.equal(launch.outputs[0], function(*given)), name


def test_triton_makes_the_integer_of_a_float64_s_nan_by_hand():
    x = torch.empty(64, dtype=torch.float64)
    traced = [replace(op, outputs=tuple(replace(meta, device="cuda:0") for meta in op.outputs)) for op in records(_INT32, x)]
    member = next(op.index for op in traced if op.role == "op")
    program = lower(traced, [member], [member]).program
    rendered = TritonBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    # One conversion that saturates: it gives 0 for a NaN, and CUDA's eager gives the lowest integer.
    assert "selp.b32" in (ptx := assembly_for(program, rendered, 90)["ptx"])
    assert re.search(r"selp\.b32\s+%r\d+, -2147483648, %r\d+, %p", ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [TritonBackend, CudaBackend])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_what_its_eager_gives(backend, name, tmp_path):
    function, given = CASES[name]
    given = [tensor.cuda() for tensor in given]
    lowered, ops = lower_function(function, *given)
    rendered = backend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    arguments, output = _result(lowered, ops, given)
    kernel = backend().build(rendered, tmp_path / f"kernel{rendered.suffix}")
    kernel.bind(lowered.program)(*arguments, output)
    assert torch.equal(output, function(*given))
