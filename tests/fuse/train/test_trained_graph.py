"""``torch.compile(model, backend="fusion_advisor")`` on a model that trains: right gradients, and all that autograd promises."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fusion_advisor.fuse.dynamo_backend import fuse_graph, optimise
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.train.judge.gradients import check_gradients
from fusion_advisor.fuse.train.trained_graph import NOT_FASTER, Outcome, TrainedGraph
from fusion_advisor.timing.paired import compare_rounds
from tests.tiny import BANDWIDTH

OPTIONS = ApplyOptions(keep="verified", compile=False, min_share=0.0, bandwidth=BANDWIDTH)
WIDTH = 48


class Block(nn.Module):
    """RMSNorm, a gate and a residual: chains in both passes."""

    def __init__(self, *, dropout=0.0):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        rows = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return x + self.dropout(self.down(functional.silu(self.gate(rows)) * self.up(rows)))


class Counted:
    """The backend, with a count of the passes that were rewritten."""

    def __init__(self, options=OPTIONS):
        self.changed, self.options = [], options

    def __call__(self, graph_module, inputs):
        return fuse_graph(graph_module, inputs, self.options, self.optimise)

    def optimise(self, region, options, check=None):
        call = optimise(region, options, check=check)
        self.changed.append(call != region.original.forward)
        return call


def step(model, x, **kind):
    loss = model(x, **kind).square().mean()
    loss.backward()
    return loss.detach()


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def made():
    torch.manual_seed(0)
    model, backend = Block(), Counted()
    return model, copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False), backend


@pytest.fixture
def x():
    return torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops")
        yield
    torch.compiler.reset()


def compare(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=2e-5, atol=2e-6, msg=lambda said, name=name: f"{name}: {said}")


def test_both_passes_are_fused_and_gradients_are_eagers(made, x):
    model, plain, compiled, backend = made
    assert torch.allclose(step(compiled, x), step(plain, x))
    assert backend.changed == [True, True]
    compare(gradients(model), gradients(plain))


def no_memory(value):
    raise torch.OutOfMemoryError("of attention's scores")


def test_where_the_wide_ops_do_not_fit_both_passes_as_they_were_traced_are_the_truth(x):
    found = []

    def trained(*args, traced, **more):
        full = torch.fx.GraphModule(traced, copy.deepcopy(traced.graph))
        with full.graph.inserting_before(full.graph.output_node()):
            full.graph.call_function(no_memory, (next(iter(full.graph.nodes)),))

        def check(ours, theirs, wide):
            found.append(check_gradients(ours, theirs, wide))
            return found[-1]

        return TrainedGraph(*args, traced=full, **more, check=check)

    model = Block()
    compiled = torch.compile(model, backend=functools.partial(fuse_graph, options=OPTIONS, trained=trained), dynamic=False)
    step(compiled, x)
    assert [(one.oracle, one.is_passed) for one in found] == [("float64", True)]


@pytest.mark.parametrize("is_none", [True, False])
def test_gradients_add_up_until_they_are_set_to_zero_or_none(made, x, is_none):
    model, plain, compiled, _ = made
    for _ in range(3):
        step(compiled, x)
        step(plain, x)
    compare(gradients(model), gradients(plain))
    model.zero_grad(set_to_none=is_none)
    step(compiled, 2 * x)
    plain.zero_grad(set_to_none=is_none)
    step(plain, 2 * x)
    compare(gradients(model), gradients(plain))


def test_in_float64_nothing_is_wider_and_eager_judges(x):
    """Each loss is its own truth there, and would allow no rounding but its own. Many parameters of modules are called alike."""
    torch.manual_seed(0)
    model, backend = Block().double(), Counted()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    step(compiled, x.double())
    step(plain, x.double())
    assert backend.changed == [True, True]  # no warning: it was not refused
    for name, theirs in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], theirs, rtol=1e-12, atol=1e-15)


def test_inputs_get_gradients_too(made, x):
    _, plain, compiled, _ = made
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    step(compiled, ours)
    step(plain, theirs)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-5, atol=2e-6)


def test_a_backward_pass_may_run_twice(made, x):
    model, plain, compiled, _ = made
    for one in (compiled, plain):
        loss = one(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    compare(gradients(model), gradients(plain))


def test_hooks_on_gradients_see_them(made, x):
    model, plain, compiled, _ = made
    seen = {}
    for name, one in (("ours", model), ("theirs", plain)):
        one.gain.register_hook(lambda gradient, name=name: seen.setdefault(name, gradient.clone()) * 0.5)
    step(compiled, x)
    step(plain, x)
    torch.testing.assert_close(seen["ours"], seen["theirs"], rtol=2e-5, atol=2e-6)
    compare(gradients(model), gradients(plain))


def test_frozen_weights_get_none(made, x):
    model, plain, _, _ = made
    for one in (model, plain):
        one.gate.requires_grad_(False)
    compiled = torch.compile(model, backend=Counted(), dynamic=False)
    step(compiled, x)
    step(plain, x)
    assert model.gate.weight.grad is None and model.up.weight.grad is not None
    compare(gradients(model), gradients(plain))


def test_it_trains_as_eager_does(made, x):
    model, plain, compiled, _ = made
    losses = []
    for one, call in ((model, compiled), (plain, plain)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            losses.append(step(call, x))
            optimizer.step()
    ours, theirs = torch.stack(losses[:10]), torch.stack(losses[10:])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ours[-1] < 0.9 * ours[0]


def test_bfloat16_under_autocast(made, x):
    model, plain, compiled, backend = made
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(compiled, x)
        step(plain, x)
    assert any(backend.changed)
    for name, theirs in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], theirs, rtol=0.05, atol=2e-3)


class Repeated(nn.Module):
    """One block used twice, under a checkpoint where it is asked to."""

    def __init__(self, *, is_checkpointed, dropout=0.0):
        super().__init__()
        self.block, self.is_checkpointed = Block(dropout=dropout), is_checkpointed

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.is_checkpointed else self.block(x)
        return x


@pytest.mark.parametrize(
    "outcome", [Outcome(), Outcome(NOT_FASTER), Outcome("a planted reason")], ids=["kept", "not faster", "refused"]
)
def test_a_dropout_under_a_checkpoint_drops_the_same_in_both_passes_whatever_runs(outcome, x):
    class Judged(TrainedGraph):
        def _judged(self, args):
            super()._judged(args)
            return outcome

    torch.manual_seed(0)
    model = Repeated(is_checkpointed=True, dropout=0.4)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=functools.partial(fuse_graph, options=OPTIONS, trained=Judged), dynamic=False)
    said = pytest.warns(UserWarning, match="a planted reason") if "planted" in outcome.reason else contextlib.nullcontext()
    with said:
        for seed in (1, 2):
            for one in (compiled, plain):
                torch.manual_seed(seed)
                step(one, x)
    compare(gradients(model), gradients(plain))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_one_module_used_twice(is_checkpointed, x):
    torch.manual_seed(0)
    model, backend = Repeated(is_checkpointed=is_checkpointed), Counted()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    step(compiled, x)
    step(plain, x)
    assert any(backend.changed)
    compare(gradients(model), gradients(plain))


def test_dropout_drops_anew_in_each_step_and_its_gradient_knows_where(x):
    torch.manual_seed(0)
    model, backend = Block(dropout=0.5), Counted()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = step(compiled, x)
        drawn.append((loss, gradients(model)["down.bias"]))
    assert any(backend.changed)
    assert torch.equal(drawn[1][1], drawn[0][1]) and not torch.allclose(drawn[2][0], drawn[0][0])
    dropped = compiled(x) == x  # what was dropped leaves the residual alone
    assert 0.4 < dropped.float().mean() < 0.6


def test_the_first_step_draws_the_numbers_of_any_other(x):
    torch.manual_seed(0)
    model = Block(dropout=0.5)
    compiled = torch.compile(model, backend=Counted(), dynamic=False)
    torch.manual_seed(3)
    first = compiled(x).detach()
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(compiled(x).detach(), first) and torch.equal(torch.rand(3), after)


class Counting(nn.Module):
    """A batch norm counts the steps."""

    def __init__(self):
        super().__init__()
        self.norm, self.block = nn.BatchNorm1d(5), Block()

    def forward(self, x):
        return self.block(functional.gelu(self.norm(x)))


def test_running_statistics_move_once_for_each_step(x):
    torch.manual_seed(0)
    model = Counting()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=Counted(), dynamic=False)
    for _ in range(2):
        step(compiled, x)
        step(plain, x)
    assert int(model.norm.num_batches_tracked) == 2
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)
    compare(gradients(model), gradients(plain))


def test_eval_and_train_take_turns(x):
    torch.manual_seed(0)
    model = Block(dropout=0.5)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=Counted(), dynamic=False)
    step(compiled, x)
    model.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x), rtol=2e-5, atol=2e-6)
    model.train()
    torch.manual_seed(5)
    one = step(compiled, x)
    torch.manual_seed(5)
    assert torch.allclose(step(compiled, x), one)


@pytest.mark.parametrize(("times", "is_kept"), [((2000, 1000), True), ((1000, 1000), False), ((1000, 2000), False)], ids=str)
def test_it_stays_where_the_whole_step_is_faster(times, is_kept, x):
    torch.manual_seed(0)
    model, graphs = Block(), []

    def compared(*_):
        return compare_rounds([times[0]] * 20, [times[1]] * 20)

    def backend(graph_module, inputs):
        options, optimiser = replace(OPTIONS, keep="paying"), functools.partial(verified, optimise)
        trained = functools.partial(TrainedGraph, compare=compared)
        graphs.append(fuse_graph(graph_module, inputs, options, optimiser, trained=trained))
        return graphs[-1]

    step(torch.compile(model, backend=backend, dynamic=False), x)
    (call,) = graphs
    assert (call._call == call._joint) == is_kept


def verified(optimiser, region, options, check=None):
    """Optimise one pass without a clock."""
    return optimiser(region, replace(options, keep="verified"), check=check)
