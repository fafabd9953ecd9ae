"""CUDA: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.runtime.torch_internals import cuda_state


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph, and this machine has no CUDA device")
def test_a_recorded_gemm_outlives_the_workspaces_that_others_free():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 4096), (4096, 256), (256,)))
    want = torch.addmm(bias, x, weight)
    graph = torch.cuda.CUDAGraph()
    with cuda_state.own_gemm_workspace(), torch.cuda.graph(graph):
        out = torch.addmm(bias, x, weight)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    guard = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert not guard.any()


def test_without_a_device_there_is_no_workspace_to_free():
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") or not torch.cuda.is_available()
    with cuda_state.own_gemm_workspace():
        pass


@pytest.mark.gpu
def test_the_current_device_and_streams():
    assert cuda_state.current_device_number() == torch.cuda.current_device()
    other = torch.cuda.Stream()
    assert cuda_state.current_stream_number(0) == torch.cuda.current_stream(0).cuda_stream
    with torch.cuda.stream(other):
        assert cuda_state.current_stream_number(0) == other.cuda_stream
