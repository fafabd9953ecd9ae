"""A saved plan's first step on several ranks: it is run by all of them or by none."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.installed import LastStage
from fusion_advisor.fuse.live.restore_plan import measure_warm_up
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.workload.load import describe_live
from tests.fuse.test_pipeline import Model, keep_all, pytestmark  # noqa: F401


def test_a_plan_that_another_rank_cannot_put_in_place_is_not_run():
    options = ApplyOptions(keep="verified", runs=2, steps=1, warmup=1, compile=False)
    for told in ("", "rank 1: its numbers no longer pass"):
        asked = []
        last = LastStage(
            measure_warm_up=functools.partial(
                measure_warm_up, worst=lambda own, told=told, asked=asked: asked.append(own) or told
            )
        )
        run = apply_workload(
            describe_live(Model().eval(), (torch.randn(2, 48, 64),)),
            options,
            instruments=replace(Instruments(), decide=keep_all),
            last=last,
        )
        run.revert()
        assert asked == [""] and (run.report.warm_up is None) is bool(told)
        assert bool(told) is any(told in warning for warning in run.report.warnings if told)
