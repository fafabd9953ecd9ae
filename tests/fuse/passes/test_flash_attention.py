"""Attention by the flash kernel alone: where it may stand for torch's own choice, and where it may not."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.nn import functional

from fusion_advisor.capture.graph.fx_nodes import ATTENTION, FLASH_ATTENTION, draws_numbers
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.segments import split
from fusion_advisor.fuse.passes.flash_attention import use_flash
from fusion_advisor.runtime.torch_internals import symbolic_sizes
from tests.fuse.points.test_choose_layouts import work_on

ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Computes what the GPU's kernel does, with the same first arguments."""
HALF = torch.bfloat16


def cudnn(*_, **__):
    return "aten._scaled_dot_product_cudnn_attention.default"


class Attention(torch.nn.Module):
    """One call of attention with some options, among ops."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        query, key, value = (one.transpose(1, 2) for one in (query * 2, key, value))
        return functional.scaled_dot_product_attention(query, key, value, **self.options).transpose(1, 2) + 1


def given(queries=5, keys=5, heads=4, shared=4, width=16, dtype=HALF, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, *sizes, width).to(dtype) for sizes in ((queries, heads), (keys, shared), (keys, shared))]


def graph_of(inputs, **options):
    torch.compiler.reset()
    with torch.no_grad():
        (region,) = capture_regions(Attention(**options), tuple(inputs), {}).regions
    return region.graph


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 0.3}])
def test_it_computes_the_call(options):
    inputs = given()
    module = graph_of(inputs, **options)
    expected = module.forward(*inputs)
    assert use_flash(module.graph, {}, kernel_of=cudnn, flash=ON_CPU) == 1
    module.recompile()
    module.graph.lint()
    (found,), (wanted,) = module.forward(*inputs), expected
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    targets = [node.target for node in module.graph.nodes]
    assert ON_CPU in targets and ATTENTION not in targets


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dtype": torch.float32}, {}),
        ({"width": 12}, {}),
        ({"width": 264}, {}),
        ({"keys": 7}, {"is_causal": True}),
        ({}, {"dropout_p": 0.1}),
        ({}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()}),
    ],
)
def test_what_the_kernel_does_not_compute_stays(sizes, options):
    module = graph_of(given(**sizes), **options)
    assert ATTENTION in [node.target for node in module.graph.nodes]
    assert use_flash(module.graph, {}, kernel_of=cudnn) == 0


def test_shared_kv_heads_stay_shared():
    module = graph_of(given(queries=1, keys=7, shared=2), enable_gqa=True)
    assert use_flash(module.graph, {}, kernel_of=cudnn) == 1
    (call,) = (node for node in module.graph.nodes if node.target is FLASH_ATTENTION)
    assert [one.meta["val"].shape[1] for one in call.args[:3]] == [4, 2, 2] and "enable_gqa" not in call.kwargs
    out, rows = call.meta["val"]
    assert out.shape == (2, 4, 1, 16) and rows.shape == (2, 4, 1) and rows.dtype == torch.float32


def test_keys_and_values_may_each_have_a_symbol_for_their_length():
    query, key, value = given(queries=1, keys=7)
    torch.compiler.reset()
    for one in (key, value):
        torch._dynamo.mark_dynamic(one, 1)
    with torch.no_grad(), torch.fx.experimental._config.patch(use_duck_shape=False):
        (region,) = capture_regions(Attention(), (query, key, value), {}).regions
    graph = region.graph.graph
    lengths = {symbolic_sizes.symbol_of(node.meta.get("val")) for node in graph.nodes} - {None}
    assert len(lengths) == 2
    symbols = dict.fromkeys(lengths, 7)
    assert use_flash(graph, symbols, kernel_of=cudnn) == 0
    apart = {symbol: sympy.Symbol(f"dim{number}") for number, symbol in enumerate(lengths)}
    assert use_flash(graph, symbols, apart, kernel_of=cudnn) == 0
    assert use_flash(graph, symbols, dict.fromkeys(lengths, sympy.Symbol("cached")), kernel_of=cudnn) == 1


def test_a_kernel_without_plans_stays_torchs_choice():
    asked = []

    def efficient(*operands, **options):
        asked.append((*operands, options))
        return "aten._scaled_dot_product_efficient_attention.default"

    module = graph_of(given(), is_causal=True, scale=0.5)
    assert use_flash(module.graph, {}, kernel_of=efficient) == 0
    ((query, *_, is_causal, options),) = asked
    assert query.shape == (2, 4, 5, 16) and is_causal is True and options == {"scale": 0.5}


def test_layers_alike_are_asked_for_once_and_open_sizes_at_those_of_the_point():
    class Layers(torch.nn.Module):
        def forward(self, hidden_states):
            batch, tokens, _ = hidden_states.shape
            x = (hidden_states * 1.5).view(batch, tokens, 2, 16).transpose(1, 2)
            for _ in range(3):
                x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            return x.transpose(1, 2).reshape(hidden_states.shape)

    asked = []

    def noting(query, *_, **__):
        asked.append(tuple(query.shape))
        return cudnn()

    work = work_on(maker=Layers, x=torch.randn(5, 7, 32).to(HALF))
    opened = work.ranged.finder(work.capture).next().opened
    graph = opened.region.graph.graph
    assert use_flash(graph, opened.symbols({"batch": 3, "seq": 11}), kernel_of=noting) == 3
    assert len(set(asked)) == 1 and asked[0] == (3, 2, 11, 16) and len(asked) <= 2  # the first query is laid out otherwise
    for call in [node for node in graph.nodes if node.target is FLASH_ATTENTION]:
        assert not draws_numbers(call)
        (item,) = call.users
        assert item.meta["val"] is call.meta["val"][0]


def test_a_step_on_a_growing_cache_is_split_around_it():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

        def forward(self, hidden_states, keys):
            x = hidden_states.tanh()
            for layer in self.layers:
                x = functional.silu(layer(x)).exp().tanh()
                new = x.view(x.shape[0], 1, 2, 16).transpose(1, 2)
                cached = torch.cat([keys, new], dim=2)
                x = functional.scaled_dot_product_attention(new, cached, cached).transpose(1, 2).reshape(x.shape)
                x = (x * 2).tanh().exp().tanh()
            return x

    torch.compiler.reset()
    keys = torch.randn(2, 2, 7, 16).to(HALF)
    torch._dynamo.mark_dynamic(keys, 2)
    model = Step().to(HALF)
    with torch.no_grad():
        (region,) = capture_regions(model, (torch.randn(2, 1, 32).to(HALF), keys), {}).regions
    module = region.graph
    (slot,) = (node for node in module.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt) and node.op == "placeholder")
    growing = {symbolic_sizes.symbol_of(slot.meta["val"])}
    before = split(module, growing)
    assert use_flash(module.graph, dict.fromkeys(growing, 9), kernel_of=cudnn) == 4
    after = split(module, growing)
    assert before is not None and after is not None
    assert len(after.parts) == len(before.parts) and after.launches_inside == before.launches_inside
    assert [len(part.passed) for part in after.parts] == [len(part.passed) for part in before.parts]
