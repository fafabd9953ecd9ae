"""The zoo at tiny widths on a CPU: each is applied with right numbers and complete receipts, or refused with a reason."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.errors import AdvisorError
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.records import Status
from fusion_advisor.workload.load import describe_live
from tests.tiny import BANDWIDTH
from tools.zoo.size import MissingPackage, Size
from tools.zoo.workloads import NAMES, make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]

TINY = Size(is_tiny=True, layers=0, dtype=torch.float32)
REFUSED: dict[str, str] = {}
"""Workloads that no apply can take, by the code of the reason."""


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_workload_is_applied_or_refused_with_a_reason(name):
    try:
        model, inputs = make(name, TINY)
    except MissingPackage as missing:
        pytest.skip(str(missing))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        model(*args, **kwargs)  # transformers' models register hooks of their own when they are first called
    loaded = describe_live(model, args, kwargs)
    options = ApplyOptions(
        keep="verified", compile=False, warmup=1, runs=3, min_share=0.0, budgets=Budgets(wall_s=0.02), bandwidth=BANDWIDTH
    )
    try:
        run = apply_workload(loaded, options)
    except AdvisorError as error:
        assert REFUSED.get(name) == error.code, f"{error.code}: {error}"
        return
    assert name not in REFUSED
    try:
        with torch.no_grad():
            model(*args, **kwargs)
        assert run.fused.fallbacks == {}
    finally:
        run.revert()
    report = run.report
    assert report.model_check is not None and report.model_check.is_passed
    assert not [f"{row.id} {row.reason}" for row in report.fusions if row.status is Status.BUILD_FAILED]
    kept = [row for row in report.fusions if row.status is Status.KEPT]
    assert kept
    for row in kept:
        receipt = row.receipt
        assert receipt.launches_after > 0, (row.id, receipt.refusals)
        if row.chain_id:
            assert receipt.sites_replaced + len(receipt.refusals) == receipt.sites_matched <= receipt.sites_found, row.id
