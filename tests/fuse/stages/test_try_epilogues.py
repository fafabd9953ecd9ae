"""The stage that lets GEMMs compute the activations behind them, in the whole loop on a CPU: its row, its numbers, its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.errors import CannotCapture, CannotSpecialize, PlanMismatch
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.rebind import Kept
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.restore_kernels import build_epilogues
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE, EpilogueSite
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.stages.epilogue_sites import find_places
from fusion_advisor.fuse.stages.gemm_sites import observe
from fusion_advisor.fuse.stages.try_epilogues import compute_in_epilogues
from fusion_advisor.records import Status, Tolerance
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.live.test_saved_plan import saved_run
from tests.fuse.stages.test_try_linear_kernels import Unobservable, raising
from tests.fuse.test_pipeline import TIMING, keep_all, verdicts

quick = test_pipeline.quick
pytestmark = [test_pipeline.pytestmark, pytest.mark.usefixtures("cpu_epilogue")]
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


def planted(status=Status.KEPT, **more):
    """Every rewrite is kept, this one as asked."""

    def verdict(_runner, before, after, *, name, **_):
        before(), after()
        return Verdict(id=name, status=status, reason="planted", delta_ns=-5, interval_ns=(-6, -4))

    return verdicts(keep_all, on_top=verdict, saving_alone_ns=lambda *_: 150, **more)


class Plain(torch.nn.Module):
    """A ReLU and a GELU after linears; no kernel computes them."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.out(functional.gelu(self.two(functional.relu(self.one(x)))))


def plain_bench(of=Bench, **more):
    torch.manual_seed(0)
    with torch.no_grad():
        live = capture_regions(Plain().eval(), (torch.randn(96, WIDTH),), {})
    return of(live, on_cuda=False, **more)


def place(rewrite=GEMM_EPILOGUE, bench=None, **planted_more):
    """Try the rewrite in a step without kernels; returns what stays, and its row."""
    bench = bench or plain_bench()
    decision = Decision(verdicts={}, noise_share=0.01, before=TIMING, after=TIMING, method="wall")
    before = Kept(bench=bench, captured=bench, decision=decision, rewrites=(), fusions=[], built=[])
    instruments = planted(**planted_more)
    kept = compute_in_epilogues(before, rewrite, ApplyOptions(), Progress(), budget_s=0.01, instruments=instruments)
    (row,) = kept.rewrites
    assert bool(kept.linears) == (row.status is Status.KEPT) and kept.decision is decision
    return kept, row


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(EpilogueSite):
    """A site whose call is another one."""

    other: Callable[..., torch.Tensor]

    def call(self):
        return self.other


def finding(call_of):
    """The rewrite with ``call_of(site)`` for each site's call."""

    def find(*args, **options):
        sites, refusals = GEMM_EPILOGUE.find(*args, **options)
        found = [
            Changed(product=site.product, activation=site.activation, members=site.members, other=call_of(site)) for site in sites
        ]
        return found, refusals

    return replace(GEMM_EPILOGUE, find=find)


def a_thousandth_more(call):
    """Return a call whose results are off by a thousandth."""

    def wrong(*tensors):
        return call(*tensors) * 1.001

    return wrong


def row_of(run):
    return next(row for row in run.report.rewrites if row.id == GEMM_EPILOGUE.id)


def calls_of(fused):
    """Names of what its graphs call."""
    return [node.name for module in fused._rewritten.modules for node in module.graph.nodes]


def kernel_of(run, name="gelu_erf"):
    return [fusion for fusion in run.report.fusions if fusion.kernel == name]


def test_activations_go_into_their_gemms_and_take_kernels_sites(quick):
    loaded = mlp()
    expected = loaded.model(*loaded.args)
    run = apply_workload(loaded, quick, instruments=planted())
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


@pytest.mark.slow
@pytest.mark.parametrize("status", [Status.WITHIN_NOISE, Status.SLOWER])
def test_activations_whose_move_does_not_pay_stay(quick, status):
    run = apply_workload(mlp(), quick, instruments=planted(status))
    assert row_of(run).status is status, row_of(run).reason
    assert all(one.status is Status.KEPT and one.receipt.sites_replaced for one in kernel_of(run))


