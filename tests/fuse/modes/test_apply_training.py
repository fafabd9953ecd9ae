"""``apply --phase train`` as a whole: the report of both passes, what is refused, and a gradient that is wrong."""

from __future__ import annotations

import copy
import io
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import fusion_advisor as fa
from fusion_advisor.errors import CannotCapture, NotTrainable, UnreadableReport, UsageError
from fusion_advisor.fuse.dynamo_backend import optimise
from fusion_advisor.fuse.loss.recompute_options import GELU_CHECKPOINT
from fusion_advisor.fuse.loss.record import LINEAR_CROSS_ENTROPY
from fusion_advisor.fuse.modes.apply_training import apply_training
from fusion_advisor.fuse.modes.training_findings import logits_findings, merged, step_rows
from fusion_advisor.fuse.passes.registry import row_of
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.fuse.plan.plan import Plan
from fusion_advisor.fuse.train.journal import Journal
from fusion_advisor.fuse.train.trained_graph import NOT_FASTER, SLOWER, SPARSE, Outcome
from fusion_advisor.records import GRADIENT, Status
from fusion_advisor.records.serialize import dump_report, load_report, read_report, write_capture
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.terminal.result import apply_table
from fusion_advisor.workload.load import describe_live
from tests.fuse.train.test_chunked_losses import Speaker, batch
from tests.fuse.train.test_planted import PLANTS
from tests.fuse.train.test_trained_graph import WIDTH, Block, compare, gradients, step
from tests.report.fixtures import applied
from tests.tiny import BANDWIDTH

OPTIONS = ApplyOptions(
    keep="verified", compile=False, min_share=0.0, bandwidth=BANDWIDTH, warmup=1, runs=3, steps=1, budgets=Budgets(wall_s=0.05)
)


@pytest.fixture
def loaded():
    torch.manual_seed(0)
    yield describe_live(Block().train(), (torch.randn(8, 5, WIDTH),), phase="train")
    torch.compiler.reset()


def test_the_report_of_a_step_holds_both_passes_and_is_shown_by_every_view(loaded, tmp_path):
    reports = []
    run = apply_training(loaded, replace(OPTIONS, run_dir=tmp_path), on_report=reports.append)
    report = run.report
    assert (report.status, report.workload.phase, report.after.label, report.captured.label) == (
        "applied", "train", "fused", "captured",
    )  # fmt: skip
    assert [one.status for one in reports] == ["interrupted"] * len(reports) and len(reports) >= 2
    assert {chain.training_pass for chain in report.chains} == {"forward", "backward"}
    assert [chain.id for chain in report.chains] == [f"C{number + 1}" for number in range(len(report.chains))]
    assert [chain.device_ns for chain in report.chains] == sorted((one.device_ns for one in report.chains), reverse=True)
    assert sum(chain.share for chain in report.chains) <= 1 and len(report.answers) == len(report.chains)
    passes = {chain.id: chain.training_pass for chain in report.chains}
    assert all(fusion.training_pass == passes[fusion.chain_id] for fusion in report.fusions)
    assert len({fusion.id for fusion in report.fusions}) == len(report.fusions)
    kept = [fusion for fusion in report.fusions if fusion.status is Status.KEPT]
    assert {fusion.training_pass for fusion in kept} == {"forward", "backward"}
    assert all(fusion.receipt.launches_after == fusion.receipt.sites_replaced > 0 for fusion in kept)
    assert all((tmp_path / kernel.path).is_file() for fusion in kept for kernel in fusion.rendered)
    check = report.model_check
    assert check.is_passed and check.oracle == "float64"
    wanted = {f"{GRADIENT}{name}" for name, _ in loaded.model.named_parameters()}
    assert {name for name in check.outputs if name.startswith(GRADIENT)} == wanted and check.worst in check.outputs
    assert report.before.wall.times_ns and len(report.before.wall.times_ns) == len(report.after.wall.times_ns)
    assert report.training.backward_ns > 0 and report.quality.captured_device_ns == report.captured.device_ns
    assert "forward" in report.quality.reconciliation and "backward" in report.quality.reconciliation
    assert load_report(dump_report(report)) == report
    page, text = render_html(report), render_markdown(report)
    assert page.count('<th scope="col">Pass</th>') == 2 and "| Fusion | Pass |" in text
    for shown in (page, text):
        assert "training step (forward, loss, backward)" in shown and f"{len(wanted)} gradients compared with float64" in shown
    run.revert()


