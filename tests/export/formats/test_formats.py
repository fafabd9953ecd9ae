"""Each format by the command and from Python: what is wrong is said before anything is written."""

from __future__ import annotations

import pytest

import fusion_advisor
from fusion_advisor.cli.app import main
from fusion_advisor.cli.common import core
from fusion_advisor.errors import BadFactory, CannotExport, ExportExists, UsageError
from fusion_advisor.export.formats.names import FORMATS
from fusion_advisor.export.formats.write import write_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.report.first_screen import next_steps
from tests.export.models import QUICK

SOURCE = """
import torch


class Gated(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 0.5 + x


def make():
    return Gated().eval(), {"x": torch.randn(64, 64)}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with its request, and the file of its factory."""
    folder = tmp_path_factory.mktemp("run")
    factory = folder / "gated.py"
    factory.write_text(SOURCE)
    loaded = core.load_workload(core.make_request(model_id=f"{factory}:make"))
    fused = fusion_advisor.apply(loaded.model, loaded.kwargs, run_dir=folder / "kept", **QUICK)
    fused.revert()
    (folder / "kept" / "request.json").write_text(core.dump_request(loaded.request))
    return folder / "kept", factory, fused


@pytest.mark.parametrize("form", ["patch", "kernels"])
def test_the_command_writes_the_format(run, form, tmp_path, capsys):
    command = ["export", str(run[0]), "--to", str(tmp_path / "out"), "--format", form]
    assert main(command) == 0
    assert f"next: pytest {tmp_path / 'out' / 'tests'}" in capsys.readouterr().out
    expected = {"patch": "out_kernels.patch", "kernels": "build.toml"}[form]
    assert (tmp_path / "out" / expected).is_file()
    assert main(command) == ExportExists.exit_code
    assert main([*command, "--force"]) == 0


def test_a_format_that_is_unknown_is_refused_by_both(run, tmp_path, capsys):
    assert main(["export", str(run[0]), "--to", str(tmp_path / "out"), "--format", "onnx"]) == UsageError.exit_code
    shown = capsys.readouterr().err
    assert all(form in shown for form in ("`onnx`", *FORMATS))
    with pytest.raises(UsageError, match="`onnx` is not known"):
        run[2].export(tmp_path / "out", format="onnx")
    assert not (tmp_path / "out").exists()


def test_only_a_package_ships_compiled_kernels(run, tmp_path, capsys):
    command = ["export", str(run[0]), "--to", str(tmp_path / "out"), "--format", "patch", "--with-cache"]
    assert main(command) == UsageError.exit_code
    assert "`patch` ships no compiled kernels" in capsys.readouterr().err
    with pytest.raises(UsageError, match="`kernels` ships no compiled kernels"):
        run[2].export(tmp_path / "out", format="kernels", with_cache=True)


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_folder_that_is_there_is_left_alone(run, form, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ExportExists):
        write_plan(
            core.load_workload(core.make_request(model_id=f"{run[1]}:make")), load_plan(run[0]), tmp_path / "out", form=form
        )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_factory_that_is_gone_is_named_in_each_format(run, form, tmp_path):
    place = run[1].with_name("elsewhere.py")
    run[1].rename(place)
    try:
        with pytest.raises(BadFactory, match="there is no file"):
            core.export_run(run[0], tmp_path / "out", force=False, trust_remote_code=False, form=form)
    finally:
        place.rename(run[1])
    assert not (tmp_path / "out").exists()


def test_the_report_names_every_format(run):
    shown = " ".join(step.sentence for step in next_steps(load_plan(run[0]).report))
    for form in FORMATS:
        assert form in shown


def test_a_training_step_has_no_export_in_any_format(run, tmp_path):
    exporter, run[2].exporter = run[2].exporter, None
    try:
        with pytest.raises(CannotExport, match="training step"):
            run[2].export(tmp_path / "out", format="patch")
    finally:
        run[2].exporter = exporter
