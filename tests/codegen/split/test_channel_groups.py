"""Group norms in channels last as three launches: the same numbers, whole lines of memory, and nothing else cut."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fusion_advisor.autotune.tune import candidates
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.split.channel_groups import split_groups
from fusion_advisor.codegen.split.several import SeveralKernels, rendered_parts
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.codegen.triton.backend import TritonBackend, assembly_for, compile_for
from fusion_advisor.ir.program import TINY_ELEMENTS
from tests.kernel_cases.evaluate import evaluate
from tests.kernel_cases.lowered import lower_function
from tests.lowering.rules.test_tables import rand

LAST = torch.channels_last
HEADER = Header(title="case", summary="a test", origin="a test")
SHAPES = [(2, 24, 42, 36, 3), (1, 64, 32, 36, 32), (1, 96, 31, 32, 1), (3, 40, 24, 24, 4), (2, 1280, 7, 7, 32)]
"""Images and groups: several images and one, pairs of channels, one group, odd numbers of pixels."""


def silu_of_sum(groups):
    def normed(x, y, time, weight, bias):
        total = x + y + time
        return functional.silu(functional.group_norm(total, groups, weight, bias)), total * 2

    return normed


def case(shape, dtype=torch.float64):
    """Return a function and its inputs, of a mean that is large against the deviation."""
    *images, groups = shape
    x, y = (rand(*images, seed=seed).add(seed * 30).to(dtype).contiguous(memory_format=LAST) for seed in (0, 1))
    time, weight, bias = rand(*images[:2], 1, 1, seed=2), rand(images[1], seed=3), rand(images[1], seed=4)
    return silu_of_sum(groups), [x, y, *(one.to(dtype) for one in (time, weight, bias))]


def run_parts(parts, given):
    """Evaluate launch by launch; given: flat tensors by operand; returns the outputs by operand."""
    known = dict(enumerate(given))
    for part in parts.parts:
        flags = [operand.is_output for operand in part.program.operands]
        inputs = [known[number] for number, is_output in zip(part.operands, flags, strict=True) if not is_output]
        written = [number for number, is_output in zip(part.operands, flags, strict=True) if is_output]
        known.update(zip(written, evaluate(part.program, *inputs), strict=True))
    return [known[number] for number in sorted(known) if number >= len(given)]


def flat(tensor):
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_launches_compute_what_the_program_does(shape):
    function, inputs = case(shape)
    lowered, ops = lower_function(function, *inputs)
    parts = split_groups(lowered.program)
    assert [part.does for part in parts.parts] == ["moments", "groups", ""]
    found = run_parts(parts, [flat(inputs[root]) for root in lowered.inputs])
    for index, result, want in zip(lowered.outputs, found, function(*inputs), strict=True):
        meta = ops[index].outputs[0]
        torch.testing.assert_close(result.as_strided(meta.shape, meta.stride), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_launch_writes_its_scratch_whole(shape):
    parts = split_groups(lower_function(*_with(*case(shape)))[0].program)
    for part in parts.parts:
        for number, operand in zip(part.operands, part.program.operands, strict=True):
            if number < 0:
                assert operand.element_count == parts.scratch[-1 - number].elements
        for store in part.program.stores:
            reached = 1 + sum((size - 1) * step for size, step in zip(part.program.dims, store.strides, strict=True))
            count = part.program.operands[store.operand].element_count
            assert reached == count


def _with(function, inputs):
    return function, *inputs


def program_of(function, *inputs):
    return lower_function(function, *inputs)[0].program


def image(*shape):
    return rand(*shape).contiguous(memory_format=LAST)


def test_what_is_no_such_norm_is_not_cut():
    def norm(x):
        return functional.group_norm(x, 4) * 2

    big = (2, 64, 32, 32)
    assert split_groups(program_of(norm, image(*big))) is not None
    assert split_groups(program_of(norm, rand(*big))) is None  # channels first
    assert split_groups(program_of(norm, image(1, 4, 8, 8))) is None  # tiny
    assert split_groups(program_of(norm, image(2, 64, 29, 37))) is not None
    assert split_groups(program_of(norm, image(2, 64, 31, 127))) is not None  # 127 pixels are a block
    assert split_groups(program_of(norm, image(2, 64, 1, 2003))) is None  # a prime number of pixels
    assert split_groups(program_of(lambda x: x.softmax(-1), rand(4, 2**15))) is None
    assert split_groups(program_of(lambda x: functional.layer_norm(x, (2**15,)), rand(4, 2**15))) is None
    assert split_groups(program_of(lambda x, w: functional.layer_norm(x, (64, 64), w), rand(1024, 64, 64), rand(64, 64))) is None


def test_one_group_of_many_images_stays_one_launch():
    def norm(x, weight):
        return functional.group_norm(x, 1, weight)

    few, many = (program_of(norm, image(count, 32, 8, 8), rand(32)) for count in (200, 300))
    assert split_groups(few) is not None and split_groups(many) is None


def test_the_first_launch_has_programs_for_a_whole_gpu():
    for shape in ((1, 512, 64, 64), (1, 128, 512, 512), (2, 320, 64, 64), (2, 1280, 16, 16)):
        x, weight = torch.zeros(shape, dtype=torch.bfloat16).to(memory_format=LAST), torch.zeros(shape[1], dtype=torch.bfloat16)
        program = program_of(lambda x, w: functional.group_norm(x, 32, w), x, weight)
        images, blocks, channels, _ = split_groups(program).parts[0].program.dims
        assert images * blocks * channels / 64 >= 2 * 132, shape


def test_a_file_has_all_launches_and_no_choice_of_tunings():
    function, inputs = case((1, 64, 32, 36, 32), torch.bfloat16)
    program = program_of(function, *inputs)
    assert program.dims[-1] * 32 > TINY_ELEMENTS
    rendered = TritonBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    entries = [one.entry for one in rendered.parts]
    assert [re.sub(r"_[0-9a-f]{6}$", "", entry) for entry in entries] == ["fa_case_moments", "fa_case_groups", "fa_case"]
    assert rendered.entry == entries[-1] and all(f"def {entry}(" in rendered.source for entry in entries)
    assert len(candidates(program, "triton")) == 1


def test_another_size_takes_a_kernel_of_its_own(tmp_path):
    first, second = (program_of(*_with(*case(shape, torch.float32))) for shape in ((1, 64, 32, 36, 32), (1, 64, 32, 38, 32)))
    rendered = TritonBackend().render(first, HEADER, tuning=Tuning(), fast_math=False)
    kernel = SeveralKernels(rendered, [_Bindable()] * 3, split_groups)
    kernel.bind(first)
    kernel.bind(first)
    with pytest.raises(KernelBuildFailed, match="other launches"):
        kernel.bind(second)
    tiny = program_of(*_with(*case((1, 8, 4, 4, 2), torch.float32)))
    with pytest.raises(KernelBuildFailed, match="other launches"):
        kernel.bind(tiny)


class _Bindable:
    build_ns, tuning = 1, "shape"

    def bind(self, program):
        return lambda *tensors: None


def test_the_first_launch_reads_and_the_last_reads_and_writes_whole_vectors():
    """16 bytes at a time, of 16-bit images: a group's channels would be 8."""
    images = [rand(*shape).to(torch.bfloat16).contiguous(memory_format=LAST) for shape in ((1, 128, 64, 64),) * 2]
    weight = rand(128).to(torch.bfloat16)

    def norm(x, y, weight):
        return functional.silu(functional.group_norm(x + y, 32, weight, weight))

    program = program_of(norm, *images, weight)
    rendered = TritonBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    first, _, last = (assembly_for(*one, 90)["ptx"] for one in rendered_parts(program, rendered, split_groups))
    assert len(re.findall(r"ld\.global\.v4\.b32", first)) >= 4 and not re.findall(r"ld\.global\.b16", first)
    assert len(re.findall(r"ld\.global\.v4\.b32", last)) >= 4
    assert re.findall(r"st\.global\.v4\.b32", last) and not re.findall(r"st\.global\.b16", last)
    assert compile_for(program, rendered, 90)


