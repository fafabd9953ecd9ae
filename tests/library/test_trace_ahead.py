"""Patterns that are traced while the model is loaded: by a process of their own, that ends with the loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fusion_advisor.files import private_folder
from fusion_advisor.library import kept_patterns, patterns, trace_ahead
from fusion_advisor.library.discover import list_kernels
from fusion_advisor.library.spec import CHAIN

ROOT = Path(__file__).parents[2]
NAMES = ("gelu_tanh", "swiglu")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    private_folder._of_this_process.cache_clear()
    for cached in (patterns._traced, patterns._first_traced, patterns._arithmetic_of):
        cached.cache_clear()
    return tmp_path / "cache" / "fusion-advisor" / "patterns"


def in_a_new_process(cache, then, **environment):
    """Run a block under ``traced_ahead`` where torch is not loaded; returns what it prints."""
    program = (
        "import json, sys; from fusion_advisor.library.trace_ahead import traced_ahead\n"
        f"import fusion_advisor.library.trace_ahead as ahead\n{then}\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    home = {"XDG_CACHE_HOME": str(cache.parents[1]), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **home, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_traced_is_found_by_the_process_that_loads(cache):
    """The keys of both processes are one: versions, modes, manifest, reference."""
    some = [spec for spec in list_kernels() if spec.name in NAMES]
    wait = "import time, glob, os\nwith traced_ahead():\n    end = time.monotonic() + 90\n"
    wait += f"    while time.monotonic() < end and not all(map(glob.glob, {[f'{cache}/{name}-first-*' for name in NAMES]})):\n"
    wait += "        time.sleep(0.1)\n"
    assert in_a_new_process(cache, wait) == ["false"], "the process that loads has no torch by this"
    for spec in some:
        found = kept_patterns.kept_patterns(spec, patterns._source(spec), of="first")
        assert found == tuple(patterns._trace_patterns(spec, most_shapes=1))


def test_the_process_ends_with_the_block(cache):
    then = "import subprocess\nmade = []\nnew = subprocess.Popen\n"
    then += "class Popen(new):\n    def __init__(self, *a, **k):\n        super().__init__(*a, **k); made.append(self)\n"
    then += "ahead.subprocess.Popen = Popen\n"
    then += "try:\n    with traced_ahead():\n        raise KeyError\nexcept KeyError:\n    print(len(made), made[0].returncode)\n"
    begun = time.monotonic()
    assert in_a_new_process(cache, then) == ["1 -15", "false"]
    assert time.monotonic() - begun < 60, "nothing waits for the patterns"
    assert not list(cache.glob("all-*"))


def test_nothing_is_started_where_torch_is_loaded(cache, monkeypatch):
    monkeypatch.setattr(trace_ahead.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    with trace_ahead.traced_ahead():
        pass


def test_nothing_is_started_where_all_is_kept_or_one_core_is_there(cache):
    refuse = "def refuse(*_, **__): raise SystemExit('started')\nahead.subprocess.Popen = refuse\n"
    block = "with traced_ahead():\n    print('loaded')\n"
    assert in_a_new_process(cache, f"{refuse}ahead._mark().touch()\n{block}") == ["loaded", "false"]
    for mark in cache.glob("all-*"):
        mark.unlink()
    assert in_a_new_process(cache, f"{refuse}ahead._cores = lambda: 1\n{block}") == ["loaded", "false"]


@pytest.mark.parametrize("fails", ["ahead._mark", "ahead.subprocess.Popen"])
def test_a_process_that_cannot_be_started_stops_nothing(cache, fails):
    refuse = f"def refuse(*_, **__): raise OSError('no more processes')\n{fails} = refuse\n"
    assert in_a_new_process(cache, f"{refuse}with traced_ahead():\n    print('loaded')\n") == ["loaded", "false"]


def test_all_patterns_are_traced_before_the_mark_says_so(cache, monkeypatch):
    some = tuple(spec for spec in list_kernels() if spec.name in NAMES or spec.kind != CHAIN)
    monkeypatch.setattr("fusion_advisor.library.discover.list_kernels", lambda: some)
    trace_ahead.trace_all()
    assert trace_ahead._mark().is_file()
    for spec in some:
        for of in ("first", "all"):
            assert (kept_patterns.kept_patterns(spec, patterns._source(spec), of=of) is not None) == (spec.kind == CHAIN)


def test_the_working_directory_has_no_say(cache, tmp_path):
    """The search path is handed over: a folder of this name in the working directory is not imported."""
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    path = json.dumps([entry for entry in sys.path if entry not in ("", str(tmp_path))])
    program = trace_ahead._PROGRAM.replace("trace_all()", "import torch")
    done = subprocess.run([sys.executable, "-P", "-c", program, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "was_run").exists()
