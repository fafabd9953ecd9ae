"""Every library kernel in C++ passes the check of special values in three dtypes: the signs of its zeros are eager's too."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.hostile import library_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]


def test_every_library_kernel_passes_on_special_values(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = library_cases.verdicts(tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(found) > 140 and {dtype for _, _, dtype in found} == set(library_cases.DTYPES)
    assert {key: numerics.faults for key, numerics in found.items() if not numerics.is_passed} == {}
