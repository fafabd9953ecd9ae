"""The ops in which two steps differ: which they are, what they are given, and what is said where they cannot run alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.graph_diff_cost import _change, change_alone, saving_alone_ns
from fusion_advisor.fuse.decide.rebind import changed_bench
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, Step
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.passes.merge_gemms import merge_all
from fusion_advisor.fuse.passes.slice_pushdown import narrow_all
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite
from fusion_advisor.fuse.rewrite.record import CopyRoom
from fusion_advisor.timing.interleaving import Difference
from fusion_advisor.workload.weight_packing import lay_out_siblings, leave_room
from tests.fuse.stages.test_try_layout_change_merge import gated
from tests.fuse.stages.test_try_layout_change_narrow import classifier


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


class Ran(list):
    """What ran in the two steps, step by step."""

    def saving(self, runner, before, after, *, least_ops=1):
        """Return what is saved where each op takes a microsecond."""
        change = change_alone(runner, before, after, least_ops=least_ops, interleave=self._interleave)
        return None if change is None else -change.median_ns

    def _interleave(self, calls, **_):
        for call in calls:
            with Counted() as counted:
                call()
            self.append(counted.ops)
        return [[1000 * len(ops)] * 6 for ops in self[-2:]]


@pytest.fixture
def ran():
    return Ran()


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


def test_of_a_merge_the_linears_and_what_reads_slices_now_run(ran):
    bench = bench_of(gated())
    before, after = steps(bench, merge_all(bench.live.regions, CopyRoom())[0])
    drawn = torch.random.get_rng_state()
    assert ran.saving(StepRunner(bench), before, after) == 1000
    assert torch.equal(torch.random.get_rng_state(), drawn)
    wide = (2, 48, 96)
    assert ran == [
        [("mm", (96, 96)), ("silu", wide), ("mm", (96, 96)), ("mul", wide)],
        [("mm", (96, 192)), ("silu", wide), ("mul", wide)],
    ]
    assert ran.saving(StepRunner(bench), after, before) == -1000


def test_of_rows_left_out_what_has_another_size_runs(ran):
    bench = bench_of(classifier())
    before, after = steps(bench, next(narrow_all(bench.live.regions, CopyRoom())))
    ran.saving(StepRunner(bench), before, after)
    rows = [{shape[0] for name, shape in ops if name in ("addmm", "mm")} for ops in ran]
    assert len(ran[0]) == len(ran[1]) > 3
    assert rows == [{2, 96}, {2}]  # the classes' linear reads a slice no more
    assert ("cumsum", (2, 48, 64)) not in ran[0]


def test_a_call_runs_for_the_ops_that_it_stands_for(ran):
    bench = bench_of(gated())
    given = []

    def gate(*tensors):
        given.extend(tensors)
        return functional.silu(tensors[0])

    before, after = with_call(bench, ["aten.silu.default"], gate, reads=["aten.linear.default"])
    assert ran.saving(StepRunner(bench), before, after) == 0
    assert ran == [[("silu", (2, 48, 96))]] * 2
    assert given[0].shape == (2, 48, 96) and given[0].std() > 0.5  # made up: no step computed it
    assert ran.saving(StepRunner(bench), before, before) == 0 and len(ran) == 2


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
    ran.saving(StepRunner(bench), *[Step(bench=bench, variant=one) for one in variants])
    assert given[0] is loaded.args[0] and given[1] is loaded.model.norm.weight


def test_few_ops_run_several_times_over(ran):
    bench = bench_of(gated())
    before, after = with_call(bench, ["aten.silu.default"], lambda x: x, reads=["aten.linear.default"])
    assert ran.saving(StepRunner(bench), before, after, least_ops=20) == 1000
    assert [len(ops) for ops in ran] == [10, 0]  # 20 over an op and a call


class Shared(torch.nn.Module):
    """Linears of one input, and a reshape that is a view of one of them alone."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(64, 96, bias=False)

    def forward(self, x):
        return self.gate(x).tanh(), self.up(x).reshape(-1).tanh()


def test_a_copy_that_only_one_step_makes_counts(ran):
    torch.manual_seed(0)
    model = Shared().eval()
    assert lay_out_siblings(model) == 2
    bench = Bench(capture_regions(model, (torch.randn(2, 48, 64),), {}), on_cuda=False)
    before, after = steps(bench, merge_all(bench.live.regions, CopyRoom())[0])
    saving_ns = ran.saving(StepRunner(bench), before, after)
    assert [[name for name, _ in ops].count("clone") for ops in ran] == [0, 1]
    assert saving_ns == 0  # a GEMM less and a copy more


class Layer(torch.nn.Module):
    """Linears with biases, of several widths, and a residual."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        x = x + self.o(functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return x + self.down(functional.relu(self.up(x)))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_gemms_with_their_biases_written_out_are_told_apart(slow_biases, ran, layers):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(layers))).eval()
    assert lay_out_siblings(model) == 10 * layers
    bench = Bench(capture_regions(model, (torch.randn(1, 64, 64),), {}), on_cuda=False)
    before, after = steps(bench, merge_all(bench.live.regions, CopyRoom())[0])
    ran.saving(StepRunner(bench), before, after)
    columns = [sum(shape[-1] for name, shape in ops if name in ("addmm", "mm")) for ops in ran]
    assert columns == [layers * 3 * 64] * 2  # q, k and v of each layer, and nothing else


class Looped(torch.nn.Module):
    """Layers that share a graph and have their own weights: there is a graph break in each."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = broken(layer, x)
        return x


