"""Memsets of recorded graphs as kernels: which ones, what they write, and what stays as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.cuda import graph_memsets
from fusion_advisor.codegen.cuda.graph_memsets import Memsets
from fusion_advisor.export.copied import cuda_graphs, memset_nodes
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder


def test_without_cuda_core_all_memsets_stay(monkeypatch):
    monkeypatch.setattr(graph_memsets, "has_cuda_core", lambda: False)
    assert Memsets().replace(None) == 0


@pytest.mark.nvrtc
def test_a_driver_s_error_is_said_by_name():
    from cuda.bindings import driver

    with pytest.raises(RuntimeError, match="cannot be replaced: CUDA_ERROR_INVALID_VALUE"):
        memset_nodes.done((driver.CUresult.CUDA_ERROR_INVALID_VALUE, None))
    assert memset_nodes.done((driver.CUresult.CUDA_SUCCESS,)) is None
    for name in ("cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes", "cuGraphAddDependencies"):
        assert callable(memset_nodes.of_edges(name))


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_the_kernel_that_packages_bring_assembles(arch, tmp_path):
    assembler = shutil.which("ptxas", path=f"{Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin'}:{os.environ['PATH']}")
    assert assembler is not None  # Triton brings it
    (tmp_path / "kernel.ptx").write_bytes(memset_nodes.PTX)
    command = [assembler, f"-arch={arch}", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert memset_nodes.ENTRY.encode() in (tmp_path / "kernel.cubin").read_bytes()


def kinds_of(graph):
    from cuda.bindings import driver

    captured = driver.CUgraph(graph.raw_cuda_graph())
    nodes = memset_nodes.listed(driver.cuGraphGetNodes, captured)
    return [memset_nodes.done(driver.cuGraphNodeGetType(node)).name.rpartition("TYPE_")[2] for node in nodes]


def recorded(call, replace=None):
    """Capture a call twice: as it is, and with its memsets replaced; return the graphs, their results and the count."""
    found = []
    for keeps in (True, False):
        graph, replacing = torch.cuda.CUDAGraph(keep_graph=True), Memsets()
        with torch.cuda.graph(graph):
            result = call()
        count = 0 if keeps else (replace or replacing.replace)(graph)
        found.append((graph, result, kinds_of(graph)))
        graph.instantiate()
        graph.replay()
        torch.cuda.synchronize()
        graph.kept = replacing
    return found, count


@pytest.mark.gpu
@pytest.mark.nvrtc
@pytest.mark.parametrize("replace", [None, memset_nodes.replace], ids=["compiled", "as in packages"])
def test_what_a_memset_writes_a_kernel_writes(replace):
    """Of one, two and four bytes' width, in a row and in rows of their own; a part of a word is left to the memset."""
    from cuda.bindings import driver

    def call():
        out = torch.full((64,), 7, dtype=torch.uint8, device="cuda")
        stream, at = driver.CUstream(torch.cuda.current_stream().cuda_stream), out.data_ptr()
        memset_nodes.done(driver.cuMemsetD8Async(driver.CUdeviceptr(at), 0xAB, 8, stream))
        memset_nodes.done(driver.cuMemsetD16Async(driver.CUdeviceptr(at + 16), 0x1234, 6, stream))
        memset_nodes.done(driver.cuMemsetD32Async(driver.CUdeviceptr(at + 32), 0xDEADBEEF, 1, stream))
        memset_nodes.done(driver.cuMemsetD8Async(driver.CUdeviceptr(at + 40), 0xFF, 3, stream))
        memset_nodes.done(driver.cuMemsetD2D8Async(driver.CUdeviceptr(at + 48), 8, 0x11, 4, 2, stream))
        return out + 1

    ((_, expected, before), (_, result, after)), count = recorded(call, replace)
    assert torch.equal(result, expected) and len({int(value) for value in expected}) > 5
    assert before.count("MEMSET") == 5 and (count, after.count("MEMSET")) == (3, 2)
    assert len(after) == len(before)


@pytest.mark.gpu
@pytest.mark.nvrtc
def test_a_kernel_that_does_not_compile_is_said_once_and_memsets_stay(monkeypatch):
    def fail(rendered, _):
        raise KernelBuildFailed(kernel=rendered.entry, target="cuda", cause="planted")

    monkeypatch.setattr(graph_memsets, "compile_loaded", fail)
    out = torch.ones(64, device="cuda")

    def call():
        from cuda.bindings import driver

        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        memset_nodes.done(driver.cuMemsetD8Async(driver.CUdeviceptr(out.data_ptr()), 0, 64, stream))

    with pytest.warns(UserWarning, match=r"memsets stay in CUDA graphs.*planted"):
        (_, (graph, _, after)), count = recorded(call)
    assert (count, after.count("MEMSET"), graph.kept.replace(graph)) == (0, 1, 0)


@pytest.mark.gpu
@pytest.mark.nvrtc
def test_attention_of_cudnn_is_recorded_as_kernels_alone():
    query = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    expected = call()
    ((_, _, before), (graph, result, after)), count = recorded(call)
    assert count == before.count("MEMSET") and "MEMSET" not in after
    assert torch.equal(result, expected)
    for scale in (2.0, 0.5):
        query.mul_(scale)
        graph.replay()
        assert torch.equal(result, call())


@pytest.mark.gpu
@pytest.mark.nvrtc
def test_a_recorder_replaces_them_and_its_graphs_outlive_the_call():
    weight = torch.randn(768, 768, device="cuda")
    x, bias = torch.randn(128, 768, device="cuda"), torch.randn(768, device="cuda")
    recorder = CudaRecorder()
    torch.addmm(bias, x, weight)
    replay, result = recorder.record(lambda: torch.addmm(bias, x, weight))
    for _ in range(3):
        x.add_(1)
        replay()
        assert torch.equal(result, torch.addmm(bias, x, weight))


@pytest.mark.gpu
@pytest.mark.nvrtc
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_package_s_recorder_replaces_them_or_records_without(is_broken):
    query, counts = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16), []

    def replace(graph):
        counts.append(memset_nodes.replace(graph))
        if is_broken:
            raise RuntimeError("planted")
        return counts[-1]

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    call()
    recorder = cuda_graphs.CudaRecorder(replace)
    result, replay = recorder.record(call)
    for scale in (2.0, 0.5):
        query.mul_(scale)
        replay()
        assert torch.equal(result, call())
    recorder.record(call)
    assert len(counts) == (1 if is_broken else 2)
