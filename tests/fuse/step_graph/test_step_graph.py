"""Replays of both passes: the bits of a step launched kernel by kernel, whatever its caller does in between."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

from fusion_advisor.fuse.step_graph.step_graph import HOOKED, WAITING
from fusion_advisor.timing.interleaving import CannotRecord
from tests.fuse.step_graph.fake_passes import Backend

WIDTH = 8


class Net(nn.Module):
    """Statistics that a step moves on, a norm, a dropout and a result besides the loss."""

    def __init__(self):
        super().__init__()
        self.statistics, self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.25)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        rows = self.outer(self.dropout(torch.tanh(self.norm(self.inner(self.statistics(x))))))
        return rows.square().mean(), rows


@pytest.fixture
def made():
    torch.manual_seed(0)
    model, backend = Net(), Backend()
    yield torch.compile(model, backend=backend, dynamic=False), copy.deepcopy(model), backend
    torch.compiler.reset()


@pytest.fixture
def direct(made):
    """The same model, launched kernel by kernel."""
    return torch.compile(made[1], backend=Backend(is_on=False), dynamic=False)


def x(seed):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model, seed, *, is_fresh=True):
    """One step; returns its results and gradients."""
    if is_fresh:
        model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, rows = model(x(seed))
    loss.backward()
    return [loss.detach(), rows.detach(), *(one.grad for one in model.parameters()), *model.buffers()]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def cloned(tensors):
    return [one.clone() for one in tensors]


def test_other_inputs_and_random_numbers_give_the_bits_of_launches(made, direct):
    compiled, _, backend = made
    for seed in range(5):
        assert_same(step(compiled, seed), step(direct, seed))
    assert backend.graphs.replays == [4, 4] and backend.recorder.recorded == 2 and not backend.graphs.refusals
    assert (backend.passes["forward"].runs, backend.passes["backward"].runs) == (1, 1)


def test_what_a_caller_holds_is_not_written_by_later_replays(made):
    compiled, _, backend = made
    step(compiled, 0)
    held = step(compiled, 1)
    then = cloned(held[:-3])  # buffers move on
    for seed in (2, 3):
        step(compiled, seed)
    assert backend.graphs.replays == [3, 3]
    assert_same(held[:-3], then)


def test_gradients_are_a_callers_own_memory(made):
    """It may be resized and lies in no graph: "Why gradients are copied out" in docs/measurements/training_steps.md."""
    compiled, _, backend = made
    for seed in (0, 1):
        step(compiled, seed)
    recorded = backend.graphs._recorded
    static = {memory.tensor.data_ptr() for memory in recorded.backward.memories} | recorded.kept_at
    for one in compiled.parameters():
        storage = one.grad.untyped_storage()
        assert storage.resizable() and storage.nbytes() == one.grad.nbytes and storage.data_ptr() not in static


@pytest.mark.parametrize("is_none", [True, False])
def test_gradients_of_two_steps_are_zeroed_written_and_kept_as_in_eager(made, direct, is_none):
    """Two steps ahead of each of the optimizer's; one that the caller puts in, a hook that keeps all, views that live on."""
    found = []
    for one in (made[0], direct):
        optimizer, kept = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.5), []
        hook = one.inner.weight.register_hook(kept.append)
        views = []
        for seed in range(6):
            torch.manual_seed(seed)
            one(x(seed))[0].backward()
            if seed == 3:
                one.outer.bias.grad = torch.ones_like(one.outer.bias)
            views.append(one.inner.bias.grad.detach().view(2, -1))
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=is_none)
        hook.remove()
        found.append(cloned([*one.parameters(), *kept, *views]))
    assert_same(*found)
    assert made[2].graphs.replays == [5, 5] and not made[2].graphs.refusals


def test_a_gradient_that_is_not_set_to_none_stays_where_it_is(made):
    compiled, _, backend = made
    for seed in (0, 1):
        step(compiled, seed)
    before = [one.grad.data_ptr() for one in compiled.parameters()]
    for seed in (2, 3):
        compiled.zero_grad(set_to_none=False)
        step(compiled, seed, is_fresh=False)
    assert [one.grad.data_ptr() for one in compiled.parameters()] == before and backend.graphs.replays == [3, 3]


def test_gradients_add_up_over_replays(made, direct):
    compiled, _, backend = made
    for one in (compiled, direct):
        for seed in range(4):
            found = step(one, seed, is_fresh=False)
        if one is compiled:
            ours = found
    assert_same(ours, found)
    assert backend.graphs.replays == [3, 3]


