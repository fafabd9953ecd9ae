"""A patch puts the kernels into a copy of the model's source: the fused model's bits, and the original for any other call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.llama import modeling_llama

import fusion_advisor
from fusion_advisor.errors import CannotExport, ExportExists
from tests.export import models
from tests.export.models import QUICK
from tests.export.patch.applied import loaded, patched

SITE_PACKAGES = Path(transformers.__file__).parent.parent


class Counted:
    """Stands for a function of a kernels' package, and counts the calls that it served."""

    def __init__(self, site):
        self.site, self.served = site, 0

    def __call__(self, *args):
        found = self.site(*args)
        self.served += found is not None
        return found


def counted(module, package, name):
    """Count the served calls of a patched module."""
    counter = Counted(getattr(getattr(module, package), name))
    setattr(getattr(module, package), name, counter)
    return counter


def test_gpt2s_gelu_in_a_copy_of_transformers(tmp_path):
    _, _, fused = models.fused(models.gpt2)
    left_out = fused.export(tmp_path / "gpt2", format="patch")
    assert any("add_layernorm" in line and "branch or a loop" in line for line in left_out)
    fused.revert()
    folder = patched(tmp_path / "gpt2", "gpt2_kernels", SITE_PACKAGES, tmp_path / "copy")
    text = (folder / "transformers/activations.py").read_text()
    assert "import gpt2_kernels\n" in text
    assert "        return 0.5 * input * (1.0 + torch.tanh(" in text  # the fallback
    with loaded(folder / "transformers/activations.py", "transformers.activations", tmp_path / "gpt2") as module:
        own, new = NewGELUActivation(), module.NewGELUActivation()
        x = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.equal(torch.compile(new, fullgraph=True, backend="eager")(x), new(x))
        counter = counted(module, "gpt2_kernels", "gelu_tanh")
        with torch.no_grad():
            found, truth = new(x), own(x.double())
            assert counter.served == 1
            error, eager = ((one.double() - truth).norm() / truth.norm() for one in (found, own(x)))
            assert error <= 1.5 * eager + 1e-7
            for other in (x[:1], x.double(), x.transpose(0, 1).contiguous().transpose(0, 1), x.half()):
                assert torch.equal(new(other), own(other))
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(new(x), own(x))
        asked = x.clone().requires_grad_()
        new(asked).sum().backward()
        assert asked.grad is not None
        assert new(x.to("meta")).is_meta  # another device
        assert counter.served == 1


def test_the_whole_model_with_the_patched_gelu_has_the_fused_bits(tmp_path):
    model, inputs, fused = models.fused(models.gpt2, skip=("add_layernorm", "embedding_embedding_add_layer_norm_633b"))
    kept = {row.kernel for row in fused.report.fusions if row.status == "kept"}
    with torch.no_grad():
        expected = fused(**inputs).logits
    fused.export(tmp_path / "whole", format="patch")
    fused.revert()
    folder = patched(tmp_path / "whole", "whole_kernels", SITE_PACKAGES, tmp_path / "copy")
    with loaded(folder / "transformers/activations.py", "transformers.activations", tmp_path / "whole") as module:
        counter = counted(module, "whole_kernels", "gelu_tanh")
        for block in model.transformer.h:
            block.mlp.act = module.NewGELUActivation()
        with torch.no_grad():
            found = model(**inputs).logits
    assert counter.served == 3
    if kept == {"gelu_tanh"}:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected)


