"""GEMV kernels in a decode step, on a CPU: torch's own ops stand in for the kernels, everything else is real."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fusion_advisor.fuse.stages.try_linear_kernels as stage
from fusion_advisor import units
from fusion_advisor.autotune.select_gemm import GemvChoice, is_served
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.problem import GemvConfig, GemvProblem, candidates, entry_of
from fusion_advisor.errors import CannotCapture, PlanMismatch
from fusion_advisor.fuse.decide.graph_diff_cost import change_alone
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.rebind import Kept, changed_bench, confirmed_once
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.restore_kernels import build_linears
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.passes.merge_gemms import merge_all
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.record import CopyRoom
from fusion_advisor.fuse.stages import gemm_sites as places
from fusion_advisor.fuse.stages.linear_kernels import LinearKernels, Made, header_of, linear_kernels
from fusion_advisor.fuse.stages.linear_kinds import find_kinds
from fusion_advisor.fuse.stages.try_linear_kernels import place_gemvs
from fusion_advisor.records import RenderedKernel, Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report import baseline_rows
from fusion_advisor.timing.interleaving import Difference, compare_alone
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.weight_packing import lay_out_siblings
from tests.fuse.live.test_saved_plan import save
from tests.fuse.test_pipeline import TIMING, faster_alone, keep_all, pytestmark, quick, verdicts  # noqa: F401
from tests.tiny import LAYERS, cache_in, decode_step, gpt2, llama, qwen2

QWEN2 = ["rmsnorm_gate_up", "rmsnorm_linear_bias", "rmsnorm_linear", "linear_residual", "linear_residual"]


def phi3():
    """Fused q/k/v and gate/up weights, read as chunks."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval(), {}


