"""The all-reduce kernel: its own source runs on CPU threads under ThreadSanitizer, and compiles for a GPU.

On the CPU every rank is a thread that makes its calls one after the other and every CUDA thread is a thread. ThreadSanitizer
reports memory that two of them touch with nothing that orders them, so a protocol with a race fails here although the sums may be
right by luck.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.cuda.nvrtc import compile_cubin, find_nvcc, has_cuda_core
from fusion_advisor.collectives.all_reduce_norm import AllReduceNorm, macros_of, render
from fusion_advisor.collectives.launch_shape import launch_shape

HOST = Path(__file__).parent / "on_host.cpp"
SHAPES = ("1 1 1", "7 2 2", "3 3 1", "20 2 3", "5 1 2")
"""Rows, blocks and rows of a round; from one call to the next a block's place in the buffer moves."""
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and its sanitizers")


def run_on_host(folder, source, *, way, world_size, calls, seed, norm=0, has_offset=0):
    (folder / "kernel.cu").write_text(source)
    macros = {
        "WORLD": world_size, "THREADS": 4, "PACKS": 2, "BLOCKS_PER_SM": 1, "TWO_SHOT": int(way == "two-shot"),
        "DATA_AT": 1 << 17, "RING_BYTES": 1 << 16, "NORM": norm, "HAS_OFFSET": has_offset,
        "KERNEL_FILE": f'"{folder / "kernel.cu"}"',
    }  # fmt: skip
    command = ["g++", "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", str(HOST), "-o", str(folder / "ranks")]
    subprocess.run([*command, *(f"-D{name}={value}" for name, value in macros.items())], check=True)
    shapes = [number for shape in SHAPES for number in shape.split()]
    return subprocess.run(
        [str(folder / "ranks"), str(calls), str(seed), *shapes], capture_output=True, text=True, check=False, timeout=200
    )


def on_host():
    rendered = render()
    return rendered.source.replace(rendered.entry, "fa_kernel")


@needs_gxx
@pytest.mark.parametrize("way", ["one-shot", "two-shot"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_in_all_bits_and_nothing_races(way, world_size, tmp_path):
    done = run_on_host(tmp_path, on_host(), way=way, world_size=world_size, calls=40, seed=world_size)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[:2000]


@needs_gxx
@pytest.mark.parametrize("way", ["one-shot", "two-shot"])
@pytest.mark.parametrize(("norm", "has_offset"), [(1, 0), (2, 0), (2, 1), (0, 1)])
def test_other_norms_and_the_bias_of_a_linear_are_right(way, norm, has_offset, tmp_path):
    done = run_on_host(tmp_path, on_host(), way=way, world_size=2, calls=10, seed=7, norm=norm, has_offset=has_offset)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[:2000]


@needs_gxx
@pytest.mark.parametrize(
    ("written", "broken"),
    [("mean = sum / count", "mean = 0.0f"), ("if (HAS_OFFSET) add(sum, columns", "if (RANK) add(sum, columns"),
     ("+ low_shift", "- low_shift")],
)  # fmt: skip
def test_a_norm_without_its_mean_shift_or_the_bias_is_seen_to_be_wrong(written, broken, tmp_path):
    source = on_host()
    assert source.count(written) == 1
    done = run_on_host(
        tmp_path, source.replace(written, broken), way="one-shot", world_size=2, calls=5, seed=7, norm=2, has_offset=1
    )
    assert (done.returncode, done.stdout) == (1, "wrong\n")


@needs_gxx
def test_a_buffer_of_fewer_parts_is_seen_to_race(tmp_path):
    broken = on_host().replace("RING = 4", "RING = 1")
    done = run_on_host(tmp_path, broken, way="one-shot", world_size=2, calls=40, seed=1)
    assert done.returncode != 0 and "data race" in done.stderr


@pytest.mark.skipif(not has_cuda_core() and find_nvcc() is None, reason="needs NVRTC or nvcc")
@pytest.mark.parametrize("way", ["one-shot", "two-shot"])
@pytest.mark.parametrize(("cols", "world_size", "dtype"), [(3584, 2, torch.bfloat16), (8192, 8, torch.float16)])
def test_it_compiles_for_a_gpu_that_is_not_here(way, cols, world_size, dtype):
    shape = launch_shape(64, cols, world_size, 132)
    for norm, has_offset in (("rms", False), ("rms-once", True), ("layer", False), ("layer", True)):
        macros = macros_of(shape, dtype, way, world_size - 1, world_size, norm=norm, has_offset=has_offset)
        assert compile_cubin(render(norm), "sm_90", macros).startswith(b"\x7fELF")


@pytest.mark.skipif(not has_cuda_core(), reason="needs cuda-core")
def test_sizes_that_it_does_not_serve_are_refused():
    asked = []
    fused = AllReduceNorm((256, 512), 0, multiprocessors=132, compiled=lambda _, macros: asked.append(macros))
    with pytest.raises(ValueError, match="multiples of 8"):
        fused.launcher(1, 3583, torch.bfloat16, eps=1e-6, way="one-shot")
    with pytest.raises(ValueError, match="4 bytes"):
        fused.launcher(1, 3584, torch.float32, eps=1e-6, way="one-shot")
    with pytest.raises(ValueError, match="0 rows"):
        fused.launcher(0, 3584, torch.bfloat16, eps=1e-6, way="one-shot")
    assert not asked


@pytest.mark.skipif(not has_cuda_core(), reason="needs cuda-core")
def test_each_shape_is_compiled_once():
    asked = []
    fused = AllReduceNorm((256, 512), 1, multiprocessors=132, compiled=lambda _, macros: asked.append(macros))
    for rows in (1, 2, 1):
        fused.launcher(rows, 3584, torch.bfloat16, eps=1e-6, way="one-shot")
    assert len(asked) == 1 and asked[0]["RANK"] == 1 and asked[0]["WORLD"] == 2
