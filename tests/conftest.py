"""Tests that need a CUDA device are not collected where there is none; the header says so. Of several, each worker has one."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpus import gpu_of_worker, visible_gpus

_GPU = gpu_of_worker(os.environ.get("PYTEST_XDIST_WORKER", ""), visible_gpus())
if _GPU is not None:  # before anything asks CUDA
    os.environ["CUDA_VISIBLE_DEVICES"] = _GPU


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return ""
    return (
        "no CUDA device: tests marked `gpu` are left out; where there is one, run `pytest -n 8 -m 'gpu and not serial'`, then "
        "`pytest -m 'gpu and serial'`"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if "gpu" in item.keywords]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if "gpu" not in item.keywords]
