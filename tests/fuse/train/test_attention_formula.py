"""Attention with a bias that is trained: autograd takes PyTorch's plain formula, and its bias and softmax are one kernel."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.find import find_groups
from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.fuse.train.passes.columns_last import sink_column_sums
from fusion_advisor.fuse.train.passes.gradient_parts import split_norm_gradients
from fusion_advisor.records.op_facts import overload_free
from tests.fuse.train.passes.test_gradient_parts import passes
from tests.fuse.train.test_trained_graph import OPTIONS

HEADS, WIDTH, LENGTH = 2, 8, 12


def t5():
    """An encoder and a decoder of one layer each: self-attention in both has a bias of relative positions."""
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": WIDTH, "d_ff": 32, "num_layers": 1, "num_heads": HEADS}
    idle = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **idle)).train()


def text():
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


class Biased(nn.Module):
    """One attention whose bias is trained; which keys a query sees follows from the input."""

    def __init__(self, shown=lambda scores: scores > -1, *, is_shared=False, **options):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.inner = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.shown, self.is_shared, self.options = shown, is_shared, options

    def forward(self, x):
        q, k, v = self.inner(x).view(*x.shape[:2], 3 * HEADS, WIDTH).transpose(1, 2).chunk(3, dim=1)
        if self.is_shared:
            k, v = k[:, :1], v[:, :1]
        bias = self.bias.masked_fill(~self.shown(x[:, None, :, :LENGTH]), -torch.inf)
        out = scaled_dot_product_attention(q, k, v, bias, **self.options)
        return out.transpose(1, 2).reshape(x.shape)


def no_key_of_the_first(scores):
    rows = torch.arange(LENGTH, device=scores.device)[:, None]
    return (scores > -1) & (rows > 0)


def chains_of(model, given):
    """The ops of every chain of the forward passes, by name."""
    found = []
    for graph_module in passes(model, **given)["forward"]:
        graph = sink_column_sums(split_norm_gradients(graph_module))
        names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
        region = Region(index=0, graph=graph, original=graph, names=names, roles=("input",) * len(names), training_pass="forward")
        ops, _ = describe(region)
        groups = [group for group in find_groups(ops, functools.partial(judge_with, ops)) if group.verdict.is_fusible]
        found += [[overload_free(ops[member].target) for member in group.members] for group in groups]
    return found


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_the_bias_and_the_softmax_of_a_t5_are_one_chain():
    softmaxes = [names for names in chains_of(t5(), text()) if "_safe_softmax" in names]
    assert len(softmaxes) == 2 and all("add" in names for names in softmaxes)


def gradients_of(call, model, given):
    result = call(**given)
    (result.loss if hasattr(result, "loss") else result.square().mean()).backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def rows():
    return {"x": torch.randn(3, LENGTH, HEADS * WIDTH)}


CASES = {
    "t5": (t5, text), "keys hidden": (Biased, rows), "no key is left": (lambda: Biased(no_key_of_the_first), rows),
    "a scale below zero": (lambda: Biased(scale=-0.3), rows),
    "grouped heads": (lambda: Biased(is_shared=True, enable_gqa=True), rows),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_fp64(name):
    """No gradient is further from fp64's than four times eager's."""
    make, draw = CASES[name]
    model, given, graphs = make(), draw(), []
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()

    def backend(graph_module, inputs):
        graphs.append(fuse_graph(graph_module, inputs, OPTIONS))
        return graphs[-1]

    wider = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
    ours = gradients_of(torch.compile(model, backend=backend, dynamic=False), model, given)
    theirs, truth = gradients_of(plain, plain, given), gradients_of(wide, wide, wider)
    assert graphs and all(graph.is_rewritten for graph in graphs)
    assert ours.keys() == theirs.keys() == truth.keys()
    for key, exact in truth.items():
        assert exact.isfinite().all() == ours[key].isfinite().all()
        unit = torch.finfo(torch.float32).eps * exact.norm()
        assert (ours[key] - exact).norm() <= 4 * (theirs[key] - exact).norm() + 4 * unit, key
