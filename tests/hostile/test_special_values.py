"""Every pointwise op with a lowering on zeros of both signs, infinities, NaN, subnormals and the ends of the range."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from tests.hostile.special_cases import BINARY, DTYPES, UNARY, function, inputs, problem
from tests.kernel_cases.cpp_at_once import build_all
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
NAMES = (*UNARY, *BINARY)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(op, dtype) → what the C++ kernel gives."""
    folder, programs = tmp_path_factory.mktemp("special"), {}
    for name in NAMES:
        for dtype in DTYPES:
            given = inputs(name, DTYPES[dtype])
            programs[name, dtype] = (*lower_function(function(name), *given), given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        render = CppBackend().render
        rendered = {k: render(one.program, HEADER, tuning=Tuning(), fast_math=False) for k, (one, _, _) in programs.items()}
        built = build_all(list(rendered.values()), folder)
    found = {}
    for key, (one, ops, given) in programs.items():
        at = [op.index for op in ops if op.role not in ("op", "output")]
        output = torch.empty(given[0].shape, dtype=getattr(torch, ops[one.outputs[0]].outputs[0].dtype))
        built[rendered[key].entry].bind(one.program)(*(given[at.index(root)] for root in one.inputs), output)
        found[key] = output
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_an_op_gives_what_eager_gives(results, name, dtype):
    assert problem(results[name, dtype], name, DTYPES[dtype]) == ""