def test_the_file_runs_by_itself(tmp_path):
    """It launches all three, and compares with its own reference."""
    function, inputs = case((1, 64, 32, 36, 32), torch.float32)
    lowered, ops = lower_function(function, *inputs)
    rendered = TritonBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    layouts = [ops[index].outputs[0] for index in (*lowered.inputs, *lowered.outputs)]
    path = tmp_path / f"{rendered.entry}.py"
    path.write_text(with_launcher(rendered, lowered.program, tensors=layouts).file_text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(": ok") == 2 and "WRONG" not in done.stdout


def test_other_processes_compile_all_launches(tmp_path):
    """Under the keys under which a launch looks for them: of the whole file."""
    function, inputs = case((1, 64, 32, 36, 32), torch.float32)
    program = program_of(function, *inputs)
    script = (
        "import pickle, sys\n"
        "from fusion_advisor.codegen.common.interface import Header, Tuning\n"
        "from fusion_advisor.codegen.triton.ahead import compile_ahead\n"
        "from fusion_advisor.codegen.triton.backend import TritonBackend\n"
        "program = pickle.load(open(sys.argv[1], 'rb'))\n"
        "header = Header(title='case', summary='a test', origin='a test')\n"
        "compile_ahead(program, TritonBackend().render(program, header, tuning=Tuning(), fast_math=False), 90)\n"
    )
    (tmp_path / "program").write_bytes(pickle.dumps(program))
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "program")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = {path.stem for path in (tmp_path / "cache").rglob("*.cubin")}
    assert len(made) == 3
