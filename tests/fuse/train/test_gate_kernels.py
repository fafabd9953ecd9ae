"""The backward pass of a gate in one kernel: of a whole model's step, and with the gate's product computed again."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.chains.find import find_groups
from fusion_advisor.fuse.dynamo_backend import fuse_graph, optimise
from fusion_advisor.fuse.loss.recompute_options import GELU_CHECKPOINT
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from fusion_advisor.records import Status
from fusion_advisor.timing.paired import compare_rounds
from tests.fuse.train.test_models import BATCH, LENGTH, MODELS, SMALL, batch
from tests.fuse.train.test_trained_graph import OPTIONS, gradients
from tests.fuse.train.test_trained_model import applied, compare
from tests.tiny import names

TENSOR_BYTES = BATCH * LENGTH * SMALL["intermediate_size"] * 4
LAYERS = SMALL["num_hidden_layers"]
INPUTS = batch("llama", 0, range(BATCH))


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = MODELS["llama"]().train()
    yield model, copy.deepcopy(model)
    torch.compiler.reset()


def test_the_backward_pass_of_a_gate_is_one_kernel(models):
    model, plain = models
    fused = applied(model, INPUTS)
    gates = [chain for chain in fused.report.chains if "silu_backward" in chain.ops]
    assert [(chain.ops, len(chain.sites)) for chain in gates] == [(("silu", "mul", "mul", "silu_backward"), LAYERS)]
    assert gates[0].floor_bytes == LAYERS * 5 * TENSOR_BYTES
    (kept,) = [fusion for fusion in fused.report.fusions if fusion.chain_id == gates[0].id]
    assert kept.status is Status.KEPT and kept.training_pass == "backward" and kept.receipt.launches_after == LAYERS
    for one in (model, plain):
        one(**INPUTS).loss.backward()
    compare(gradients(model), gradients(plain))
    assert fused.launches == sum(one.receipt.launches_after for one in fused.report.fusions if one.status is Status.KEPT)


def test_the_product_that_is_computed_again_is_one_write_more(models):
    """The step with the option, which costs no time by a planted clock."""
    model, plain = models
    gates, turns, graphs = [], iter([(1000, 500), (1000, 1000)]), []

    def noted(region, options, check=None):
        ops = describe(region)[0]
        groups = [group for group in find_groups(ops, functools.partial(judge_with, ops)) if group.verdict.is_fusible]
        found = [(sorted(names(ops, group.members)), group.verdict.floor_bytes) for group in groups]
        if region.training_pass == "backward":
            gates.append([one for one in found if "silu" in one[0] or "silu_backward" in one[0]])
        return optimise(region, options, check=check)

    def clock(*_):
        return compare_rounds(*([one] * 20 for one in next(turns)))

    def backend(graph_module, inputs):
        trained = functools.partial(TrainedGraph, compare=clock)
        options = replace(OPTIONS, keep="paying", skip=("linear-cross-entropy",))
        graphs.append(fuse_graph(graph_module, inputs, options, noted, trained=trained))
        return graphs[-1]

    compiled = torch.compile(model, backend=backend, dynamic=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops")
        compiled(**INPUTS).loss.backward()
    plain(**INPUTS).loss.backward()
    compare(gradients(model), gradients(plain))
    rows = {row.id: row for row in graphs[0].outcome.step_rows}
    assert rows[GELU_CHECKPOINT.id].status is Status.KEPT and rows[GELU_CHECKPOINT.id].sites == LAYERS
    without, again = gates
    assert without == [(["mul", "mul", "silu", "silu_backward"], 5 * TENSOR_BYTES)] * LAYERS
    assert again == [(["mul", "mul", "mul", "silu", "silu_backward"], 6 * TENSOR_BYTES)] * LAYERS
