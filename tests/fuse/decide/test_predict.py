"""Predictions: traced kernels plus the launches' own cost, against the H200 figures that they were tried on."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from fusion_advisor.fuse.decide.predict import estimates, launch_cost_ns, price_fusions, price_passes, removed_ops
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.records import GraphRewrite, Launch, OpClass, Status
from fusion_advisor.workload.weight_packing import leave_room
from tests.report.fixtures import applied, chain, timing
from tests.tiny import profile_live


def launch(index, ns, category="pointwise"):
    return Launch(kernel_name="k", category=category, duration_ns=ns, op_index=index)


def test_a_launch_costs_what_the_step_takes_beyond_its_kernels():
    launches = [launch(0, 900), launch(1, 1100)]
    assert launch_cost_ns(launches, 3600, (), most_ns=1100) == 800
    assert launch_cost_ns(launches, 5000, (), most_ns=1100) == 1100  # the clocks' share is not a launch's
    assert launch_cost_ns(launches, 1500, (), most_ns=1100) == 0  # traced kernels may take longer than timed ones
    assert launch_cost_ns(launches, 0, (), most_ns=1100) == launch_cost_ns([], 5000, (), most_ns=1100) == 0


def test_biases_that_the_trace_had_apart_are_no_cost_of_launches():
    rows = [
        GraphRewrite(id=name, name=PASSES[name].title, status=Status.KEPT, reason="", sites=1, step_delta_ns=delta_ns)
        for name, delta_ns in {"split-biases": -1000, "drop-masks": -500}.items()
    ]
    assert launch_cost_ns([launch(0, 900), launch(1, 1100)], 4600, rows, most_ns=1100) == 800


H200 = (
    (55, 495, 2_150_863, 241_780, 1419, 2_187_551),
    (28, 140, 898_267, 91_672, 1419, 1_024_128),
    (28, 56, 707_109, 413_392, 1419, 365_856),
    (28, 140, 362_111, 60_564, 1419, 519_104),
    (12, 96, 574_535, 75_984, 173, 523_808),
    (24, 48, 192_671, 100_488, 173, 94_400),
)
"""Qwen2.5-7B bf16 1 x 512 and GPT-2 fp32 1 x 1024: sites, launches, traced ns, ns alone, a launch's cost, the measured saving.
Without the ops' own times, so the kernel's time alone is taken as it is."""


def test_it_meets_what_an_h200_measured():
    errors = []
    for sites, launches, device_ns, after_ns, cost_ns, measured_ns in H200:
        row = replace(chain(2, ("mul",), sites, device_ns, 0.1), launches=launches)
        after = timing(round(after_ns / sites))
        fusion = replace(applied().fusions[0], chain_id="C2", chain_before=None, chain_after=after)
        (priced,) = price_fusions([fusion], [row], cost_ns)
        errors.append(abs(priced.predicted_saving_ns - measured_ns) / measured_ns)
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.2


def test_what_was_not_timed_alone_keeps_its_figure():
    fusion = applied().fusions[3]
    assert price_fusions([fusion], applied().chains, 500) == [fusion]


class Masked(torch.nn.Module):
    def forward(self, x):
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_pass_is_expected_to_save_the_ops_that_it_takes_away_and_eagers_attention():
    capture, live = profile_live(Masked(), (torch.randn(1, 2, 8, 16),))
    bench = Bench(live, on_cuda=False)
    gone = removed_ops(bench, bench.build((), ["drop-masks"]))
    assert {"ones", "tril"} == {bench.ops[index].target.split(".")[1] for index in gone if bench.ops[index].role == "op"}
    launches = tuple(launch(op.index, 1000) for op in bench.ops if op.role == "op")
    (attention,) = (op.index for op in bench.ops if "scaled_dot_product" in op.target)
    of_the_op = [launch(attention, 7000, "attention"), launch(attention, 600, "memory")]
    launches = tuple(one for one in launches if one.op_index != attention)
    capture = replace(capture, launches=(*launches, *of_the_op), eager_launches=(launch(None, 3000, "attention"),))
    rows = [
        GraphRewrite(id="drop-masks", name="a title", status=Status.KEPT, reason="", sites=1, step_delta_ns=-1),
        GraphRewrite(id="fold-constants", name="a title", status=Status.KEPT, reason="", sites=1, step_delta_ns=-1),
        GraphRewrite(id="another-kind", name="a title", status=Status.KEPT, reason="", sites=1, step_delta_ns=-1),
    ]
    masks, folded, other = price_passes(rows, bench, capture, 500)
    removed = sum(bench.ops[index].role == "op" for index in gone)
    assert masks.predicted_saving_ns == removed * 1500 + 4600 + 500
    assert folded.predicted_saving_ns == 0  # nothing is left to fold once the mask is gone
    assert other.predicted_saving_ns is None


class Grouped(torch.nn.Module):
    def forward(self, query, key, value):
        key, value = (one[:, :, None].expand(-1, -1, 4, -1, -1).reshape(1, 8, -1, 16) for one in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("queries", [1, 8])
def test_attention_of_one_token_is_expected_to_read_no_repeated_heads(queries):
    given = torch.randn(1, 8, queries, 16), torch.randn(1, 2, 32, 16), torch.randn(1, 2, 32, 16)
    capture, live = profile_live(Grouped(), given)
    bench = Bench(live, on_cuda=False)
    launches = tuple(launch(op.index, 1000) for op in bench.ops if op.op_class is OpClass.MEMORY)
    assert len(launches) == 2
    capture = replace(capture, launches=launches, bandwidth=replace(capture.bandwidth, copy_bytes_per_s=1e9))
    row = GraphRewrite(
        id="group-heads", name=PASSES["group-heads"].title, status=Status.KEPT, reason="", sites=1, step_delta_ns=-1
    )
    (priced,) = price_passes([row], bench, capture, 500)
    unread_bytes = 2 * (8 - 2) * 32 * 16 * 4 if queries == 1 else 0
    assert priced.predicted_saving_ns == 3000 + unread_bytes


class OneHead(torch.nn.Module):
    def forward(self, query, key):
        return torch.nn.functional.scaled_dot_product_attention(query, key, key)


@pytest.mark.parametrize(("took_ns", "saved_ns"), [([1000, 4000, 2000], 3000 + 2 * 500), ([4000], 0)])
def test_a_kernel_in_place_of_the_formula_is_expected_to_take_as_long_as_its_longest_launch(took_ns, saved_ns):
    capture, live = profile_live(OneHead(), (torch.randn(1, 8, 6, 16), torch.randn(1, 1, 6, 16)))
    bench = Bench(live, on_cuda=False)
    (index,) = (op.index for op in bench.ops if op.op_class is OpClass.ATTENTION)
    capture = replace(capture, launches=tuple(launch(index, one_ns) for one_ns in took_ns))
    row = GraphRewrite(id="group-heads", name="a title", status=Status.KEPT, reason="", sites=1, step_delta_ns=-1)
    (priced,) = price_passes([row], bench, capture, 500)
    assert priced.predicted_saving_ns == saved_ns


class Layers(torch.nn.Module):
    """As GPT-2's: its layers call ``addmm``, only its head is a linear."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 32).bfloat16())
        self.bias = torch.nn.Parameter(torch.randn(32).bfloat16())
        self.head = torch.nn.Linear(32, 21, bias=False).bfloat16()

    def forward(self, x):
        return self.head(torch.addmm(self.bias, x, self.weight))


