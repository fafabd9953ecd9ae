"""Real CUDA graphs of both passes: the bits of a step launched kernel by kernel, dropout included, and memory that is freed."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.step_graph.step_graph import WAITING
from tests.fuse.step_graph.fake_passes import Backend
from tests.fuse.step_graph.test_step_graph import WIDTH, Net, assert_same, x

pytestmark = pytest.mark.gpu


@pytest.fixture
def pair():
    """A model whose steps are replayed, its twin launched kernel by kernel, and the backend of the first."""
    torch.manual_seed(0)
    model = Net().cuda()
    twin, backend = copy.deepcopy(model), Backend(CudaRecorder())
    yield (
        torch.compile(model, backend=backend, dynamic=False),
        torch.compile(twin, backend=Backend(CudaRecorder(), is_on=False), dynamic=False),
        backend,
    )
    torch.compiler.reset()


def step(model, seed, *, is_fresh=True):
    if is_fresh:
        model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, rows = model(x(seed).cuda())
    loss.backward()
    return [loss.detach(), rows.detach(), *(one.grad for one in model.parameters()), *model.buffers()]


def test_replays_have_the_bits_of_launches(pair):
    compiled, direct, backend = pair
    for seed in range(5):
        assert_same(step(compiled, seed), step(direct, seed))
    for seed in range(3):
        ours, theirs = step(compiled, seed, is_fresh=False), step(direct, seed, is_fresh=False)
    assert_same(ours, theirs)
    assert backend.graphs.replays == [7, 7] and not backend.graphs.refusals


def test_dropout_goes_on_where_it_was(pair):
    compiled, direct, _ = pair
    found = []
    for one in (compiled, direct):
        step(one, 0), step(one, 0)
        torch.manual_seed(5)
        found.append([one(x(1).cuda())[1].detach() for _ in range(3)])
    assert_same(*found)
    assert not torch.equal(found[0][0], found[0][1])


def test_two_forwards_before_a_backward(pair):
    compiled, direct, backend = pair
    found = []
    for one in (compiled, direct):
        step(one, 0), step(one, 1)
        one.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        (one(x(5).cuda())[0] + one(x(6).cuda())[0]).backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert_same(*found)
    assert backend.graphs.refusals == {WAITING: 1}


def test_memory_stays_the_same_and_is_freed(pair):
    compiled, _, backend = pair
    for seed in range(4):
        step(compiled, seed)
    held = set()
    for _ in range(50):
        step(compiled, 1)
        held.add(torch.cuda.memory_allocated())
    assert len(held) == 1 and backend.graphs.pool_bytes > WIDTH
    backend.graphs.forget()
    gc.collect()
    assert torch.cuda.memory_allocated() < held.pop()


def test_a_backward_pass_uses_memory_of_what_it_has_read():
    torch.manual_seed(0)
    model, backend = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(12)]).cuda(), Backend(CudaRecorder())
    compiled, rows = torch.compile(model, backend=backend, dynamic=False), torch.randn(4096, 4096, device="cuda")
    compiled(rows).sum().backward()
    loss = compiled(rows).sum()
    kept_bytes = backend.graphs.pool_bytes
    loss.backward()
    assert backend.graphs.replays == [1, 1]
    # Twelve gradients of weights lie where eleven activations were: by themselves they and what lies between would take fifteen.
    units = (backend.graphs.pool_bytes - kept_bytes) / rows.nbytes
    assert units < 8
    torch.compiler.reset()


def third_loss(model):
    """The loss of a third step, without its backward pass."""
    step(model, 0), step(model, 1)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    return model(x(2).cuda())[0]


def test_what_a_replay_kept_outlives_its_graph(pair):
    compiled, direct, backend = pair
    found = []
    for one in (compiled, direct):
        loss = third_loss(one)
        if one is compiled:
            backend.graphs.forget()
            gc.collect()
            torch.cuda.empty_cache()
        junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
        del junk
    assert_same(*found)


def test_a_retained_backward_pass_runs_again(pair):
    compiled, direct, backend = pair
    found = []
    for one in (compiled, direct):
        loss = third_loss(one)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert_same(*found)
    assert backend.graphs.replays == [2, 2]


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_gradient_that_another_stream_reads_is_not_written_once_it_is_dropped(pair, name):
    """``record_stream`` waits for the reader, as in eager: gradients are memory of the allocator's, not of a graph."""
    compiled, direct, backend = pair
    found = []
    for one in (compiled, direct):
        step(one, 0), step(one, 1)
        side, parameter = torch.cuda.Stream(), getattr(one.inner, name)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work = torch.ones(8192, 8192, device="cuda")
            for _ in range(20):  # the device reads the gradient long after later steps were launched
                work = work @ work
            read = parameter.grad.clone()
        parameter.grad.record_stream(side)
        expected = parameter.grad.clone()
        for seed in (2, 3, 4):
            step(one, seed)
        torch.cuda.synchronize()
        assert torch.equal(read, expected)
        found.append([read])
    assert_same(*found)
    assert backend.graphs.replays == [4, 4]


def test_gradients_are_memory_of_the_allocators(pair):
    compiled, _, backend = pair
    for seed in (0, 1):
        step(compiled, seed)
    spans = [
        (part["address"], part["address"] + part["total_size"])
        for part in torch.cuda.memory_snapshot()
        if tuple(part.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    assert spans and backend.graphs.replays == [1, 1]
    for one in compiled.parameters():
        storage = one.grad.untyped_storage()
        assert storage.resizable() and not any(low <= storage.data_ptr() < high for low, high in spans)


class Attending(torch.nn.Module):
    """Attention in fp32 with a mask and a dropout: its seeds lie in host memory, or on the device in a graph."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(64, 192), torch.nn.Linear(64, 3)

    def forward(self, x, mask):
        heads = self.inner(x).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            found = functional.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=0.25)
        rows = self.outer(found.transpose(1, 2).flatten(2))
        return rows.square().mean(), rows


def attended(model, seed):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(seed)).cuda()
    loss, rows = model(x, torch.zeros(2, 1, 16, 16, device="cuda"))
    loss.backward()
    return [loss.detach(), rows.detach(), *(one.grad for one in model.parameters())]


def test_seeds_of_attention_are_read_where_they_lie():
    torch.manual_seed(0)
    model, backend = Attending().cuda(), Backend(CudaRecorder())
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    direct = torch.compile(twin, backend=Backend(CudaRecorder(), is_on=False), dynamic=False)
    for seed in range(4):
        assert_same(attended(compiled, seed), attended(direct, seed))
    assert backend.graphs.replays == [3, 3] and backend.graphs._seeds
    turns = iter((None, "planted"))
    backend.recorder.refusal = lambda: next(turns)
    assert_same(attended(compiled, 9), attended(direct, 9))  # a launched backward pass after a replayed forward pass
    assert backend.graphs.replays == [4, 3] and backend.graphs.refusals == {"planted": 1}
    torch.compiler.reset()
