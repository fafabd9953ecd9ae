"""Training with losses in chunks: eager's gradients, all that autograd promises, and a verdict of its own."""

from __future__ import annotations

import copy
import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.errors import NoSecondDerivative
from fusion_advisor.fuse.dynamo_backend import chosen_options, fuse_graph
from fusion_advisor.fuse.loss.recompute_options import GELU_CHECKPOINT
from fusion_advisor.fuse.loss.record import plan_losses, verdict_on_loss
from fusion_advisor.fuse.passes.registry import REWRITES
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from fusion_advisor.records import Status
from fusion_advisor.timing.paired import compare_rounds
from tests.fuse.train.kept_graphs import KeptGraphs
from tests.fuse.train.test_trained_graph import OPTIONS, compare, gradients

WORDS, WIDTH, ROWS = 211, 24, 64
KEPT = Status.KEPT


class Speaker(nn.Module):
    """An embedding, a layer and a head; the loss is all that it returns, unless it is asked for the logits."""

    def __init__(self, *, is_tied=False, dropout=0.0, is_checkpointed=False, returns_logits=False, z=0.0, more=0):
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(more))
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.is_checkpointed, self.returns_logits, self.z = is_checkpointed, returns_logits, z

    def body(self, words):
        rows = self.embedding(words)
        for layer in (*self.more, self.layer):
            rows = functional.gelu(layer(rows))
        return self.dropout(rows)

    def forward(self, words, labels):
        hidden = checkpoint(self.body, words, use_reentrant=False) if self.is_checkpointed else self.body(words)
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1))
        if self.z:
            loss = loss + self.z * logits.float().logsumexp(-1).square().mean()
        return (loss, logits) if self.returns_logits else loss