def test_a_padded_gemm_is_expected_to_be_as_quick_as_the_other_products():
    model, rows = Layers(), 8
    leave_room(model)
    capture, live = profile_live(model, (torch.randn(rows, 16).bfloat16(),))
    bench = Bench(live, on_cuda=False)
    layer, head = (op.index for op in capture.ops if op.target in ("aten.addmm.default", "aten.linear.default"))
    capture = replace(capture, launches=(launch(layer, 4096), launch(head, 1_000_000)))
    row = GraphRewrite(id="pad-gemm", name=PASSES["pad-gemm"].title, status=Status.KEPT, reason="", sites=1, step_delta_ns=-1)
    (priced,) = price_passes([row], bench, capture, 500)
    product_ns = rows * 21 * 32 * 4096 / (rows * 32 * 16)
    copy_ns = 2 * rows * 21 * 2 * 1e9 / capture.bandwidth.copy_bytes_per_s
    assert priced.predicted_saving_ns == pytest.approx(1_000_500 - product_ns - copy_ns - 1000, abs=1)


class MaskedLayer(Masked):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return super().forward(self.layer(x))


def test_a_bias_that_the_trace_has_apart_is_no_pass_s_saving(slow_biases):
    capture, live = profile_live(MaskedLayer(), (torch.randn(1, 2, 64, 16),))
    product, total = (op.index for op in capture.ops if op.target in ("aten.linear.default", "aten.add.Tensor"))
    capture = replace(capture, launches=(launch(product, 70_000), launch(total, 4_000)), eager_launches=())
    row = GraphRewrite(id="drop-masks", name=PASSES["drop-masks"].title, status=Status.KEPT, reason="", sites=1, step_delta_ns=-1)
    (priced,) = price_passes([row], Bench(live, on_cuda=False), capture, 500)
    assert priced.predicted_saving_ns == 0


