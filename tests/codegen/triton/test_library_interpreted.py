"""Every library kernel's Triton source in the interpreter, against fp64 and beside eager's own error.

All references and layouts of the manifest's small cases; the first reference also in every dtype and on rows wider than the
registers hold. ``kernels check`` runs the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_advisor.library.discover import list_kernels

HERE = Path(__file__).parents[2] / "kernel_cases"
NAMES = [spec.name for spec in list_kernels() if spec.gemv is None]  # those: gemm/test_problem.py
PARTS = 4
"""Processes: starting one takes two seconds, and workers of the test run share them."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_keep_to_eagers_own_error(part):
    names = NAMES[part::PARTS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "interpret_library.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == names
    assert all(count >= 8 for count, _ in found.values())
    assert not {name: complaints for name, (_, complaints) in found.items() if complaints}