class Normed(nn.Module):
    """RMSNorm of transformers' own between linear layers."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = modeling_llama.LlamaRMSNorm(64, eps=eps)

    def forward(self, x):
        """Normalise in between."""
        return self.down(self.norm(self.up(x)))


def test_llamas_rmsnorm_in_a_copy_of_transformers(tmp_path):
    torch.manual_seed(0)
    model, x = Normed().eval(), torch.randn(4, 16, 64)
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
    fused = fusion_advisor.apply(model, {"x": x}, **QUICK)
    with torch.no_grad():
        expected = fused(x=x)
    fused.export(tmp_path / "normed", format="patch")
    fused.revert()
    path = "transformers/models/llama/modeling_llama.py"
    folder = patched(tmp_path / "normed", "normed_kernels", SITE_PACKAGES, tmp_path / "copy")
    with loaded(folder / path, "transformers.models.llama.modeling_llama", tmp_path / "normed") as module:
        counter = counted(module, "normed_kernels", "rmsnorm")
        assert "input_dtype = hidden_states.dtype" in (folder / path).read_text().split("return fused\n")[1]  # the whole forward
        own = model.norm
        with torch.no_grad():
            new = module.LlamaRMSNorm(64, eps=1e-6)
            new.load_state_dict(own.state_dict())
            model.norm = new
            assert torch.equal(model(x=x), expected)
            assert counter.served == 1
            assert torch.equal(new(x[:2]), own(x[:2]))
            other = module.LlamaRMSNorm(64, eps=1e-3)  # the kernel holds 1e-6
            assert torch.equal(other(x), modeling_llama.LlamaRMSNorm(64, eps=1e-3)(x))
        new(x).sum().backward()
        assert new.weight.grad is not None
        assert counter.served == 1


def test_llamas_layer_with_its_add_and_norm(tmp_path):
    """The add lies in the decoder layer and the norm in its module: the statements of the layer stand for both."""
    model, inputs, fused = models.fused(models.llama)
    left_out = fused.export(tmp_path / "llama", format="patch")
    fused.revert()
    assert any(" add_rmsnorm, 2 of its sites" in line for line in left_out)  # which chain is F1 depends on times
    path = "transformers/models/llama/modeling_llama.py"
    folder = patched(tmp_path / "llama", "llama_kernels", SITE_PACKAGES, tmp_path / "copy")
    with loaded(folder / path, "transformers.models.llama.modeling_llama", tmp_path / "llama") as module:
        norms, ropes = (counted(module, "llama_kernels", name) for name in ("add_rmsnorm", "rope_qk"))
        new = module.LlamaForCausalLM(model.config).eval()
        new.load_state_dict(model.state_dict())
        with torch.no_grad():
            found, eager = new(**inputs).logits, model(**inputs).logits
            truth = model.double()(**inputs).logits
    assert (norms.served, ropes.served) == (3, 3)
    error, own = ((one.double() - truth).norm() / truth.norm() for one in (found, eager))
    assert error <= 2 * own


def test_the_exported_tests_of_the_kernels_pass(tmp_path):
    _, _, fused = models.fused(models.bert)
    fused.export(tmp_path / "bert", format="patch")
    fused.revert()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", str(tmp_path), "tests"],
        cwd=tmp_path / "bert", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


USERS = """
import torch


class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(32, 32), 2.0

    def forward(self, x):
        hidden = self.linear(x)
        twice = hidden * self.scale
        hidden = torch.tanh(twice) + hidden
        return hidden, hidden.sum()


def make():
    torch.manual_seed(0)
    return Mine().eval(), {"x": torch.randn(64, 32)}
"""


def test_a_users_file_and_its_constants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine

    model, inputs = mine.make()
    fused = fusion_advisor.apply(model, inputs, **QUICK)
    fused.revert()
    try:
        fused.export(tmp_path / "out", format="patch")
    except CannotExport as error:
        pytest.fail(str(error))
    patched(tmp_path / "out", "out_kernels", tmp_path, tmp_path / "copy")
    text = (tmp_path / "copy" / "mine.py").read_text()
    assert text.index("fused = out_kernels.") < text.index("twice = hidden * self.scale")
    assert "    hidden = fused" in text
    with pytest.raises(ExportExists):
        fused.export(tmp_path / "out", format="patch")
    with loaded(tmp_path / "copy" / "mine.py", "mine", tmp_path / "out") as module:
        new, _ = module.make()
        with torch.no_grad():
            torch.testing.assert_close(new(**inputs), model(**inputs))
            new.scale = 3.0  # the kernel holds 2.0
            model.scale = 3.0
            assert torch.equal(new(**inputs)[0], model(**inputs)[0])
    sys.modules.pop("mine")


class Split(nn.Module):
    """Its one chain lies on both sides of a branch."""

    def forward(self, x, twice=False):
        """Compute."""
        y = x.tanh()
        if twice:
            y = y * 2
        return y.sigmoid()


def test_a_run_with_nothing_to_express_says_why_and_writes_nothing(tmp_path):
    fused = fusion_advisor.apply(Split().eval(), {"x": torch.randn(64, 64)}, **QUICK)
    with pytest.raises(CannotExport, match="both sides of a branch"):
        fused.export(tmp_path / "out", format="patch")
    assert list(tmp_path.iterdir()) == []
    fused.revert()
