"""A rewrite that is right alone and wrong in the model is found, dropped and named; the rest stays."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch

import fusion_advisor
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.bisect import find_guilty
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.records import Status
from tests.fuse.test_pipeline import Model
from tests.tiny import BANDWIDTH

QUICK = {
    "warmup": 1, "runs": 3, "min_share": 0.0, "keep": "verified", "bandwidth": BANDWIDTH, "budgets": Budgets(wall_s=0.02),
}  # fmt: skip


@pytest.mark.parametrize("guilty", [{0}, {6}, {3}, {1, 5}, {0, 1, 2, 3, 4, 5, 6}], ids=str)
def test_whatever_is_guilty_alone_is_found_and_nothing_else(guilty):
    assert set(find_guilty(range(7), lambda chosen: not guilty & set(chosen))) == guilty


def test_of_two_that_are_wrong_only_together_one_goes():
    for pair in itertools.combinations(range(6), 2):
        found = find_guilty(range(6), lambda chosen, pair=pair: not set(pair) <= set(chosen))
        assert len(found) == 1 and found[0] in pair


def test_what_fails_without_any_rewrite_has_no_guilty_one():
    assert find_guilty(range(3), lambda chosen: False) is None


def test_few_checks_are_made():
    asked = []
    find_guilty(range(64), lambda chosen: asked.append(1) or 40 not in chosen)
    assert len(asked) <= 9


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_a_fusion_that_is_right_alone_and_wrong_in_the_model_is_named_and_the_rest_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = Bench.install

    def spoilt(self, fusion, kernel, built):
        """The check has passed by now: what is installed is wrong."""
        result = real(self, fusion, kernel, built)
        if fusion.match.kernel == "gelu_tanh":
            for site in result.sites:
                call = site.call

                def wrong(*tensors, call=call):
                    return call(*tensors) * 1.01

                vars(wrong).update(vars(call))
                wrong.__name__ = call.__name__
                object.__setattr__(site, "call", wrong)
        return result

    monkeypatch.setattr(Bench, "install", spoilt)
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 48, 64)
    with torch.no_grad():
        expected = model(x)
        with fusion_advisor.apply(model, x, **QUICK) as fused:
            report = fused.report
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
            assert fused.launches == 1
    by_kernel = {row.kernel: row for row in report.fusions}
    assert by_kernel["gelu_tanh"].status is Status.WRONG_NUMBERS
    assert "bisection" in by_kernel["gelu_tanh"].reason
    assert [row.kernel for row in report.fusions if row.status is Status.KEPT] == ["add_layernorm"]
    assert report.model_check.is_passed
    assert any(by_kernel["gelu_tanh"].id in warning for warning in report.warnings)
    receipt = by_kernel["add_layernorm"].receipt
    assert (receipt.sites_replaced, receipt.launches_after, receipt.refusals) == (1, 1, ())
