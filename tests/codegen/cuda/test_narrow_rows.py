"""CUDA kernels where several rows share a warp, on the host with all threads of a block, and their launch shapes."""

from __future__ import annotations

import shutil

import pytest

from fusion_advisor.autotune.tune import candidates
from fusion_advisor.codegen.common.arguments import schedule
from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.cuda.shared_memory import SharedMemory
from fusion_advisor.codegen.cuda.tiling import launch_shape
from tests.kernel_cases import programs as p
from tests.kernel_cases import simt_on_host
from tests.kernel_cases.cases import cases, distance, inputs
from tests.kernel_cases.evaluate import allocate, evaluate

CASES = cases()
NARROW = (
    "softmax-float32", "softmax-bfloat16", "rmsnorm-float16", "add_layernorm-float64", "causal_softmax", "batched_softmax",
    "nan_softmax", "gathered_group_norm_split",
)  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
def test_rows_that_share_a_warp_on_the_host(tmp_path):
    """Packs of one column, two and four lanes to a row, and a last block that is cut: its rows past the end leave early."""
    launches, given = [], []
    for name in NARROW:
        program = CASES[name]
        (call,) = calls_of(program, flatten_rows=True)
        rendered = CudaBackend().render(
            program, Header(title="case", summary="a test", origin="a test"), tuning=Tuning(), fast_math=False
        )
        for lanes in (2, 4, 16):
            columns = call.plan.program.dims[-1]
            each = -(-columns // lanes)
            macros = {"THREADS": lanes, "ROWS": 32 // lanes, "PACKS": each, "VEC": 1, "FULL": int(columns == lanes * each)}
            macros |= {"LATE": 1} if "LATE" in rendered.source else {}
            tensors, outputs = inputs(name, program), allocate(program)
            launches.append(
                simt_on_host.Launch(
                    rendered=rendered, calls=[[*tensors, *outputs]], grid=-(-call.plan.row_count // macros["ROWS"]), threads=32,
                    scalars=[value for _, value in call.arguments], macros=macros,
                )
            )  # fmt: skip
            given.append((name, program, tensors, outputs))
        assert not rendered.form.is_looped
    simt_on_host.run_all(launches, tmp_path)
    for name, program, tensors, outputs in given:
        for got, oracle in zip(outputs, evaluate(program, *tensors), strict=True):
            assert distance(name, got, oracle) <= 1


def test_narrow_rows_share_a_warp_and_others_do_not():
    shapes = {}
    for rows, cols in ((65536, 64), (65536, 128), (65536, 136), (4, 64), (65536, 8), (65536, 40)):
        macros, (blocks, _, _) = launch_shape(schedule(p.rmsnorm(rows, cols, "bfloat16"), flatten_rows=True), Tuning())
        shapes[rows, cols] = (macros["THREADS"], macros["ROWS"], macros["PACKS"], macros["FULL"])
        assert blocks * macros["ROWS"] >= rows and macros["THREADS"] * macros["PACKS"] * macros["VEC"] >= cols
    assert shapes == {
        (65536, 64): (8, 16, 1, 1), (65536, 128): (16, 8, 1, 1), (65536, 136): (32, 4, 1, 0), (4, 64): (8, 4, 1, 1),
        (65536, 8): (1, 128, 1, 1), (65536, 40): (8, 16, 1, 0),
    }  # fmt: skip


def test_tuning_tries_narrow_rows_in_blocks_of_several_sizes():
    texts = [text for _, text in candidates(p.rmsnorm(65536, 128, "bfloat16"), "cuda", limits=SharedMemory())]
    assert len(texts) == 6
    assert {text.split()[0] for text in texts} == {"THREADS=16", "THREADS=8"}
