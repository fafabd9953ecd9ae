"""An exported package runs where fusion_advisor is not, and gives the fused model's own bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.export import models

SCRIPT = Path(__file__).with_name("without_us.py")


def in_a_fresh_process(folder, name, model, inputs, fused):
    """Run the package's tests and compare it with the fused model, in a process without fusion_advisor."""
    with torch.no_grad():
        outputs = {key: value for key, value in fused(**inputs).items() if isinstance(value, torch.Tensor)}
    assert not fused.fallbacks
    expected = folder.parent / "expected.pt"
    torch.save({"state": model.state_dict(), "inputs": inputs, "outputs": outputs}, expected)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), str(folder), name, str(expected)], capture_output=True, text=True, check=False,
        env=environment, cwd=folder.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout


@pytest.mark.parametrize("make", [models.gpt2, models.llama, models.bert])
def test_a_package_gives_the_fused_models_bits_without_us(make, tmp_path):
    model, inputs, fused = models.fused(make)
    name = f"{make.__name__}_fused"
    assert fused.export(tmp_path / name) == ()
    assert fused.is_applied
    shown, printed = in_a_fresh_process(tmp_path / name, name, model, inputs, fused)
    assert shown["equal"]
    assert all(shown["equal"])
    assert shown["fallbacks"] == {}
    assert (shown["graphs"], shown["breaks"]) == (1, 0)
    assert shown["loaded"] == []
    assert shown["tests"] == 0, printed
    source = (tmp_path / name / name / "forward.py").read_text()
    assert source.count("for index in range(") == 1
