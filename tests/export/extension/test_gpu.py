"""Extensions built and run on a GPU: kernels of every kind, and what a run of a Llama kept, next to float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fusion_advisor.files.whole_folder import write_folder
from tests.export import models
from tests.export.extension import native


def built_and_tested(folder):
    """Build a repository's extension and run its tests; return what they printed."""
    for words in (["build.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "tests"]):
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.gpu
def test_the_exported_tests_pass_with_numbers(tmp_path):
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    listed = [op for op in native.ops() if is_hopper or not op.rendered.is_for_one_arch]
    write_folder(native.files(listed), tmp_path / "native", force=False)
    shown = built_and_tested(tmp_path / "native")
    assert "skipped" not in shown


@pytest.mark.gpu
def test_what_a_run_kept_is_built(tmp_path):
    def on_gpu():
        model, inputs = models.llama()
        return model.cuda().half(), {**inputs, "input_ids": inputs["input_ids"].cuda()}

    _, _, fused = models.fused(on_gpu, backend="cuda", graph=False, skip=("cuda-graph",))
    fused.export(tmp_path / "llama-kernels", format="kernels")
    fused.revert()
    shown = built_and_tested(tmp_path / "llama-kernels")
    assert "skipped" not in shown
    assert list((tmp_path / "llama-kernels" / "csrc").glob("*.cu"))
