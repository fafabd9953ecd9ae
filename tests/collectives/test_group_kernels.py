"""The kernel of a process group: who gets it, buffers that come and go, bytes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fusion_advisor.capture.trace.attribute import category_of
from fusion_advisor.codegen.cuda.nvrtc import has_cuda_core
from fusion_advisor.collectives.all_reduce_norm import render
from fusion_advisor.collectives.group_kernels import NormCall, SymmetricKernels, gathered, join_group, moved_bytes, why_no_buffers
from fusion_advisor.collectives.launch_shape import BUFFER_BYTES

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CALL = NormCall(rows=64, cols=3584, dtype=torch.bfloat16, eps=1e-6)


def alone(_what, value):
    return [value]


def test_ranks_on_cpus_and_processes_without_a_group_get_none():
    assert join_group("0", CPU, alone) == "no symmetric memory: the ranks run on CPUs"
    assert join_group("0", GPU, alone) == "no process group was joined"


def test_other_groups_and_groups_of_other_sizes_get_none():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    try:
        assert join_group(f"{name}1", GPU, alone) == "its group is not that of all ranks"
        assert join_group(name, GPU, alone) == "a group of 1 ranks: the kernel serves 2 to 8"
        assert gathered("anything", 5) == [5]
    finally:
        dist.destroy_process_group()
    assert gathered("anything", 5) == [5]


def test_what_one_rank_lacks_no_rank_has():
    found = join_group("0", CPU, lambda _, own: ["", own])
    assert found == "rank 1: no symmetric memory: the ranks run on CPUs"


def test_the_rank_without_memory_for_a_buffer_is_named():
    assert why_no_buffers([BUFFER_BYTES, 2 * BUFFER_BYTES]) == ""
    assert why_no_buffers([2 * BUFFER_BYTES, 1000]) == f"rank 1: 1,000 bytes are free, and a buffer takes {BUFFER_BYTES:,}"


def symmetric(made, compiled):
    def shared(size_bytes, device, group_name):
        assert (size_bytes, device, group_name) == (BUFFER_BYTES, CPU, "0")
        made.append(SimpleNamespace(addresses=(4096 * len(made) + 256, 512)))
        return made[-1]

    return SymmetricKernels(
        "0", CPU, 0, 2, multiprocessors=132, shared=shared, compiled=lambda _, macros: compiled.append(macros) or len(compiled)
    )


def test_dtypes_and_widths_that_it_does_not_serve_are_named():
    kernels = symmetric([], [])
    assert kernels.why_not(CALL) == ""
    for dtype in (torch.float32, torch.int16):
        other = NormCall(rows=1, cols=64, dtype=dtype, eps=0.0)
        assert "the kernel serves bfloat16 and float16" in kernels.why_not(other)
    assert "multiples of 8" in kernels.why_not(NormCall(rows=1, cols=63, dtype=torch.float16, eps=0.0))
    assert kernels.ways(CALL) == ("one-shot",)
    assert kernels.ways(NormCall(rows=2048, cols=64, dtype=torch.float16, eps=0.0)) == ("one-shot", "two-shot")
    assert kernels.words(CALL) == "64 blocks of 448 threads, 1 rounds of 1 rows a block"


@pytest.mark.skipif(not has_cuda_core(), reason="needs cuda-core")
def test_each_norm_has_a_kernel_of_its_own():
    asked = []
    kernels = SymmetricKernels(
        "0", CPU, 0, 2, multiprocessors=132, shared=lambda *_: SimpleNamespace(addresses=(256, 512)),
        compiled=lambda rendered, macros: asked.append((rendered.entry, macros["NORM"], macros["HAS_OFFSET"])),
    )  # fmt: skip
    kernels.acquire()
    for call in (CALL, replace(CALL, norm="rms-once"), replace(CALL, norm="layer", has_offset=True)):
        kernels.launcher(call, "one-shot")
        assert kernels.rendered(call).entry == asked[-1][0]
    rms, layer = render().entry, render("layer").entry
    assert asked == [(rms, 0, 0), (rms, 1, 0), (layer, 2, 1)] and "layernorm" in layer


@pytest.mark.skipif(not has_cuda_core(), reason="needs cuda-core")
def test_buffers_are_made_once_freed_and_made_again_without_another_compilation():
    made, compiled = [], []
    kernels = symmetric(made, compiled)
    with pytest.raises(RuntimeError, match="were freed"):
        kernels.launcher(CALL, "one-shot")
    kernels.acquire()
    kernels.acquire()
    launch = kernels.launcher(CALL, "one-shot")
    assert len(made) == 1 and len(compiled) == 1
    kernels.release()
    kernels.release()
    with pytest.raises(RuntimeError, match="were freed"):
        launch(*[torch.zeros(1)] * 5)
    kernels.acquire()
    kernels.launcher(CALL, "one-shot")
    assert len(made) == 2 and len(compiled) == 1
    kernels.launcher(CALL, "two-shot")
    assert len(compiled) == 2


def test_bytes_count_what_goes_to_other_ranks_and_comes_from_them():
    row = 3584 * 2
    # x twice, the residual, both results; with a second rank its rows are read, and ours are written into its buffer.
    assert moved_bytes(CALL, "one-shot", 1) == 64 * 5 * row + row
    assert moved_bytes(CALL, "one-shot", 2) == 64 * 7 * row + row
    assert moved_bytes(CALL, "two-shot", 8) < moved_bytes(CALL, "one-shot", 8)
    layer = replace(CALL, norm="layer", has_offset=True)  # a shift and a linear's bias beside the weight
    assert moved_bytes(layer, "one-shot", 2) == moved_bytes(CALL, "one-shot", 2) + 2 * row


def test_its_launches_count_as_ops_between_ranks_in_a_trace():
    assert (
        category_of(render().entry, "") == category_of(render("layer").entry, "") == "collective"
        and category_of("fa_add_rmsnorm_0c9e", "") == "fused"
    )