@pytest.mark.parametrize("name", ["one element is wrong", "a weight gets no gradient", "double count"])
def test_a_wrong_gradient_is_refused_with_its_reason(loaded, name):
    def planted(region, options, **more):
        call = optimise(region, options, **more)
        return PLANTS[name](region, call) if region.training_pass == "backward" else call

    with pytest.warns(UserWarning, match="fusion-advisor runs the original ops: the step's"):
        run = apply_training(loaded, OPTIONS, optimise=planted)
    report = run.report
    assert report.after.label == "unchanged" and not run.fused.is_applied
    assert report.fusions and not any(fusion.status is Status.KEPT for fusion in report.fusions)
    reasons = {fusion.reason for fusion in report.fusions if fusion.status is Status.NOT_REPLACED}
    assert len(reasons) == 1 and re.search(r"the step's (outputs and gradients are too far|gradients are others)", reasons.pop())
    assert report.model_check is None or not report.model_check.is_passed
    step(loaded.model, loaded.args[0])
    assert len(gradients(loaded.model)) == len(list(loaded.model.parameters())) and run.fused.launches == 0


def test_where_nothing_is_tried_the_model_is_as_it_was(loaded):
    run = apply_training(loaded, replace(OPTIONS, only=("no_kernel", "no-rewrite")))
    assert run.report.after.label == "unchanged" and not run.report.fusions and run.report.model_check is None
    assert all(answer.code == "FA607" for answer in run.report.answers if answer.code not in ("FA601", "FA604"))
    assert "_compiled_call_impl" not in loaded.model.__dict__


def test_a_dry_run_builds_kernels_of_both_passes_and_times_no_step(loaded):
    run = apply_training(loaded, replace(OPTIONS, dry_run=True))
    report = run.report
    assert (report.status, report.after, report.model_check, run.fused.is_applied) == ("dry run", None, None, False)
    planned = [fusion for fusion in report.fusions if fusion.status is Status.PLANNED]
    assert {fusion.training_pass for fusion in planned} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("refusal", "status"), [("", Status.KEPT), (NOT_FASTER, Status.WITHIN_NOISE), ("too far", Status.NOT_REPLACED)]
)
def test_rows_of_a_graph_that_runs_its_own_ops_are_not_kept(refusal, status):
    journal, base = Journal(), applied()
    plan = Plan(chains=base.chains, answers=base.answers, fusions=())
    capture = SimpleNamespace(launches=())
    for training_pass in ("forward", "backward"):
        entry = journal.begin(nn.Identity(), training_pass, capture, plan)
        entry.fusions, entry.rewrites = base.fusions, base.rewrites
    found = merged(journal.entries, lambda entry: refusal if entry.training_pass == "backward" else "")
    for rows in (found.fusions, found.rewrites):
        was_kept = [row for row in rows if row.training_pass == "forward" and row.status is Status.KEPT]
        ours = [row for row in rows if row.training_pass == "backward" and row.status is status and row.reason]
        assert was_kept and len(ours) >= len(was_kept)
        if refusal:
            assert {row.reason for row in ours if row.status is status} >= {refusal}
            assert not any(row.status is Status.KEPT for row in rows if row.training_pass == "backward")
    assert {row.id for row in found.rewrites} == {f"{row.id}-{name}" for row in base.rewrites for name in ("forward", "backward")}
    assert [chain.id for chain in found.chains] == [f"C{n + 1}" for n in range(2 * len(base.chains))]
    by_id = {chain.id: chain for chain in found.chains}
    assert all(by_id[answer.chain_id] is chain for answer, chain in zip(found.answers, found.chains, strict=True))
    kernels = {(one.id, fusion.kernel) for one in base.chains for fusion in base.fusions if fusion.chain_id == one.id}
    ops = {one.id: one.ops for one in base.chains}
    assert {(by_id[row.chain_id].ops, row.kernel) for row in found.fusions} == {(ops[at], kernel) for at, kernel in kernels}