def test_wrong_numbers_are_found_before_anything_is_timed(quick, cpu_epilogue):
    cpu_epilogue("gelu_tanh")  # it computes the GELU with erf all the same
    run = apply_workload(mlp(by_tanh), quick, instruments=planted())
    row = row_of(run)
    assert (row.status, row.step_delta_ns, row.predicted_saving_ns) == (Status.WRONG_NUMBERS, None, None)
    assert "relative error" in row.reason
    kernels = kernel_of(run, "gelu_tanh")
    assert kernels and all(one.status is Status.KEPT for one in kernels) and run.report.model_check.is_passed


def test_one_wrong_place_among_right_ones_is_found():
    def last_wrong(site):
        return a_thousandth_more(site.call()) if site.activation == "gelu_erf" else site.call()

    kept, row = place()
    assert (row.status, row.sites, [len(one.sites) for one in kept.linears]) == (Status.KEPT, 2, [2])
    assert place(finding(last_wrong))[1].status is Status.WRONG_NUMBERS


def test_a_model_whose_gelu_is_another_one_is_told(quick):
    run = apply_workload(mlp(by_tanh), quick, instruments=planted())
    row = row_of(run)
    assert (row.status, row.sites) == (Status.KEPT, 1) and "2 were left alone: the model goes through gelu_tanh" in row.reason
    assert all(one.status is Status.KEPT for one in kernel_of(run, "gelu_tanh"))


def test_without_any_place_the_row_says_why_or_is_not_there(quick):
    class Two(torch.nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.one, self.two, self.activation = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH), activation
            self.norm = torch.nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(self.two(self.activation(self.one(x))) + x)

    x = (torch.randn(96, WIDTH),)
    row = row_of(apply_workload(describe_live(Two(torch.nn.GELU("tanh")).eval(), x), quick, instruments=planted()))
    assert (row.status, row.sites) == (Status.NOT_REPLACED, 1) and row.reason.startswith("1 activations follow a GEMM")
    report = apply_workload(describe_live(Two(torch.nn.SiLU()).eval(), x), quick, instruments=planted()).report
    assert not any(row.id == GEMM_EPILOGUE.id for row in report.rewrites)


def test_places_that_do_not_fit_beside_their_oracle_are_left_alone(quick):
    row = row_of(apply_workload(mlp(), quick, instruments=planted(memory_bytes=lambda _: (1000, 2000))))
    assert row.status is Status.NOT_REPLACED and "bytes; 1,000 are free" in row.reason


@pytest.mark.parametrize("where", ["observe", "check"])
def test_memory_that_runs_out_while_they_are_checked_ends_the_rewrite_and_not_the_run(where):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore of it")
    if where == "observe":
        _, row = place(bench=plain_bench(Unobservable, error=error))
    else:
        _, row = place(finding(lambda _: raising(error)))
    assert row.status is Status.NOT_REPLACED
    assert "memory ran out while it was checked: CUDA out of memory" in row.reason and "More" not in row.reason


def test_other_failures_of_the_check_are_not_swallowed():
    error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        place(finding(lambda _: raising(error)))


class Packed(torch.Tensor):
    """A class of its own, as quantised weights have."""


def test_a_model_with_tensors_of_a_class_of_their_own_keeps_its_ops(quick):
    loaded = mlp()
    loaded.model.up.weight = torch.nn.Parameter(loaded.model.up.weight.detach().as_subclass(Packed))
    with pytest.raises(CannotCapture, match=r"up\.weight` is a Packed"):
        apply_workload(loaded, quick, instruments=planted())


def test_a_saved_plan_leaves_them_alone_too(quick):
    saved_run(mlp(), quick, planted())
    other = mlp()
    other.model.up.weight = torch.nn.Parameter(other.model.up.weight.detach().as_subclass(Packed))
    with pytest.raises(CannotCapture, match="Packed"):
        apply_plan(other, load_plan(quick.run_dir))


