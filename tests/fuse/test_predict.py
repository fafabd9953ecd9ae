"""Predictions: traced kernels plus the launches' own cost, against the H200 figures that they were tried on."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from fusion_advisor.fuse.bench import PASSES, Bench
from fusion_advisor.fuse.predict import launch_cost_ns, price_fusions, price_passes, removed_ops
from fusion_advisor.records import GraphRewrite, Launch, Status
from tests.report.fixtures import applied, chain, timing
from tests.tiny import profile_live


def launch(index, ns, category="pointwise"):
    return Launch(kernel_name="k", category=category, duration_ns=ns, op_index=index)


def test_a_launch_costs_what_the_step_takes_beyond_its_kernels():
    launches = [launch(0, 900), launch(1, 1100)]
    assert launch_cost_ns(launches, 5000) == 1500
    assert launch_cost_ns(launches, 1500) == 0  # traced kernels may take longer than timed ones
    assert launch_cost_ns(launches, 0) == launch_cost_ns([], 5000) == 0


H200 = (
    (55, 495, 2_150_863, 241_780, 1419, 2_187_551),
    (28, 140, 898_267, 91_672, 1419, 1_024_128),
    (28, 56, 707_109, 413_392, 1419, 365_856),
    (28, 140, 362_111, 60_564, 1419, 519_104),
    (12, 96, 574_535, 75_984, 173, 523_808),
    (24, 48, 192_671, 100_488, 173, 94_400),
)
"""Qwen2.5-7B bf16 1 x 512 and GPT-2 fp32 1 x 1024: sites, launches, traced ns, ns alone, a launch's cost, the measured saving."""


def test_it_meets_what_an_h200_measured():
    errors = []
    for sites, launches, device_ns, after_ns, cost_ns, measured_ns in H200:
        row = replace(chain(2, ("mul",), sites, device_ns, 0.1), launches=launches)
        fusion = replace(applied().fusions[0], chain_id="C2", chain_after=timing(round(after_ns / sites)))
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
    gone = removed_ops(bench, bench.build((), ["drop_masks"]))
    assert {"ones", "tril"} == {bench.ops[index].target.split(".")[1] for index in gone if bench.ops[index].role == "op"}
    launches = tuple(launch(op.index, 1000) for op in bench.ops if op.role == "op")
    traced, eager = launch(None, 7000, "attention"), launch(None, 3000, "attention")
    capture = replace(capture, launches=(*launches, traced), eager_launches=(eager,))
    titles = {name: title for name, (title, _) in PASSES.items()}
    rows = [
        GraphRewrite(id="R1", name=titles["drop_masks"], status=Status.KEPT, reason="", sites=1, step_delta_ns=-1),
        GraphRewrite(id="R3", name=titles["fold_constants"], status=Status.KEPT, reason="", sites=1, step_delta_ns=-1),
        GraphRewrite(id="R4", name="another kind", status=Status.KEPT, reason="", sites=1, step_delta_ns=-1),
    ]
    masks, folded, other = price_passes(rows, bench, capture, 500)
    removed = sum(bench.ops[index].role == "op" for index in gone)
    assert masks.predicted_saving_ns == removed * 1500 + 4000
    assert folded.predicted_saving_ns == 0  # nothing is left to fold once the mask is gone
    assert other.predicted_saving_ns is None
