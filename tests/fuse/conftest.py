"""One thread for all tests here: a thread pool costs milliseconds on tensors this small."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from fusion_advisor.capture.graph import retrace
from fusion_advisor.fuse.dynamo_backend import fuse_graph, optimise
from fusion_advisor.fuse.passes import gemm_epilogue


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def backend_with(options, **planted):
    """The backend of ``torch.compile`` with all the options of a run and what is planted in ``optimise``."""

    def backend(graph_module, example_inputs):
        return fuse_graph(graph_module, example_inputs, options, functools.partial(optimise, **planted))

    return backend


@pytest.fixture
def cpu_epilogue(monkeypatch):
    """A CPU's GEMMs are asked for their epilogue, which has the GELU with erf; yields a function that says it is another one.

    oneDNN is off: where the CPU has AVX-512 its GELU of an infinite number is NaN (torch 2.13).
    """

    def plant(gelu):
        monkeypatch.setattr(gemm_epilogue, "GELU_OF", {**gemm_epilogue.GELU_OF, "cpu": gelu})

    plant("gelu_erf")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=False):
            yield plant


@pytest.fixture
def slow_biases(monkeypatch):
    """GEMMs are slower with their biases in them, as on a GPU in fp32."""
    monkeypatch.setattr(retrace, "is_slower_with_bias", lambda *_: True)
