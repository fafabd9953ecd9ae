from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpus import has_gpu_tests

HERE = Path(__file__).parent
MARKER = "pytest.mark." + "gpu"


@pytest.mark.parametrize(
    ("name", "text", "is_one"), [("test_a.py", MARKER, True), ("test_a.py", "", False), ("a.py", MARKER, False)]
)
def test_a_folder_has_gpu_tests_where_one_of_its_files_has(tmp_path, name, text, is_one):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_text(text)
    assert has_gpu_tests(tmp_path) is is_one


@pytest.mark.slow
def test_files_without_gpu_tests_are_not_imported_for_them(pytester_run):
    found = pytester_run("-m", "gpu")
    assert "1 passed" in found and "error" not in found.lower()
    assert "1 error" in pytester_run()


@pytest.fixture
def pytester_run(tmp_path):
    """Run pytest with this suite's conftest on a GPU test and a file that cannot be imported."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_ignore_collect\n"
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'gpu: on a GPU')\n"
    )
    (tmp_path / "test_gpu.py").write_text(f"import pytest\n@{MARKER}\ndef test_runs(): pass\n")
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "test_other.py").write_text("import no_such_module\n")

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", *arguments, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, check=False).stdout

    return run
