"""Packages with Triton and with CUDA C++ kernels, on a GPU, where fusion_advisor cannot be imported."""

from __future__ import annotations

import pytest
import torch

from tests.export import models
from tests.export.fresh import check_shown, in_a_fresh_environment


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("make", [models.gpt2, models.llama, models.bert])
def test_a_package_on_a_gpu_gives_the_fused_models_bits(make, backend, tmp_path):
    def on_gpu():
        model, inputs = make()
        moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        return model.cuda().half() if backend == "cuda" else model.cuda(), moved

    # what a package cannot hold is skipped, so that both sides compute the same
    skip = ("odd-width-gemm", "cuda-graph")
    model, inputs, fused = models.fused(on_gpu, backend=backend, graph=False, skip=skip)
    name = f"{make.__name__}_{backend}"
    left_out = fused.export(tmp_path / name)
    assert left_out == ()
    shown = in_a_fresh_environment(tmp_path, {name: (model, inputs, fused)})
    check_shown(shown[name])
    suffix = ".py" if backend == "triton" else ".cu"
    kernels = [path for path in (tmp_path / name / name / "kernels").iterdir() if path.name.startswith("fa_")]
    assert {path.suffix for path in kernels} == {suffix}
