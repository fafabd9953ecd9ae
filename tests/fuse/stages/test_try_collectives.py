"""Sums over ranks as one kernel with what follows them, in the whole loop of one process: which sums, which stay and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.capturable import has_collectives, host_work
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.rewrite.collective_kernels import LAYER_TITLE, TITLE, TITLES, group_kernels_in
from fusion_advisor.fuse.stages.collective_sites import find_kinds, read_tuning
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.ranks.host_kernels import HostKernels

pytestmark, quick = test_pipeline.pytestmark, test_pipeline.quick
WIDTH = 64


class Norm(nn.Module):
    """RMSNorm as Llama writes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def norm_of(way):
    """The norm that a way's words name."""
    if "layer norm" not in way:
        return nn.RMSNorm(WIDTH, eps=1e-5) if "builtin" in way else Norm()
    made = nn.LayerNorm(WIDTH, elementwise_affine="without weight" not in way)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return made


class Layer(nn.Module):
    """A product that is summed over the ranks, the residual, the norm: the way of a layer of a split model."""

    def __init__(self, way, group):
        super().__init__()
        self.way, self.group = way, group
        self.lin, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = norm_of(way)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def summed(self, partial):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(partial, "max" if self.way == "max" else "sum", self.group))

    def forward(self, x):
        partial, base = (x, self.lin(x)) if self.way == "written" else (self.lin(x), x)
        total = self.summed(partial)
        if self.way == "written":
            x.mul_(0.5)
        if "two sums" in self.way:
            base = base + (self.summed(self.out(x)) + self.bias if "bias" in self.way else self.summed(self.out(x)))
        if "bias" in self.way:
            total = self.bias + total if "left" in self.way else total + self.bias
        rows = total.flatten(0, -2).view(x.shape) if "views" in self.way else total
        residual = base + rows
        normed = self.norm(residual)
        result = self.out(normed)
        return residual, result + self.lin(total) if "read twice" in self.way else result


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


class Layers(nn.ModuleList):
    """Layers one after another."""

    def forward(self, x):
        results = []
        for layer in self:
            total, x = layer(x)
            results.append(total)
        return *results, x


