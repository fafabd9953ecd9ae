"""A kernel repository: layers by the rules of the library that loads it, with the fused model's bits and the class's own forward.

``with_kernels.py`` does the same with the library itself, where it is installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import tomllib
from types import MethodType

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fusion_advisor
from tests.export.models import QUICK


class Normed(nn.Module):
    """RMSNorm of transformers' own between linear layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = LlamaRMSNorm(64, eps=1e-6)

    def forward(self, x):
        """Normalise in between, and gate at the end."""
        y = self.down(self.norm(self.up(x)))
        return torch.tanh(y) * 0.5 + y


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model, its input, the fused model's output, the repository and what is left out of it."""
    torch.manual_seed(0)
    model, x = Normed().eval(), torch.randn(4, 16, 64)
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
    fused = fusion_advisor.apply(model, {"x": x}, **QUICK)
    with torch.no_grad():
        expected = fused(x=x)
    folder = tmp_path_factory.mktemp("export") / "my-normed"
    left_out = fused.export(folder, format="kernels")
    fused.revert()
    return model, x, expected, folder, left_out


def load(folder):
    """Import the variant for this machine as the library does: under its id, by the path of its ``__init__.py``."""
    variant = folder / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def test_a_norm_is_a_layer_with_the_fused_bits(exported):
    model, x, expected, folder, _ = exported
    kernel = load(folder)
    layer = kernel.layers.RMSNorm
    assert layer.__init__ is nn.Module.__init__  # the library refuses layers with state
    own = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert own <= {"can_torch_compile", "has_backward"}
    assert list(inspect.signature(layer.forward).parameters) == list(inspect.signature(LlamaRMSNorm.forward).parameters)
    hidden = model.up(x).detach()
    with torch.no_grad():
        norm = kernel.layers.sites.rmsnorm(model.norm, hidden)
        y = model.down(norm)
        rest = next(name for name in kernel.__all__ if name not in ("rmsnorm", "layers"))
        assert torch.equal(getattr(kernel, rest)(y), expected)
        model.norm.forward = MethodType(layer.forward, model.norm)
        try:
            assert torch.equal(model.norm(hidden), norm)
            few = torch.randn(2, 64)
            assert torch.equal(model.norm(few), LlamaRMSNorm.forward(model.norm, few))
            model.norm.variance_epsilon = 1e-3  # the kernel holds 1e-6
            assert torch.equal(model.norm(hidden), LlamaRMSNorm.forward(model.norm, hidden))
        finally:
            model.norm.variance_epsilon = 1e-6
            del model.norm.forward
    asked = hidden.clone().requires_grad_()
    layer.forward(model.norm, asked).sum().backward()
    assert asked.grad is not None


def test_what_is_no_layer_is_said(exported):
    *_, folder, left_out = exported
    assert any(line.startswith("no layer for") and "forward computes more than the chain" in line for line in left_out)
    assert all(line in (folder / "README.md").read_text() for line in left_out)


def test_the_repositorys_files(exported):
    *_, folder, _ = exported
    build = tomllib.loads((folder / "build.toml").read_text())
    metadata = json.loads((folder / "build/torch-cpu/metadata.json").read_text())
    assert build["general"]["name"] == metadata["name"] == "my-normed"
    assert build["general"]["backends"] == [metadata["backend"]["type"]] == ["cpu"]
    assert "torch-noarch" in build
    names = {path.relative_to(folder / "build/torch-cpu") for path in (folder / "build/torch-cpu").rglob("*.*") if path.is_file()}
    sources = folder / "torch-ext" / "my_normed"
    own = {path.relative_to(sources) for path in sources.rglob("*") if path.is_file()}
    assert {str(one) for one in names if "__pycache__" not in str(one)} - {str(one) for one in own} == {"metadata.json"}


def test_the_exported_tests_of_the_kernels_pass(exported):
    *_, folder, _ = exported
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", str(folder), "tests"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
