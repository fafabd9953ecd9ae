"""The stage that lets GEMMs compute the activations behind them, in the whole loop on a CPU: its row, its numbers, its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import fusion_advisor.fuse.stages.try_epilogues as stage
from fusion_advisor.errors import CannotCapture, CannotSpecialize, PlanMismatch
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.passes import gemm_epilogue
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.stages import gemm_sites
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.live.test_saved_plan import saved_run
from tests.fuse.test_pipeline import keep_all, verdicts

quick, pytestmark = test_pipeline.quick, test_pipeline.pytestmark
WIDTH = 32


class Mlp(torch.nn.Module):
    """A GELU that is written out, as in GPT-2, twice; then a ReLU."""

    def __init__(self, gelu):
        super().__init__()
        self.up, self.again, self.last = (torch.nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.down, self.back, self.out = (torch.nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.norm, self.gelu = torch.nn.LayerNorm(WIDTH), gelu

    def forward(self, x):
        x = x + self.down(self.gelu(self.up(x)))
        x = x + self.back(self.gelu(self.again(x)))
        return self.norm(self.out(functional.relu(self.last(x))) + x)


def by_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


def by_tanh(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def mlp(gelu=by_erf, *, seed=0, rows=48, device="cpu", dtype=torch.float32):
    torch.manual_seed(seed)
    model = Mlp(gelu).eval().to(device, dtype)
    return describe_live(model, (torch.randn(2, rows, WIDTH, device=device, dtype=dtype),))


@pytest.fixture
def planted(monkeypatch):
    """Every rewrite is kept, this one as asked; a CPU's epilogue has the GELU with erf."""
    verdicts(monkeypatch, keep_all)
    monkeypatch.setattr(gemm_epilogue, "GELU_OF", {"cpu": "gelu_erf"})
    monkeypatch.setattr(stage, "saving_alone_ns", lambda *_: 150)

    def plant(status=Status.KEPT):
        def verdict(_runner, before, after, *, name, **_):
            before(), after()
            return Verdict(id=name, status=status, reason="planted", delta_ns=-5, interval_ns=(-6, -4))

        monkeypatch.setattr(stage, "on_top", verdict)

    plant()
    return plant


def row_of(run):
    return next(row for row in run.report.rewrites if row.id == GEMM_EPILOGUE.id)


def calls_of(fused):
    """Names of what its graphs call."""
    return [node.name for module in fused._rewritten.modules for node in module.graph.nodes]


def kernel_of(run, name="gelu_erf"):
    return [fusion for fusion in run.report.fusions if fusion.kernel == name]


def test_activations_go_into_their_gemms_and_take_kernels_sites(quick, planted):
    loaded = mlp()
    expected = loaded.model(*loaded.args)
    run = apply_workload(loaded, quick)
    row = row_of(run)
    assert (row.id, row.status, row.sites) == (GEMM_EPILOGUE.id, Status.KEPT, 3)
    assert row.predicted_saving_ns == 150
    assert "relative error" in row.reason and "against float64" in row.reason
    assert kernel_of(run) and all(one.status is Status.ABSORBED for one in kernel_of(run))
    assert all("then gemm-epilogue (GEMM epilogues) took in" in one.reason for one in kernel_of(run))
    assert run.report.model_check.is_passed
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(*loaded.args), expected, rtol=1e-5, atol=1e-5)
    assert sum("linear_gelu_erf" in call for call in calls_of(run.fused)) == 2
    assert sum("linear_relu" in call for call in calls_of(run.fused)) == 1
    run.revert()
    assert torch.equal(loaded.model(*loaded.args), expected)
    assert load_report(dump_report(run.report)) == run.report


@pytest.mark.parametrize("status", [Status.WITHIN_NOISE, Status.SLOWER])
def test_activations_whose_move_does_not_pay_stay(quick, planted, status):
    planted(status)
    run = apply_workload(mlp(), quick)
    assert row_of(run).status is status
    assert all(one.status is Status.KEPT and one.receipt.sites_replaced for one in kernel_of(run))


def test_wrong_numbers_are_found_before_anything_is_timed(quick, planted, monkeypatch):
    def spoilt(site):
        call = right(site)

        def wrong(*tensors):
            return call(*tensors) * 1.001

        return wrong

    right = gemm_epilogue.EpilogueSite.call
    monkeypatch.setattr(gemm_epilogue.EpilogueSite, "call", spoilt)
    run = apply_workload(mlp(), quick)
    row = row_of(run)
    assert (row.status, row.step_delta_ns, row.predicted_saving_ns) == (Status.WRONG_NUMBERS, None, None)
    assert "relative error" in row.reason
    assert all(one.status is Status.KEPT for one in kernel_of(run)) and run.report.model_check.is_passed


