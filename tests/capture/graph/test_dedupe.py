"""A graph put together from its distinct ops is the graph that tracing all of it gives; where it would not be, there is none."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fusion_advisor.capture.graph.dedupe import retrace_distinct
from fusion_advisor.capture.graph.fx_nodes import module_path, source_of
from fusion_advisor.runtime.torch_internals import dynamo, fx_trace, tensor_memory
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph
from tests.tiny import gpt2, qwen2


def whole(graph):
    return fx_trace.retrace_to_aten(torch.fx.Interpreter(graph).run, dynamo.placeholder_values(graph))


def both(graph):
    return retrace_distinct(graph), whole(graph)


def values_of(node):
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def layout(value):
    return value if value is None else (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)


def unnumbered(text):
    """Leave out the numbers of constants: the tracer tells them apart by address, and one may lie where another lay."""
    return re.sub(r"_tensor_constant[\d_]+", "_tensor_constant", text)


def assert_same(ours, theirs):
    """Same ops by name, on tensors that lie alike and share memory alike, from the same modules and lines."""
    assert ours is not None
    assert unnumbered(ours.code) == unnumbered(theirs.code)
    places = {}
    for one, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert (unnumbered(one.name), module_path(one), source_of(one)) == (
            unnumbered(other.name), module_path(other), source_of(other),
        )  # fmt: skip
        for mine, its in zip(values_of(one), values_of(other), strict=True):
            assert layout(mine) == layout(its), one
            if mine is not None:
                key, its_key = tensor_memory.storage_key(mine), tensor_memory.storage_key(its)
                assert places.setdefault(key, its_key) == its_key, one
    assert len(set(places.values())) == len(places)


def in_place(x, y):
    z = x * 2
    z.add_(1)
    z[:, 1:].mul_(y[:, 1:])
    x.add_(z)
    return z + x, x * 2


def no_op_casts(x, y):
    a = x.to(torch.float32)
    b = a.to(torch.float32).to(x.device)
    b.add_(1)
    return a * b, x + y.to(torch.float32)


def pieces(x, y):
    a, b = x.chunk(2, dim=-1)
    c, d = y.chunk(2, dim=-1)
    e, f, _ = (a + b).split(1)
    return torch.cat((-b, a), -1), torch.cat([c, c]), d, e * f, y.max(dim=-1)[0], torch.topk(x, 2)[1]


def shared_memory(x, y):
    view = x.view(-1)
    return x * x, x * y, torch.add(x, x.view(3, 4)), torch.cat([view, view]), torch.cat([view, y.view(-1)])


def constants(x, y):
    return x + 1, x + 1.0, x + True, x * 0.0, x * -0.0, x.clamp(0), y.clamp(0.0), x.sum(-1), x.sum(-1, keepdim=True)


def long_index(x, y):
    return x[None, :, 1:, None] * 2, y[None, :, 1:, None] * 2, x[..., ::2], x[:, :2].expand(3, 2).reshape(6), x[0, 1]


def composite(x, y):
    q = x.view(1, 3, 1, 4)
    attention = F.scaled_dot_product_attention(q, q, y.view(1, 3, 1, 4))
    return attention, F.layer_norm(x, (4,)), F.layer_norm(y, (4,)), F.dropout(x, 0.5, True), F.gelu(x) @ F.gelu(y).T


def made_inside(x, y):
    ids = torch.arange(3, device=x.device)
    return x.index_copy(0, ids, y), x[ids], torch.zeros(3, 4) + x, torch.full((3, 4), 2.0) + y, x.new_ones(4)


def without_elements(x, y):
    """The cache of keys and values before its first token, in each layer."""
    for _ in range(3):
        x = torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), x * 2], dim=-2)
        y = torch.cat([torch.tensor([], dtype=y.dtype, device=y.device), y], dim=-2)
    return x, y, torch.tensor([], dtype=torch.int64)


@pytest.mark.parametrize(
    "function",
    [in_place, no_op_casts, pieces, shared_memory, constants, long_index, composite, made_inside, without_elements],
)
def test_functions(function):
    _, (ours, theirs) = dynamo_graph(function, torch.randn(3, 4), torch.randn(3, 4), then=both)
    assert_same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, qwen2])
@pytest.mark.parametrize("use_cache", [False, True])
def test_models(make, use_cache):
    model, inputs = make()
    inputs = {**inputs, "use_cache": use_cache}
    _, (ours, theirs) = dynamo_graph(lambda **kwargs: model(**kwargs, return_dict=False)[0], then=both, **inputs)
    assert_same(ours, theirs)


def test_an_op_that_is_repeated_is_traced_once(monkeypatch):
    traced = []
    real = fx_trace.retrace_to_aten
    monkeypatch.setattr(fx_trace, "retrace_to_aten", lambda *args: traced.append(real(*args)) or traced[0])

    def layers(x):
        for _ in range(50):
            x = F.gelu(x * 2) + x
        return x

    _, ours = dynamo_graph(layers, torch.randn(3, 4), then=retrace_distinct)
    targets = [str(node.target) for node in traced[0].graph.nodes if node.op == "call_function"]
    assert targets == ["aten.mul.Tensor", "aten.gelu.default", "aten.add.Tensor"]
    assert len([node for node in ours.graph.nodes if node.op == "call_function"]) == 150


def changes_layout(x):
    y = x * 2
    before = y.sum(0)
    y.t_()
    return y * 2, before


def switches_gradients(x):
    with torch.enable_grad():
        y = x * 2
    return y * 2


def switches_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
    return y, x @ x.T


def holds_a_constant(x):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


def maps_over_rows(x):
    return torch.func.vmap(lambda row: row.softmax(-1) * 2)(x)


def complex_by_value(x):
    return x * (1 + 2j)


def writes_to_several(x):
    y = x * 2
    torch._foreach_add_([x, y], 1.0)
    return x * y


@pytest.mark.parametrize(
    "function",
    [
        changes_layout, switches_gradients, switches_autocast, holds_a_constant, maps_over_rows, complex_by_value,
        writes_to_several,
    ],
)  # fmt: skip
def test_what_cannot_be_told_op_by_op_is_left_to_the_whole_trace(function):
    _, ours = dynamo_graph(function, torch.randn(3, 4), then=retrace_distinct)
    assert ours is None


def spoilt(change):
    def then(graph):
        last = [node for node in graph.graph.nodes if node.op == "call_function"][-1]
        last.meta["example_value"] = change(last.meta["example_value"], last.args[0].meta["example_value"])
        return retrace_distinct(graph)

    return then


@pytest.mark.parametrize(
    "change",
    [
        lambda own, _: own.t(),
        lambda own, _: own[:1],
        lambda own, _: own.double(),
        lambda _, given: given,
        lambda _, given: given[:],
    ],
    ids=["strides", "shape", "dtype", "the input itself", "the input's memory"],
)
def test_a_result_of_dynamos_that_is_another_one_is_refused(change):
    x = torch.randn(4, 4)
    assert dynamo_graph(lambda x: (x * 2) * 2, x, then=spoilt(lambda own, _: own))[1] is not None
    assert dynamo_graph(lambda x: (x * 2) * 2, x, then=spoilt(change))[1] is None
