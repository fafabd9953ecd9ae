from __future__ import annotations

import getpass
import platform
import re
import subprocess
import time

import pytest
import torch

from fusion_advisor.runtime import environment
from fusion_advisor.runtime.environment import checkout_commit, content_digest, describe_environment, measure_bandwidth


def test_the_cpu_is_described_without_who_and_where() -> None:
    found = describe_environment("cpu")
    assert found.device_kind == "cpu"
    assert found.device_name
    assert found.torch == torch.__version__
    assert found.python == platform.python_version()
    assert found.transformers
    assert found.cores >= 1
    assert found.device_memory_bytes > 2**28
    assert found.driver == ""
    text = repr(found)
    assert platform.node() not in text
    assert f"/{getpass.getuser()}" not in text


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_the_commit_of_a_checkout_says_whether_files_differ(tmp_path) -> None:
    assert checkout_commit(tmp_path) == ""
    git(tmp_path, "init")
    assert checkout_commit(tmp_path) == ""  # nothing was committed yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    commit = checkout_commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", commit)
    (tmp_path / "another").write_text("not tracked")
    assert checkout_commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert checkout_commit(tmp_path) == f"{commit}, changed"


def test_one_digest_tells_templates_apart(tmp_path, monkeypatch) -> None:
    for name in ("templates", "kernels"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(environment, "content_dir", lambda name: tmp_path / name)
    template = tmp_path / "templates" / "a.jinja"
    template.write_text("a")
    first = content_digest()
    (tmp_path / "templates" / "notes.txt").write_text("no template")
    assert content_digest() == first
    template.write_text("b")
    assert content_digest() != first
    template.rename(tmp_path / "kernels" / "a.py")
    assert len(content_digest()) == 12


def test_a_missing_compiler_is_an_empty_string(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert describe_environment("cpu").compiler == ""


def test_cpu_ceilings_are_plausible_and_quick() -> None:
    start = time.perf_counter()
    found = measure_bandwidth("cpu")
    # The limit is one second on an idle machine; a loaded one may be slower.
    assert time.perf_counter() - start < 5
    assert 10**8 < found.copy_bytes_per_s < 10**13
    assert 50 < found.launch_ns < 10**6


@pytest.mark.gpu
@pytest.mark.serial
def test_the_mixes_of_reading_and_writing_are_of_one_size() -> None:
    found = measure_bandwidth("cuda")
    for speed in (found.read_bytes_per_s, found.write_bytes_per_s, found.triad_bytes_per_s):
        # fills, sums, copies and triads of device memory are known to lie within a third of each other
        assert 0.6 < speed / found.copy_bytes_per_s < 1.6