class Split(nn.Module):
    """Two blocks with a graph break between them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.two(x)


def test_a_graph_break_makes_two_graphs_of_each_pass():
    torch.manual_seed(0)
    model = Split().train()
    run = apply_training(describe_live(model, (torch.randn(8, 5, WIDTH),), phase="train"), OPTIONS)
    report = run.report
    assert len(report.quality.graph_breaks) == 1 and len(run.fused.graphs_of_step) == 2
    assert report.model_check.gradients >= len(list(model.parameters()))
    step(model, torch.randn(8, 5, WIDTH))
    kept = [fusion for fusion in report.fusions if fusion.status is Status.KEPT]
    assert run.fused.launches == sum(fusion.receipt.launches_after for fusion in kept) and not run.fused.fallbacks
    run.revert()
    torch.compiler.reset()


def test_what_cannot_be_trained_is_refused_with_a_hint(loaded, tmp_path):
    x = loaded.args[0]
    with pytest.raises(NotTrainable, match="all of its parameters are frozen") as caught:
        fa.apply(Block().requires_grad_(False), (x,), phase="train", bandwidth=BANDWIDTH)
    assert "--phase forward" in caught.value.hint_text
    for options, name in (({"freeze": True}, "--freeze"), ({"rtol": 1e-3}, "--rtol"), ({"dynamic": "on_first_use"}, "--dynamic"),
                          ({"shapes": "batch=1..4"}, "--shapes")):  # fmt: skip
        with pytest.raises(UsageError, match=f"{name} .*cannot be used with --phase train") as refused:
            fa.apply(Block(), (x,), phase="train", **options)
        assert "leave" in refused.value.hint_text
    with pytest.raises(TypeError, match="phase is 'forward' or 'train'"):
        fa.apply(Block(), (x,), phase="decode")
    run = apply_training(loaded, replace(OPTIONS, only=("no_kernel", "no-rewrite"), run_dir=tmp_path))
    path = tmp_path / "report.json"
    path.write_text(dump_report(run.report))

    write_capture(run.capture, tmp_path / "capture.json.gz")
    assert read_report(path).training is not None
    with pytest.raises(UnreadableReport, match="it is of a training step"):
        fa.load_plan(tmp_path)


class Penalised(Block):
    """Its loss holds the norm of a gradient."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        rows = super().forward(x)
        (gradient,) = torch.autograd.grad(rows.sum(), x, create_graph=True)
        return rows.mean() + (gradient.norm(dim=-1) - 1).square().mean()


class Follows(Block):
    """Its encoder of keys is given other memory at each step."""

    def __init__(self):
        super().__init__()
        self.key = Block().requires_grad_(requires_grad=False)

    def forward(self, x):
        for own, key in zip(super().parameters(), self.key.parameters(), strict=False):
            key.data = key.data * 0.9 + own.data * 0.1
        return super().forward(x) + self.key(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Follows, "gives a parameter other memory (`p.data = …`): write the numbers in place (`p.data.copy_(…)`)"),
        (Penalised, "its step differentiates a gradient (create_graph=True)"),
        (lambda: nn.LSTM(WIDTH, WIDTH), "`LSTM` is a recurrent layer"),
    ],
    ids=["other memory", "double backward", "recurrent"],
)
def test_what_no_compiled_backward_pass_can_hold_is_refused_with_its_reason(make, said):
    torch.manual_seed(0)  # with other weights the graph's own check may refuse it first: then nothing is compiled
    model, x = make().train(), torch.randn(8, 5, WIDTH)
    with pytest.raises(CannotCapture, match=re.escape(said)):
        apply_training(describe_live(model, (x,), phase="train"), OPTIONS)
    torch.compiler.reset()


def test_parts_that_are_frozen_in_eval_mode_stay_so(loaded):
    model = nn.Sequential(nn.BatchNorm1d(5), Block()).train()
    model[0].eval()
    before = model[0].running_mean.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = apply_training(describe_live(model, (loaded.args[0],), phase="train"), OPTIONS)
        step(model, loaded.args[0])
    assert run.fused.launches > 0 and not run.fused.fallbacks
    assert torch.equal(model[0].running_mean, before) and model[0].num_batches_tracked == 0
    assert not notes_on_norms(run.report)
    run.revert()