def test_an_optimizer_that_writes_weights_is_seen(made, direct):
    compiled, _, backend = made
    for one in (compiled, direct):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for seed in range(4):
            found = step(one, seed)
            optimizer.step()
        if one is compiled:
            ours = cloned(found)
    assert_same(ours, found)
    assert backend.graphs.replays == [3, 3]


def two_forwards(model):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    (model(x(5))[0] + model(x(6))[0]).backward()
    return [one.grad for one in model.parameters()]


def test_a_second_forward_before_the_backward_is_launched_and_said_once(made, direct):
    compiled, _, backend = made
    for one in (compiled, direct):
        step(one, 0)
    with pytest.warns(UserWarning, match="without its CUDA graphs") as said:
        for _ in range(2):
            assert_same(two_forwards(compiled), two_forwards(direct))
    assert len(said) == 1 and backend.graphs.refusals == {WAITING: 2}
    assert backend.graphs.replays == [2, 2]
    assert_same(step(compiled, 1), step(direct, 1))
    assert backend.graphs.replays == [3, 3]


def test_a_backward_pass_may_run_twice_and_after_a_later_step(made, direct):
    compiled, _, backend = made
    found = []
    for one in (compiled, direct):
        step(one, 0)
        one.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss, _ = one(x(1))
        loss.backward(retain_graph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one(x(2))[0].backward()
        loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert_same(*found)
    # The first pass leaves what its graph would overwrite.
    assert backend.graphs.refusals == {WAITING: 1} and backend.graphs.replays == [1, 1]


def test_a_backward_pass_that_was_recorded_for_other_flags_is_launched_and_both_are_recorded_again(made, direct):
    compiled, _, backend = made
    found = []
    for one in (compiled, direct):
        for seed in (0, 1):
            step(one, seed)
        one.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        loss, _ = one(x(2))
        with torch.backends.cudnn.flags(deterministic=True):
            loss.backward()
        found.append(cloned(parameter.grad for parameter in one.parameters()))
    assert_same(*found)
    assert backend.graphs.replays == [2, 1]
    assert_same(step(compiled, 3), step(direct, 3))
    assert_same(step(compiled, 4), step(direct, 4))
    assert backend.recorder.recorded == 4 and backend.graphs.replays == [4, 3]


def test_nothing_holds_what_is_kept_once_the_backward_pass_was_recorded(made):
    compiled, _, backend = made
    for seed in (0, 1):
        step(compiled, seed)
    recorded = backend.graphs._recorded
    assert recorded.backward is not None and recorded.kept.owners == [] and recorded.forward.kept


def test_hooks_that_drop_some_of_what_is_kept_have_the_step_launched(made, direct):
    compiled, _, backend = made
    large = WIDTH * 4

    def pack(value):
        return value.clone() if value.numel() >= large else value  # the rest stays where it is

    found = []
    for one in (compiled, direct):
        for seed in (0, 1):
            step(one, seed)
        one.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = one(x(2))[0]
            second = one(x(3))[0]
        (first + second).backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert_same(*found)
    assert backend.graphs.refusals == {HOOKED: 2} and backend.graphs.replays == [1, 1]


def test_an_input_gets_its_gradient(made, direct):
    found = []
    for one in (made[0], direct):
        for seed in range(3):
            batch = x(seed).requires_grad_()
            torch.manual_seed(seed)
            one(batch)[0].backward()
        found.append([batch.grad])
    assert_same(*found)
    assert made[2].graphs.replays == [2, 2]


def test_a_loss_that_is_kept_or_dropped_lets_the_next_step_replay(made):
    compiled, _, backend = made
    step(compiled, 0)
    losses = []
    for seed in (1, 2, 3):
        loss, _ = compiled(x(seed))
        loss.backward()
        losses.append(loss)
    compiled(x(4))  # no backward pass at all
    compiled(x(5))
    assert backend.graphs.replays == [5, 3] and not backend.graphs.refusals


def test_a_weight_with_other_memory_is_recorded_again(made, direct):
    compiled, _, backend = made
    for one in (compiled, direct):
        for seed in (0, 1):
            step(one, seed)
        weight = one.inner.weight
        weight.data = weight.data * 2
    assert_same(step(compiled, 2), step(direct, 2))
    assert_same(step(compiled, 3), step(direct, 3))
    assert backend.recorder.recorded == 4 and backend.graphs.replays == [3, 3]


def test_a_step_whose_weights_move_at_each_call_is_launched_in_the_end(made, direct):
    compiled, _, backend = made
    with pytest.warns(UserWarning, match="changed its address or its layout 8 times") as said:
        for seed in range(12):
            assert_same(step(compiled, seed), step(direct, seed))
            weight = compiled.inner.weight
            weight.data = weight.data.clone()
    assert len(said) == 1 and backend.graphs.is_refused and backend.recorder.recorded == 16


def test_a_batch_in_one_place_that_moves_later_is_copied_from_then_on(made, direct):
    compiled, _, backend = made
    batches = x(0), x(1), x(2)

    def run(model, batch):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss, rows = model(batch)
        loss.backward()
        return [loss.detach(), rows.detach(), *(one.grad for one in model.parameters())]

    for number in (0, 0, 0, 1, 2, 1):
        assert_same(run(compiled, batches[number]), run(direct, batches[number]))
    assert backend.recorder.recorded == 4 and backend.graphs.replays == [5, 5]


def test_a_recorder_that_refuses_or_fails_leaves_the_step_launched(made, direct):
    compiled, _, backend = made
    step(compiled, 0), step(direct, 0)
    backend.recorder.why_not = "the call comes from another stream"
    with pytest.warns(UserWarning, match="another stream"):
        assert_same(step(compiled, 1), step(direct, 1))
    backend.recorder.why_not, backend.recorder.fails = None, CannotRecord("the driver says no")
    with pytest.warns(UserWarning, match="the driver says no"):
        assert_same(step(compiled, 2), step(direct, 2))
    assert backend.graphs.is_refused and backend.graphs.replays == [0, 0]


def test_a_backward_pass_that_cannot_be_recorded_is_launched_on_what_the_replay_kept(made, direct):
    compiled, _, backend = made
    step(compiled, 0), step(direct, 0)
    found = []
    for one in (compiled, direct):
        one.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss, _ = one(x(1))
        backend.recorder.fails = CannotRecord("the driver says no")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert_same(*found)
    assert backend.graphs.is_refused and backend.graphs.replays == [1, 0]


def test_a_call_of_another_thread_meanwhile_is_launched(made, direct):
    compiled, _, backend = made
    for seed in (0, 1):
        step(compiled, seed), step(direct, seed)
    record, found = backend.graphs._recorded.forward, []
    play = record.play

    def slow_play():
        thread = threading.Thread(target=lambda: found.append(compiled(x(9))[1].detach()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            thread.start()
            thread.join()
        play()

    record.play = slow_play
    compiled(x(2))
    assert backend.graphs.refusals == {"another thread is running it": 1} and found[0].isfinite().all()


def test_what_nobody_can_watch_is_launched():
    backend = Backend()

    def run(x, mask):
        return x.masked_fill(mask > 0, 0.0).sum()

    compiled = torch.compile(run, backend=backend, dynamic=False)
    with pytest.warns(UserWarning, match="nobody can tell"):
        for seed in range(3):
            batch, mask = x(seed).requires_grad_(), x(seed + 1)
            compiled(batch, mask).backward()
            assert torch.equal(batch.grad, (mask <= 0).float())
    torch.compiler.reset()
    assert backend.graphs.is_refused and backend.graphs.replays == [0, 0]


def test_forget_frees_the_graphs_and_a_later_call_records_anew(made, direct):
    compiled, _, backend = made
    for seed in (0, 1):
        step(compiled, seed), step(direct, seed)
    graphs = backend.graphs
    assert graphs.pool_bytes > 1 << 20
    kept = next(one for one in graphs._recorded.forward.kept if isinstance(one, torch.Tensor))
    memory = weakref.ref(kept.untyped_storage())
    del kept
    graphs.forget()
    gc.collect()
    assert memory() is None and graphs.pool_bytes == 0
    for seed in (2, 3):
        assert_same(step(compiled, seed), step(direct, seed))
    assert graphs.replays == [2, 2] and backend.recorder.recorded == 4


def test_launches_read_seeds_of_attention_in_host_memory(made):
    """A replay of the forward pass keeps them on the device, and its backward pass may be launched kernel by kernel."""
    compiled, _, backend = made

    class OnDevice:
        def cpu(self):
            return "in host memory"

    step(compiled, 0)
    backend.graphs._seeds, given = (1,), {}
    for which, name in enumerate(("forward", "backward")):
        backend.passes[name].run = lambda args, name=name: given.update({name: [type(one) for one in args]})
        backend.graphs._launch(which, [OnDevice(), OnDevice()])
    assert given == {"forward": [OnDevice, OnDevice], "backward": [OnDevice, str]}
