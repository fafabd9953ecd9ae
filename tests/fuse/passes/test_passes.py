"""Graph passes on traced code: what they change, and above all what they leave."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.capturable import host_work
from fusion_advisor.fuse.passes import constant_folding
from fusion_advisor.fuse.passes.attention import drop_masks, group_query_heads, share_masks
from fusion_advisor.fuse.passes.constant_folding import fold_constants, fold_frozen, frozen_bytes, held_bytes
from fusion_advisor.fuse.rewrite.graph_rewriter import rewrite_region
from fusion_advisor.runtime.torch_internals import aten_ops
from tests.tiny import Calling, profiled, region_of

Q = torch.randn(2, 4, 6, 8)


def rewritten(function, inputs, *passes):
    """Run passes over a function; return (module, changed) after comparing with the function, call by call."""
    region, _, index_of = region_of(function, *inputs)
    module, changed = rewrite_region(region, index_of, [], passes)
    for _ in range(3):
        torch.testing.assert_close(module(*[i.clone() for i in inputs]), function(*[i.clone() for i in inputs]))
    return module, changed


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def attention(module):
    return next(node for node in module.graph.nodes if "scaled_dot" in str(node.target))


# ---------------------------------------------------------------------- masks


def masked(make):
    return rewritten(lambda q: sdpa(q, q, q, attn_mask=make(q.shape[-2])), (Q,), drop_masks)


CAUSAL = {
    "bool": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "bool with a batch": lambda n: torch.ones(n, n, dtype=torch.bool).tril().expand(2, 1, n, n),
    "from positions": lambda n: torch.arange(n).unsqueeze(0) <= torch.arange(n).unsqueeze(1),
    "float, lowest": lambda n: torch.full((n, n), torch.finfo(torch.float32).min).triu(1),
    "float, -inf": lambda n: torch.full((n, n), float("-inf")).triu(1),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_that_is_exactly_causal_becomes_the_flag(name):
    module, changed = masked(CAUSAL[name])
    assert changed == [1]
    assert attention(module).args[3] is None
    assert attention(module).args[5] is True
    assert not any("tril" in target or "triu" in target or "full" in target for target in targets(module))


def test_a_mask_that_is_all_true_or_zero_goes():
    for make in (lambda n: torch.ones(n, n, dtype=torch.bool), lambda n: torch.zeros(n, n)):
        module, changed = masked(make)
        assert changed == [1]
        assert attention(module).args[3] is None
        assert attention(module).args[5] is False


def with_one_wrong(row, column):
    def make(n):
        mask = torch.arange(n).unsqueeze(0) <= torch.arange(n).unsqueeze(1)
        place = (torch.arange(n).unsqueeze(1) == row) & (torch.arange(n).unsqueeze(0) == column)
        return mask ^ place

    return make


KEPT = {
    "off by one above": lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "off by one below": lambda n: torch.ones(n, n, dtype=torch.bool).tril(-1) | torch.eye(n, dtype=torch.bool).roll(1, 0),
    "window": lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-3),
    "padding": lambda n: torch.ones(n, n, dtype=torch.bool).tril() & (torch.arange(n) > 0) | torch.eye(n, dtype=torch.bool),
    "one element less": with_one_wrong(5, 1),
    "one element more": with_one_wrong(1, 5),
    "additive bias": lambda n: torch.full((n, n), float("-inf")).triu(1) + 0.5 * torch.eye(n),
    "nearly blocked": lambda n: torch.full((n, n), -1e4).triu(1),
}


@pytest.mark.parametrize("name", KEPT)
def test_any_other_mask_stays(name):
    module, changed = masked(KEPT[name])
    assert changed == [0]
    assert attention(module).args[3] is not None


def test_a_causal_mask_over_more_keys_than_queries_stays():
    def function(q, k):
        mask = torch.arange(9).unsqueeze(0) <= torch.arange(6).unsqueeze(1) + 3
        return sdpa(q, k, k, attn_mask=mask)

    assert rewritten(function, (Q, torch.randn(2, 4, 9, 8)), drop_masks)[1] == [0]


def test_a_mask_that_depends_on_an_input_stays_even_if_it_is_causal_now():
    def function(q, keep):
        return sdpa(q, q, q, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril() & keep[:, None, None, :])

    assert rewritten(function, (Q, torch.ones(2, 6, dtype=torch.bool)), drop_masks)[1] == [0]


def test_a_mask_that_is_an_input_stays():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert rewritten(lambda q, m: sdpa(q, q, q, attn_mask=m), (Q, mask), drop_masks)[1] == [0]


def test_scale_and_grouping_survive():
    def function(q, k):
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        return sdpa(q, k, k, attn_mask=mask, scale=0.3, enable_gqa=True)

    module, changed = rewritten(function, (Q, torch.randn(2, 2, 6, 8)), drop_masks)
    assert changed == [1]
    assert attention(module).kwargs == {"scale": 0.3, "enable_gqa": True}


def test_the_masks_of_a_real_model_are_found():
    _, _, live = profiled("qwen2")
    region = live.regions[0]
    module, changed = rewrite_region(region, _indices(region), [], [drop_masks, group_query_heads, fold_constants])
    assert changed[:2] == [2, 2]
    assert changed[2] > 0
    torch.testing.assert_close(module(*region.example_args), region.original.forward(*region.example_args), rtol=1e-5, atol=1e-5)


def _indices(region):
    return {node: number for number, node in enumerate(region.graph.graph.nodes)}


# ---------------------------------------------------------------------- masks that several calls read

KEEP = torch.arange(6) < 4


def layers(count, dtypes=(torch.float32,)):
    def function(q, keep):
        mask = keep.expand(1, 1, 6, 6)
        return sum(sdpa(q.to(dtype), q.to(dtype), q.to(dtype), attn_mask=mask, scale=0.3).float() for dtype in dtypes * count)

    return function


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)])
def test_a_boolean_mask_is_converted_once(dtypes):
    module, (changed,) = rewritten(layers(3, dtypes), (Q, KEEP), share_masks)
    assert changed == 3 * len(dtypes)
    assert targets(module).count("aten.where.self") == len(dtypes)
    masks = {node.args[3].target for node in module.graph.nodes if "scaled_dot" in str(node.target)}
    assert masks == {torch.ops.aten.where.self}


def test_the_shared_mask_gives_the_very_numbers():
    region, _, index_of = region_of(layers(2), Q, KEEP)
    module, _ = rewrite_region(region, index_of, [], (share_masks,))
    for keep in (KEEP, torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)):
        assert torch.equal(module(Q, keep), layers(2)(Q, keep))


def written(q, keep):
    mask = keep.clone().expand(6, 6)
    first = sdpa(q, q, q, attn_mask=mask)
    mask[0].logical_not_()
    return first + sdpa(q, q, q, attn_mask=mask)


def additive(q, keep):
    mask = torch.where(keep, 0.0, -1.0).expand(6, 6)
    return sdpa(q, q, q, attn_mask=mask) + sdpa(q, q, q, attn_mask=mask)


def one_key(q, keep):
    k, mask = q[..., :1, :], keep[:1].expand(6, 1)
    return sdpa(q, k, k, attn_mask=mask) + sdpa(q, k, k, attn_mask=mask)


def other_masks(q, keep):
    return sdpa(q, q, q, attn_mask=keep.expand(6, 6)) + sdpa(q, q, q, attn_mask=keep.flip(0).expand(6, 6))


@pytest.mark.parametrize("function", [layers(1), written, additive, one_key, other_masks])
def test_masks_that_stay_boolean(function):
    region, _, index_of = region_of(function, Q, KEEP)
    _, (changed,) = rewrite_region(region, index_of, [], (share_masks,))
    assert changed == 0


# ---------------------------------------------------------------------- shared KV heads


def repeat(k, times=2):
    batch, heads, length, dim = k.shape
    return k[:, :, None, :, :].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


KV = torch.randn(2, 2, 6, 8)


def test_repeated_heads_are_read_in_place():
    module, changed = rewritten(lambda q, k, v: sdpa(q, repeat(k), repeat(v)), (Q, KV, KV + 1), group_query_heads)
    assert changed == [1]
    assert attention(module).kwargs["enable_gqa"] is True
    assert not any("expand" in target for target in targets(module))


UNGROUPED = {
    "only keys": lambda q, k: sdpa(q, repeat(k), torch.cat((k, k), 1)),
    "tiled, not repeated": lambda q, k: sdpa(q, torch.cat((k, k), 1), torch.cat((k, k), 1)),
    "tiled by a leading dim": lambda q, k: sdpa(
        q, *[k[:, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8)] * 2
    ),
    "expanded along the length": lambda q, k: sdpa(
        q, *[k[:, :, :, None, :].expand(2, 2, 6, 2, 8).reshape(2, 4, 6, 8)] * 2
    ),
    "nothing repeated": lambda q, k: sdpa(q, torch.cat((k, -k), 1), torch.cat((k, k), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNGROUPED)
def test_anything_but_a_repeat_of_each_head_stays(name):
    assert rewritten(UNGROUPED[name], (Q, KV), group_query_heads)[1] == [0]


ONE_HEAD = {
    "plain": lambda q, k: sdpa(q, k, k + 1),
    "causal": lambda q, k: sdpa(q, k, k + 1, is_causal=True),
    "a mask that says causal": lambda q, k: sdpa(q, k, k + 1, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril()),
    "a scale": lambda q, k: sdpa(q, k, k + 1, scale=-0.3),
}


@pytest.mark.parametrize("name", ONE_HEAD)
def test_one_head_that_broadcasts_is_served_by_a_kernel(name):
    def served(module):
        call = attention(module)
        given = torch.fx.node.map_arg((call.args, call.kwargs), lambda source: source.meta["val"])
        return aten_ops.has_attention_kernel(*given[0], **given[1])

    one = KV[:, :1]
    module, (dropped, changed) = rewritten(ONE_HEAD[name], (Q, one), drop_masks, group_query_heads)
    assert (dropped, changed) == (name == "a mask that says causal", 1)
    assert attention(module).kwargs["enable_gqa"] is True and served(module)
    assert not served(rewritten(ONE_HEAD[name], (Q, one))[0])


BROADCAST = {
    "a mask": lambda q, k: sdpa(q, k, k, attn_mask=q[:, :1, :, :6] > 0),
    "dropout": lambda q, k: sdpa(q, k, k, dropout_p=0.5),
    "one query head": lambda q, k: sdpa(q[:, :1], k, k),
    "only values": lambda q, k: sdpa(q, torch.cat([k] * 4, 1), k),
    "batches too": lambda q, k: sdpa(q, k[:1], k[:1]),
    "three dims": lambda q, k: sdpa(q[0], k[0], k[0]),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_what_else_broadcasts_stays(name):
    region, _, index_of = region_of(BROADCAST[name], Q, KV[:, :1])
    _, changed = rewrite_region(region, index_of, [], [group_query_heads])
    assert changed == [0]


# ---------------------------------------------------------------------- constants


def test_what_depends_on_no_input_is_computed_once():
    def function(x):
        table = torch.arange(6.0).unsqueeze(1) * torch.arange(8.0)
        return x * torch.cos(table) + torch.sin(table)

    module, changed = rewritten(function, (Q,), fold_constants)
    assert changed[0] >= 5
    assert targets(module) == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert len(dict(module.named_buffers())) == 2


def test_literals_in_the_models_code_are_constants_too():
    def function(x):
        positions = torch.arange(8.0)
        highest = torch.tensor(3).type_as(positions)
        return x * torch.where(positions > 3, highest, positions) / torch.sqrt(torch.tensor([[4.0]]))

    model = Calling(function)
    (region,) = capture_regions(model, (Q,), {}).regions  # `retrace` makes `detach_` a view
    module, changed = rewrite_region(region, _indices(region), [], [fold_constants])
    assert changed[0] >= 6
    assert targets(module) == ["aten.mul.Tensor", "aten.div.Tensor"]
    torch.testing.assert_close(module(Q)[0], model(Q))


def test_a_literal_that_is_written_to_is_made_anew_at_each_call():
    def function(x):
        total = torch.tensor([1.0, 2.0])
        total.add_(x[0, 0, 0, :2])
        return total * 2

    rewritten(function, (Q,), fold_constants)


def test_a_mask_that_is_made_of_a_literal_becomes_the_flag():
    def additive(n):
        return torch.where(torch.ones(n, n, dtype=torch.bool).tril(), 0.0, torch.tensor(float("-inf")))

    model = Calling(lambda q: sdpa(q, q, q, attn_mask=additive(q.shape[-2])))
    (region,) = capture_regions(model, (Q,), {}).regions
    assert rewrite_region(region, _indices(region), [], [drop_masks])[1] == [1]


def positions_in_a_window(side=2):
    """BEiT's table of relative positions: made, and filled by rows and columns."""
    table = torch.zeros(side * side + 1, side * side + 1, dtype=torch.int64)
    table[1:, 1:] = torch.arange(16).view(4, 4) % 7
    table[0, 0:] = 7
    table[0:, 0] += 8
    return table