def phi():
    """LayerNorm, one for attention and MLP, biases everywhere."""
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    config = PhiConfig(
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=200,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return PhiForCausalLM(config).eval(), {}


def decoder(make=qwen2, *, dtype=torch.bfloat16, batch=1, is_laid_out=True):
    model = make()[0].to(dtype)
    if is_laid_out:
        lay_out_siblings(model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:  # weights of one would hide a norm left out
                value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(dtype) / 4)
    return describe_live(model, (), decode_step(model, batch=batch))


@functools.cache
def qwen2_bench():
    return bench_of(decoder())


def bench_of(loaded, args=()):
    bench = Bench(capture_regions(loaded.model, args, loaded.kwargs), on_cuda=False)
    return changed_bench(bench, merge_all(bench.live.regions, CopyRoom())[0])[0]


def kinds_of(loaded):
    return find_kinds(bench_of(loaded))


def torch_kernel(problem, header, config, *, spoil=0.0):
    compute = torch_launcher(problem)

    def launch(*tensors):
        compute(*tensors)
        tensors[-1].add_(spoil)

    name = entry_of(problem, header, config)
    kernel = RenderedKernel(
        name=name, backend="cuda", path=f"kernels/{name}.cu", source="// the source", origin=header.origin, tuning=config.text
    )
    return Made(kernel=kernel, launch=launch)


def on_top(status_of):
    """The keep rule's answer, planted."""

    def verdict(_runner, before, after, *, name, **_):
        before(), after()
        return Verdict(id=name, status=status_of(name), reason="planted", delta_ns=-5, interval_ns=(-6, -4))

    return verdict


def made_of_torch(problem, header, _file):
    return torch_kernel(problem, header, candidates(problem, ("cuda",))[0])


def built_of_torch(problem, header, config, _path, *, tuning):
    return torch_kernel(problem, header, config)


def of_torch(**changed):
    """Says that kernels of torch's ops are there, on whatever device."""
    return lambda *_, **__: LinearKernels(make=made_of_torch, **changed)


def place(
    status_of=lambda _: Status.KEPT, *, make=made_of_torch, bench=None, captured=None, free_bytes=(0, 0), worst=str, **options
):  # fmt: skip
    """Place kernels of torch's ops in a decode step whose other rewrites were left out."""
    instruments = Instruments(
        compare_alone=faster_alone,
        change_alone=lambda _, before, after, __: Difference(median_ns=-70, low_ns=-80, high_ns=-60),
        on_top=on_top(status_of),
        memory_bytes=lambda _: free_bytes,
        worst=worst,
    )
    decision = Decision(verdicts={}, noise_share=0.01, before=TIMING, after=TIMING, method="wall")
    bench = bench or qwen2_bench()
    kept = Kept(bench=bench, captured=captured or bench, decision=decision, rewrites=(), fusions=[], built=[])
    kernels = None if make is None else LinearKernels(make=make)
    return place_gemvs(kept, ApplyOptions(**options), Progress(), budget_s=0.01, kernels=kernels, instruments=instruments)


def test_kinds_of_a_decoder():
    kinds = find_kinds(qwen2_bench())
    assert [kind.title for kind in kinds] == QWEN2
    assert [len(kind.places) for kind in kinds] == [LAYERS, LAYERS, 1, LAYERS, LAYERS]
    gate_up, qkv, head, down, out = (kind.problem for kind in kinds)
    assert (gate_up.n, gate_up.k, gate_up.is_gated, gate_up.eps) == (128, 64, True, pytest.approx(3e-6))
    assert (qkv.n, qkv.has_bias) == (64 + 2 * 32, True)
    assert (head.n, down.k, out.k) == (200, 128, 64)
    assert all(kind.problem.m == 1 for kind in kinds)


def test_a_linear_is_found_without_the_norm_that_another_call_keeps():
    bench = qwen2_bench()
    rsqrts = [index for index, op in enumerate(bench.ops) if op.target == "aten.rsqrt.default"]
    kinds = find_kinds(bench, rsqrts)
    assert {kind.title for kind in kinds} == {"gate_up", "linear_bias", "linear", "linear_residual"}
    assert all(set(rsqrts).isdisjoint(place.members) for kind in kinds for place in kind.places)
    linears = [index for index, op in enumerate(bench.ops) if op.target == "aten.linear.default"]
    assert find_kinds(bench, linears) == []


def test_what_is_wrong_on_another_rank_is_out_on_this_one():
    found = place(worst=lambda own: own or "rank 1: a kernel of its own").fusions
    assert {(row.status, row.reason) for row in found} == {(Status.NOT_REPLACED, "rank 1: a kernel of its own")}
    asked = iter([""] * 2 + ["rank 1: not compiled"] + [""] * 2 + ["rank 1: wrong numbers"] + [""] * 90)
    first, second, *rest = place(worst=lambda _: next(asked)).fusions
    assert (first.status, first.reason) == (Status.BUILD_FAILED, "rank 1: not compiled")
    assert (second.status, second.reason, second.numerics.is_passed) == (Status.WRONG_NUMBERS, "rank 1: wrong numbers", True)
    assert {row.status for row in rest} == {Status.KEPT}


@pytest.mark.parametrize(
    ("make", "titles"),
    [
        (llama, ["rmsnorm_gate_up", "rmsnorm_linear", "rmsnorm_linear", "linear_residual", "linear_residual"]),
        (phi3, ["rmsnorm_gate_up", "rmsnorm_linear", "rmsnorm_linear", "linear_residual", "linear_residual"]),
        (phi, ["linear_bias", "linear_bias_residual", "linear_bias", "linear_bias", "linear_bias"]),
    ],
)
def test_kinds_of_other_models(make, titles):
    assert sorted(kind.title for kind in kinds_of(decoder(make))) == sorted(titles)


def test_weights_that_lie_transposed_are_cublas_s():
    """GPT-2 keeps (in, out): only its head is a linear."""
    kinds = kinds_of(decoder(gpt2))
    assert [(kind.title, kind.problem.n) for kind in kinds] == [("linear", 200)]


def test_float32_and_many_rows_are_cublas_s():
    assert kinds_of(decoder(dtype=torch.float32)) == []
    model = decoder().model
    loaded = describe_live(model, (), {"input_ids": torch.randint(1, 200, (5, 16)), "use_cache": False})
    assert [kind.title for kind in kinds_of(loaded)] == ["gate_up"]
    assert kinds_of(describe_live(gpt2()[0].to(torch.bfloat16), (), {"input_ids": torch.randint(1, 200, (5, 16))})) == []


def test_without_merging_a_norm_that_three_linears_read_stays():
    kinds = kinds_of(decoder(is_laid_out=False))
    norms = {kind.title: len(kind.places) for kind in kinds if kind.problem.has_norm}
    assert norms == {"rmsnorm_linear": 1}


def test_a_weight_of_a_class_of_its_own_is_left_alone():
    class Packed(torch.Tensor):
        """As quantised weights are."""

    loaded = decoder()
    weight = loaded.model.lm_head.weight
    assert "rmsnorm_linear" in {kind.title for kind in kinds_of(loaded)}
    loaded.model.lm_head.weight = torch.nn.Parameter(weight.detach().as_subclass(Packed))
    with pytest.raises(CannotCapture, match=r"lm_head\.weight` is a Packed"):
        kinds_of(loaded)


def test_what_pays_is_placed_and_one_that_does_not_is_out():
    kept = place(lambda name: Status.SLOWER if name == "G3" else Status.KEPT)
    assert [(row.id, row.kernel) for row in kept.fusions] == [
        (f"G{number}", title) for number, title in enumerate(QWEN2, start=1)
    ]
    reasons = [row.reason for row in kept.fusions]
    assert [row.status for row in kept.fusions] == [Status.KEPT, Status.KEPT, Status.SLOWER, Status.KEPT, Status.KEPT], reasons
    assert [gemv.id for gemv in kept.linears] == ["G1", "G2", "G4", "G5"]
    for row in kept.fusions:
        assert row.numerics.is_passed and row.numerics.elements > 0
        assert row.chain_before.median_ns == 100 // row.receipt.sites_found and row.original_source
        assert row.receipt.launches_before > row.receipt.sites_found
        assert "on top of all that was kept" in row.reason
        assert row.predicted_saving_ns == 70 and baseline_rows.predicted(row) == units.delta(-70)


def test_what_stays_is_timed_once_against_the_step_as_captured():
    run = []
    kept = place(captured=SimpleNamespace(step=lambda *_: "untouched", run=run.append))
    assert not run and kept.decision.before is kept.decision.after
    confirmed = confirmed_once(kept, is_timed=True, budget_s=0.01).decision
    assert run and set(run) == {"untouched"}
    assert confirmed.method == "cpu_time" and confirmed.after != confirmed.before


def test_a_step_that_nothing_was_put_on_is_not_timed_again():
    kept = place(lambda _: Status.WITHIN_NOISE)
    bench = kept.bench
    assert confirmed_once(replace(kept, captured=bench), is_timed=True, budget_s=0.01).decision is kept.decision


def test_a_step_that_stands_for_the_kept_one_is_timed_as_it_is():
    kept = place(lambda _: Status.WITHIN_NOISE)
    kept = replace(kept, captured=kept.bench, decision=replace(kept.decision, is_as_kept=False))
    found = confirmed_once(kept, is_timed=True, budget_s=0.01).decision
    assert found.is_as_kept and found.after is not kept.decision.after


def test_nothing_changes_where_nothing_pays():
    kept = place(lambda _: Status.WITHIN_NOISE)
    assert {row.status for row in kept.fusions} == {Status.WITHIN_NOISE}, [row.reason for row in kept.fusions]
    assert kept.linears == ()
    assert place(make=None).fusions == []


def test_wrong_numbers_failed_builds_and_cublas_are_rows():
    def make(problem, header, _file):
        if problem.is_gated:
            return torch_kernel(problem, header, candidates(problem, ("cuda",))[0], spoil=0.05)
        if problem.has_norm:
            raise KernelBuildFailed(kernel=header.title, target="cuda", cause="no compiler")
        return "cuBLAS is faster"

    kept = place(make=make)
    found = {row.kernel: row for row in kept.fusions}
    assert found["rmsnorm_gate_up"].status is Status.WRONG_NUMBERS
    assert "against float64" in found["rmsnorm_gate_up"].reason
    assert found["rmsnorm_linear_bias"].status is Status.BUILD_FAILED
    assert (found["linear_residual"].status, found["linear_residual"].reason) == (Status.SLOWER, "cuBLAS is faster")
    assert kept.linears == ()


class Probe(torch.nn.Module):
    """Two linears of as many rows: one divides them among two dims, as a pooling head's query does."""

    def __init__(self):
        super().__init__()
        self.query, self.out = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, rows):
        return self.out(self.query(rows.unsqueeze(0)).relu().view(16, 64))


