"""Rows that a cluster of blocks shares: on the host with all threads, compiled for GPUs that have clusters, and there."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.codegen.common.arguments import schedule
from fusion_advisor.codegen.common.horizontal_fusion import calls_of, starts
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend, compile_for
from fusion_advisor.codegen.cuda.tiling import form_for, launch_shape, pack_width
from tests.kernel_cases import moments_rows, simt_on_host, softmax_rows
from tests.kernel_cases import programs as p
from tests.kernel_cases.cases import cases, distance, inputs
from tests.kernel_cases.evaluate import allocate, evaluate

CASES = cases()
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
needs_clusters = pytest.mark.skipif(
    "not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0)", reason="runs kernels on a GPU with clusters"
)


def render(program, cluster, **more):
    return CudaBackend().render(program, HEADER, tuning=Tuning(cluster=cluster, **more), fast_math=False)


def launch(program, tensors, cluster, threads=0):
    """A launch on the host, with as many packs of a thread as the row needs."""
    tuning = Tuning(cluster=cluster, num_warps=threads // 32 or None)
    rendered, calls = render(program, cluster), calls_of(program, flatten_rows=True)
    plan, form = calls[0].plan, rendered.form
    macros, (blocks, _, _) = launch_shape(plan, tuning, form=form, width=min(pack_width(c.plan, form)[0] for c in calls))
    counts = [call.plan.row_count * cluster for call in calls]
    scalars = [value for _, value in (*starts(counts), *(item for call in calls for item in call.arguments))]
    assert blocks == counts[0]
    return simt_on_host.Launch(
        rendered=rendered, calls=[tensors], grid=sum(counts), threads=macros["THREADS"], scalars=scalars, macros=macros
    )


@needs_compiler
def test_norms_on_the_host(tmp_path):
    """Full blocks, one that the row does not fill, and blocks behind its end."""
    asked = [("layernorm-bfloat16", 1608, 8, 32), ("std-float32", 16387, 3, 64)]
    launches, results = [], []
    for name, cols, cluster, threads in asked:
        function, dtype = moments_rows.CASES[name]
        both = moments_rows.inputs(dtype, cols)
        program, tensors, out = moments_rows.lowered(function, both)
        launches.append(launch(program, [*tensors, out], cluster, threads))
        results.append((function, both, out))
    simt_on_host.run_all(launches, tmp_path)
    complaints = [moments_rows.complaint(*result) for result in results]
    assert complaints == [""] * len(asked)


@needs_compiler
def test_softmax_on_the_host(tmp_path):
    """The second's rows start at any address; the last writes one number for a row."""
    asked = (("softmax", 808, 5), ("log_softmax", 16403, 8), ("scaled_logsumexp", 1608, 4))
    launches, results = [], []
    for name, cols, cluster in asked:
        function = softmax_rows.FUNCTIONS[name]
        both = tuple(tensor[: len(tensor) // 2].clone() for tensor in softmax_rows.inputs(torch.bfloat16, cols))
        program, tensors, out = moments_rows.lowered(function, both)
        launches.append(launch(program, [*tensors, out], cluster))
        results.append((function, both, out))
    assert [one.rendered.form.is_shifted for one in launches] == [False, True, False]
    simt_on_host.run_all(launches, tmp_path)
    assert [softmax_rows.complaint(*result) for result in results] == [""] * len(asked)


@needs_compiler
def test_sums_of_8_bytes_nests_side_by_side_and_groups_on_the_host(tmp_path):
    names = (
        "add_layernorm-float64",
        "looped_beside",
        "gathered_group_norm",
        "gathered_group_norm_split",
        "looped_group_norm_table",
    )
    launches = [(CASES[name], inputs(name, CASES[name]), allocate(CASES[name])) for name in names]
    simt_on_host.run_all([launch(program, [*given, *out], 2) for program, given, out in launches], tmp_path)
    for name, (program, given, outputs) in zip(names, launches, strict=True):
        for got, oracle in zip(outputs, evaluate(program, *given), strict=True):
            assert distance(name, got, oracle) <= 1


def test_a_launch_has_a_block_for_each_part_of_each_row():
    plan = schedule(p.softmax(2048, 40960, "bfloat16"), flatten_rows=True)
    shapes = {}
    for cluster in (1, 2, 4, 8):
        tuning = Tuning(cluster=cluster)
        macros, grid = launch_shape(plan, tuning, form=form_for([plan], tuning))
        shapes[cluster] = (macros["THREADS"], macros["PACKS"], macros["FULL"], grid[0])
    assert shapes == {1: (1024, 5, 1, 2048), 2: (640, 4, 1, 4096), 4: (320, 4, 1, 8192), 8: (160, 4, 1, 16384)}


def test_the_source_says_how_many_blocks_share_a_row():
    program = p.softmax(8, 40960, "bfloat16")
    rendered = render(program, 4, num_warps=8)
    assert rendered.tuning == Tuning(cluster=4, num_warps=8)
    assert rendered.form.is_clustered and not rendered.form.is_looped
    assert len({rendered.entry, render(program, 8, num_warps=8).entry, render(program, None).entry}) == 3
    assert "luster" not in render(program, None).source


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["looped_add_layernorm-1x20000", "add_layernorm-float64", "looped_beside"])
def test_compiles_where_there_are_clusters(name):
    program = CASES[name]
    assert compile_for(render(program, 4), 90, program=program, compiler="nvrtc")[:4] == b"\x7fELF"
    with pytest.raises(KernelBuildFailed):
        compile_for(render(program, 4), 80, program=program, compiler="nvrtc")


@pytest.mark.gpu
@needs_clusters
# Not 1: memcheck takes a block that sends to itself for a fault where no cluster was asked for.
@pytest.mark.parametrize("cluster", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["layernorm-bfloat16", "std-float32", "mean_where_no_variance-float32"])
def test_norms_on_the_device(tmp_path, name, cluster):
    function, dtype = moments_rows.CASES[name]
    both = moments_rows.inputs(dtype)
    program, tensors, out = moments_rows.lowered(function, both)
    rendered, on_device = render(program, cluster), out.cuda()
    CudaBackend().build(rendered, tmp_path / f"{rendered.entry}.cu").bind(program)(*(t.cuda() for t in tensors), on_device)
    assert not moments_rows.complaint(function, both, on_device.cpu())


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize("cols", [16400, 50257])
@pytest.mark.parametrize("cluster", [2, 4, 7, 8])
def test_softmax_on_the_device(tmp_path, cluster, cols):
    function = softmax_rows.FUNCTIONS["log_softmax"]
    both = tuple(tensor[: len(tensor) // 2].clone() for tensor in softmax_rows.inputs(torch.bfloat16, cols))
    program, tensors, out = moments_rows.lowered(function, both)
    rendered, on_device = render(program, cluster), out.cuda()
    launcher = CudaBackend().build(rendered, tmp_path / f"{rendered.entry}.cu").bind(program)
    arguments = [*(tensor.cuda() for tensor in tensors), on_device]
    launcher(*arguments)
    assert not softmax_rows.complaint(function, both, on_device.cpu())
    graph, first = torch.cuda.CUDAGraph(), on_device.clone()
    on_device.zero_()
    with torch.cuda.graph(graph):
        launcher(*arguments)
    graph.replay()
    torch.testing.assert_close(on_device, first, rtol=0, atol=0, equal_nan=True)