def test_a_folded_value_is_no_site_of_the_fusion_that_computed_it():
    def mark(graph, region, constants):
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["fusion_id"] = "F1"
        return 0

    module, changed = rewritten(lambda x: x + torch.arange(4).to(torch.int32).mul(2), (torch.ones(4),), mark, fold_constants)
    stored = [node for node in module.graph.nodes if node.op == "get_attr"]
    assert changed[1] > 0 and stored
    assert all("fusion_id" not in node.meta for node in stored)
    assert any("fusion_id" in node.meta for node in module.graph.nodes)


def test_a_table_that_is_filled_in_place_is_folded_with_its_writes():
    module, changed = rewritten(lambda x: x.flatten()[positions_in_a_window().view(-1)], (Q,), fold_constants)
    assert changed[0] >= 8
    assert targets(module) == ["aten.flatten.using_ints", "aten.index.Tensor"]
    (stored,) = dict(module.named_buffers()).values()
    assert torch.equal(stored, positions_in_a_window().view(-1))


def read_before_it_is_full(x):
    table = torch.zeros(8)
    early = x * table
    table[2:] = 1.0
    return early + x * table


def filled_from_an_input(x):
    table = torch.zeros(8)
    table[2:] = x[0, 0, 0, 2:]
    return x * table


def given_back(x):
    table = torch.zeros(8)
    table[2:] = 1.0
    return x * table, table


