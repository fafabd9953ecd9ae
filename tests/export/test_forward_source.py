"""The printed forward: names from the model, equal layers as one function, exactly the ops of the graph."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch.fx import Graph

from fusion_advisor.errors import CannotExport
from fusion_advisor.export.expressions import Printer
from fusion_advisor.export.kernel_ops import KernelOps
from fusion_advisor.export.names import Names, identifier
from fusion_advisor.export.parameters import Layer, attribute, layer_of, tensor_names
from tests.export import models

aten = torch.ops.aten


OPS = [
    (aten.add.Tensor, ("x", 2.5), {}), (aten.add.Tensor, ("x", "x"), {"alpha": 2}), (aten.sub.Tensor, ("x", "x"), {}),
    (aten.mul.Tensor, ("x", -3), {}), (aten.div.Tensor, ("x", 7), {}), (aten.pow.Tensor_Scalar, ("x", 2), {}),
    (aten.view.default, ("x", [3, -1]), {}), (aten.reshape.default, ("x", [24]), {}),
    (aten.permute.default, ("x", [2, 0, 1]), {}), (aten.expand.default, ("x", [2, 3, 4]), {}),
    (aten.transpose.int, ("x", 1, 2), {}), (aten.unsqueeze.default, ("x", -1), {}), (aten.slice.Tensor, ("x", 1, 0, 2), {}),
    (aten.slice.Tensor, ("x", -1, 1, 3), {}), (aten.slice.Tensor, ("x", 0, 1, 2**63 - 1), {}),
    (aten.slice.Tensor, ("x", 2, 0, 4, 2), {}), (aten.slice.Tensor, ("x", -2, 0, 1), {}), (aten.select.int, ("x", 1, -1), {}),
    (aten.mean.dim, ("x", [-1], True), {}), (aten.sum.dim_IntList, ("x", [0]), {}), (aten.to.dtype, ("x", torch.float64), {}),
    (aten.to.dtype, ("x", torch.float64, False, True), {}), (aten.gelu.default, ("x",), {"approximate": "tanh"}),
    (aten.softmax.int, ("x", -1), {}), (aten.clamp.default, ("x", -math.inf, 0.5), {}), (aten.cat.default, (["x", "x"], 1), {}),
    (aten.layer_norm.default, ("x", [4]), {}), (aten.linear.default, ("x", "weight"), {}), (aten.neg.default, ("x",), {}),
    (aten.embedding.default, ("weight", "ids", 0), {}),
    (aten.arange.default, (5,), {"device": torch.device("cpu"), "pin_memory": False}),
]  # fmt: skip
"""An op, its arguments (names of tensors are strings) and keyword arguments."""


def replaced(argument, by_name):
    if isinstance(argument, list):
        return [replaced(item, by_name) for item in argument]
    return by_name.get(argument, argument) if isinstance(argument, str) else argument


@pytest.mark.parametrize(("op", "args", "kwargs"), OPS, ids=lambda part: str(part)[:40])
def test_an_expression_computes_its_op(op, args, kwargs):
    generator = torch.Generator().manual_seed(0)
    values = {"x": torch.randn(2, 3, 4, generator=generator), "weight": torch.randn(5, 4, generator=generator)}
    values["ids"] = torch.tensor([[0, 4]])
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in values}
    node = graph.call_function(op, tuple(replaced(argument, nodes) for argument in args), kwargs)
    text = Printer(KernelOps(ops=(), by_call={}), "x.device").expression(node, lambda one: one.name)
    found = eval(text, {"torch": torch, "aten": aten, "F": torch.nn.functional, **values})
    right = op(*(replaced(argument, values) for argument in args), **kwargs)
    assert torch.equal(found, right), text
    assert found.stride() == right.stride(), text


def test_infix_keeps_its_brackets():
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.add.Tensor, (x, 1))
    power = graph.call_function(aten.pow.Tensor_Scalar, (total, 2))
    printer = Printer(KernelOps(ops=(), by_call={}), "x.device")
    assert printer.expression(power, lambda one: "x + 1" if one is total else one.name) == "(x + 1) ** 2"


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("transformer.h.3.mlp.c_fc.weight", Layer("transformer.h.", 3)),
        ("layers.1.blocks.2.attn", Layer("layers.", 1)),
        ("layer1.0.conv1", Layer("layer1.", 0)),
        ("lm_head.weight", None),
        ("0.weight", None),
        ("", None),
    ],
)
def test_the_outermost_number_is_the_layer(path, layer):
    assert layer_of(path) == layer


def test_paths_become_attributes():
    assert attribute("h.3.mlp.0.weight") == "model.h[3].mlp[0].weight"
    assert attribute(".mlp.weight", "block") == "block.mlp.weight"
    assert attribute("my-head.class.weight") == "getattr(getattr(model, 'my-head'), 'class').weight"


class Linear(torch.nn.Module):
    """A layer whose last op has the name of its class, which its function in the printed forward has too."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.eye(8))

    def forward(self, x):
        return torch.nn.functional.linear(torch.nn.functional.gelu(self.inner(x)), self.weight)


class Layers(torch.nn.Module):
    """Layers whose functions and values want one name; further layers under the names that it is given."""

    def __init__(self, *names):
        super().__init__()
        self.into = torch.nn.ModuleList(Linear() for _ in range(3))
        self.named = torch.nn.ModuleDict({name: torch.nn.LayerNorm(8) for name in names})

    def forward(self, x):
        hidden = x
        for layer in self.into:
            hidden = layer(hidden)
        for layer in self.named.values():
            hidden = layer(hidden + x)
        return hidden


@torch.no_grad()
def test_a_function_keeps_its_name_from_values(tmp_path, monkeypatch):
    inputs = {"x": torch.randn(4, 8)}
    model, _, fused = models.fused(lambda: (Layers("my-norm", "lambda").eval(), inputs))
    right = fused(**inputs)
    fused.export(tmp_path / "named_layers")
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / "named_layers")
    package = importlib.import_module("named_layers")
    package.apply(model)
    assert torch.equal(model(**inputs), right)
    assert package.fallbacks(model) == {}
    assert "def linear(" in (tmp_path / "named_layers" / "named_layers" / "forward.py").read_text()


def test_numbers_that_no_index_finds_are_refused():
    with pytest.raises(CannotExport, match="`named` is a ModuleDict whose parts are named by numbers"):
        tensor_names(Layers("0"), [], [])


def test_names_are_identifiers_that_nobody_has():
    names = Names({"block": 0})
    assert [names.take(word) for word in ("ln_1", "ln_1", "block", "3d", "self", "F")] == [
        "ln_1", "ln_1_2", "block_value", "value_3d", "self", "f",
    ]  # fmt: skip
    assert identifier("a-b.c\u00e9'); import os") == "a_b_c_____import_os"
    assert identifier("class") == "class_value"