def test_sites_whose_rows_lie_in_other_dims_share_a_kernel():
    torch.manual_seed(0)
    loaded = describe_live(Probe().to(torch.bfloat16).eval(), (torch.randn(16, 64, dtype=torch.bfloat16),), {})
    kept = place(bench=bench_of(loaded, loaded.args))
    assert [(row.kernel, row.status, row.receipt.sites_found) for row in kept.fusions] == [("linear_bias", Status.KEPT, 2)]
    assert kept.fusions[0].numerics.is_passed


def test_one_wrong_layer_among_right_ones_is_found():
    """Every site is checked on its own tensors, not only the first one."""

    def make(problem, header, _file):
        made = made_of_torch(problem, header, _file)
        calls = []

        def launch(*tensors):
            made.launch(*tensors)
            calls.append(tensors)
            if len(calls) == 2:
                tensors[-1].mul_(1.1)

        return replace(made, launch=launch)

    assert {row.status for row in place(make=make).fusions} == {Status.WRONG_NUMBERS}


def test_only_and_skip_name_these_kernels_too():
    assert [row.kernel for row in place(skip=("linear_residual", "rmsnorm_linear*")).fusions] == ["rmsnorm_gate_up"]
    assert [row.kernel for row in place(only=("rmsnorm_gate*",)).fusions] == ["rmsnorm_gate_up"]