def workload(group, *ways, rows=40, dtype=torch.float32):
    model = Layers([Layer(way, group) for way in ways]) if len(ways) > 1 else Layer(ways[0], group)
    return describe_live(model.to(dtype).eval(), (torch.randn(2, rows // 2, WIDTH, dtype=dtype),), {})


def applied(loaded, quick, made, *, status_of=lambda way: Status.KEPT):
    """Apply with planted verdicts; the way of summing that is timed is the one whose kernels were made last."""
    tried = []

    def on_top(*_, name, **__):
        tried.append(name)
        delta_ns = -5 * len(tried) if name.startswith("A") else -5
        status = status_of(len(tried)) if name.startswith("A") else Status.KEPT
        return Verdict(id=name, status=status, reason="planted", delta_ns=delta_ns, interval_ns=(delta_ns - 1, delta_ns + 1))

    instruments = test_pipeline.verdicts(test_pipeline.keep_all, on_top=on_top)
    if made is not None:
        instruments = replace(instruments, group_kernels=lambda *_: made)
    run = apply_workload(loaded, replace(quick, skip=("merge-gemms", *quick.skip)), instruments=instruments)
    return run, [row for row in run.report.fusions if row.kernel in TITLES]


def test_a_sum_with_its_residual_and_norm_is_one_call_whose_total_is_read_later_too(quick, group):
    loaded, made = workload(group, "plain"), HostKernels()
    run, (row,) = applied(loaded, quick, made)
    assert (row.id, row.status, row.receipt.sites_found, row.receipt.sites_replaced) == ("A1", Status.KEPT, 1, 1)
    assert row.numerics.is_passed and row.step_delta_ns == -10  # two-shot was timed second, and planted faster
    assert read_tuning(row.rendered[0].tuning) == ("two-shot", 1) and "one-shot: planted" in row.reason
    assert row.kernel_bytes == 40 * WIDTH * 4 * 6 + WIDTH * 4  # one rank: 2 + 4 times each row, and the weight
    norm = next(fusion for fusion in run.report.fusions if fusion.kernel == "add_rmsnorm")
    assert norm.status is Status.ABSORBED and TITLE in norm.reason
    assert run.report.model_check.is_passed and load_report(dump_report(run.report)) == run.report
    (x,) = loaded.args
    with torch.no_grad():
        ours = run.fused(x)
        run.revert()
        eager, exact = loaded.model(x), loaded.model.double()(x.double())
    for one, other, truth in zip(ours, eager, exact, strict=True):
        assert (one.double() - truth).norm() <= 1.5 * (other.double() - truth).norm() + 1e-7
    assert not made.is_there


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize(
    ("way", "norm", "has_offset"),
    [
        ("layer norm", "layer", False), ("bias, layer norm", "layer", True), ("bias, views, layer norm", "layer", True),
        ("left bias, layer norm", "layer", True), ("bias", "rms-once", True), ("bf16, builtin", "rms-once", False),
        ("bf16, bias", "rms", True), ("bf16, bias, builtin", "rms-once", True), ("bf16, bias, layer norm", "layer", True),
    ],
)  # fmt: skip
def test_other_norms_and_the_bias_of_a_linear_go_with_the_sum(quick, group, way, norm, has_offset, rows):
    loaded, made = workload(group, way, rows=rows, dtype=torch.bfloat16 if "bf16" in way else torch.float32), HostKernels()
    run, (row,) = applied(loaded, quick, made)
    assert (row.status, row.kernel) == (Status.KEPT, LAYER_TITLE if norm == "layer" else TITLE)
    assert (made.asked[-1].norm, made.asked[-1].has_offset, made.asked[-1].eps) == (norm, has_offset, pytest.approx(1e-5))
    assert row.rendered[0].name.startswith(f"fa_{row.kernel}") and row.numerics.is_passed
    (x,) = loaded.args
    with torch.no_grad():
        ours = run.fused(x)
        assert made.launches > 0 and "_c10d_functional" not in run.fused._rewritten.modules[0].code
        run.revert()
        eager, exact = loaded.model(x), loaded.model.double()(x.double())
    for one, other, truth in zip(ours, eager, exact, strict=True):
        assert (one.double() - truth).norm() <= 1.5 * (other.double() - truth).norm() + 1e-7


def test_a_sum_whose_norm_was_kept_as_no_chain_is_taken_all_the_same(quick, group):
    made = HostKernels()
    run, rows = applied(workload(group, "plain"), replace(quick, skip=("add_rmsnorm",)), made)
    assert [row.status for row in rows] == [Status.KEPT] and rows[0].receipt.sites_replaced == 1
    assert not [row for row in run.report.fusions if row.kernel == "add_rmsnorm" and row.status is Status.KEPT]
    run.revert()


def test_kinds_are_chosen_by_their_names(quick, group):
    run, rows = applied(workload(group, "plain", "layer norm"), replace(quick, skip=(TITLE,)), HostKernels())
    assert [(row.id, row.kernel, row.status) for row in rows] == [("A2", LAYER_TITLE, Status.KEPT)]
    run.revert()


def test_views_between_the_sum_and_the_residual_are_taken_in(quick, group):
    run, (row,) = applied(workload(group, "views"), quick, HostKernels())
    assert row.status is Status.KEPT and row.receipt.sites_replaced == 1
    run.revert()


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("max", "it takes the max over the ranks, not the sum"),
        ("layer norm without weight", "not one residual add and an RMSNorm or LayerNorm with a weight"),
        ("bias, bias, read twice", "other ops read the sum before the residual is added"),
        ("read twice", "other ops read the sum before the residual is added"),
        ("written", "what is summed is written to before it would be read"),
    ],
)
def test_other_sums_stay_and_say_why(quick, group, way, reason):
    made = HostKernels()
    run, (row,) = applied(workload(group, way), quick, made)
    assert row.status is Status.NOT_REPLACED and reason in row.reason and row.receipt.sites_found == 1
    assert run.report.model_check.is_passed and made.launches == 0
    run.revert()


def test_a_process_that_decides_alone_leaves_them(quick, group):
    run, (row,) = applied(workload(group, "plain"), quick, None)
    assert row.status is Status.NOT_REPLACED and "this process decides alone" in row.reason
    run.revert()


def test_one_that_does_not_pay_is_left_out_and_its_buffer_freed(quick, group):
    made = HostKernels()
    run, (row,) = applied(workload(group, "plain"), quick, made, status_of=lambda _: Status.SLOWER)
    assert row.status is Status.SLOWER and "two-shot: planted" in row.reason and not made.is_there
    assert next(one for one in run.report.fusions if one.kernel == "add_rmsnorm").status is Status.KEPT
    run.revert()


def test_the_faster_way_stays_and_a_slower_one_does_not(quick, group):
    made = HostKernels()
    kept_first = {1: Status.KEPT, 2: Status.SLOWER}
    run, (row,) = applied(workload(group, "plain"), quick, made, status_of=kept_first.__getitem__)
    assert row.status is Status.KEPT and read_tuning(row.rendered[0].tuning)[0] == "one-shot" and row.step_delta_ns == -5
    run.revert()


def test_a_graph_with_the_call_is_recorded_by_all_ranks_or_by_none(quick, group):
    made = HostKernels()
    run, _ = applied(workload(group, "plain"), quick, made)
    (module,) = run.fused._rewritten.modules
    assert group_kernels_in([module]) == (made,) and "_c10d_functional" not in module.code
    assert has_collectives(module) and host_work(module, holds_collectives=True) is None
    assert "processes meet in" in host_work(module)
    run.revert()


@pytest.mark.parametrize("way", ["two sums", "two sums, bias, layer norm"])
def test_two_sums_in_front_of_one_norm_stay_and_say_why(quick, group, way):
    run, (row,) = applied(workload(group, way), quick, HostKernels())
    assert row.status is Status.NOT_REPLACED and row.receipt.sites_found == 2
    assert "2 sums over ranks are added before the norm" in row.reason
    run.revert()


def test_sums_of_layers_before_are_no_reason(quick, group):
    way = "layer norm without weight"
    run, (row,) = applied(workload(group, way, way), quick, HostKernels())
    assert row.receipt.sites_found == 2 and row.reason.startswith("what follows is not one residual add")
    run.revert()


def test_sums_that_another_call_took_are_named(group):
    loaded = workload(group, "plain")
    bench = Bench(capture_regions(loaded.model, loaded.args, {}), on_cuda=False)
    (kind,), left = find_kinds(bench)
    assert not left and kind.title == TITLE
    kinds, (left,) = find_kinds(bench, kind.places[0].members[-1:])
    assert not kinds and left.reason == "another call took in what follows"


def test_a_text_without_a_way_is_refused():
    with pytest.raises(ValueError, match="no way to sum"):
        read_tuning("32 rows at once")