def filled_at_random(x):
    table = torch.zeros(8)
    table.uniform_()
    return x * 0 + (table < 2)


@pytest.mark.parametrize("function", [read_before_it_is_full, filled_from_an_input, given_back, filled_at_random])
def test_a_table_that_others_see_before_or_after_it_is_filled_is_made_at_each_call(function):
    module, _ = rewritten(function, (Q,), fold_constants)
    assert any("copy_" in target or "fill_" in target or "uniform_" in target for target in targets(module))


def test_a_filled_table_that_is_too_large_to_hold_is_made_at_each_call():
    def function(x):
        table = torch.zeros(1, 1).expand(9000, 9000).contiguous()
        table[0] = 2.0
        return x * table[:8, 0]

    module, _ = rewritten(function, (Q,), fold_constants)
    assert "aten.fill_.Tensor" in targets(module)


@pytest.mark.gpu
def test_positions_in_host_memory_are_stored_on_the_device():
    module, _ = rewritten(lambda x: x.flatten()[positions_in_a_window().view(-1)], (Q.cuda(),), fold_constants)
    assert {value.device.type for name, value in module.named_buffers() if name.endswith("_on_cuda")} == {"cuda"}
    assert host_work(module) is None


def test_folding_keeps_dtypes_and_layouts():
    def function(x):
        return x + torch.arange(48, dtype=torch.float64).reshape(8, 6).t()

    rewritten(function, (Q.double(),), fold_constants)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(6, 8), lambda: torch.randn(6, 8), lambda: torch.randint(0, 9, (6, 8)), lambda: torch.randperm(8) + 0,
        lambda: torch.bernoulli(torch.full((6, 8), 0.5)), lambda: torch.dropout(torch.ones(6, 8), 0.5, True),
        lambda: torch.poisson(torch.full((6, 8), 4.0)), lambda: torch.rand_like(torch.ones(6, 8)),
        lambda: torch.multinomial(torch.ones(8), 8), lambda: torch.binomial(torch.full((8,), 9.0), torch.full((8,), 0.5)),
    ],
    ids=["rand", "randn", "randint", "randperm", "bernoulli", "dropout", "poisson", "rand_like", "multinomial", "binomial"],
)  # fmt: skip
def test_random_numbers_are_drawn_at_every_call(draw):
    region, _, index_of = region_of(lambda x: x + draw() * 2, Q)
    module, _ = rewrite_region(region, index_of, [], [fold_constants])
    first = module(Q)
    assert any(not torch.equal(module(Q), first) for _ in range(8))


