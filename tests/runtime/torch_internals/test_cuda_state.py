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


def _exchange(owner, name):
    """Set a switch to something else and back, as (set, put back)."""
    before = getattr(owner, name)
    other = ({"ieee": "tf32"}.get(before, "ieee")) if isinstance(before, str) else not before
    return (lambda: setattr(owner, name, other)), (lambda: setattr(owner, name, before))


def _enable(kind):
    before = getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
    enable = getattr(torch.backends.cuda, f"enable_{kind}_sdp")
    return (lambda: enable(not before)), (lambda: enable(before))


def _deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    return (lambda: torch.use_deterministic_algorithms(not before)), (lambda: torch.use_deterministic_algorithms(before))


SWITCHES = {
    **{kind: lambda kind=kind: _enable(kind) for kind in ("flash", "mem_efficient", "math", "cudnn")},
    "tf32 of matmul": lambda: _exchange(torch.backends.cuda.matmul, "fp32_precision"),
    "tf32 of conv": lambda: _exchange(torch.backends.cudnn.conv, "fp32_precision"),
    "tf32 of rnn": lambda: _exchange(torch.backends.cudnn.rnn, "fp32_precision"),
    "tf32 of all": lambda: _exchange(torch.backends, "fp32_precision"),
    **{name: lambda name=name: _exchange(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")},
    "deterministic algorithms": _deterministic,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_that_chooses_kernels_is_seen(name):
    change, put_back = SWITCHES[name]()
    before = cuda_state.kernel_switches()
    try:
        change()
        assert cuda_state.kernel_switches() != before
    finally:
        put_back()
    assert cuda_state.kernel_switches() == before and hash(before)
