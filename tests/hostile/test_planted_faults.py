"""Each planted fault is refused by the verifier, and each kernel without one is accepted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hostile import planted

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++",))), reason="needs g++")


def judge(found):
    """Print the table; every fault is refused and every right kernel passes."""
    for name, words in found.items():
        print(f"{name:60s} {words or 'accepted'}")  # noqa: T201
    missed = [name for name, words in found.items() if not words and ": right " not in name]
    wronged = [f"{name}: {words}" for name, words in found.items() if words and ": right " in name]
    assert not missed and not wronged, (missed, wronged)


def test_there_are_forty_faults_in_all_backends():
    assert len({(fault.name, fault.backend, fault.chain) for fault in planted.FAULTS}) == len(planted.FAULTS) >= 40
    assert {fault.backend for fault in planted.FAULTS} == {"cpp", "triton", "cuda"}


@needs_compiler
@pytest.mark.parametrize("backend", ["cpp", "cuda"])
def test_every_fault_in_cpp_and_cuda_is_refused(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        judge(planted.verdicts(backend, tmp_path))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_every_fault_in_triton_is_refused():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(planted.__file__))], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    judge(json.loads(done.stdout.splitlines()[-1]))
