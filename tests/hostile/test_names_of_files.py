"""Names from a file are names, never routes: nothing is written or run outside a run's directory."""

from __future__ import annotations

import json

import pytest

from fusion_advisor.cli.app import main
from fusion_advisor.content import content_dir
from fusion_advisor.errors import UnsafeName
from fusion_advisor.files.safe_name import path_inside, why_unsafe
from fusion_advisor.records.serialize import load_report, read_report
from tests.report.make_fixtures import DIRECTORY


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\..\\b", "C:\\x", "a\0b", "a\nb", ".hidden", "-rf", "CON",
     "kernels/nul.py", "com1.txt", "a.", "a/b/c/d/e", "x" * 300, "~/x", "$HOME", "\u202ex", "a b"],
)  # fmt: skip
def test_a_name_is_no_route(tmp_path, name):
    with pytest.raises(UnsafeName) as caught:
        path_inside(tmp_path, name)
    assert caught.value.code == "FA501"
    assert caught.value.exit_code == 9


def test_names_of_ours_are_names():
    for path in content_dir("reports").glob("examples/*/report.json"):
        for fusion in read_report(path).fusions:
            assert [why_unsafe(kernel.path) for kernel in fusion.rendered] == [""] * len(fusion.rendered)


@pytest.mark.parametrize("link", ["kernels", "kernels/F1.py"])
def test_a_link_leads_nowhere(tmp_path, link):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(outside if link == "kernels" else outside / "victim")
    with pytest.raises(UnsafeName, match="symbolic link"):
        path_inside(run, "kernels/F1.py")


def test_a_run_directory_that_is_reached_by_a_link_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert path_inside(tmp_path / "link", "kernels/F1.py") == tmp_path / "link" / "kernels" / "F1.py"


@pytest.mark.parametrize("path", ["../victim", "/victim", "kernels/victim"])
def test_writing_a_run_overwrites_nothing_outside(tmp_path, path):
    from fusion_advisor.cli.common.run_dir import write_run

    (tmp_path / "victim").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "kernels").symlink_to(tmp_path)
    document = json.loads((DIRECTORY / "applied.json").read_text())
    for fusion in document["fusions"]:
        for kernel in fusion["rendered"]:
            kernel["path"] = path
    with pytest.raises(UnsafeName):
        write_run(load_report(json.dumps(document)), run, ())
    assert (tmp_path / "victim").read_text() == "precious"


def test_csv_through_a_link_is_refused(tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.json").write_bytes((DIRECTORY / "applied.json").read_bytes())
    (run / "csv").symlink_to(outside)
    assert main(["report", str(run), "--format", "csv"]) == 9
    assert "symbolic link" in capsys.readouterr().err
    assert list(outside.iterdir()) == []


def test_a_planted_pyc_does_not_run(tmp_path):
    """A run directory that was given away may hold ``__pycache__``; an unchecked one would be taken for the kernel."""
    import importlib.util
    import py_compile

    from fusion_advisor.codegen.common.interface import Rendered
    from fusion_advisor.codegen.triton.backend import load_source

    pytest.importorskip("triton")
    path, evil = tmp_path / "kernels" / "F1.py", tmp_path / "evil.py"
    path.parent.mkdir()
    path.symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("precious")
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(evil), cfile=importlib.util.cache_from_source(str(path)), invalidation_mode=mode)
    rendered = Rendered(backend="triton", entry="fa_x", source="VALUE = 7\n", suffix=".py")
    assert load_source(rendered, path).VALUE == 7
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "victim").read_text() == "precious"
    assert path.read_text() == "VALUE = 7\n"
