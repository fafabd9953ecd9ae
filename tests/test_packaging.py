"""The wheel holds what the tree holds: a subpackage missing from ``packages`` would vanish from it without a word."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTENT = ("kernels", "templates", "reports")
SUFFIXES = {
    "kernels": (".toml", ".py", ".jinja"),
    "templates": (".toml", ".jinja"),
    "reports": (".jinja", ".css", ".js"),
}

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the source tree")


def tracked(*patterns: str) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("needs a git checkout")
    return {line for line in done.stdout.splitlines() if (ROOT / line).is_file()}


@pytest.fixture(scope="session")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build from a copy of the tracked files, so that no build/ folder of an earlier version can fill a gap."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected() -> set[str]:
    code = {name for name in tracked("fusion_advisor") if name.endswith((".py", ".json", ".typed"))}
    content = {
        f"fusion_advisor/{name}"
        for folder in CONTENT
        for name in tracked(folder)
        if name.endswith(SUFFIXES[folder]) and not name.startswith("reports/examples/")
    }
    return code | content


def test_the_wheel_holds_the_tree(wheel_files: set[str]) -> None:
    assert expected() - wheel_files == set(), "missing from the wheel"
    assert wheel_files - expected() == set(), "not wanted in the wheel"


def test_what_was_once_forgotten_is_there(wheel_files: set[str]) -> None:
    wanted = (
        "fusion_advisor/py.typed",
        "fusion_advisor/workload/presets/gpt2.json",
        "fusion_advisor/kernels/gelu_tanh/kernel.toml",
        "fusion_advisor/kernels/gelu_tanh/reference.py",
        "fusion_advisor/templates/cpp/pointwise.cpp.jinja",
        "fusion_advisor/templates/new_kernel/kernel.toml.jinja",
        "fusion_advisor/reports/html/report.css",
        "fusion_advisor/reports/markdown/report.md.jinja",
        "fusion_advisor/fuse/passes/__init__.py",
    )
    assert set(wanted) <= wheel_files
    assert not [name for name in wheel_files if name.endswith(".pyc") or "/examples/" in name or name.startswith("tests/")]


def test_every_package_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {str(Path(name).parent).replace("/", ".") for name in tracked("fusion_advisor") if name.endswith("/__init__.py")}
    assert declared == found | {f"fusion_advisor.{name}" for name in CONTENT}


def test_content_folders_are_no_packages() -> None:
    # An __init__.py in kernels/ would shadow the Hugging Face package of that name from the repository's root.
    found = [name for name in tracked(*CONTENT) if name.endswith("__init__.py")]
    assert not [name for name in found if not name.startswith("reports/examples/")]  # an exported package among them


def test_dynamo_finds_the_backend() -> None:
    found = [entry for entry in entry_points(group="torch_dynamo_backends") if entry.name == "fusion_advisor"]
    if not found:
        pytest.skip("fusion-advisor is not installed in this environment")
    assert callable(found[0].load())
