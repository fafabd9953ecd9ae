"""Means and maxima over windows, and group norms in channels last, against torch in fp64 and on every backend that runs here."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.triton.backend import compile_for
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.lowering.lower import lower
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases.lowered import check, lower_function, records
from tests.kernel_cases.window_cases import CASES, FIRST, LAST, complaint, empty_result, make_inputs
from tests.lowering.rules.test_tables import rand

HERE = Path(__file__).parents[2] / "kernel_cases"
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
LAYOUTS = pytest.mark.parametrize("layout", [FIRST, LAST], ids=["channels first", "channels last"])
WINDOWS = {
    "3 by 3": (3, 1, 1), "of a stem": (3, 2, 1), "halves": (2, 2, 0), "a stride of their own": (2, None, 1),
    "columns": ((3, 1), (1, 2), (1, 0)), "5 by 5": (5, 1, 2), "one": (1, 1, 0), "gaps": (2, 3, 0),
}  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(("ceil", "padded", "divisor"), list(itertools.product((False, True), (False, True), (None, 7))))
def test_means(name, layout, ceil, padded, divisor):
    images = rand(2, 3, 6, 7).contiguous(memory_format=layout)
    check(lambda x: functional.avg_pool2d(x, *WINDOWS[name], ceil, padded, divisor) * 2, images)


@LAYOUTS
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("ceil", [False, True])
def test_maxima(name, layout, ceil):
    images = rand(2, 3, 6, 7).contiguous(memory_format=layout)
    check(lambda x: functional.max_pool2d(x, *WINDOWS[name], 1, ceil) * 2, images)
    if name != "5 by 5":  # with places two apart it is wider than the image
        check(lambda x: functional.max_pool2d(x, *WINDOWS[name], 2, ceil) * 2, images)


@pytest.mark.parametrize("shape", [(3, 6, 6), (1, 2, 1, 1), (2, 1, 1, 5), (1, 1, 4, 1)])
def test_images_of_few_dims_and_of_one_row(shape):
    check(lambda x: functional.avg_pool2d(x, 3, 1, 1, False, False) * 2, rand(*shape))
    check(lambda x: functional.avg_pool2d(torch.relu(x) + 1, 3, 1, 1), rand(*shape))
    check(lambda x: functional.max_pool2d(x - 5, 3, 1, 1), rand(*shape))


def test_what_is_computed_is_hidden_outside_the_image():
    """``exp(0)`` is no 0, and the maximum of negative numbers is none."""
    check(lambda x: functional.avg_pool2d(x.relu() + 1, 3, 1, 1) * 2, rand(2, 3, 6, 7))
    check(lambda x: functional.max_pool2d(x.abs() * -1, 3, 1, 1) + 1, rand(2, 3, 6, 7))
    check(lambda x: functional.avg_pool2d(functional.pad(x, (1, 0), value=2.0), 2, 1) + 1, rand(2, 3, 6, 7))


def test_a_broadcast_image_is_not_read_outside():
    check(lambda x: functional.avg_pool2d(x.expand(2, 3, 4, 5) * 2, 3, 1, 1), rand(2, 3, 1, 1))


@needs_compiler
def test_bits_are_eagers(tmp_path):
    """Sums go row by row and begin with 0, as torch's do: a window of -0.0 has the mean 0.0."""
    images = torch.full((1, 1, 5, 5), -0.0)
    images[0, 0, 3:] = torch.randn(2, 5)
    images[0, 0, 4, 4] = math.inf
    lowered, ops = lower_function(lambda x: functional.avg_pool2d(x, 3, 1), images)
    out = empty_result(lowered, ops)
    rendered = backend_of("cpp").render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    backend_of("cpp").build(rendered, tmp_path / "mean.cpp").bind(lowered.program)(images, out)
    assert torch.equal(out.view(torch.int32), functional.avg_pool2d(images, 3, 1).view(torch.int32))


def refusal(function, *inputs):
    with pytest.raises(CannotLower) as caught:
        lower_function(function, *inputs)
    return caught.value.code, caught.value.reason