def test_what_is_written_to_is_not_stored():
    def function(x):
        total = torch.zeros(6, 8)
        total.add_(x[0, 0])
        return total * 2

    rewritten(function, (Q,), fold_constants)


def test_what_is_written_to_through_a_view_is_not_stored():
    def function(x):
        total = torch.zeros(6, 8)
        total[:3].add_(x[0, 0, :3])
        return total * 2

    rewritten(function, (Q,), fold_constants)


def test_what_the_caller_is_given_is_not_shared_between_calls():
    def function(x):
        return x + 1, torch.arange(6) * 2, (torch.arange(8) * 3).view(2, 4)

    region, _, index_of = region_of(function, Q)
    module, _ = rewrite_region(region, index_of, [], [fold_constants])
    for _ in range(2):
        _, ids, table = module(Q)
        assert torch.equal(ids, torch.arange(6) * 2)
        assert torch.equal(table.flatten(), torch.arange(8) * 3)
        ids.zero_()
        table.zero_()


def test_what_depends_on_an_input_is_not_folded():
    module, changed = rewritten(lambda x: torch.tanh(x * 0 + 1) * 2, (Q,), fold_constants)
    assert changed == [0]
    assert len(targets(module)) == 4


@pytest.mark.parametrize("role", ["buffer", "parameter"])
def test_what_depends_on_a_buffer_or_a_parameter_is_not_folded(role):
    table = torch.rand(8)
    region, _, index_of = region_of(rotary, Q, table)
    region.roles = ("input", role)
    module, _ = rewrite_region(region, index_of, [], [fold_constants])
    assert not any("arange" in target for target in targets(module))
    assert held_bytes(module.graph) == 6 * 4
    table.data.mul_(2)  # counts no version
    torch.testing.assert_close(module(Q, table), rotary(Q, table))


