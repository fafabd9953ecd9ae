"""C++ kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, outside Python.

One dtype and the first spelling of each manifest, at its small cases; `python -m tools.sanitize cpp` runs them all.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tools import sanitize_cpp

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and its sanitizers")


@pytest.mark.parametrize("sanitizer", sanitize_cpp.SANITIZERS)
def test_a_sanitizer_sees_each_planted_fault(sanitizer, tmp_path):
    seen = sanitize_cpp.planted(tmp_path, sanitizer)
    assert seen and all(seen.values()), seen


@pytest.mark.slow
def test_every_manifest_is_clean(tmp_path):
    names = sanitize_cpp.cpp_kernel_names()
    found = list(sanitize_cpp.manifest_calls(names, dtypes=("bfloat16",), most_elements=2**15, most_references=1))
    assert len({rendered.entry for rendered, _ in found}) >= len(names)
    assert not sanitize_cpp.run(found, "address", tmp_path / "all")


@pytest.mark.slow
def test_no_template_races(tmp_path):
    """Loops over elements, over dims, over rows, over one row's columns, with buffers of each thread, and side by side."""
    names = ("silu", "rope", "add_rmsnorm", "groupnorm", "softmax", "cross_entropy", "rope_qk")
    calls = sanitize_cpp.manifest_calls(names, dtypes=("bfloat16",), most_elements=2**15, most_references=1)
    assert not sanitize_cpp.run(sanitize_cpp.distinct(calls, "thread"), "thread", tmp_path / "all")


def test_the_rest_of_the_calls_is_made_after_a_fault(tmp_path):
    """A fault ends the process; the calls after it are made in another."""
    found = list(sanitize_cpp.manifest_calls(["silu"], dtypes=("float32",), most_elements=2**10, most_references=1))
    rendered, call = found[1]
    short = replace(call, label="short", buffers=tuple(content[:-4] for content in call.buffers))
    broken = [found[0], (rendered, short), *found[2:], (rendered, replace(short, label="last"))]
    faults = sanitize_cpp.run(broken, "address", tmp_path / "all")
    assert [fault.label for fault in faults] == ["short", "last"]
    assert all("heap-buffer-overflow" in fault.detail for fault in faults)
