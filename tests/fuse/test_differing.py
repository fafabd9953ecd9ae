"""The ops in which two steps differ: which they are, what they are given, and what is said where they cannot run alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_advisor.fuse.differing as stage
from fusion_advisor.capture.graph import capture_regions
from fusion_advisor.fuse.bench import Bench, BuiltLinear, Step
from fusion_advisor.fuse.decide import StepRunner
from fusion_advisor.fuse.merging import merge_all
from fusion_advisor.fuse.narrowing import narrow_all
from fusion_advisor.fuse.relocate import changed_bench
from fusion_advisor.fuse.rewrite import SiteRewrite
from tests.fuse.test_merging import gated
from tests.fuse.test_narrowing import classifier


class Counted(TorchDispatchMode):
    """Notes the ops that compute, with the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            shapes = [tuple(one.shape) for one in (result if isinstance(result, tuple) else [result])]
            self.ops.append((func.overloadpacket.__name__, *shapes[:1]))
        return result


@pytest.fixture
def ran(monkeypatch):
    """Each op takes a microsecond; what ran in the two steps is appended, step by step."""
    found = []

    def interleave(calls, **_):
        for call in calls:
            with Counted() as counted:
                call()
            found.append(counted.ops)
        return [[1000 * len(ops)] * 6 for ops in found[-2:]]

    monkeypatch.setattr(stage.measure, "interleave", interleave)
    return found


def bench_of(loaded):
    return Bench(capture_regions(loaded.model, loaded.args, loaded.kwargs), on_cuda=False)


def steps(bench, changed):
    after = changed_bench(bench, changed)[0]
    return [Step(bench=one, variant=one.build((), ())) for one in (bench, after)]


def with_call(bench, targets, call, *, reads):
    """Steps without and with a call in the place of the ops of these names."""
    members = tuple(op.index for op in bench.ops if op.target in targets)
    inputs = tuple(next(op.index for op in bench.ops if op.target == target) for target in reads)
    site = SiteRewrite(fusion_id="G1", members=members, inputs=inputs, outputs=members[-1:], call=call)
    linear = BuiltLinear(id="G1", sites=(site,))
    return [Step(bench=bench, variant=bench.build((), (), linears)) for linears in ((), [linear])]


def test_of_a_merge_the_linears_alone_run(ran):
    bench = bench_of(gated())
    before, after = steps(bench, merge_all(bench, may_copy=False, free_bytes=0))
    drawn = torch.random.get_rng_state()
    assert stage.saving_alone_ns(StepRunner(bench), before, after) == 1000
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert ran == [[("mm", (96, 96))] * 2, [("mm", (96, 192))]]
    assert stage.saving_alone_ns(StepRunner(bench), after, before) == -1000


def test_of_rows_left_out_what_has_another_size_runs(ran):
    bench = bench_of(classifier())
    before, after = steps(bench, narrow_all(bench)[0])
    stage.saving_alone_ns(StepRunner(bench), before, after)
    shapes = [{shape for name, shape in ops if name in ("addmm", "mm")} for ops in ran]
    assert len(ran[0]) == len(ran[1]) > 3
    assert all(shape[0] == 2 for shape in shapes[1]) and not shapes[0] & shapes[1]
    assert ("cumsum", (2, 48, 64)) not in ran[0]


def test_a_call_runs_for_the_ops_that_it_stands_for(ran):
    bench = bench_of(gated())
    given = []

    def gate(*tensors):
        given.extend(tensors)
        return functional.silu(tensors[0])

    before, after = with_call(bench, ["aten.silu.default"], gate, reads=["aten.linear.default"])
    assert stage.saving_alone_ns(StepRunner(bench), before, after) == 0
    assert ran == [[("silu", (2, 48, 96))]] * 2
    assert given[0].shape == (2, 48, 96) and given[0].std() > 0.5  # made up: no step computed it
    assert stage.saving_alone_ns(StepRunner(bench), before, before) == 0 and len(ran) == 2


def test_parameters_and_inputs_are_the_models_own(ran):
    loaded = gated()
    bench = bench_of(loaded)
    given = []

    def norm(x, weight):
        given.extend([x, weight])
        return functional.layer_norm(x, (64,), weight)

    (at,) = (op.index for op in bench.ops if op.target == "aten.layer_norm.default")
    (x,) = (op.index for op in bench.ops if op.role == "input")
    (weight,) = (op.index for op in bench.ops if op.target == "norm.weight")
    site = SiteRewrite(fusion_id="G1", members=(at,), inputs=(x, weight), outputs=(at,), call=norm)
    variants = [bench.build((), (), linears) for linears in ((), [BuiltLinear(id="G1", sites=(site,))])]
    stage.saving_alone_ns(StepRunner(bench), *[Step(bench=bench, variant=one) for one in variants])
    assert given[0] is loaded.args[0] and given[1] is loaded.model.norm.weight


class Writes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(x.sum(0))
        return torch.sigmoid(x)


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.sigmoid(self.linear(x))


@pytest.mark.parametrize(("model", "target"), [(Writes(), "aten.add_.Tensor"), (Mixed(), "aten.sigmoid.default")])
def test_what_writes_and_what_runs_in_autocast_gets_no_figure(ran, model, target):
    bench = Bench(capture_regions(model.eval(), (torch.randn(4, 8),), {}), on_cuda=False)
    before = Step(bench=bench, variant=bench.build((), ()))
    after = Step(bench=bench, variant=bench.build((), ()))
    (graph,) = [module.graph for module in after.variant.modules]
    (node,) = (node for node in graph.nodes if str(node.target) == target)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    assert stage.saving_alone_ns(StepRunner(bench), before, after) is None
    assert not ran


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_without_memory_there_is_no_figure_and_other_failures_are_not_swallowed(monkeypatch):
    bench = bench_of(gated())
    before, after = steps(bench, merge_all(bench, may_copy=False, free_bytes=0))
    monkeypatch.setattr(stage.measure, "interleave", failing(torch.OutOfMemoryError("CUDA out of memory.")))
    assert stage.saving_alone_ns(StepRunner(bench), before, after) is None
    monkeypatch.setattr(stage.measure, "interleave", failing(RuntimeError("an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        stage.saving_alone_ns(StepRunner(bench), before, after)


def test_what_costs_nothing_saves_what_the_ops_take():
    bench = bench_of(gated())
    targets = ["aten.silu.default", "aten.mul.Tensor"]
    before, after = with_call(bench, targets, lambda x: x, reads=["aten.linear.default"])
    saved_ns = stage.saving_alone_ns(StepRunner(bench), before, after)
    assert saved_ns > 1000  # two ops on 9,216 numbers