# ---------------------------------------------------------------------- frozen: values that depend on buffers and parameters


def folded_over(function, table, role="buffer"):
    """Freeze a function of (x, buffer); return the rewritten module and how many ops went."""
    region, _, index_of = region_of(function, Q, table)
    region.roles = ("input", role)
    module, changed = rewrite_region(region, index_of, [], [fold_constants, fold_frozen])
    torch.testing.assert_close(module(Q, table), function(Q, table))
    return module, sum(changed)


def rotary(x, frequencies):
    angles = torch.arange(6.0).unsqueeze(1) * frequencies
    return x * torch.cos(angles) + torch.sin(angles)


@pytest.mark.parametrize("role", ["buffer", "parameter"])
def test_what_depends_on_a_buffer_alone_is_computed_once(role):
    module, changed = folded_over(rotary, torch.rand(8), role)
    assert changed >= 5
    assert [target for target in targets(module) if "aten" in target] == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert held_bytes(module.graph) == frozen_bytes(module.graph) == 2 * 6 * 8 * 4


def test_it_is_computed_again_when_the_buffer_changes():
    table = torch.rand(8)
    module, _ = folded_over(rotary, table)
    table.mul_(2)
    torch.testing.assert_close(module(Q, table), rotary(Q, table))
    other = torch.rand(8)
    torch.testing.assert_close(module(Q, other), rotary(Q, other))


def test_a_view_of_a_buffer_is_not_stored():
    assert folded_over(lambda x, table: x + table.view(1, 8), torch.rand(8))[1] == 0


def test_a_frozen_value_may_depend_on_a_constant_that_another_op_reads_too():
    def function(x, table):
        steps = torch.arange(8.0) + 1
        return x * steps + torch.sin(steps * table)

    table = torch.rand(8)
    module, _ = folded_over(function, table)
    assert [target for target in targets(module) if "aten" in target] == ["aten.mul.Tensor", "aten.add.Tensor"]
    table.mul_(3)
    torch.testing.assert_close(module(Q, table), function(Q, table))


def test_a_written_buffer_is_not_frozen():
    def counting(x, count):
        count.add_(1)
        return x * (count * 2)

    region, _, index_of = region_of(counting, Q, torch.zeros(8))
    region.roles = ("input", "buffer")
    module, changed = rewrite_region(region, index_of, [], [fold_frozen])
    assert changed == [0]
    count = torch.zeros(8)
    torch.testing.assert_close(module(Q, count), Q * 2)
    torch.testing.assert_close(module(Q, count), Q * 4)


def test_an_inference_tensor_counts_no_writes_and_is_not_folded():
    with torch.inference_mode():
        table = torch.rand(8)
    region, _, index_of = region_of(rotary, Q, torch.rand(8))
    region.roles, region.example_args = ("input", "buffer"), (Q, table)
    module = rewrite_region(region, index_of, [], [fold_constants, fold_frozen])[0]
    assert any("cos" in target for target in targets(module))


def test_values_past_the_limit_are_computed_at_every_call(monkeypatch):
    monkeypatch.setattr(constant_folding, "HELD_LIMIT_BYTES", 6 * 4 + 6 * 8 * 4)  # the positions, and one table of angles
    module, changed = folded_over(rotary, torch.rand(8))
    assert changed > 0
    assert held_bytes(module.graph) == frozen_bytes(module.graph) == 6 * 8 * 4
    assert sum("cos" in target or "sin" in target for target in targets(module)) >= 1


def test_the_rotary_tables_of_a_real_model_are_frozen():
    _, _, live = profiled("qwen2")
    region = live.regions[0]
    module, _ = rewrite_region(region, _indices(region), [], [drop_masks, group_query_heads, fold_constants, fold_frozen])
    assert not any(word in target for target in targets(module) for word in ("cos", "sin", "arange"))
    torch.testing.assert_close(module(*region.example_args), region.original.forward(*region.example_args), rtol=1e-5, atol=1e-5)