def broken(layer, x):
    return torch.sigmoid(layer(x))


def test_each_run_of_a_region_is_on_its_own_tensors(ran):
    model = Looped().eval()
    bench = Bench(capture_regions(model, (torch.randn(4, 8),), {}), on_cuda=False)
    before, after = (Step(bench=bench, variant=bench.build((), ())) for _ in range(2))
    given = []

    def noted(*args):
        given.append(args)
        return torch.nn.functional.linear(*args)

    for module in after.variant.modules:
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                node.target = noted
    ran.saving(StepRunner(bench), before, after)
    assert {args[1].data_ptr() for args in given} == {layer.weight.data_ptr() for layer in model.layers}
    assert len(given) == 4


def test_a_step_does_not_differ_from_itself(ran):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 31)).eval().to(torch.bfloat16)
    leave_room(model)
    bench = Bench(capture_regions(model, (torch.randn(64, 64, dtype=torch.bfloat16),), {}), on_cuda=False)
    variants = [bench.build((), ("pad-gemm", "odd-width-gemm", "fold-constants")) for _ in range(2)]
    assert variants[0].changed["pad-gemm"]
    assert ran.saving(StepRunner(bench), *[Step(bench=bench, variant=one) for one in variants]) == 0
    assert not ran


class Divides(torch.nn.Module):
    def forward(self, x, ids):
        return torch.sigmoid(x) * (ids * 7 % (ids + 3).cumsum(0))


def test_integers_that_are_not_known_divide_nothing(ran):
    bench = Bench(capture_regions(Divides().eval(), (torch.randn(4), torch.arange(4)), {}), on_cuda=False)
    before, after = (Step(bench=bench, variant=bench.build((), ())) for _ in range(2))
    (graph,) = [module.graph for module in after.variant.modules]
    (node,) = (node for node in graph.nodes if str(node.target) == "aten.remainder.Tensor")
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    assert ran.saving(StepRunner(bench), before, after) is None


class Unrecorded(StepRunner):
    """Of a step that cannot be recorded."""

    def recorded(self, plain):
        self.method = "cuda_events"
        return plain


def test_a_recording_that_fails_leaves_the_runner_as_it_was(ran):
    bench = bench_of(gated())
    before, after = steps(bench, merge_all(bench.live.regions, CopyRoom())[0])
    runner = Unrecorded(bench)
    assert ran.saving(runner, before, after) is None
    assert runner.method == bench.timer.method


class Writes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(x.sum(0))
        return torch.sigmoid(x)


class Inplace(torch.nn.Module):
    def forward(self, x):
        doubled = x * 2
        functional.relu(doubled[:2], inplace=True)  # the whole is read afterwards, so that it stays in place
        return doubled


def test_what_writes_to_the_steps_own_activations_runs(ran):
    bench = Bench(capture_regions(Inplace().eval(), (torch.randn(4),), {}), on_cuda=False)
    before, after = (Step(bench=bench, variant=bench.build((), ())) for _ in range(2))
    (graph,) = [module.graph for module in after.variant.modules]
    (node,) = (node for node in graph.nodes if str(node.target) == "aten.relu_.default")
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    assert ran.saving(StepRunner(bench), before, after) == 1000


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
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
    assert ran.saving(StepRunner(bench), before, after) is None
    assert not ran


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_without_memory_there_is_no_figure_and_other_failures_are_not_swallowed():
    bench = bench_of(gated())
    before, after = steps(bench, merge_all(bench.live.regions, CopyRoom())[0])
    full, lost = torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("an illegal memory access was encountered")
    assert change_alone(StepRunner(bench), before, after, interleave=failing(full)) is None
    with pytest.raises(RuntimeError, match="illegal memory access"):
        change_alone(StepRunner(bench), before, after, interleave=failing(lost))


def test_what_costs_nothing_saves_what_the_ops_take():
    bench = bench_of(gated())
    targets = ["aten.silu.default", "aten.mul.Tensor"]
    before, after = with_call(bench, targets, lambda x: x, reads=["aten.linear.default"])
    saved_ns = saving_alone_ns(StepRunner(bench), before, after)
    assert saved_ns > 1000  # two ops on 9,216 numbers


def test_an_interval_is_of_the_rounds_differences_and_one_side_may_be_nothing():
    assert _change([0] * 9, [3_000] * 9, 0.95, 3) == Difference(median_ns=1_000, low_ns=1_000, high_ns=1_000)
    found = _change([10, 20, 30, 40, 50, 60, 70, 80], [8, 21, 27, 36, 45, 54, 63, 72], 0.95, 1)
    assert (found.low_ns, found.high_ns) == (-8, 1)
    assert found.median_ns == -4
