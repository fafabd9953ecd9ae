"""Real CUDA graphs: right results, memory that stays the same, and every reason to run launch by launch."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.workload.weight_packing import leave_room
from tests.fuse.cuda_graph.test_replay import Counter
from tests.tiny import Toy, gpt2

pytestmark = pytest.mark.gpu


def graphed(model, args=(), kwargs=None, **options):
    live = capture_regions(model, args, kwargs or {})
    variant = Bench(live, on_cuda=True).build((), ())
    graphs = Graphs(CudaRecorder(), **options)
    return FusedModel(model, live.regions, variant.modules, args, kwargs or {}, graphs=graphs).apply()


@pytest.fixture
def fused():
    torch.manual_seed(0)
    with torch.no_grad():
        yield graphed(Toy(width=256).eval().cuda(), (torch.randn(64, 256, device="cuda"),))


def values(count):
    return [torch.randn(64, 256, device="cuda") for _ in range(count)]


def test_replays_equal_eager_and_leave_earlier_results_alone(fused):
    given = values(6)
    results = [fused(value) for value in given]
    (recording,) = fused.graphs.recordings
    assert recording.replays == 5 and fused.graphs.pool_bytes() > 0
    for value, result in zip(given, results, strict=True):
        torch.testing.assert_close(result, fused._original(value))


def test_two_hundred_steps_hold_constant_memory(fused):
    x = torch.randn(64, 256, device="cuda")
    for _ in range(5):
        fused(x)
    gc.collect()
    torch.cuda.synchronize()
    held = []
    for _ in range(200):
        fused(x)
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(held)) == 1
    assert fused.graphs.recordings[0].replays == 204


def test_a_generating_model_on_the_device():
    model, inputs = gpt2()
    model, ids = model.cuda(), inputs["input_ids"].cuda()
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = graphed(model, (), {"input_ids": ids, "use_cache": False})
        for _ in range(3):
            torch.testing.assert_close(
                fused(input_ids=ids, use_cache=False).logits, model._call_impl(ids, use_cache=False).logits
            )
        assert fused.graphs.recordings
        assert torch.equal(fused.generate(ids, max_new_tokens=6, do_sample=False), expected)


def test_a_step_that_writes_once_per_call():
    model, plain = Counter().eval().cuda(), Counter().eval().cuda()
    with torch.no_grad():
        fused = graphed(model, (torch.randn(3, 4, device="cuda"),))
        model.total.zero_()
        for _ in range(6):
            x = torch.randn(3, 4, device="cuda")
            torch.testing.assert_close(fused(x), plain(x))
            torch.testing.assert_close(model.total, plain.total)
    assert fused.graphs.recordings[0].replays == 5


def test_moved_parameters_are_recorded_again(fused):
    for value in values(3):
        fused(value)
    for parameter in fused.model.parameters():
        parameter.data = parameter.data * 2
    torch.cuda.empty_cache()
    for value in values(3):
        torch.testing.assert_close(fused(value), fused._original(value))
    assert fused.graphs.recordings[0].replays == 3


def test_another_stream_and_an_outer_capture_run_launch_by_launch(fused):
    for value in values(3):
        fused(value)
    x = torch.randn(64, 256, device="cuda")
    expected = fused._original(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), pytest.warns(UserWarning, match="another stream"):
        result = fused(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(result, expected)
    outer = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="being recorded"), torch.cuda.graph(outer):
        captured = fused(x)
    outer.replay()
    torch.testing.assert_close(captured, expected)


class OnHost(torch.nn.Module):
    """Reads a tensor in host memory at each step."""

    def forward(self, x, scale):
        return torch.tanh(x) * scale.to(x.device)


def test_a_step_that_reads_host_memory_says_where():
    x, scale = torch.randn(8, device="cuda"), torch.full((8,), 2.0)
    with torch.no_grad():
        fused = graphed(OnHost().eval(), (x, scale))
        with pytest.warns(UserWarning, match=r"read in host memory.*test_replay_gpu.py:\d+"):
            for _ in range(3):
                torch.testing.assert_close(fused(x, scale), torch.tanh(x) * 2)
    assert fused.graphs.recordings == ()


class Waits(torch.nn.Module):
    """Holds an op that the driver refuses to record."""

    def forward(self, x):
        return (
            torch.repeat_interleave(x, torch.ones(8, dtype=torch.int64, device=x.device), output_size=None)
            + torch.linalg.inv(torch.eye(4, device=x.device)).sum()
        )


def test_what_cannot_be_recorded_still_runs():
    x = torch.randn(8, device="cuda")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = graphed(Waits().eval(), (x,))
        for _ in range(4):
            torch.testing.assert_close(fused(x), fused._original(x))
        torch.testing.assert_close(torch.randn(4, device="cuda").sum() * 0, torch.zeros((), device="cuda"))


def test_reverting_gives_the_memory_back(fused):
    for value in values(4):
        fused(value)
    assert fused.graphs.pool_bytes() > 0
    fused.revert()
    gc.collect()
    torch.cuda.empty_cache()
    assert fused.graphs.pool_bytes() == 0


def head(rows=4096, words=50257):
    """A bf16 head of an odd vocabulary behind a hidden layer, with room behind its weight, and an input."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, words, bias=False))
    model = model.to(torch.bfloat16).cuda().eval()
    leave_room(model)
    return model, torch.randn(rows, 256, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("passes", [(), ("pad-gemm",), ("pad-gemm", "odd-width-gemm")], ids=str)
def test_logits_are_computed_into_the_callers_memory(passes):
    model, x = head()
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=True).build((), passes)
    with torch.no_grad():
        fused = FusedModel(model, live.regions, variant.modules, (x,), {}, graphs=Graphs(CudaRecorder())).apply()
        given = [torch.randn_like(x) for _ in range(5)]
        results = [fused(value) for value in given]
        for value, result in zip(given, results, strict=True):
            torch.testing.assert_close(result, fused._original(value), rtol=2e-2, atol=2e-2)
        assert len({result.data_ptr() for result in results}) == 5
        (recording,) = fused.graphs.recordings
        is_behind = passes != ("pad-gemm",)
        assert [memory.name for memory in recording.memories] == ["2" if is_behind else ""]
        assert fused.graphs.pool_bytes() < results[0].nbytes or not is_behind
        model[2].weight.mul_(-2)  # written to: seen at once; moved: recorded again
        torch.testing.assert_close(fused(x), fused._original(x), rtol=2e-2, atol=2e-2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fused(x)
            torch.cuda.synchronize()
        kernels = [event.key for event in profile.key_averages()]
        if is_behind:
            assert not any("rows_copy" in name for name in kernels), kernels
        assert fused.fallbacks == {}
    fused.revert()


def test_logits_behind_the_graph_hold_constant_memory():
    model, x = head(rows=512, words=8192)
    with torch.no_grad():
        fused = graphed(model, (x,))
        for _ in range(5):
            fused(x)
        gc.collect()
        torch.cuda.synchronize()
        held = set()
        for _ in range(100):
            fused(x)
            held.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert len(held) == 1
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        torch.cuda.empty_cache()
        for _ in range(3):
            torch.testing.assert_close(fused(x), fused._original(x), rtol=2e-2, atol=2e-2)
    fused.revert()


class Scaled(torch.nn.Module):
    """A value of a buffer alone, and one of a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(256))
        self.gain = torch.nn.Parameter(torch.randn(256))

    def forward(self, x):
        return x * torch.tanh(self.table) + torch.sigmoid(self.gain)


@pytest.mark.parametrize("passes", [(), ("fold-frozen",)], ids=["default", "frozen"])
def test_a_replay_follows_writes_that_torch_does_not_count(passes):
    model, x = Scaled().eval().cuda(), torch.randn(64, 256, device="cuda")
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=True).build((), passes)
    fused = FusedModel(model, live.regions, variant.modules, (x,), {}, graphs=Graphs(CudaRecorder())).apply()
    writes = [
        lambda: model.table.data.mul_(2),
        lambda: model.gain.data.copy_(torch.randn_like(model.gain)),
        lambda: torch.from_dlpack(model.table.detach()).neg_(),
        lambda: model.gain.untyped_storage().copy_(torch.randn(256, device="cuda").untyped_storage()),
    ]
    with torch.no_grad():
        for write in [lambda: None, *writes]:
            write()
            if passes:
                fused.refresh()
            for value in values(3):
                torch.testing.assert_close(fused(value), fused._original(value))
        (recording,) = fused.graphs.recordings
        assert recording.replays == 3 * 5 - 1
        model.table = torch.randn(256, device="cuda")
        for value in values(4):
            torch.testing.assert_close(fused(value), fused._original(value))
    assert len(fused.graphs.recordings) == 1
    assert fused.fallbacks == {}