def test_biases_that_stay_apart_keep_the_figure_that_was_timed(slow_biases):
    capture, live = profile_live(MaskedLayer(), (torch.randn(1, 2, 64, 16),))
    rows = [
        GraphRewrite(
            id=name,
            name=PASSES[name].title,
            status=Status.KEPT,
            reason="",
            sites=1,
            step_delta_ns=-1,
            predicted_saving_ns=timed_ns,
        )
        for name, timed_ns in (("split-biases", 41_000), ("fold-constants", None))
    ]
    bench = Bench(live, on_cuda=False)
    made = [op.index for op in capture.ops if op.target in ("aten.ones.default", "aten.tril.default")]
    product, total = (op.index for op in capture.ops if op.target in ("aten.linear.default", "aten.add.Tensor"))
    launches = [launch(product, 70_000), launch(total, 4_000), *(launch(index, 1_000) for index in made)]
    apart, folded = price_passes(rows, bench, replace(capture, launches=tuple(launches), eager_launches=()), 500)
    assert apart.predicted_saving_ns == 41_000
    assert folded.predicted_saving_ns == len(made) * 1500 > 0


class SharedMask(torch.nn.Module):
    """Three calls that read one boolean mask, and one without a mask."""

    def forward(self, x, keep):
        mask = keep.expand(1, 1, 8, 8)
        for _ in range(3):
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_mask_that_calls_share_is_expected_to_be_made_once():
    capture, live = profile_live(SharedMask(), (torch.randn(1, 2, 8, 16), torch.arange(8) < 5))
    bench = Bench(live, on_cuda=False)
    calls = [op.index for op in bench.ops if "scaled_dot_product" in op.target]
    assert len(calls) == 4
    of_each = [("attention", 7_000), ("attention", 2_000), ("memory", 1_000), ("memory", 1_100), ("pointwise", 1_500)]
    launches = tuple(launch(index, ns, category) for index in calls for category, ns in of_each)
    row = GraphRewrite(
        id="share-masks", name=PASSES["share-masks"].title, status=Status.KEPT, reason="", sites=3, step_delta_ns=-1
    )
    (priced,) = price_passes([row], bench, replace(capture, launches=launches, eager_launches=()), 500)
    assert priced.predicted_saving_ns == 2 * (1_000 + 1_100 + 1_500 + 3 * 500)
    estimated = estimates([], {}, ["share-masks"], bench, replace(capture, launches=launches, eager_launches=()), 0.95)
    cost_ns = capture.bandwidth.launch_ns
    assert estimated["share-masks"].median_ns == -2 * (1_000 + 1_100 + 1_500 + 3 * cost_ns)
    math = tuple(launch(index, 7_000, "attention") for index in calls)  # all of it in kernels of attention's own
    (priced,) = price_passes([row], bench, replace(capture, launches=math, eager_launches=()), 500)
    assert priced.predicted_saving_ns == 0


def test_estimates_take_the_larger_of_the_trace_and_the_kernels_own_times():
    report = applied()
    capture, live = profile_live(Masked(), (torch.randn(1, 2, 8, 16),))
    bench = Bench(live, on_cuda=False)
    row = replace(chain(2, ("mul",), 10, 100_000, 0.1), launches=20)
    fusion = replace(report.fusions[0], chain_id="C2", chain_before=timing(9_000), chain_after=timing(1_000))
    found = estimates([fusion], {"C2": row}, ["drop-masks"], bench, capture, 0.95)
    cost_ns = capture.bandwidth.launch_ns
    assert found[fusion.id].median_ns == -(100_000 + 20 * cost_ns - 10 * 1_000)
    assert found[fusion.id].low_ns == min(found[fusion.id].median_ns, -80_000)
    assert set(found) == {fusion.id, "drop-masks"}
    assert estimates([fusion], {}, [], bench, capture, 0.95) == {}