def test_what_is_not_served_is_refused_with_a_reason():
    images = rand(1, 2, 8, 8)
    assert "6 x 5" in refusal(lambda x: functional.avg_pool2d(x, (6, 5)) + 1, images)[1]
    assert "int64" in refusal(lambda x: functional.avg_pool2d(x, 2) + 1, torch.arange(16).reshape(1, 1, 4, 4))[1]
    assert "several sizes" in refusal(lambda x: functional.adaptive_avg_pool2d(x, 3) + 1, images)[1]
    assert "padding" in refusal(lambda x: functional.max_pool2d(x, 2, 1, 1, 2) + 1, rand(1, 2, 1, 1))[1]


def test_a_group_norm_is_not_computed_for_every_window():
    refusal(lambda x: functional.avg_pool2d(functional.group_norm(x, 1), 3, 1, 1) + 1, rand(1, 2, 8, 8))


@pytest.mark.parametrize(
    "norm", [lambda x: functional.layer_norm(x, (8,)), lambda x: x.softmax(-1), lambda x: x / x.mean((1, 2, 3), True)]
)
def test_a_norm_is_not_computed_for_every_window(norm):
    code, reason = refusal(lambda x: functional.avg_pool2d(norm(x), 3, 1, 1) + 1, rand(1, 2, 8, 8))
    assert (code, "row reduction" in reason) == ("FA604", True)


def test_what_takes_long_is_not_computed_for_every_window():
    images, scale = rand(1, 2, 8, 8), rand(2, 1, 1, seed=1)
    assert refusal(lambda x: functional.avg_pool2d(functional.gelu(x), 3, 1, 1), images)[0] == "FA604"
    assert refusal(lambda x: functional.max_pool2d(functional.max_pool2d(x, 5, 1, 2), 5, 1, 2), images)[0] == "FA604"
    check(lambda x: functional.avg_pool2d(functional.gelu(x), 2), images, rtol=1e-9)  # each element lies in one window
    check(lambda x, s: functional.max_pool2d(torch.relu(x * s + s), 3, 2, 1), images, scale)


@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (2, 6, 4, 1), (2, 6, 1, 5), (1, 6, 3, 3)])
def test_a_group_norm_of_one_group_reads_and_writes_channels_last(shape):
    images, weight, bias = rand(*shape).contiguous(memory_format=LAST), rand(6, seed=1), rand(6, seed=2)
    added = rand(*shape, seed=3).contiguous(memory_format=LAST)

    def normed(x, y, w, b):
        total = x * w[:, None, None] + y
        return functional.group_norm(total, 1, w, b), total

    program = check(normed, images, added, weight, bias, rtol=1e-10)
    assert program.dims[-1] == math.prod(shape[1:])


