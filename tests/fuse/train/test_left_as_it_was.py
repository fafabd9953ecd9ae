"""``fa.apply`` runs a training step many times, and leaves no trace in the model's modules or in the caller's inputs."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn import functional
from torch.utils import _pytree as pytree

import fusion_advisor as fa
from fusion_advisor.errors import CannotCapture, NotTrainable
from tests.fuse.train.test_trained_graph import WIDTH, Block
from tests.fuse.train.test_trained_model import OPTIONS, applied


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def batch(dtype=torch.float32):
    return torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


class Averaged(nn.Module):
    """Replaces a buffer, and keeps a table that the first call makes."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype)
        hidden = self.block(x) * self.table
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean((0, 1))
        return self.head(functional.gelu(hidden + self.mean))


class Forced(nn.Module):
    """Writes to its weights in each forward pass: one is moved by its data, one normalised without gradients."""

    def __init__(self):
        super().__init__()
        self.block, self.shift, self.gain = Block(), nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, x):
        self.shift.data.add_(0.25)
        with torch.no_grad():
            self.gain.copy_(self.gain / self.gain.norm())
        return self.block(functional.gelu(x + self.shift) * self.gain * 5)


class Scaling(nn.Module):
    """Writes to its input."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x.mul_(0.5))


def trained(model, steps=3):
    """Return gradients, weights and buffers after some calls, and what is left of the input."""
    x = batch(next(model.parameters()).dtype)
    for _ in range(steps):
        model(x).square().mean().backward()
    state = {**dict(model.named_buffers()), **{f"weight {name}": one.detach() for name, one in model.named_parameters()}}
    return {"x": x, **state, **{name: one.grad for name, one in model.named_parameters()}}


class Followed(nn.Module):
    """Its second encoder and its table are large, and are written to in the forward pass: one by ops, one by its data."""

    def __init__(self, write="op"):
        super().__init__()
        self.block, self.write, self.words = Block(), write, nn.Embedding(4, 70_000, max_norm=0.5)
        self.first, self.second = nn.Linear(WIDTH, 6000), nn.Linear(WIDTH, 6000).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, others in zip(self.second.parameters(), self.first.parameters(), strict=True):
                if self.write == "op":
                    mine.mul_(0.5).add_(others, alpha=0.5)
                elif self.write == "data":
                    mine.data.mul_(0.5).add_(others.data, alpha=0.5)
                else:
                    mine.data = mine.data * 0.5 + others.data * 0.5
            target = self.second(x)
        words = self.words(torch.arange(2, device=x.device))
        return self.block(x), (self.first(x) - target).square().mean(), words.square().mean()


@pytest.mark.parametrize("write", ["op", "data", "memory"])
def test_large_parameters_that_the_forward_pass_writes_to_are_put_back(write):
    model = Followed(write).train()
    before, memory = copy.deepcopy(model.state_dict()), [one.data_ptr() for one in model.parameters()]
    if write == "memory":  # dynamo traces no such write
        with pytest.raises(CannotCapture):
            applied(model, (batch(),))
    else:
        applied(model, (batch(),)).revert()
    assert [one.data_ptr() for one in model.parameters()] == memory
    for (name, one), other in zip(model.state_dict().items(), before.values(), strict=True):
        assert torch.equal(one, other), name
    model(batch())
    assert not torch.equal(model.second.weight, before["second.weight"])
    assert not torch.equal(model.words.weight, before["words.weight"])


@pytest.mark.parametrize("kind", [Averaged, Forced, Scaling])
def test_training_goes_on_as_if_nothing_had_been(kind):
    model = kind().train()
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    x = batch()
    fused = applied(model, (x,))
    assert torch.equal(x, batch())
    for (name, one), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    ours, theirs, true = map(trained, (model, plain, wide))
    for name, exact in true.items():
        mine, eagers = (float((side[name].double() - exact).norm() / exact.norm()) for side in (ours, theirs))
        assert mine <= 3 * eagers + 1e-6, (name, mine, eagers)
    assert fused.launches > 0


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_an_observers_ranges_are_empty_again():
    """They are resized by the first batch that they see."""
    model = Block()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model.train())
    plain, empty = copy.deepcopy(model), copy.deepcopy(model)
    fused = applied(model, (batch(),))
    for other in (empty, plain):
        if other is plain:
            for one in (model, plain):
                one(batch()).square().mean().backward()
        for (name, mine), own in zip(model.named_buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(mine, own, msg=lambda said, name=name: f"{name}: {said}")
    assert any(one.numel() == 0 for one in empty.buffers()) and fused.launches > 0


def test_a_buffer_that_is_replaced_is_put_back_and_a_table_stays():
    model = Averaged().train()
    mean = model.mean
    fused = applied(model, (batch(),))
    assert model.mean is mean and model.table is not None
    trained(model)
    assert fused.launches > 0 and not fused.fallbacks


class Counting(Block):
    """Counts its calls and keeps a list of them, and may raise in the second."""

    def __init__(self, *, last=None):
        super().__init__()
        self.calls, self.seen, self.last = 5, [], last

    def forward(self, x):
        if self.last == self.calls:
            raise ValueError("no further step")
        self.calls += 1
        self.seen.append(x.shape[0])
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:fusion-advisor runs the original ops")  # dynamo takes the count for a constant
@pytest.mark.parametrize("last", [None, 5, 6])
def test_what_a_model_counts_in_python_is_put_back(last):
    model = Counting(last=last).train()
    seen = model.seen
    if last is None:
        fa.apply(model, (batch(),), **OPTIONS)
    else:
        with pytest.raises(NotTrainable, match="no further step"):
            fa.apply(model, (batch(),), **OPTIONS)
    assert model.calls == 5 and model.seen is seen and not seen
    if last is None:
        model(batch())
        assert model.calls == 6 and seen == [8]


def test_an_optimizer_that_steps_in_the_backward_pass_waits_for_the_callers():
    """Hooks on parameters see the caller's gradients alone: steps of ours would train the model meanwhile."""
    model = Block().train()
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    seen = []

    def stepping(one):
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in one.parameters()}

        def stepped(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [parameter.register_post_accumulate_grad_hook(stepped) for parameter in optimizers]
        return [*handles, one.gain.register_hook(lambda gradient: seen.append(gradient.dtype))]

    handles = stepping(model)
    fused = applied(model, (batch(),))
    assert not seen
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    for one in (plain, wide):
        stepping(one)
    for one in (model, plain, wide):
        for _ in range(3):
            one(batch(one.gain.dtype)).square().mean().backward()
    assert len(seen) == 9 and fused.launches > 0 and not fused.fallbacks
    for mine, eagers, truth in zip(model.parameters(), plain.parameters(), wide.parameters(), strict=True):
        exact = truth.detach()
        ours, theirs = (float((one.detach().double() - exact).norm() / exact.norm()) for one in (mine, eagers))
        assert ours <= 3 * theirs + 1e-6
    for handle in handles:
        handle.remove()
    model(batch()).square().mean().backward()
    assert len(seen) == 9 and model.gain.grad is not None


class Held(torch.Tensor):
    """A tensor without memory of its own, around another one, as DTensor is: its ops run on that."""

    @staticmethod
    def __new__(cls, held, **how):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, strides=held.stride(), **how)

    def __init__(self, held, **_):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, op, _types, args=(), kwargs=None):
        opened = pytree.tree_map_only(cls, lambda one: one.held, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, op(*opened[0], **opened[1]))


def test_a_parameter_that_handles_its_ops_is_refused_ahead_of_the_first_step():
    model = Counting().train()
    model.gain = nn.Parameter(Held(model.gain.detach()))
    with pytest.raises(CannotCapture, match="`gain` is a Held, a tensor class that handles its ops by itself"):
        applied(model, (batch(),))
    assert model.calls == 5


class Drawing(Block):
    """Draws from a generator of its own, and from Python's and numpy's."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        self.draw()
        return super().forward(x)

    @torch._dynamo.disable
    def draw(self):
        random.random()
        numpy.random.rand()
        torch.rand(2, generator=self.generator)


def test_random_generators_are_where_they_were():
    model = Drawing().train()

    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(1).item(), torch.rand(1, generator=model.generator).item()

    random.seed(1)
    numpy.random.seed(1)
    state = model.generator.get_state(), torch.get_rng_state()
    expected = drawn()
    random.seed(1)
    numpy.random.seed(1)
    model.generator.set_state(state[0])
    torch.set_rng_state(state[1])
    fa.apply(model, (batch(),), **OPTIONS)
    assert drawn() == expected
