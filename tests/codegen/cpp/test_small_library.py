"""Plain C++ functions are compiled once, and a missing compiler or a faulty source is an error that callers can go on from."""

from __future__ import annotations

import pytest

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.codegen.cpp.small_library import small_library


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_function_is_compiled_and_a_faulty_one_is_refused():
    source = 'extern "C" int fa_seven() { return 7; }'
    assert small_library("fa_seven", source).fa_seven() == 7
    assert small_library("fa_seven", source.replace("7;", "8;")).fa_seven() == 8
    with pytest.raises(KernelBuildFailed, match="fa_seven"):
        small_library("fa_seven", source.replace("7;", "nothing"))
    with pytest.raises(KernelBuildFailed):
        small_library("fa_other", source)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildFailed, match="no C\\+\\+ compiler"):
        small_library("fa_seven", "")
