"""``--phase train`` as a whole, on a model of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fusion_advisor.capture import unchanged_step
from fusion_advisor.errors import NotTrainable
from fusion_advisor.fuse.modes.training import profile_training
from fusion_advisor.fuse.plan.options import Budgets, ProfileOptions
from fusion_advisor.records.serialize import dump_capture, dump_report, load_capture, load_report
from fusion_advisor.workload.load import load_workload
from fusion_advisor.workload.request import WorkloadRequest
from tests.tiny import BANDWIDTH

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x, labels=None):
        logits = self.head(self.norm(torch.nn.functional.gelu(self.up(x))))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}

def plain():
    return Net(), torch.randn(4, 16)

def labelled():
    return Net(), {"x": torch.randn(4, 16), "labels": torch.arange(4)}

def frozen():
    return Net().requires_grad_(False), torch.randn(4, 16)

def one_row():
    return nn.BatchNorm1d(4), torch.randn(1, 4)

class Remembers(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x):
        self.seen.mul_(0.9).add_(self.up(x).mean(0))
        return self.head(self.norm(self.seen * 1.0))

def remembers():
    return Remembers(), torch.randn(4, 16)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)

    def call(name, **more):
        loaded = load_workload(WorkloadRequest(model_id=f"net.py:{name}", device="cpu", phase="train"))
        options = ProfileOptions(
            warmup=1, runs=5, run_dir=tmp_path, run_id="r", steps=1, bandwidth=BANDWIDTH, budgets=Budgets(wall_s=0.02), **more
        )
        return loaded, *profile_training(loaded, options)

    return call


@pytest.mark.parametrize(("name", "loss"), [("plain", "the mean of the outputs in fp32"), ("labelled", "the model's own")])
def test_a_training_step_is_timed_traced_and_joined(run, name, loss):
    random = torch.get_rng_state()
    loaded, report, capture = run(name)
    assert torch.equal(torch.get_rng_state(), random)
    assert not loaded.model.training and all(parameter.grad is None for parameter in loaded.model.parameters())
    found = report.training
    assert (report.status, report.workload.phase, report.chains, report.captured, found.loss) == (
        "profiled", "train", (), None, loss,
    )  # fmt: skip
    assert found.forward_ns + found.backward_ns == report.before.device_ns and found.backward_ns > 0
    assert {row.path for row in found.modules} == {"up", "norm", "head", ""}
    assert len(report.before.wall.times_ns) >= 5
    named = sum(row.forward_ns + row.backward_ns for row in found.modules if row.path)
    assert report.quality.joined_share == pytest.approx(named / report.before.device_ns) and named > 0
    assert load_report(dump_report(report)) == report and load_capture(dump_capture(capture)) == capture
    assert (Path("trace.before.json.gz")).is_file()
    json.loads(dump_report(report))


def test_what_cannot_be_trained_is_told(run):
    with pytest.raises(NotTrainable, match=r"all of its parameters are frozen; call requires_grad_\(\)"):
        run("frozen")
    with pytest.raises(NotTrainable, match="ValueError: Expected more than 1 value per channel when training") as caught:
        run("one_row")
    with pytest.raises(NotTrainable, match="in the second step, not in the first, RuntimeError: Trying to backward"):
        run("remembers")
    assert (caught.value.code, caught.value.exit_code) == ("FA311", 4)


def test_nvtx_names_the_phases_of_a_training_step_too(run, monkeypatch):
    opened = []
    annotate = unchanged_step.nvtx.annotate
    monkeypatch.setattr(unchanged_step.nvtx, "annotate", lambda name, **more: opened.append(name) or annotate(name, **more))
    assert run("plain", nvtx=True)[1].training.backward_ns > 0
    assert list(dict.fromkeys(opened))[:5] == ["fa:warmup", "fa:baseline", "fa:step", "fa:module:up", "fa:module:norm"]
    assert opened[-1] == "fa:trace"


@pytest.mark.gpu
def test_on_a_gpu_nearly_all_of_the_backward_pass_has_a_module():
    loaded = load_workload(
        WorkloadRequest(model_id="distilgpt2", device="cuda", phase="train", weights="random", offline=True, seq_len=128)
    )
    report, _ = profile_training(loaded, ProfileOptions(warmup=2, runs=5))
    assert report.quality.launches == report.quality.kernels
    assert report.quality.joined_share > 0.9
    assert report.training.backward_ns > report.training.forward_ns > 0
    assert report.before.peak_memory_bytes > 2 * report.workload.parameter_bytes  # weights and gradients