class Pictures(nn.Module):
    """A convolution, batch norm and ReLU, twice, with a residual sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms, self.head = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)]), nn.Linear(8, 10)

    def forward(self, x):
        y = torch.relu(self.norms[0](self.first(x)))
        return self.head(torch.relu(y + self.norms[1](self.second(y))).mean((2, 3)))


def notes_on_norms(report):
    return [note for note in report.notes if note.startswith("Batch norm in training stays torch's own op")]


def test_batch_norm_stays_torchs_own_with_its_reason_and_chains_around_it_are_fused():
    torch.manual_seed(0)
    model, x = Pictures().train(), torch.randn(4, 3, 12, 12)
    plain = copy.deepcopy(model)
    run = apply_training(describe_live(model, (x,), phase="train"), OPTIONS)
    (note,) = notes_on_norms(run.report)
    share = float(
        re.search(r"\((.*)% of kernel time: _native_batch_norm_legit_functional, native_batch_norm_backward\)", note)[1]
    )
    assert 0 < share < 100
    kept = {fusion.chain_id for fusion in run.report.fusions if fusion.status is Status.KEPT}
    assert {chain.training_pass for chain in run.report.chains if chain.id in kept} == {"forward", "backward"}
    for one in (model, plain):
        step(one, x)
    compare(gradients(model), gradients(plain))
    assert run.fused.launches > 0 and not run.fused.fallbacks
    for mine, own in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, own)
    run.revert()
    torch.compiler.reset()


@pytest.fixture
def speaker():
    torch.manual_seed(0)
    yield lambda **kind: describe_live(Speaker(**kind).train(), batch(), phase="train")
    torch.compiler.reset()


def row_of_loss(report):
    return next(row for row in report.rewrites if row.id == "linear-cross-entropy")


def test_a_loss_in_chunks_is_a_row_with_what_it_spares(speaker):
    run = apply_training(speaker(), replace(OPTIONS, only=("no_kernel", "linear-cross-entropy")))
    report, row = run.report, row_of_loss(run.report)
    assert (report.status, report.after.label, row.status) == ("applied", "fused", Status.KEPT)
    assert row.saved_bytes > 0 and "of memory" in render_markdown(report)
    assert load_report(dump_report(report)) == report and not any(one.spared_bytes for one in report.findings)
    assert "less at its peak" in render_html(report)
    loss = run.fused.model(*batch())
    loss.backward()
    assert not run.fused.fallbacks
    run.revert()
    torch.testing.assert_close(loss, run.fused.model(*batch()), rtol=2e-5, atol=2e-6)


def test_returned_logits_are_a_finding_and_dropped_where_the_user_says_so(speaker):
    options = replace(OPTIONS, only=("no_kernel", "linear-cross-entropy"))
    report = apply_training(speaker(returns_logits=True), options).report
    (finding,) = (one for one in report.findings if one.spared_bytes)
    row = row_of_loss(report)
    assert row.status is Status.NOT_REPLACED and finding.spared_bytes == row.saved_bytes > 0
    for shown in (render_html(report), render_markdown(report)):
        assert "The step returns its logits: at least" in shown and "--drop-logits" in shown
    torch.compiler.reset()
    run = apply_training(speaker(returns_logits=True), replace(options, drop_logits=True))
    assert row_of_loss(run.report).status is Status.KEPT and not any(one.spared_bytes for one in run.report.findings)
    loss, logits = run.fused.model(*batch())
    assert logits is None
    loss.backward()
    run.revert()
    assert run.fused.model(*batch())[1] is not None


def test_logits_are_dropped_in_training_steps_alone():
    with pytest.raises(UsageError, match="--drop-logits needs --phase train"):
        fa.apply(Block().eval(), (torch.randn(2, 5, WIDTH),), drop_logits=True)


@pytest.mark.parametrize(("reason", "status"), [(SLOWER, Status.SLOWER), ("wrong", Status.NOT_REPLACED), ("", Status.KEPT)])
def test_a_loss_in_chunks_goes_with_the_step_that_it_stands_in(reason, status):
    kept = row_of(LINEAR_CROSS_ENTROPY, status=Status.KEPT, reason="", sites=1)
    (row,) = step_rows([Outcome(reason, step_rows=(replace(kept, saved_bytes=7),))])
    assert (row.status, row.reason, row.saved_bytes) == (status, reason, 0 if reason else 7)
    assert [one.id for one in step_rows([Outcome(step_rows=(kept,))] * 2)] == ["linear-cross-entropy-1", "linear-cross-entropy-2"]


@pytest.mark.parametrize(("rewrite", "found"), [(LINEAR_CROSS_ENTROPY, 1), (GELU_CHECKPOINT, 0)], ids=["loss", "option"])
def test_only_a_loss_that_would_spare_memory_is_a_finding_about_logits(rewrite, found):
    row = replace(row_of(rewrite, status=Status.NOT_REPLACED, reason="why", sites=1), saved_bytes=7)
    assert len(logits_findings(step_rows([Outcome(step_rows=(row,))] * 2), "m")) == 2 * found


def test_a_step_in_which_no_chain_was_looked_for_says_why():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.block = nn.Embedding(20, WIDTH, sparse=True), Block()

        def forward(self, ids):
            return self.block(self.words(ids))

    torch.manual_seed(0)
    loaded = describe_live(Sparse().train(), (torch.randint(0, 20, (4, 6)),), phase="train")
    with pytest.warns(UserWarning, match=SPARSE):
        report = apply_training(loaded, OPTIONS).report
    assert report.warnings == (f"the original ops run, and no chain was ranked: {SPARSE}",) and not report.chains
    lines = Console(width=120, record=True, file=io.StringIO())
    lines.print(apply_table(report, lines))
    shown = lines.export_text()
    assert "No rewrite was tried: no chain was ranked." in shown and "joined to an op" not in shown
    torch.compiler.reset()
