"""A large last product is a function of its own in a package, and a CUDA graph leaves it out; on a CPU, by a fake recorder."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fusion_advisor.workload.weight_packing import leave_room
from tests.export import models

ROWS, WORDS = 96, 12288
"""Logits of 4.5 MiB."""


@dataclass
class Output:
    """Results of a model."""

    logits: torch.Tensor
    hidden: torch.Tensor


class Head(nn.Module):
    """A chain and a head of many words."""

    def __init__(self, *, views=True, reads_twice=False):
        super().__init__()
        self.up, self.head = nn.Linear(32, 32), nn.Linear(32, WORDS, bias=False)
        self.up.register_buffer("scale", torch.ones(1))
        self.views, self.reads_twice = views, reads_twice

    def forward(self, x):
        """Compute."""
        hidden = torch.nn.functional.gelu(self.up(x) * 1.5)
        logits = self.head(hidden)
        if self.views:
            logits = logits.view(4, ROWS // 4, WORDS)
        if self.reads_twice:
            hidden = hidden + logits.amax()
        return Output(logits=logits, hidden=hidden)


class Recorder:
    """Replays by computing again, into what was recorded."""

    def __init__(self):
        self.recorded = []

    def is_recording(self):
        return False

    def record(self, run):
        output = run()
        self.recorded.append(output)

        def replay():
            again = run()
            output.hidden.copy_(again.hidden)
            if not isinstance(output.logits, torch.Tensor):
                for one, other in zip(output.logits.given, again.logits.given, strict=True):
                    if isinstance(one, torch.Tensor):
                        one.copy_(other)
            else:
                output.logits.copy_(again.logits)

        return output, replay


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """Export a model; return it with its call and the imported package."""

    def export(name, **options):
        torch.manual_seed(0)
        model, x = Head(**options).eval(), torch.randn(ROWS, 32)
        _, _, fused = models.fused(lambda: (model, {"x": x}))
        fused.export(tmp_path / name)
        fused.revert()
        monkeypatch.syspath_prepend(tmp_path / name)
        return model, x, importlib.import_module(name), (tmp_path / name / name / "forward.py").read_text()

    return export


@torch.no_grad()
@pytest.mark.parametrize("views", [True, False])
def test_the_product_is_made_behind_the_graph(exported, views):
    model, _, package, source = exported(f"late_head_{views}".lower(), views=views)
    assert "    head = late(last_product, model, gelu)\n" in source
    inputs = [torch.randn(ROWS, 32) for _ in range(4)]
    package.apply(model)
    launched = [model(x=one) for one in inputs]
    package.revert(model)
    recorder = Recorder()
    package.apply(model, cuda_graph=True, recorder=recorder)
    found = [model(x=one) for one in inputs]
    (recorded,) = recorder.recorded
    assert isinstance(recorded.logits, package._graphs.Late)
    assert package.fallbacks(model) == {}
    for one, other in zip(found, launched, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.hidden, other.hidden)
    assert len({one.logits.data_ptr() for one in found}) == len(inputs)
    package.revert(model)


@torch.no_grad()
def test_a_product_that_is_read_again_stays_in_the_graph(exported):
    model, x, package, source = exported("read_twice", views=False, reads_twice=True)
    assert "last_product" not in source
    package.apply(model)
    assert model(x=x).logits.shape == (ROWS, WORDS)
    assert package.fallbacks(model) == {}
    package.revert(model)


ODD_WORDS = 1025


class OddHead(nn.Module):
    """A chain and a head of an odd width, whose rows are stored in place: 4.5 MB of logits in 16 bits."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, ODD_WORDS, bias=False)

    def forward(self, x):
        """Compute."""
        hidden = torch.nn.functional.gelu(self.norm(x) * 1.5)
        return Output(logits=self.head(hidden), hidden=hidden)


def odd_head():
    torch.manual_seed(0)
    model = OddHead().bfloat16().eval()
    leave_room(model)
    return model, {"x": torch.randn(2, 1100, 32, dtype=torch.bfloat16)}


@torch.no_grad()
def test_a_head_of_an_odd_width_is_made_behind_the_graph(tmp_path, monkeypatch):
    model, inputs, fused = models.fused(odd_head)
    assert "odd-width-gemm" in {row.id for row in fused.report.rewrites if row.status == "kept"}
    expected = fused(**inputs)
    fused.export(tmp_path / "late_odd_head")
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / "late_odd_head")
    package, recorder = importlib.import_module("late_odd_head"), Recorder()
    model, _ = odd_head()
    package.apply(model, cuda_graph=True, recorder=recorder)
    found = [model(**inputs) for _ in range(3)]
    (recorded,) = recorder.recorded
    assert isinstance(recorded.logits, package._graphs.Late) and package.fallbacks(model) == {}
    assert all(torch.equal(one.logits, expected.logits) for one in found)
    assert len({one.logits.data_ptr() for one in found}) == 3
    package.revert(model)


def replace_parameter(model):
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))


def replace_buffer(model):
    model.up._buffers["scale"] = torch.ones(1)


def add_hook(model):
    model.up.register_forward_hook(lambda module, given, result: result + 1)


def other_dtype(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


@torch.no_grad()
@pytest.mark.parametrize("with_graph", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replace_parameter, "a parameter or buffer is another one"), (replace_buffer, "a parameter or buffer is another one"),
        (add_hook, "a hook was added"), (other_dtype, "parameters have another dtype"),
    ],
)  # fmt: skip
def test_a_model_that_changed_runs_its_own_forward(exported, change, reason, with_graph):
    """A graph that was replayed before the model was looked at hands nothing out."""
    model, x, package, _ = exported(f"changed_{change.__name__}_{with_graph}".lower())
    options = {"cuda_graph": True, "recorder": Recorder()} if with_graph else {}
    package.apply(model, **options)
    for _ in range(3):
        model(x=x)
    assert package.fallbacks(model) == {}
    change(model)
    if change is other_dtype:
        with pytest.raises(RuntimeError):  # the model's own forward refuses it
            model(x=x)
    else:
        found = model(x=x)
        expected = Head.forward(model, x)
        assert torch.equal(found.logits, expected.logits)
    assert [words.startswith(reason) for words in package.fallbacks(model)] == [True]
    package.revert(model)