def test_one_wrong_place_among_right_ones_is_found(quick, planted, monkeypatch):
    def spoilt(site):
        call = right(site)
        return (lambda *tensors: call(*tensors) * 1.001) if site.activation == "relu" else call

    right = gemm_epilogue.EpilogueSite.call
    monkeypatch.setattr(gemm_epilogue.EpilogueSite, "call", spoilt)
    assert row_of(apply_workload(mlp(), quick)).status is Status.WRONG_NUMBERS


def test_a_model_whose_gelu_is_another_one_is_told(quick, planted):
    run = apply_workload(mlp(by_tanh), quick)
    row = row_of(run)
    assert (row.status, row.sites) == (Status.KEPT, 1) and "2 were left alone: the model goes through gelu_tanh" in row.reason
    assert all(one.status is Status.KEPT for one in kernel_of(run, "gelu_tanh"))


def test_without_any_place_the_row_says_why_or_is_not_there(quick, planted):
    class Two(torch.nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.one, self.two, self.activation = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH), activation
            self.norm = torch.nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(self.two(self.activation(self.one(x))) + x)

    x = (torch.randn(96, WIDTH),)
    row = row_of(apply_workload(describe_live(Two(torch.nn.GELU("tanh")).eval(), x), quick))
    assert (row.status, row.sites) == (Status.NOT_REPLACED, 1) and row.reason.startswith("1 activations follow a GEMM")
    report = apply_workload(describe_live(Two(torch.nn.SiLU()).eval(), x), quick).report
    assert not any(row.id == GEMM_EPILOGUE.id for row in report.rewrites)


def test_places_that_do_not_fit_beside_their_oracle_are_left_alone(quick, planted, monkeypatch):
    monkeypatch.setattr(gemm_sites, "memory_bytes", lambda _: (1000, 2000))
    row = row_of(apply_workload(mlp(), quick))
    assert row.status is Status.NOT_REPLACED and "bytes; 1,000 are free" in row.reason


@pytest.mark.parametrize("where", ["observe", "check"])
def test_memory_that_runs_out_while_they_are_checked_ends_the_rewrite_and_not_the_run(quick, planted, monkeypatch, where):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore of it")

    monkeypatch.setattr(stage, where, run_out)
    run = apply_workload(mlp(), quick)
    row = row_of(run)
    assert row.status is Status.NOT_REPLACED
    assert "memory ran out while it was checked: CUDA out of memory" in row.reason and "More" not in row.reason
    assert all(one.status is Status.KEPT for one in kernel_of(run)) and run.report.model_check.is_passed


def test_other_failures_of_the_check_are_not_swallowed(quick, planted, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(stage, "check", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        apply_workload(mlp(), quick)


class Packed(torch.Tensor):
    """A class of its own, as quantised weights have."""


def test_a_model_with_tensors_of_a_class_of_their_own_keeps_its_ops(quick, planted):
    loaded = mlp()
    loaded.model.up.weight = torch.nn.Parameter(loaded.model.up.weight.detach().as_subclass(Packed))
    with pytest.raises(CannotCapture, match=r"up\.weight` is a Packed"):
        apply_workload(loaded, quick)


def test_a_saved_plan_leaves_them_alone_too(quick, planted):
    saved_run(mlp(), quick)
    other = mlp()
    other.model.up.weight = torch.nn.Parameter(other.model.up.weight.detach().as_subclass(Packed))
    with pytest.raises(CannotCapture, match="Packed"):
        apply_plan(other, load_plan(quick.run_dir))


def test_a_saved_plan_moves_the_same_activations(quick, planted, monkeypatch):
    saved_run(mlp(), quick)
    plan = load_plan(quick.run_dir)
    assert GEMM_EPILOGUE.id in plan.rewrites and {one.match.kernel for one in plan.fusions} >= {"gelu_erf"}
    other = mlp(seed=1)
    expected = other.model(*other.args)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}
        assert sum("linear_gelu_erf" in call for call in calls_of(fused)) == 2
        assert not any("fa_gelu" in call for call in calls_of(fused))
    monkeypatch.setattr(gemm_epilogue, "GELU_OF", {"cpu": "gelu_tanh"})
    with pytest.raises(PlanMismatch, match="cannot be moved here: the model goes through gelu_erf"):
        apply_plan(mlp(), plan)


def test_a_saved_plan_whose_numbers_no_longer_pass_is_refused(quick, planted, monkeypatch):
    saved_run(mlp(), quick)
    right = gemm_epilogue.EpilogueSite.call

    def spoilt(site):
        call = right(site)

        def wrong(*tensors):
            return call(*tensors) * 1.001

        return wrong

    monkeypatch.setattr(gemm_epilogue.EpilogueSite, "call", spoilt)
    with pytest.raises(PlanMismatch, match="its numbers no longer pass"):
        apply_plan(mlp(), load_plan(quick.run_dir))


def test_another_length_has_its_activations_in_its_gemms_too(quick, planted, monkeypatch):
    loaded = mlp()
    run = apply_workload(loaded, quick)
    x, y = torch.randn(3, 30, WIDTH), torch.randn(1, 100, WIDTH)
    with torch.no_grad():
        made = run.fused.specialize(x)
        assert made.sites["linear_gelu_erf"] == 2 and made.sites["linear_relu"] == 1
        torch.testing.assert_close(run.fused(x), run.fused._original(x), rtol=1e-5, atol=1e-5)
        right = stage.check_calls
        monkeypatch.setattr(stage, "check_calls", lambda *all, **how: replace(right(*all, **how), is_passed=False))
        with pytest.raises(CannotSpecialize, match="linear_gelu_erf there"):
            run.fused.specialize(y)
    run.revert()


def test_a_plan_of_epilogues_alone_needs_a_place_for_one(quick, planted):
    class Either(torch.nn.Module):
        """Another activation for odd lengths."""

        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.one(x)
            return self.two(functional.relu(y) if x.shape[0] % 2 == 0 else functional.hardtanh(y))

    run = apply_workload(describe_live(Either().eval(), (torch.randn(96, WIDTH),)), quick)
    run.fused._plan = replace(run.fused._plan, fusions=())
    with torch.no_grad():
        assert run.fused.specialize(torch.randn(98, WIDTH)).sites["linear_relu"] == 1
        with pytest.raises(CannotSpecialize, match="none of the kept kernels has a place"):
            run.fused.specialize(torch.randn(99, WIDTH))


def test_with_fast_math_one_gelu_stands_for_the_other_in_the_plan_too(quick, planted):
    loaded = mlp(by_tanh, dtype=torch.bfloat16)
    expected = loaded.model(*loaded.args)
    run = saved_run(loaded, replace(quick, fast_math=True))
    row = row_of(run)
    assert (row.status, row.sites) == (Status.KEPT, 3)
    other, plan = mlp(by_tanh, dtype=torch.bfloat16), load_plan(quick.run_dir)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=2e-2, atol=2e-2)
        assert sum("linear_gelu_tanh" in call for call in calls_of(fused)) == 2
        made = fused.specialize(torch.randn(3, 30, WIDTH, dtype=torch.bfloat16))
        assert made.sites["linear_gelu_tanh"] == 2


