"""A second length of a fused model: the same compiled kernels, other sizes, the same numbers."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.codegen.cpp import backend
from fusion_advisor.errors import CannotSpecialize
from fusion_advisor.fuse.decide import trial
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.live import specialize as specialising
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.workload.load import describe_live
from tests.fuse.test_pipeline import faster_alone, keep_all, quick, verdicts  # noqa: F401
from tests.tiny import Toy, qwen2, toy

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")


@pytest.fixture
def applied(quick):  # noqa: F811
    """A Toy that is fused for 48 rows."""
    torch.manual_seed(0)
    model = Toy().eval()
    with torch.no_grad():
        run = apply_workload(describe_live(model, (torch.randn(48, 32),)), quick, instruments=verdicts(keep_all))
    yield run.fused
    run.revert()


@pytest.fixture
def nothing_is_built(applied, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a kernel was built again")

    monkeypatch.setattr(backend.CppBackend, "build", refuse)
    monkeypatch.setattr(trial, "best_tuning", refuse)


@pytest.mark.usefixtures("nothing_is_built")
def test_an_unseen_length_runs_at_once_and_is_fused_after_specialize(applied):
    x = torch.randn(100, 32)
    with torch.no_grad():
        expected = applied._original(x)
        with pytest.warns(UserWarning, match=r"not verified: .* is \[100, 32\] float32, and \[\d+, 32\] float32 was verified"):
            assert torch.equal(applied(x), expected)
        made = applied.specialize(x)
        assert sum(made.sites.values()) == 2 and made.seconds > 0
        chosen = applied._rewritten.handed_over
        torch.testing.assert_close(applied(x), expected, rtol=1e-5, atol=1e-5)
        assert applied._rewritten.handed_over == chosen + 1
        assert applied.fallbacks == {"these inputs (names, shapes, dtypes or strides) were not verified": 1}
        y = torch.randn(48, 32)
        torch.testing.assert_close(applied(y), applied._original(y), rtol=1e-5, atol=1e-5)
        assert applied.specialize(x) is None
    assert sum(applied.fallbacks.values()) == 1


@pytest.mark.usefixtures("nothing_is_built")
def test_on_first_use_learns_by_itself_and_only_so_often(applied):
    applied._on_first_use = 2
    with torch.no_grad():
        for rows in (64, 80):
            x = torch.randn(rows, 32)
            for _ in range(3):
                torch.testing.assert_close(applied(x), applied._original(x), rtol=1e-5, atol=1e-5)
        assert len(applied.specialised) == 2 and applied.fallbacks == {}
        with pytest.warns(UserWarning, match="not verified"):
            applied(torch.randn(96, 32))
    assert len(applied.specialised) == 2


def test_another_regime_is_another_plan(applied):
    x = torch.randn(1, 32)
    with torch.no_grad(), pytest.raises(CannotSpecialize, match="48 rows, this call has 1"):
        applied.specialize(x)
    applied._on_first_use = 8
    with torch.no_grad(), pytest.warns(UserWarning, match="48 rows") as said:
        assert torch.equal(applied(x), applied._original(x))
        assert torch.equal(applied(x), applied._original(x))
    assert len([one for one in said if "rows" in str(one.message)]) == 1


def test_wrong_numbers_are_refused(applied, monkeypatch):
    real = specialising.check_chain.check_chain

    def wrong(*args, **options):
        from dataclasses import replace

        return replace(real(*args, **options), is_passed=False)

    monkeypatch.setattr(specialising.check_chain, "check_chain", wrong)
    with torch.no_grad(), pytest.raises(CannotSpecialize, match="relative error"):
        applied.specialize(torch.randn(100, 32))


def test_two_regimes_are_joined_in_one_model(applied, quick):  # noqa: F811
    x = torch.randn(1, 32)
    with torch.no_grad():
        other = apply_workload(describe_live(applied.revert(), (x,)), quick, instruments=Instruments(compare_alone=faster_alone))
        joined = applied.include(other.fused).apply()
        assert joined is applied and joined.is_applied
        for value in (x, torch.randn(48, 32)):
            torch.testing.assert_close(applied(value), applied._original(value), rtol=1e-5, atol=1e-5)
    assert applied.fallbacks == {}
    with pytest.raises(ValueError, match="one model"):
        applied.include(type(applied)(toy()[0], [], [], (), {}))


@pytest.mark.slow
def test_a_decoder_keeps_its_kernels_at_another_length(quick):  # noqa: F811
    model, inputs = qwen2()
    with torch.no_grad():
        run = apply_workload(describe_live(model, (), inputs), quick, instruments=verdicts(keep_all))
        kept = sum(fusion.receipt.sites_replaced for fusion in run.report.fusions)
        ids = torch.randint(1, 200, (2, 41))
        made = run.fused.specialize(input_ids=ids, use_cache=False)
        assert sum(made.sites.values()) == kept
        expected = run.fused._original(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(run.fused(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert run.fused.fallbacks == {}
    run.revert()
