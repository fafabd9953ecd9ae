"""Bits: counting those that agree, and leaving out what changes one of them with ``--exact``."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse import dynamo_backend
from fusion_advisor.fuse.decide.exact import BitJudge, has_other_bits
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.passes.merge_gemms import MERGE_GEMMS
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.report import kernel_rows
from fusion_advisor.verify.accuracy import count_bit_equal
from tests.fuse.conftest import backend_with
from tests.tiny import BANDWIDTH


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_bits_are_counted_and_zeros_of_two_signs_differ(dtype):
    one = torch.tensor([1.0, 0.0, math.nan, math.inf, 2.0], dtype=dtype)
    other = torch.tensor([1.0, -0.0, -math.nan, math.inf, 3.0], dtype=dtype)
    assert count_bit_equal(one, other) == 3
    assert count_bit_equal(one.expand(2, 5), other.expand(2, 5)) == 6


def test_results_of_other_shapes_or_dtypes_have_other_bits():
    x = torch.ones(3)

    def again():
        return [x]

    assert not has_other_bits([x.clone()], [x], again)
    assert has_other_bits([x.double()], [x], again)
    assert has_other_bits([x[:2]], [x], again)
    assert has_other_bits([], [x], again)


def test_a_result_whose_bits_vary_from_run_to_run_is_left_out_and_no_other():
    """As a sum by atomics does; here each run adds another rounding error, and two runs in five none."""
    kept, changed, notes, errors = object(), object(), [], iter([0, 2, 0, 1, 3, 0, 2, 0, 1, 3])

    def results(step, spoilt):
        varying = torch.tensor([1.0, 1.0 + next(errors) * 2.0**-23])
        return [varying, torch.tensor([2.0, 2.5 if spoilt and step is changed else 2.0])]

    for spoilt in (False, True):
        judge = BitJudge(kept, is_on=True, note=notes.append, results=functools.partial(results, spoilt=spoilt))
        assert judge.after(MERGE_GEMMS, changed) is (kept if spoilt else changed)
    assert len(notes) == 1


def test_exact_and_fast_math_contradict_each_other():
    with pytest.raises(UsageError, match="contradict"):
        ApplyOptions(exact=True, fast_math=True)


class Casts(torch.nn.Module):
    """Rounds in the middle of an fp32 chain."""

    def forward(self, x):
        return torch.tanh((x * 1.5).to(torch.bfloat16).to(torch.float32) * 3 + 1) * x


def compiled(backend=dynamo_backend.fusion_advisor, **kinds):
    torch._dynamo.reset()
    return torch.compile(Casts(), backend=backend, **kinds)


def test_a_graph_whose_results_are_off_runs_its_original_ops_and_says_so():
    """The kernel of a chain may pass by itself and be wrong in the graph: what is judged here is the graph."""
    x = torch.randn(64, 1024)
    checked = []

    def planted(region, fused):
        checked.append(check_region(region, fused))
        return check_region(region, lambda *args: [result * 1.001 for result in fused(*args)])

    backend = backend_with(ApplyOptions(min_gain=-1e9, bandwidth=BANDWIDTH), check=planted)
    with torch.no_grad(), pytest.warns(UserWarning, match="as a whole are too far from float64"):
        found = compiled(backend)(x)
    assert torch.equal(found, Casts()(x))
    assert checked
    assert checked[0].is_passed


def test_an_option_of_the_backend_that_is_not_known_is_refused():
    with torch.no_grad(), pytest.raises(Exception, match="no option exakt"):
        compiled(options={"exakt": True})(torch.randn(4, 4))


class Chains(torch.nn.Module):
    """One chain of exactly rounded ops, and one with an exponential."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 512)

    def forward(self, x):
        return torch.exp(self.linear(torch.relu(x * 1.1 + 0.3) * 0.7) * 0.3) * 1.7


@pytest.mark.slow
def test_an_exact_run_says_by_measurement_which_kernels_have_eagers_bits():
    torch.manual_seed(0)
    x = torch.randn(2048, 64, dtype=torch.bfloat16)
    fused = fa.apply(Chains().eval().to(torch.bfloat16), (x,), exact=True, dry_run=True, runs=3, warmup=1, min_share=0.0)
    report = fused.report
    assert report.is_exact
    lines = {fusion.kernel: kernel_rows.bits_line(report, fusion) for fusion in report.fusions}
    exactly = [fusion for fusion in report.fusions if "relu" in fusion.kernel]
    assert exactly
    assert exactly[0].numerics.is_bit_equal
    assert lines[exactly[0].kernel].startswith("bit-equal to eager on ")
    assert "round_bf16" in exactly[0].rendered[0].source


@pytest.mark.parametrize("is_same", [True, False])
def test_a_stage_that_changes_a_bit_is_taken_back(is_same):
    before, after, notes = object(), object(), []
    results = {before: [torch.ones(2)], after: [torch.tensor([1.0, 1.0 if is_same else 1.0000001])]}
    judges = [BitJudge(before, is_on=is_on, note=notes.append, results=results.__getitem__) for is_on in (True, False)]
    assert judges[0].after(MERGE_GEMMS, after) is (after if is_same else before)
    assert bool(notes) is not is_same
    assert judges[1].after(MERGE_GEMMS, after) is after


def test_a_bit_that_changed_on_another_rank_counts_too():
    before, after, same = object(), object(), [torch.ones(2)]
    for told, stays, runs in (("rank 1: other bits", before, 5), ("", after, 1)):
        asked = []
        judge = BitJudge(
            before,
            is_on=True,
            note=str,
            results=lambda _: same,
            worst=lambda own, told=told, asked=asked: asked.append(own) or told,
        )
        assert judge.after(MERGE_GEMMS, after) is stays and asked == [""] * runs
