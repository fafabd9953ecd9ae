"""One registry of codes: each class in the module of its subject, in the order of the codes, and imported from the package."""

from __future__ import annotations

import ast
import pickle
import traceback
from pathlib import Path

import pytest

from fusion_advisor import errors

FOLDER = Path(errors.__file__).parent
SUBJECTS = {"usage": "0", "model": "1", "machine": "2", "step": "3", "kernels": "4", "files": "5", "gates": "7", "ranks": "8"}
"""Module: first digit of its codes."""


def classes_of(module):
    """Names of a module's classes, in the order of the file."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def test_every_class_is_imported_from_the_package():
    modules = [path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"]
    assert set(modules) == {*SUBJECTS, "base"}
    assert sorted(errors.__all__) == sorted(name for module in modules for name in classes_of(module))


@pytest.mark.parametrize("module", SUBJECTS)
def test_the_first_digit_of_a_code_is_its_module_and_codes_are_in_order(module):
    codes = [getattr(errors, name).code for name in classes_of(module)]
    assert codes == sorted(codes)
    assert {code[:3] for code in codes} == {f"FA{SUBJECTS[module]}"}


def test_an_error_of_a_worker_process_keeps_its_class_and_its_facts():
    error = pickle.loads(pickle.dumps(errors.NoCapture(path="a/b")))
    assert type(error) is errors.NoCapture and error.facts == {"path": "a/b"} and str(error) == "there is no `a/b`"


def test_a_traceback_ends_with_the_note_and_the_hint():
    lines = traceback.format_exception(errors.UsageError(detail="the call has no tensor `x`", help="it has args.0"))
    assert lines[-1].strip() == "it has args.0"


def test_a_path_that_is_no_directory_is_not_looked_for_on_the_hub():
    said = errors.UnknownModel(model_id="./nothing")
    assert str(said) == "no model `./nothing`: there is no such directory" and said.note_text == ""
    assert "FILE.py:factory" in said.hint_text
    assert "on the Hugging Face Hub, and no such local directory" in str(errors.UnknownModel(model_id="nothing"))