@pytest.mark.slow
def test_the_whole_loop_and_its_saved_plan(quick, monkeypatch):  # noqa: F811
    """Merged GEMMs, chains of C++ and GEMV kernels in one model; then the same from the files of that run."""
    loaded = decoder()
    state = {name: (value.data_ptr(), value.clone()) for name, value in loaded.model.state_dict().items()}
    twin = copy.deepcopy(loaded.model)
    only = ("swiglu", "add_rmsnorm", "rmsnorm_*", "linear_residual")  # each chain more is a C++ kernel more to build
    instruments = verdicts(keep_all, on_top=on_top(lambda name: Status.SLOWER if name == "G4" else Status.KEPT))
    run = apply_workload(loaded, replace(quick, only=only), instruments=instruments, linear_kernels=of_torch())
    rows = [fusion for fusion in run.report.fusions if not fusion.chain_id]
    assert [row.status for row in rows] == [Status.KEPT, Status.KEPT, Status.KEPT, Status.SLOWER, Status.KEPT]
    for row in rows:
        placed = row.receipt.sites_found if row.status is Status.KEPT else 0
        assert row.receipt.sites_replaced == row.receipt.launches_after == placed, row.receipt.refusals
    # Whatever stood there before, the fused norms and gates among it, runs alone as well.
    assert all(baseline_rows.predicted_ns(row) is not None for row in rows)
    assert run.report.model_check.is_passed
    found = {fusion.kernel: fusion for fusion in run.report.fusions if fusion.chain_id}
    swiglu, norm = found["swiglu"], found["add_rmsnorm"]
    assert (swiglu.status, swiglu.receipt.sites_replaced) == (Status.ABSORBED, 0)
    assert f"G1 rmsnorm_gate_up took in {LAYERS} of its {LAYERS} sites" in swiglu.reason
    assert norm.status is Status.ABSORBED and "took in" in norm.reason
    assert load_report(dump_report(run.report)) == run.report

    # Eager, fused and a float64 copy: logits and cache, with weights written to after the kernels were made.
    with torch.no_grad():
        for model in (loaded.model, twin):
            model.model.layers[0].mlp.gate_proj.weight.mul_(1.5)
            model.model.norm.weight.fill_(2)
        mine, other = (decode_step(twin, batch=1) for _ in range(2))
        eager, fused = twin(**other).logits, run.fused(**mine).logits
        truth = copy.deepcopy(twin).double()
        exact = truth(**decode_step(truth, batch=1)).logits
    ours, theirs = ((value.double() - exact).norm() / exact.norm() for value in (fused, eager))
    assert 0 < ours <= 1.5 * theirs
    for layer, expected in zip(cache_in(mine).layers, cache_in(other).layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=0.05, atol=0.05)
    assert run.fused.fallbacks == {}
    # Kernels for one row serve no other batch.
    more, same = (decode_step(twin, batch=2) for _ in range(2))
    with torch.no_grad(), pytest.warns(UserWarning, match="not verified"):
        torch.testing.assert_close(run.fused(**more).logits, twin(**same).logits)
    run.revert()
    with torch.no_grad():
        for name, value in loaded.model.state_dict().items():
            assert value.data_ptr() == state[name][0]
            value.copy_(state[name][1])

    save(run, quick.run_dir)
    plan = load_plan(quick.run_dir)
    assert [row.id for row in plan.linears] == ["G1", "G2", "G3", "G5"]
    built, observed = [], []
    observe_values = Bench.observe_values
    monkeypatch.setattr(Bench, "observe_values", lambda *args: observed.append(1) or observe_values(*args))

    def build(problem, header, config, _path, *, tuning):
        built.append((entry_of(problem, header, config), tuning))
        return torch_kernel(problem, header, config)

    expected = loaded.model(**decode_step(loaded.model, batch=1)).logits
    again = decode_step(loaded.model, batch=1)
    with torch.no_grad(), apply_plan(loaded, plan, build_linear=build) as model:
        torch.testing.assert_close(loaded.model(**again).logits, expected, rtol=0.05, atol=0.05)
        assert model.fallbacks == {}
    assert len(observed) == 1
    assert sorted(built) == sorted((row.rendered[0].name, row.rendered[0].tuning) for row in rows if row.status is Status.KEPT)