class Backend(KeptGraphs):
    @property
    def row(self):
        return next((row for row in self.rows if row.id == "linear-cross-entropy"), None)


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (4, ROWS // 4), generator=generator)
    labels = torch.randint(0, WORDS, (4, ROWS // 4), generator=generator)
    labels[:, ::3] = -100
    return words, labels


def made(options=OPTIONS, **kind):
    torch.manual_seed(0)
    model, backend = Speaker(**kind), Backend(options)
    return model, copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False), backend


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops")
        yield
    torch.compiler.reset()


def widest(graph):
    """Elements of the largest tensor whose last dim is the vocabulary, in both passes."""
    values = [value for half in graph.halves for node in half.graph.graph.nodes for value in tensors_of(node.meta.get("val"))]
    return max((value.numel() for value in values if value.dim() and value.shape[-1] == WORDS), default=0)


@pytest.mark.parametrize("kind", [{}, {"is_tied": True}, {"is_checkpointed": True}, {"z": 0.05}], ids=str)
def test_gradients_are_eagers_and_no_pass_holds_the_logits(kind):
    model, plain, compiled, backend = made(**kind)
    for factor in (1.0, 1.0, 0.25):  # gradients add up
        losses = [call(*batch()) for call in (compiled, plain)]
        for loss in losses:
            (factor * loss).backward()
        torch.testing.assert_close(*losses, rtol=2e-5, atol=2e-6)
    compare(gradients(model), gradients(plain))
    assert backend.row.status is KEPT and backend.row.saved_bytes > 0
    assert widest(backend.graphs[0]) == 0  # gradients of the weight are WORDS high
    assert backend.row.id in {rewrite.id for rewrite in REWRITES}


def test_without_the_rewrite_both_passes_hold_the_logits():
    _, _, compiled, backend = made(replace(OPTIONS, skip=("linear-cross-entropy",)))
    compiled(*batch()).backward()
    assert backend.row is None and widest(backend.graphs[0]) == ROWS * WORDS


def test_dropout_draws_anew_and_gradients_know_where():
    model, _, compiled, backend = made(dropout=0.5)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = compiled(*batch())
        loss.backward()
        found.append((loss.detach(), gradients(model)["layer.weight"]))
    assert backend.row.status is KEPT
    assert torch.equal(found[0][1], found[1][1]) and not torch.allclose(found[0][0], found[2][0])


def test_a_frozen_weight_gets_no_gradient():
    model, plain, compiled, backend = made()
    for one in (model, plain):
        one.head.requires_grad_(False)
    for call in (compiled, plain):
        call(*batch()).backward()
    assert model.head.weight.grad is None and backend.row.status is KEPT
    compare(gradients(model), gradients(plain))
    (asked,) = (
        node.args[-1]
        for half in backend.graphs[0].halves
        for node in half.graph.graph.nodes
        if str(node.target) == "fusion_advisor.linear_cross_entropy.default"
    )
    assert list(asked) == [True, False, False]


def test_a_backward_pass_may_run_twice_and_has_no_gradient_itself():
    model, plain, compiled, backend = made()
    for call in (compiled, plain):
        loss = call(*batch())
        loss.backward(retain_graph=True)
        loss.backward()
    compare(gradients(model), gradients(plain))
    loss = compiled(*batch())
    (gradient,) = torch.autograd.grad(loss, [model.layer.weight], create_graph=True)
    with pytest.raises(NoSecondDerivative, match="differentiated again"):
        (loss + gradient.square().sum()).backward()
    assert backend.row.status is KEPT


@pytest.mark.parametrize("kind", [{}, {"is_tied": True}, {"z": 0.05}, {"returns_logits": True}], ids=str)
@pytest.mark.parametrize("name", ["head.weight", "layer.weight", "layer.bias", "labels"])
def test_what_is_written_between_the_passes_is_an_error_where_it_is_one_in_eager(name, kind):
    model, plain, compiled, backend = made(**kind)
    found = {}
    for who, one, call in (("ours", model, compiled), ("eager", plain, plain)):
        loss_of(call(*batch())).backward()
        expected = gradients(one)
        one.zero_grad()
        words, labels = batch()
        loss = loss_of(call(words, labels))
        with torch.no_grad():
            (labels if name == "labels" else one.get_parameter(name)).add_(1)
        try:
            loss.backward()
            found[who] = ""
            compare(gradients(one), expected)
        except RuntimeError as error:
            found[who] = "modified by an inplace operation" * ("modified by an inplace operation" in str(error))
    assert found["ours"] == found["eager"]
    assert bool(found["eager"]) == (name != "layer.bias") and len(backend.graphs) == 1


def test_all_rows_ignored_gives_nan_and_no_gradient():
    model, plain, compiled, backend = made()
    compiled(*batch())  # verified on rows that count
    words, labels = batch()
    for call in (compiled, plain):
        loss = call(words, torch.full_like(labels, -100))
        loss.backward()
        assert loss.isnan()
    compare(gradients(model), gradients(plain))
    assert backend.row.status is KEPT and not model.head.weight.grad.any()


class Counted(Speaker):
    """Divides a sum by the number of its rows, as steps that accumulate gradients do: 0 where a batch is all padding."""

    def forward(self, words, labels):
        logits, rows = self.head(self.body(words)).view(-1, WORDS), labels.view(-1)
        return functional.cross_entropy(logits, rows, reduction="sum") / (rows != -100).sum()


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_infinite_gradient_of_the_loss_leaves_rows_that_do_not_count_at_zero(is_tied):
    torch.manual_seed(0)
    model, backend = Counted(is_tied=is_tied), Backend(OPTIONS)
    plain, fused = copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False)
    words, labels = batch()
    fused(words, labels).backward()
    plain(words, labels).backward()
    compare(gradients(model), gradients(plain))
    assert backend.row.status is KEPT
    for one in (model, plain):
        one.zero_grad()
    ours, theirs = fused(words, torch.full_like(labels, -100)), plain(words, torch.full_like(labels, -100))
    assert ours.isnan() and theirs.isnan()
    ours.backward()
    theirs.backward()
    assert all(not gradient.any() for gradient in gradients(plain).values())
    compare(gradients(model), gradients(plain))


@pytest.mark.parametrize("z", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_with_a_scaled_loss(dtype, z):
    model, plain, compiled, backend = made(z=z)
    for one, call in ((model, compiled), (plain, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = call(*batch(number))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**14
    assert backend.row.status is KEPT
    for name, theirs in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], theirs, rtol=0.05, atol=2e-2 * float(theirs.abs().max()))
    for (_, mine), (_, own) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-2, atol=1e-3)


def test_logits_that_are_returned_stay():
    _, plain, compiled, backend = made(returns_logits=True)
    _, logits = compiled(*batch())
    torch.testing.assert_close(logits, plain(*batch())[1], rtol=2e-5, atol=2e-6)
    assert backend.row.status is Status.NOT_REPLACED and "--drop-logits" in backend.row.reason


def test_dropped_logits_are_none_and_gradients_eagers():
    model, plain, compiled, backend = made(replace(OPTIONS, drop_logits=True), returns_logits=True)
    loss, logits = compiled(*batch())
    loss.backward()
    plain(*batch())[0].backward()
    assert logits is None and backend.row.status is KEPT and widest(backend.graphs[0]) == 0
    compare(gradients(model), gradients(plain))
    assert chosen_options({"drop_logits": True}).drop_logits and not chosen_options({}).drop_logits


def wrong(chunked_loss):
    """The graph of losses in chunks with a factor too much."""
    graph = chunked_loss.module.graph
    (output,) = graph.find_nodes(op="output")
    (loss,) = output.all_input_nodes
    with graph.inserting_before(output):
        more = graph.call_function(torch.mul, (loss, 1.01))
    output.replace_input_with(loss, more)
    chunked_loss.module.recompile()


def without_z_loss(chunked_loss):
    """The graph returns the cross-entropy alone."""
    graph = chunked_loss.module.graph
    (output,) = graph.find_nodes(op="output")
    (total,) = output.all_input_nodes
    output.replace_input_with(total, total.args[0])
    chunked_loss.module.recompile()


def without_gradient_of_z_loss(chunked_loss):
    """The loss is right, and the backward pass leaves out its last term."""
    graph = chunked_loss.module.graph
    (output,) = graph.find_nodes(op="output")
    (total,) = output.all_input_nodes
    with graph.inserting_before(total):
        total.replace_input_with(total.args[1], graph.call_method("detach", (total.args[1],)))
    chunked_loss.module.recompile()


def _compared(times, calls):
    for call in calls:
        call()
    if times is None:
        raise torch.cuda.OutOfMemoryError("planted")
    return compare_rounds(*([one] * 20 for one in times))


def judged(times=None, plant=lambda _: None, later_times=(), optimiser=None, drops_logits=False, **kind):
    """The row of a graph whose loss in chunks is planted, or timed by planted clocks: ``later_times`` in turn, then ``times``."""
    rows = []

    class Planted(TrainedGraph):
        def __init__(self, graph_module, inputs, **more):
            plan = plan_losses(graph_module, drops_logits=drops_logits, least_bytes=0)
            plant(plan.chunked)
            turns = itertools.chain(later_times, itertools.repeat(times)) if later_times else itertools.repeat(times)
            clock = None if times is None else lambda *calls: _compared(next(turns), calls)
            super().__init__(graph_module, inputs, **more | {"losses": plan, "compare": clock})

    options = OPTIONS if times is None else replace(OPTIONS, keep="paying")

    def backend(graph_module, inputs):
        rows.append(fuse_graph(graph_module, inputs, options, optimiser or unchanged, trained=Planted))
        return rows[-1]

    torch.manual_seed(0)
    model = Speaker(**kind)
    plain = copy.deepcopy(model)
    returned = torch.compile(model, backend=backend, dynamic=False)(*batch())
    loss_of(returned).backward()
    rows[0].returned = returned
    loss_of(plain(*batch())).backward()
    compare(gradients(model), gradients(plain))
    return rows[0]


def loss_of(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def unchanged(region, options, check=None):
    """Rewrite nothing in a pass."""
    return region.original.forward


def copied(region, options, check=None):
    """Stands for a pass with kernels."""
    return torch.fx.GraphModule(region.original, copy.deepcopy(region.original.graph)).forward


@pytest.mark.parametrize("z", [0.05, 1e-4])
@pytest.mark.parametrize("plant", [wrong, without_z_loss, without_gradient_of_z_loss])
def test_a_wrong_loss_is_refused(plant, z):
    graph = judged(plant=plant, z=z)
    assert graph.outcome.step_rows[0].status is Status.WRONG_NUMBERS and graph.outcome.reason
    assert "too far from float64" in graph.outcome.step_rows[0].reason


@pytest.mark.parametrize(
    ("times", "status"), [((1000, 1000), KEPT), ((1000, 900), KEPT), ((1000, 1004), KEPT), ((900, 1000), Status.SLOWER)], ids=str
)
def test_it_stays_unless_the_step_is_slower(times, status):
    row = judged(times).outcome.step_rows[0]
    assert row.status is status and row.step_delta_ns == times[1] - times[0]
    assert (row.saved_bytes > 0) == (status is KEPT)


SLOWER, FASTER = (900, 1000), (1000, 900)


def test_where_the_logits_stay_in_the_step_nobody_is_given_their_gradient():
    graph = judged(FASTER, later_times=[SLOWER, SLOWER], optimiser=copied, returns_logits=True, drops_logits=True)
    assert graph.outcome.step_rows[0].status is Status.SLOWER and widest(graph) == ROWS * WORDS
    given = [node.meta["val"].shape for node in graph.halves[1].graph.graph.nodes if str(node.target).startswith("tangents")]
    assert [tuple(shape) for shape in given] == [()]
    assert graph.is_rewritten and graph.returned[1] is None


def test_activations_are_computed_again_without_the_loss_in_chunks_too():
    graph = judged(FASTER, later_times=[SLOWER], optimiser=copied, z=0.05, more=6)
    loss, option = graph.outcome.step_rows[0], next(row for row in graph.outcome.step_rows if row.id == GELU_CHECKPOINT.id)
    assert (loss.status, option.status, option.sites) == (Status.SLOWER, KEPT, 7) and widest(graph) == ROWS * WORDS


@pytest.mark.parametrize(("fused", "status"), [(FASTER, KEPT), ((1000, 1000), KEPT), (SLOWER, Status.SLOWER)], ids=str)
def test_one_that_is_slower_op_by_op_is_judged_again_with_kernels(fused, status):
    optimised = []

    def optimiser(region, options, check=None):
        optimised.append(region.original)
        return region.original.forward

    graph = judged(FASTER, later_times=[SLOWER, fused], optimiser=optimiser)
    row = graph.outcome.step_rows[0]
    assert row.status is status and len(optimised) == 4  # both passes, with the logits and without
    assert (widest(graph) == 0) == (status is KEPT)
    assert [id(one) for one in graph.left_out] == [id(one) for one in (optimised[:2] if status is KEPT else optimised[2:])]
    if status is Status.SLOWER:
        assert "with the kernels of both steps" in row.reason


def test_where_memory_ends_on_the_way_the_step_with_all_logits_goes_on():
    graph = judged(FASTER, later_times=[SLOWER, None])
    row = graph.outcome.step_rows[0]
    assert row.status is Status.SLOWER and "no memory is left" in row.reason and widest(graph) == ROWS * WORDS
    assert len(graph.left_out) == 2


def test_a_loss_that_stays_one_op_is_not_judged_again():
    graph = judged(FASTER, later_times=[SLOWER], z=0.05)
    assert graph.outcome.step_rows[0].status is Status.SLOWER and graph.left_out == ()


def test_what_spares_nothing_does_not_stay():
    _, _, compiled, backend = made()
    compiled(*batch())
    row = verdict_on_loss(backend.row, "", None, 0, least_share=0.005)
    assert row.status is Status.NOT_REPLACED and "no less memory" in row.reason


def test_passes_of_a_step_with_a_loss_in_chunks_are_fused_too():
    _, _, compiled, backend = made()
    compiled(*batch()).backward()
    assert any(half.is_changed for half in backend.graphs[0].halves)


def test_chunks_of_one_size_share_a_kernel_that_makes_their_losses_and_gradients():
    _, _, compiled, backend = made()
    compiled(*batch()).backward()
    forward = next(half for half in backend.graphs[0].halves if "linear_cross_entropy" in str(half.graph.graph))
    nodes = [str(node.target) for node in forward.module.graph.nodes if node.op == "call_function"]
    kernels = [name for name in nodes if "nll_loss_backward" in name]
    assert len(kernels) == 4 and not any("aten" in name or "linear_cross_entropy" in name for name in kernels)
    assert nodes.count("aten.mm.default") >= 3 * 4 and "aten._log_softmax.default" not in nodes


def test_no_pass_is_rewritten_inside_a_step_while_its_loss_is_judged():
    """The truth of a step with dropout runs other calls in place of both passes; the steps that are timed next do so, too."""
    inside = []

    def noted(region, options, check=None):
        inside.append(torch._C._current_graph_task_id() != -1)
        return region.original.forward

    graph = judged((1000, 900), optimiser=noted, dropout=1e-9)  # random, and nothing is dropped
    assert graph.outcome.step_rows[0].status is KEPT
    assert inside == [False, False]
