"""Which device is the current one while something runs on a workload's."""

from __future__ import annotations

import shutil

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.fuse import pipeline
from fusion_advisor.workload.device import current_device


def test_a_gpu_becomes_the_current_one_and_a_cpu_changes_nothing():
    made = current_device(torch.device("cuda", 1))
    assert isinstance(made, torch.cuda.device) and made.idx == 1
    with current_device(torch.device("cpu")) as nothing:
        assert nothing is None


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_profiling_runs_with_the_workloads_device_current(monkeypatch):
    seen = []

    def watched(device):
        seen.append(device)
        return current_device(device)

    monkeypatch.setattr(pipeline, "current_device", watched)
    fa.profile(torch.nn.ReLU(), (torch.randn(8, 8),))
    assert seen == [torch.device("cpu")]
