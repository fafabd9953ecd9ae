"""``fusion-advisor apply --phase train`` on a model of the user's own, from its command line to its files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusion_advisor.records import Status
from fusion_advisor.records.serialize import read_report
from tests.cli.conftest import Ran
from tests.fuse.modes.test_training import CODE


def test_apply_trains_the_model_of_a_factory_and_writes_every_view(run: Callable[..., Ran], tmp_path: Path) -> None:
    Path("net.py").write_text(CODE)
    options = ("--device", "cpu", "--no-compile", "--keep", "verified", "--runs", "3", "--steps", "1", "--warmup", "1")
    ran = run("apply", "net.py:labelled", "--phase", "train", *options, "-o", "step")
    torch.compiler.reset()
    assert ran.code == 0, ran.err
    report = read_report(Path("step/report.json"))
    kept = [fusion for fusion in report.fusions if fusion.status is Status.KEPT]
    assert kept and report.workload.phase == "train" and report.training is not None
    assert report.training.loss == "the model's own"
    assert {"forward", "backward"} >= {fusion.training_pass for fusion in kept}
    assert re.search(r"\d+ gradients compared with float64, all within the limit", " ".join(ran.out.split()))
    for name in ("report.html", "report.md", "trace.before.json.gz", "trace.after.json.gz", "capture.json.gz"):
        assert Path("step", name).is_file(), name
    assert "training step (forward, loss, backward)" in Path("step/report.md").read_text()
    shown = run("report", "step", "--format", "md")
    assert shown.code == 0 and "Pass" in shown.out


@pytest.mark.parametrize(("name", "words"), [("frozen", "all of its parameters are frozen"), ("one_row", "Expected more than 1")])
def test_a_model_that_cannot_be_trained_ends_with_an_error(run: Callable[..., Ran], name: str, words: str) -> None:
    Path("net.py").write_text(CODE)
    ran = run("apply", f"net.py:{name}", "--phase", "train", "--device", "cpu")
    assert ran.code == 4 and "error[FA311]" in ran.err and words in ran.err and "help: use --phase forward" in ran.err