def prefill(rows):
    """A Qwen2 whose step has as many rows, siblings laid out side by side."""
    model = qwen2()[0].to(torch.bfloat16)
    lay_out_siblings(model)
    ids = torch.randint(1, 200, (1, rows), generator=torch.Generator().manual_seed(0))
    return describe_live(model, (), {"input_ids": ids, "use_cache": False})


@pytest.mark.slow
def test_a_gate_on_many_rows_is_computed_in_its_gemm(quick):  # noqa: F811
    """The whole loop, its saved plan, and another length, which has merged GEMMs of cuBLAS and the gate's kernel behind them."""
    loaded = prefill(70)
    with torch.no_grad():
        expected = loaded.model(**loaded.kwargs).logits
    run = apply_workload(
        loaded, replace(quick, only=("swiglu", "add_rmsnorm", "gate_up")),
        instruments=verdicts(keep_all, on_top=on_top(lambda _: Status.KEPT)),
        linear_kernels=of_torch(is_served=lambda problem, device: problem.m > 64 and device.type == "cpu"),
    )  # fmt: skip
    (row,) = [fusion for fusion in run.report.fusions if not fusion.chain_id]
    assert (row.id, row.kernel, row.status) == ("G1", "gate_up", Status.KEPT)
    assert row.receipt.sites_replaced == row.receipt.launches_after == LAYERS
    swiglu = next(fusion for fusion in run.report.fusions if fusion.kernel == "swiglu")
    assert swiglu.status is Status.ABSORBED and "G1 gate_up took in" in swiglu.reason
    config = GemvConfig.read(row.rendered[0].tuning)
    assert config.form == "cuda_wgmma" and config.stages > 1
    with torch.no_grad():
        torch.testing.assert_close(run.fused(**loaded.kwargs).logits, expected, rtol=0.05, atol=0.05)
        longer = prefill(90).kwargs
        at_length = sites_by_title(run.fused.specialize(**longer))
        assert at_length["swiglu"] == LAYERS and at_length["add_rmsnorm"] > LAYERS
        before = dict(run.fused.fallbacks)
        fused = run.fused(**longer).logits
        run.revert()
        torch.testing.assert_close(fused, loaded.model(**longer).logits, rtol=0.05, atol=0.05)
    assert run.fused.fallbacks == before == {}
    save(run, quick.run_dir)
    with torch.no_grad(), apply_plan(loaded, load_plan(quick.run_dir), build_linear=built_of_torch) as model:
        torch.testing.assert_close(loaded.model(**loaded.kwargs).logits, expected, rtol=0.05, atol=0.05)
        assert sites_by_title(model.specialize(**longer)) == at_length
        torch.testing.assert_close(loaded.model(**longer).logits, fused, rtol=0.05, atol=0.05)
        assert model.fallbacks == {}


def sites_by_title(made):
    """Sites of one more length, by what kernels are named after."""
    found = Counter()
    for name, count in made.sites.items():
        found[name.removeprefix("fa_").rpartition("_")[0]] += count
    return found


def test_a_gate_on_many_rows_is_offered_where_there_are_tensor_cores_for_it():
    problem = GemvProblem(m=512, n=64, k=64, dtype="bfloat16", is_gated=True)
    for capability, expected in (((9, 0), True), ((8, 0), False), ((10, 0), False), (None, False)):
        gpu = functools.partial(is_served, capability_of=lambda _, capability=capability: capability)
        assert gpu(problem, "cuda") is expected
        assert gpu(replace(problem, m=64), "cuda")
        assert not gpu(replace(problem, has_bias=True), "cuda")
        assert not gpu(problem, "cpu")