@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (1, 6, 4, 5), (2, 6, 4, 1), (2, 6, 1, 5), (3, 6, 3, 3)])
@pytest.mark.parametrize("groups", [2, 3])
def test_a_group_norm_of_several_groups_does_so_too(shape, groups):
    images, weight, bias = rand(*shape).contiguous(memory_format=LAST), rand(6, seed=1), rand(6, seed=2)
    added = rand(*shape, seed=3).contiguous(memory_format=LAST)
    time = rand(shape[0], 6, 1, 1, seed=4)

    def normed(x, y, z, w, b):
        total = x * w[:, None, None] + y + z
        return functional.silu(functional.group_norm(total, groups, w, b)), total

    program = check(normed, images, added, time, weight, bias, rtol=1e-10)
    assert program.dims[-2:] == (groups, math.prod(shape[1:]) // groups)
    loads = [value for value in program.values if value.op == "load"]
    assert all(value.strides[-1] == 0 for value in loads) and {len(value.args) for value in loads} == {1, 2}


def test_a_group_norm_does_not_change_the_layout():
    images = rand(2, 6, 4, 5).contiguous(memory_format=LAST)
    assert "one run" in refusal(lambda x: functional.group_norm(x, 1).contiguous(), images)[1]
    assert "one run" in refusal(lambda x: functional.group_norm(x, 2).contiguous(), images)[1]


def test_a_group_norm_of_several_groups_takes_in_no_cat_and_no_resampled_image():
    def last(*shape):
        return rand(*shape).contiguous(memory_format=LAST)

    def joined(x, y):
        return functional.group_norm(torch.cat([x, y], 1), 2)

    def resampled(x):
        return functional.group_norm(functional.interpolate(x, scale_factor=2.0), 2)

    for widths in ((6, 6), (4, 8)):
        refusal(joined, *(last(2, width, 4, 5) for width in widths))
    assert "each pixel" in refusal(resampled, last(2, 6, 4, 5))[1]


def cases(*dtypes):
    for name, dtype in itertools.product(CASES, dtypes):
        inputs = make_inputs(name, dtype)
        lowered, ops = lower_function(CASES[name][0], *inputs)
        yield name, inputs, lowered, empty_result(lowered, ops)


@pytest.mark.parametrize("name", CASES)
def test_lowering_computes_it(name):
    check(CASES[name][0], *make_inputs(name, torch.float64), rtol=1e-9, atol=1e-9)


def test_places_are_counted_by_the_conditions_of_the_loads():
    """A kernel asks where it is once: no integer is computed but those that are compared with the borders."""
    images = rand(2, 3, 6, 7)
    program = check(lambda x: functional.avg_pool2d(x, 3, 1, 1, False, False) + 1, images)
    compared = [value.op for value in program.values if value.op in ("ge", "lt")]
    integers = {value.op for value in program.values if value.dtype == "int64"}
    assert compared == ["ge", "lt", "ge", "lt"] and integers == {"index", "const", "add"}
    rendered = backend_of("triton").render(program, HEADER, tuning=Tuning(), fast_math=False)
    assert "int64" not in rendered.source.split("INDEX: tl.constexpr")[1]


@needs_compiler
@pytest.mark.parametrize("backend", ["cpp", "cuda"])
def test_kernels_compute_it_on_the_host(tmp_path, backend):
    launches, results = [], []
    for name, inputs, lowered, out in cases(torch.float32, torch.bfloat16):
        rendered = backend_of(backend).render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        results.append((name, inputs, out))
        given = [inputs[root] for root in lowered.inputs]
        if backend == "cuda":
            launches.append(cuda_on_host.Launch(rendered=rendered, program=lowered.program, inputs=given, outputs=[out]))
        else:
            backend_of(backend).build(rendered, tmp_path / f"{rendered.entry}.cpp").bind(lowered.program)(*given, out)
    cuda_on_host.run_all(launches, tmp_path)
    assert [text for result in results if (text := complaint(*result))] == []


def test_triton_computes_it_in_the_interpreter(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "window_cases.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["mean less itself, last", "maximum, first", "group norm, last", "group norm of groups, last"])
def test_triton_compiles_it(name):
    lowered, _ = lower_function(CASES[name][0], *make_inputs(name, torch.bfloat16))
    rendered = backend_of("triton").render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    assert compile_for(lowered.program, rendered, 90)


def test_exact_kernels_divide():
    ops = records(lambda x: functional.avg_pool2d(x, 3, 1, 1, False, False) + 1, rand(1, 8, 6, 6).bfloat16())
    members = [op.index for op in ops if op.role == "op"]
    exact, fast = (lower(ops, members, members[-1:], is_exact=is_exact).program for is_exact in (True, False))
    assert "div" in {value.op for value in exact.values}
    assert {"reciprocal", "div"} & {value.op for value in fast.values} == {"reciprocal"}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_on_the_device(tmp_path, backend):
    for name, inputs, lowered, out in cases(torch.float32, torch.bfloat16):
        given, result = [inputs[root].cuda() for root in lowered.inputs], out.cuda()
        rendered = backend_of(backend).render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        launch = backend_of(backend).build(rendered, tmp_path / f"{rendered.entry}{rendered.suffix}").bind(lowered.program)
        launch(*given, result)
        assert not complaint(name, [one.cuda() for one in inputs], result)