def test_a_saved_plan_holds_the_kernels_that_gemms_took_in(quick, planted):
    """Of GELUs and of ReLUs: another length may need either."""
    saved_run(mlp(), quick)
    plan = load_plan(quick.run_dir)
    report = load_report((quick.run_dir / "report.json").read_text())
    absorbed = {row.chain_id for row in report.fusions if row.status is Status.ABSORBED}
    assert absorbed and absorbed <= {one.chain.id for one in plan.fusions}


@pytest.mark.gpu
def test_on_a_gpu_fast_math_moves_a_gelu_by_erf():
    import fusion_advisor as fa

    loaded = mlp(torch.nn.functional.gelu, rows=2048, device="cuda", dtype=torch.bfloat16)
    row = next(row for row in fa.apply(loaded.model, loaded.args, compile=False).report.rewrites if row.id == GEMM_EPILOGUE.id)
    assert (row.sites, "2 were left alone" in row.reason) == (1, True)
    loaded = mlp(torch.nn.functional.gelu, rows=2048, device="cuda", dtype=torch.bfloat16)
    report = fa.apply(loaded.model, loaded.args, compile=False, fast_math=True).report
    row = next(row for row in report.rewrites if row.id == GEMM_EPILOGUE.id)
    assert (row.sites, row.status is Status.WRONG_NUMBERS, report.model_check.is_passed) == (3, False, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_a_gelu_by_tanh_goes_into_its_gemm(dtype):
    import fusion_advisor as fa

    loaded = mlp(by_tanh, rows=2048, device="cuda", dtype=dtype)
    report = fa.apply(loaded.model, loaded.args, compile=False).report
    row = next(row for row in report.rewrites if row.id == GEMM_EPILOGUE.id)
    assert row.status is not Status.WRONG_NUMBERS and row.sites == 3
    assert report.model_check.is_passed


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(65, 24), (197, 768), (128, 3072), (1, 768), (4096, 13)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_the_epilogue_is_as_near_to_the_truth_as_the_ops(rows, width, dtype):
    """GELU by tanh in 16 bits and ReLU in any dtype, for rows and widths that no tile fits."""
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((rows, 96), (96, width)))
    bias = torch.randn(width, device="cuda", dtype=dtype)
    exact = torch.addmm(bias.double(), x.double(), weight.double())
    cases = [(False, torch.relu)]
    if dtype is not torch.float32:
        cases.append((True, lambda y: functional.gelu(y, approximate="tanh")))
    for use_gelu, apart in cases:
        ours, theirs = torch._addmm_activation(bias, x, weight, use_gelu=use_gelu), apart(torch.addmm(bias, x, weight))
        truth = apart(exact)
        error, own = ((one.double() - truth).norm() / truth.norm() for one in (ours, theirs))
        assert error <= 1.5 * own