def test_kinds_that_do_not_fit_into_memory_are_left_alone_and_the_others_tried():
    """One byte less is free than the most that a kind needs."""
    bench, seen, needed = qwen2_bench(), [], []
    for kind in find_kinds(bench):
        told = places.why_no_room(bench, [*seen, *kind.places], Instruments(memory_bytes=lambda _: (1, 2)))
        needed.append(int(told.rpartition("take ")[2].split()[0].replace(",", "")))
        seen += kind.places
    largest = max(needed)
    rows = place(free_bytes=(largest - 1, largest)).fusions
    refused = [row for row in rows if row.status is Status.NOT_REPLACED]
    assert refused and {row.status for row in rows} == {Status.KEPT, Status.NOT_REPLACED}
    assert all(f"{largest - 1:,} are free" in row.reason and row.numerics is None for row in refused)


def raising(error):
    """Return what raises an error, whatever it is called with."""

    def fail(*_, **__):
        raise error

    return fail


class Unobservable(Bench):
    """Cannot run its step once more."""

    def __init__(self, live, error, *, on_cuda=False):
        super().__init__(live, on_cuda=on_cuda)
        self._error = error

    def observe_values(self, keep, check):
        raise self._error


@pytest.mark.parametrize("where", ["observe", "check"])
def test_memory_that_runs_out_ends_a_row_and_not_the_run(where):
    def placed(error):
        if where == "observe":
            return place(bench=Unobservable(qwen2_bench().live, error))
        return place(make=lambda *problem: replace(made_of_torch(*problem), launch=raising(error)))

    kept = placed(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore of it"))
    assert {row.status for row in kept.fusions} == {Status.NOT_REPLACED} and kept.linears == ()
    assert all("ran out while it was checked: CUDA out of memory" in row.reason for row in kept.fusions)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        placed(RuntimeError("an illegal memory access was encountered"))


def test_what_is_computed_from_parameters_is_not_in_memory():
    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(24, 16))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.to(torch.bfloat16))

    bench = Bench(capture_regions(Cast(), (torch.randn(4, 16, dtype=torch.bfloat16),), {}), on_cuda=False)
    (kind,) = find_kinds(bench)
    x, weight = kind.places[0].inputs
    assert places._is_in_memory(bench, x) and not places._is_in_memory(bench, weight)


def test_a_gate_on_many_rows_has_no_kernel_in_triton():
    kernels = LinearKernels(make=made_of_torch, is_served=lambda problem, device: True)
    problem = GemvProblem(m=512, n=64, k=64, dtype="bfloat16", is_gated=True)
    for backend, expected in ((None, True), ("cuda", True), ("triton", False)):
        assert stage._has_kernel(problem, qwen2_bench(), ApplyOptions(backend=backend), kernels) is expected
        assert stage._has_kernel(replace(problem, m=1), qwen2_bench(), ApplyOptions(backend=backend), kernels)


def test_merged_weights_are_in_memory_anyway():
    bench = qwen2_bench()
    (first, *_) = find_kinds(bench)
    told = places.why_no_room(bench, first.places, Instruments(memory_bytes=lambda _: (1, 2)))
    x = sum(math.prod(bench.ops[place.inputs[0]].outputs[0].shape) for place in first.places)
    float64 = max(places._float64_elements(bench, place) for place in first.places)
    assert f"take {2 * x + 8 * float64:,} bytes" in told


def test_a_saved_plan_is_refused_where_numbers_or_sites_are_others(tmp_path):
    kept = place(lambda name: Status.KEPT if name == "G1" else Status.SLOWER)
    row = kept.fusions[0]
    plan = SimpleNamespace(run_dir=tmp_path, report=SimpleNamespace(tolerance=None), linears=(row,))
    kinds = find_kinds(kept.bench)
    places.observe(kept.bench, [place for kind in kinds for place in kind.places])
    (again,) = build_linears(kept.bench, kinds, plan, built_of_torch)
    assert (again.id, {site.call.__name__ for site in again.sites}, len(again.sites)) == ("G1", {row.rendered[0].name}, LAYERS)

    def spoiled(problem, header, config, _path, *, tuning):
        return torch_kernel(problem, header, config, spoil=1.0)

    with pytest.raises(PlanMismatch, match="no longer pass"):
        build_linears(kept.bench, kinds, plan, spoiled)
    other = replace(row, rendered=(replace(row.rendered[0], name="fa_of_other_sizes"),))
    with pytest.raises(PlanMismatch, match="no linears for rmsnorm_gate_up"):
        build_linears(kept.bench, kinds, SimpleNamespace(**{**vars(plan), "linears": (other,)}), spoiled)


