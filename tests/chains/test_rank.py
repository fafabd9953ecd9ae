"""Rows: equal chains folded, priced from bytes and launches, ranked by what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.rank import common_path, floor_time_ns, rank_chains, signature
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.records import Bandwidth
from tests.tiny import launches, planned, profiled, region_of

SLOW = Bandwidth(copy_bytes_per_s=10**9, launch_ns=100)  # one byte a nanosecond


def ranked(function, *inputs, duration_ns=1000, bandwidth=SLOW, **options):
    _, ops, _ = region_of(function, *inputs)
    capture = replace(profiled("toy")[1], ops=tuple(ops), launches=launches(ops, duration_ns), bandwidth=bandwidth)
    groups = find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
    return rank_chains(capture, groups, **options)


def test_a_row_counts_bytes_and_launches_of_its_sites():
    row = ranked(lambda x: torch.tanh(x * 2.0) + x, torch.randn(10, 8))[0].chain
    tensor = 10 * 8 * 4
    assert (row.id, row.ops, row.launches, row.device_ns, row.share) == ("C1", ("mul", "tanh", "add"), 3, 3000, 1.0)
    assert row.moved_bytes == (2 + 2 + 3) * tensor
    assert row.floor_bytes == 2 * tensor
    assert row.floor_ns == 2 * tensor + 100
    assert row.saving_bound_ns == 3000 - row.floor_ns
    assert (row.shape, row.dtype, row.is_reduction) == ((10, 8), "float32", False)


def test_a_saving_is_never_negative():
    assert ranked(lambda x: torch.tanh(x * 2.0), torch.randn(100, 80), duration_ns=1)[0].chain.saving_bound_ns == 0


def test_an_expanded_input_is_read_once():
    row = ranked(lambda x, y: (x + y.expand(10, 8)) * 2.0, torch.randn(10, 8), torch.randn(1, 8))[0].chain
    assert row.floor_bytes == (80 + 8 + 80) * 4


def test_equal_chains_are_one_row_and_other_shapes_another():
    def twice(x, w, v):
        one = torch.tanh(x * 2.0) @ w
        two = torch.tanh(one * 2.0) @ v
        return torch.tanh(two * 2.0)

    rows = ranked(twice, torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 6))
    assert sorted((len(row.chain.sites), row.chain.shape) for row in rows) == [(1, (4, 6)), (2, (4, 8))]
    assert [row.chain.id for row in rows] == ["C1", "C2"]


def test_another_constant_is_another_row():
    rows = ranked(lambda x, w: torch.tanh((torch.tanh(x * 2.0) @ w) * 3.0), torch.randn(4, 8), torch.randn(8, 8))
    assert [len(row.chain.sites) for row in rows] == [1, 1]


def test_the_dearest_comes_first():
    rows = ranked(lambda x, w: torch.tanh(x * 2.0) @ w + 1.0 - x * 3.0, torch.randn(8, 8), torch.randn(8, 8))
    assert [row.chain.device_ns for row in rows] == sorted((row.chain.device_ns for row in rows), reverse=True)
    assert len(rows) == 2


def test_a_lone_reduction_is_a_row():
    (row,) = ranked(lambda x, w: torch.softmax(x, -1) @ w, torch.randn(8, 8), torch.randn(8, 8))
    assert row.chain.is_reduction


LONE_FLOOR_NS = 2 * 64 * 64 * 4 + SLOW.launch_ns


@pytest.mark.parametrize(
    ("duration_ns", "is_row"),
    [(LONE_FLOOR_NS, False), (LONE_FLOOR_NS * 114 // 100, False), (LONE_FLOOR_NS * 116 // 100, True), (10 * LONE_FLOOR_NS, True)],
)
def test_a_lone_pointwise_op_is_a_row_where_its_kernel_is_clearly_slower_than_the_memory(duration_ns, is_row):
    x = torch.randn(64, 64)
    rows = ranked(lambda x, w: torch.tanh(x @ w) @ w, x, x, duration_ns=duration_ns)
    assert [row.chain.ops for row in rows] == [("tanh",)] * is_row
    assert [(row.chain.launches, row.chain.saving_bound_ns, row.refusal) for row in rows] == [
        (1, duration_ns - LONE_FLOOR_NS, None)
    ] * is_row


def test_a_lone_pointwise_op_that_a_launch_costs_more_than_it_could_gain_is_no_row():
    def twice(x, w):
        return torch.tanh(torch.tanh(x) @ w) @ w

    floor_ns = 2 * 2 * 2 * 4 + SLOW.launch_ns
    x = torch.randn(2, 2)
    assert ranked(twice, x, x, duration_ns=floor_ns + SLOW.launch_ns) == []
    (row,) = ranked(twice, x, x, duration_ns=floor_ns + SLOW.launch_ns + 1)
    assert (row.chain.ops, len(row.chain.sites), row.chain.launches) == (("tanh",), 2, 2)


def test_a_lone_copy_is_a_row_where_its_kernel_is_clearly_slower_than_the_memory():
    def heads(x, w):
        return (x @ w).view(8, 8, 4, 16).permute(0, 2, 1, 3).contiguous().view(-1, 8, 16).bmm(x.view(-1, 16, 8))

    def turned(x, w):
        return (x @ w).t().contiguous() @ w

    x = torch.randn(64, 64)
    assert ranked(heads, x, x, duration_ns=LONE_FLOOR_NS * 114 // 100) == []
    (row,) = ranked(heads, x, x, duration_ns=LONE_FLOOR_NS * 116 // 100)
    assert (row.chain.ops, row.chain.floor_ns, row.refusal) == (("contiguous",), LONE_FLOOR_NS, None)
    assert ranked(turned, x, x, duration_ns=10 * LONE_FLOOR_NS) == []


def test_rows_below_a_share_are_left_out():
    assert ranked(lambda x, w: torch.tanh(x * 2.0) @ w, torch.randn(8, 8), torch.randn(8, 8), min_share=0.9) == []


def test_a_refusal_carries_the_rows_id():
    rows = ranked(lambda x: torch.cumsum(x, -1), torch.randn(8, 8))
    assert rows[0].refusal is not None
    assert rows[0].refusal.chain_id == rows[0].chain.id == "C1"
    assert rows[0].refusal.code == "FA601"


def test_a_value_that_is_never_read_has_a_row_that_says_so():
    def computes_in_vain(x):
        torch.softmax(x, -1)
        return torch.tanh(x * 2.0)

    _, in_vain = ranked(computes_in_vain, torch.randn(8, 16))
    assert (in_vain.chain.ops, in_vain.chain.shape) == (("softmax",), (8, 16))
    assert (in_vain.refusal.code, in_vain.refusal.reason) == ("FA601", "its value is never read")


def test_signatures_tell_wiring_layout_and_arguments_apart():
    def of(function, *inputs):
        _, ops, _ = region_of(function, *inputs)
        (group,) = find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
        return signature(ops, group)

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    same = of(lambda x, y: (x - y) * x, x, y)
    assert same == of(lambda x, y: (x - y) * x, torch.randn(4, 8), torch.randn(4, 8))
    others = [
        of(lambda x, y: (x - y) * y, x, y),
        of(lambda x, y: (x - y) * x, x, torch.randn(8, 4).t()),
        of(lambda x, y: (x - y) * x, x, y.double()),
        of(lambda x, y: torch.sub(x, y, alpha=2) * x, x, y),
    ]
    assert len({same, *others}) == 5


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["h.0.mlp.act"] * 3, "h.0.mlp.act"),
        (["h.0.ln_1", "h.0.attn"], "h.0"),
        (["h.0", "ln_f"], "ln_f"),
        ([""], ""),
    ],
)
def test_common_path(paths, expected):
    assert common_path(paths) == expected


def test_floor_time():
    assert floor_time_ns(2000, 3, SLOW) == 2300


def test_shares_of_a_real_model_add_up_to_at_most_one():
    chains = planned("qwen2").chains
    assert 0 < sum(chain.share for chain in chains) <= 1
    assert all(chain.floor_bytes <= chain.moved_bytes for chain in chains)
