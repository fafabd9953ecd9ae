"""Symmetric memory: what is used of torch is there; GPUs that map each other's memory take a machine that has several."""

from __future__ import annotations

import inspect
import os

import pytest
import torch

from fusion_advisor.runtime.torch_internals import symmetric_memory


def test_torch_still_has_what_is_used():
    assert {"dtype", "device"} <= set(inspect.signature(symmetric_memory.symmetric.empty).parameters)
    assert list(inspect.signature(symmetric_memory.symmetric.rendezvous).parameters) == ["tensor", "group"]
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "buffer_ptrs")


def test_multicast_stays_off_and_a_cpu_has_no_such_memory(monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    with pytest.raises((RuntimeError, NotImplementedError)):
        symmetric_memory.shared_buffer(1 << 10, torch.device("cpu"), "0")
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