def test_no_kernels_without_a_gpu(tmp_path):
    assert linear_kernels(tmp_path, torch.device("cpu"), backend=None, log=print) is None
    assert linear_kernels(tmp_path, torch.device("cuda"), backend="cpp", log=print) is None
    assert linear_kernels(tmp_path, torch.device("cuda"), backend="triton", log=print) is not None


def test_headers_are_the_library_s_where_it_has_the_kernel():
    assert header_of("rmsnorm_gate_up").origin == "library kernel rmsnorm_gate_up"
    assert "from the graph" in header_of("linear_bias_residual").origin


def test_configurations_are_read_back():
    for config in (GemvConfig(form="cuda_mma", rows=16, warps=8, unroll=2), GemvConfig(form="triton_fma", rows=2, block_k=64)):
        assert GemvConfig.read(f"{config.text} (measured, best of 4)") == config
    with pytest.raises(ValueError, match="no form"):
        GemvConfig.read("BLOCK=4")


def test_cublas_between_our_kernels_is_what_the_step_has_already(tmp_path):
    around = GemvChoice(config=GemvConfig(form="cuda_cublas"), source="measured", tried=(("cublas", 1500), ("cuda_cublas", 900)))
    make = linear_kernels(
        tmp_path, torch.device("cuda"), backend=None, log=lambda line: None, choose=lambda *_, **__: around
    ).make
    problem = GemvProblem(m=32, n=64, k=64, dtype="bfloat16", has_norm=True)
    answer = make(problem, header_of("rmsnorm_linear"), "G1_rmsnorm_linear")
    assert answer.startswith("cuBLAS and the ops around it are faster") and "cuda_cublas 0.9" in answer
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_decode_step_on_a_gpu(tmp_path, backend, batch):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def wide():
        config = Qwen2Config(
            num_hidden_layers=2, hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=512, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval(), {}

    model = wide()[0].to("cuda", torch.bfloat16)
    lay_out_siblings(model)
    kwargs = decode_step_on(model, batch)
    loaded = describe_live(model, (), kwargs)
    run = apply_workload(
        loaded,
        ApplyOptions(runs=10, min_share=0.0, run_dir=tmp_path, backend=backend),
        instruments=Instruments(compare_alone=never_slower, change_alone=a_gain_alone, on_top=on_top(lambda _: Status.KEPT)),
        linear_kernels=functools.partial(linear_kernels, choose=chosen_ours),
    )
    rows = [fusion for fusion in run.report.fusions if not fusion.chain_id]
    assert [row.kernel for row in rows] == QWEN2
    for row in rows:
        assert row.status is Status.KEPT, row.reason
        assert row.receipt.launches_after == row.receipt.sites_found
        assert (tmp_path / row.rendered[0].path).is_file()
    assert run.report.model_check.is_passed
    assert run.report.step_after.method == "cuda_graph"


def never_slower(*args, **kwargs):
    """Time ops and kernel. Other work on the device may slow either down, so the kernel takes half of the ops' time at most."""
    before, after = compare_alone(*args, **kwargs)
    half = as_timing([time_ns // 2 for time_ns in before.times_ns], before.method)
    return before, min(after, half, key=lambda timing: timing.median_ns)


def a_gain_alone(*args, **kwargs):
    """Time what changes in the step, and call it a gain of a millisecond."""
    change_alone(*args, **kwargs)
    return Difference(median_ns=-(10**6), low_ns=-(10**6), high_ns=-(10**6))


def chosen_ours(problem, device, *, header, backends, **_):
    from fusion_advisor.autotune.cache import TuningStore
    from fusion_advisor.autotune.select_gemm import choose

    return choose(problem, device, header=header, backends=backends, with_cublas=False, store=TuningStore(None))


def decode_step_on(model, batch):
    from fusion_advisor.workload.static_cache import cache_name, filled_cache

    ids = torch.randint(1, 200, (batch, 17), generator=torch.Generator().manual_seed(0)).to("cuda")
    cache, _ = filled_cache(model, ids[:, :-1], maximum=64, phase="decode", model_id="tiny")
    return {"input_ids": ids[:, -1:].clone(), cache_name(model): cache, "use_cache": True}
