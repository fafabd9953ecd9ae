"""Backends are described in one place: no module outside their folders names them, and a new one is a folder and a line."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import fusion_advisor
from fusion_advisor.codegen import registry
from fusion_advisor.codegen.common.descriptor import Backend
from fusion_advisor.errors import UsageError
from fusion_advisor.ir.program import Program
from fusion_advisor.records import Tuning

PACKAGE = Path(fusion_advisor.__file__).parent
VERSIONS = {  # the installed package named "triton", whose version is shown or compared; no backend
    "runtime/environment.py", "cli/commands/doctor.py", "report/background_rows.py", "report/compare/comparison.py",
    "export/export.py", "ranks/run.py", "export/copied/kept_binaries.py",
}  # fmt: skip


def named_in(tree):
    """Lines with the name of a backend. ``cuda`` alone is a kind of device; in a list with another backend it is a backend."""
    others = set(registry.NAMES) - {"cuda", "cpu"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in others:
            yield node.lineno


@pytest.mark.parametrize("text", ['if backend == "triton": pass', 'OURS = ("cuda", "cpp")'])
def test_a_name_is_found(text):
    assert list(named_in(ast.parse(text)))


def test_no_module_outside_codegen_names_a_backend():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "codegen" and path.relative_to(PACKAGE).as_posix() not in VERSIONS
        for line in named_in(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize("one", registry.BACKENDS, ids=registry.NAMES)
def test_a_descriptor_tells_what_its_files_say(one):
    assert isinstance(one, Backend) and one.suffix.startswith(".") and one.title and set(one.device_kinds) <= {"cuda", "cpu"}
    assert one.maker().name == one.name
    assert set(one.tile_parameters) <= {field.name for field in fields(Tuning)}
    assert one.is_available() is (one.why_missing() == "")
    assert list((PACKAGE.parent / "templates" / one.name).glob("*.jinja"))
    from pygments.lexers import get_lexer_by_name

    assert get_lexer_by_name(one.lexer)


def test_names_that_are_none_are_refused():
    with pytest.raises(UsageError, match="no backend `metal`"):
        registry.backend("metal")


def test_the_first_of_a_device_is_preferred():
    assert [one.name for one in registry.backends_for("cuda")] == ["triton", "cuda"]
    assert [one.name for one in registry.backends_for("cpu")] == ["cpp"]
    assert registry.backends_for("mps") == ()


def test_a_backend_with_tile_parameters_has_launches_to_try():
    program = Program(dims=(4,), operands=(), values=(), stores=())
    for one in registry.BACKENDS:
        if not one.tile_parameters:
            with pytest.raises(NotImplementedError):
                one.search(program, None)


def test_a_backend_whose_kernels_do_not_run_on_the_device_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="--backend triton makes kernels for cuda, and the model is on cpu") as caught:
        registry.refuse_unready("triton", "cpu")
    assert "use cpp" in caught.value.hint_text
    with pytest.raises(UsageError, match="--backend cpp makes kernels for cpu, and the model is on cuda"):
        registry.refuse_unready("cpp", "cuda")
    for asked in ("triton", "cuda", "fastest", None):
        registry.refuse_unready(asked, "cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CXX", "true")
    registry.refuse_unready("triton", "cpu")
