"""A saved plan is put in as often as asked, timed by phase, and taken out again."""

from __future__ import annotations

import re

import pytest

from fusion_advisor.cli.common.core import dump_request, make_request
from fusion_advisor.fuse.live.restore_plan import apply_plan
from tests.fuse.live.test_saved_plan import another, saved_run
from tests.fuse.test_pipeline import keep_all, loaded, pytestmark, quick, verdicts  # noqa: F401
from tools import saved_plan


@pytest.fixture
def run_dir(loaded, quick):  # noqa: F811
    saved_run(loaded, quick, verdicts(keep_all))
    (quick.run_dir / "request.json").write_text(dump_request(make_request(model_id="org/m")))
    return quick.run_dir


def test_each_time_is_a_line_of_phases(run_dir):
    model = another()
    told = list(saved_plan.lines(run_dir, 2, load=lambda request: model))
    assert len(told) == 2
    for line in told:
        whole = float(line.split(" s (")[0])
        phases = [float(taken) for taken in re.findall(r"[a-z] (\d+\.\d\d)[,)]", line)]
        assert len(phases) == 5 and sum(phases) == pytest.approx(whole, abs=0.1), line
    assert "_compiled_call_impl" not in model.model.__dict__


def test_a_step_that_runs_the_original_ops_is_no_figure(run_dir):
    def strayed(loaded, plan, clock):  # noqa: F811
        fused = apply_plan(loaded, plan, clock)
        shorter = another(length=32)
        fused(*shorter.args)
        return fused

    with pytest.raises(SystemExit, match="the first step ran the original ops"):
        list(saved_plan.lines(run_dir, 1, load=lambda request: another(), put_in=strayed))
