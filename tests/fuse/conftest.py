"""One thread for all tests here: a thread pool costs milliseconds on tensors this small."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.passes import gemm_epilogue


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cpu_epilogue(monkeypatch):
    """A CPU's GEMMs are asked for their epilogue, which has the GELU with erf; returns a function that says it is another one."""

    def plant(gelu):
        monkeypatch.setattr(gemm_epilogue, "GELU_OF", {**gemm_epilogue.GELU_OF, "cpu": gelu})

    plant("gelu_erf")
    return plant