def test_a_saved_plan_moves_the_same_activations(quick, cpu_epilogue):
    saved_run(mlp(), quick, planted())
    plan = load_plan(quick.run_dir)
    assert GEMM_EPILOGUE.id in plan.rewrites and {one.match.kernel for one in plan.fusions} >= {"gelu_erf"}
    other = mlp(seed=1)
    expected = other.model(*other.args)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}
        assert sum("linear_gelu_erf" in call for call in calls_of(fused)) == 2
        assert not any("fa_gelu" in call for call in calls_of(fused))
    cpu_epilogue("gelu_tanh")
    with pytest.raises(PlanMismatch, match="cannot be moved here: the model goes through gelu_erf"):
        apply_plan(mlp(), plan)


def test_a_saved_plan_whose_numbers_no_longer_pass_is_refused(tmp_path):
    bench, plan = plain_bench(), SimpleNamespace(run_dir=tmp_path, report=SimpleNamespace(tolerance=None))
    found, _ = find_places(bench, ())
    observe(bench, [one.place for one in found])
    (built,) = build_epilogues(bench, found, plan, fast_math=False)
    assert len(built.sites) == len(found) == 2
    wrong = a_thousandth_more(found[0].call)
    with pytest.raises(PlanMismatch, match="wrong: its numbers no longer pass"):
        build_epilogues(bench, [replace(found[0], call=wrong), *found[1:]], plan, fast_math=False)


def test_another_length_has_its_activations_in_its_gemms_too(quick):
    loaded = mlp()
    run = apply_workload(loaded, quick, instruments=planted())
    x, y = torch.randn(3, 30, WIDTH), torch.randn(1, 100, WIDTH)
    with torch.no_grad():
        made = run.fused.specialize(x)
        assert made.sites["linear_gelu_erf"] == 2 and made.sites["linear_relu"] == 1
        torch.testing.assert_close(run.fused(x), run.fused._original(x), rtol=1e-5, atol=1e-5)
        # No kernel but the epilogue of the ReLU is left, and its rounding is an error.
        run.fused._plan = replace(run.fused._plan, fusions=(), tolerance=Tolerance(rtol=0.0, atol=0.0))
        with pytest.raises(CannotSpecialize, match="linear_relu there"):
            run.fused.specialize(y)
    run.revert()


def test_a_plan_of_epilogues_alone_needs_a_place_for_one(quick):
    class Either(torch.nn.Module):
        """Another activation for odd lengths."""

        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.one(x)
            return self.two(functional.relu(y) if x.shape[0] % 2 == 0 else functional.hardtanh(y))

    run = apply_workload(describe_live(Either().eval(), (torch.randn(96, WIDTH),)), quick, instruments=planted())
    run.fused._plan = replace(run.fused._plan, fusions=())
    with torch.no_grad():
        assert run.fused.specialize(torch.randn(98, WIDTH)).sites["linear_relu"] == 1
        with pytest.raises(CannotSpecialize, match="none of the kept kernels has a place"):
            run.fused.specialize(torch.randn(99, WIDTH))


def test_with_fast_math_one_gelu_stands_for_the_other_in_the_plan_too(quick):
    loaded = mlp(by_tanh, dtype=torch.bfloat16)
    expected = loaded.model(*loaded.args)
    run = saved_run(loaded, replace(quick, fast_math=True), planted())
    row = row_of(run)
    assert (row.status, row.sites) == (Status.KEPT, 3)
    other, plan = mlp(by_tanh, dtype=torch.bfloat16), load_plan(quick.run_dir)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=2e-2, atol=2e-2)
        assert sum("linear_gelu_tanh" in call for call in calls_of(fused)) == 2
        made = fused.specialize(torch.randn(3, 30, WIDTH, dtype=torch.bfloat16))
        assert made.sites["linear_gelu_tanh"] == 2


def test_a_saved_plan_holds_the_kernels_that_gemms_took_in(quick):
    """Of GELUs and of ReLUs: another length may need either."""
    saved_run(mlp(), quick, planted())
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
