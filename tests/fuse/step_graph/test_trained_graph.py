"""Graphs of a step next to its kernels: they stay where both together pay, and a model that is reverted holds none."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fusion_advisor.fuse.dynamo_backend import chosen_options, fuse_graph, optimise
from fusion_advisor.fuse.loss.record import plan_losses
from fusion_advisor.fuse.train.trained_graph import NOT_FASTER, SLOWER, TrainedGraph
from fusion_advisor.fuse.train.trained_model import TrainedModel
from fusion_advisor.records import Status
from fusion_advisor.timing.paired import compare_rounds
from tests.fuse.step_graph.fake_passes import FakePasses
from tests.fuse.train.test_chunked_losses import Speaker, batch
from tests.fuse.train.test_recompute_options import ROWS, Model
from tests.fuse.train.test_recompute_options import WIDTH as MODEL_WIDTH
from tests.fuse.train.test_trained_graph import OPTIONS, WIDTH, Block, compare, gradients, step

GRAPHS = replace(OPTIONS, only=("no_kernel", "cuda-graph"))


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch.compiler.reset()


@pytest.fixture
def x():
    return torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def always(region, options, check=None):
    """Rewrite a pass whatever its time: the step is what is timed here."""
    return optimise(region, replace(options, keep="verified"), check=check)


class Backend:
    """The backend with graphs of a fake device.

    Args:
        options: of the run.
        compared: what each pair of ways to run a step is said to take; none where nothing is timed.
        peaks: of eager's step and of the one without its graphs.
        has_loss: whether losses are computed in chunks, however small.
    """

    def __init__(self, options, compared=(), peaks=(0, 0), *, has_loss=False):
        self.options, self.recorder, self.made = options, FakePasses(), []
        self.compared, self.peaks, self.has_loss = list(compared), list(peaks), has_loss

    def __call__(self, graph_module, inputs):
        return fuse_graph(graph_module, inputs, self.options, always, trained=self.trained)

    def trained(self, *args, **more):
        more |= {"make_recorder": lambda: self.recorder, "compare": self.compare, "peak": lambda _: self.peaks.pop(0)}
        if self.has_loss:
            more["losses"] = plan_losses(args[0], drops_logits=False, least_bytes=0)
        self.made.append(TrainedGraph(*args, **more))
        return self.made[-1]

    def compare(self, before, after):
        before(), after()
        before_ns, after_ns = self.compared.pop(0)
        return compare_rounds([before_ns] * 8, [after_ns] * 8)

    @property
    def row(self):
        (row,) = [row for row in self.made[0].outcome.step_rows if row.id == "cuda-graph"]
        return row


def run(options, x, compared=(), **kind):
    torch.manual_seed(0)
    model, backend = Block(**kind), Backend(options, compared)
    plain, compiled = copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False)
    for number in range(3):
        for one in (compiled, plain):
            one.zero_grad(set_to_none=True)
            step(one, x * (number + 1))
        if not kind:
            compare(gradients(model), gradients(plain))
    return backend


def test_a_step_without_any_kernel_of_ours_is_replayed_where_its_gradients_pass(x):
    backend = run(GRAPHS, x)
    (graph,) = backend.made
    assert graph.is_rewritten and graph.outcome.check.is_passed and backend.row.status is Status.KEPT
    assert graph.step_graph.replays[0] > 3 and not graph.step_graph.refusals


def test_kernels_are_replayed_with_the_bits_that_they_have_by_themselves(x):
    backend = run(OPTIONS, x)
    graph = backend.made[0]
    launches = graph.step_graph.launches
    assert backend.row.status is Status.KEPT and launches > 0 and any(half.is_changed for half in graph.halves)


def test_a_dropout_is_replayed(x):
    backend = run(GRAPHS, x, dropout=0.25)
    assert backend.row.status is Status.KEPT and not backend.made[0].step_graph.refusals


@pytest.mark.parametrize(
    ("compared", "reason", "status"),
    [
        (((100, 90), (90, 80)), "", Status.KEPT),
        (((100, 90), (90, 95)), "", Status.SLOWER),
        (((100, 120), (100, 80)), "", Status.KEPT),
        (((100, 120), (100, 101)), NOT_FASTER, Status.SLOWER),
    ],
    ids=["both pay", "kernels alone", "graphs alone", "neither"],
)
def test_graphs_must_beat_what_is_kept_without_them(x, compared, reason, status):
    backend = run(replace(OPTIONS, keep="paying"), x, compared)
    outcome = backend.made[0].outcome
    assert (outcome.reason, backend.row.status) == (reason, status) and not backend.compared
    assert backend.made[0].step_graph.is_on == (status is Status.KEPT)


@pytest.mark.parametrize("more", [{"graph": False}, {"skip": ("cuda-graph",)}, {"memory_budget": 0.5}, {"dry_run": True}])
def test_no_graph_is_tried_where_options_speak_against_it(x, more):
    backend = run(replace(GRAPHS, **more), x)
    assert backend.made[0].step_graph is None and backend.recorder.recorded == 0


@pytest.mark.parametrize("graphs_ns", [80, 120], ids=["graphs pay", "they do not"])
def test_a_loss_in_chunks_that_is_launched_slower_stays_where_its_graphs_pay(graphs_ns):
    options = replace(OPTIONS, keep="paying", only=("no_kernel", "linear-cross-entropy", "cuda-graph"))
    backend = Backend(options, [(100, 100), (100, 120), (100, graphs_ns)], has_loss=True)
    model = Speaker()
    plain, compiled = copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False)
    for one in (compiled, plain):
        one(*batch()).backward()
    compare(gradients(model), gradients(plain))
    assert not backend.compared and backend.made[0].outcome.reason == ("" if graphs_ns < 100 else SLOWER)
    assert backend.row.status is (Status.KEPT if graphs_ns < 100 else Status.SLOWER)


@pytest.mark.parametrize("is_above", [True, False])
def test_what_graphs_copy_out_counts_for_the_peak_that_options_are_tried_by(is_above):
    """And a step that is not faster without its graphs may still be tried with options."""
    options = replace(GRAPHS, keep="paying", effort="quick", only=("no_kernel", "gelu-checkpoint", "cuda-graph"))
    model, x = Model(), torch.randn(4, ROWS, MODEL_WIDTH)
    beside = sum(one.nbytes for one in model.parameters()) + 4
    peaks = (999 + beside if is_above else 1000 + beside, 1000)
    backend = Backend(options, [(100, 101), (100, 80)][not is_above :], peaks)
    plain, compiled = copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False)
    for one in (compiled, plain):
        one(x).backward()
    compare(gradients(model), gradients(plain))
    (graph,) = backend.made
    row = next(row for row in graph.outcome.step_rows if row.id == "gelu-checkpoint")
    assert (row.status is Status.KEPT) == is_above and (graph._passes is graph._base) != is_above
    assert graph.outcome.check.is_passed and backend.row.status is Status.KEPT and not backend.compared


def test_a_model_that_is_reverted_holds_no_graph(x):
    torch.manual_seed(0)
    model, backend = Block().train(), Backend(OPTIONS)
    fused = TrainedModel(model, (x,), {}, backend)
    fused.compiled_call(x).square().mean().backward()
    fused.seal([])
    with fused.apply():
        before = fused.launches
        for _ in range(3):
            step(model, x)
        (graphs,) = [one.step_graph for one in fused.graphs_of_step]
        assert graphs.pool_bytes > 0 and fused.launches > before
        replays = list(graphs.replays)
        with fused.launched():
            step(model, x)
        assert graphs.replays == replays and graphs.is_on
    assert graphs.pool_bytes == 0 and not fused.is_applied


def test_the_backend_of_torch_compile_tries_none():
    assert not chosen_options({}).graph


def test_a_weight_that_is_written_between_two_replays_is_an_error_as_in_eager(x):
    torch.manual_seed(0)
    model, backend = Block(), Backend(GRAPHS)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for _ in range(3):
        step(compiled, x)
    before = list(backend.made[0].step_graph.replays)
    for one in (compiled, copy.deepcopy(model)):
        loss = one(x).square().mean()
        with torch.no_grad():
            (model if one is compiled else one).down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert backend.made[0].step_graph.replays == [before[0] + 1, before[1]]
