"""Statements of a file under a branch that asks the kernels first, and the unified diff of it."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.export.patch.express import called_with
from fusion_advisor.export.patch.statements import Statements


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One branch.

    Attributes:
        statements: the fallback.
        call: name of the package's function.
        results: source of the variables that the statements set.
        count: results of the kernel.
    """

    statements: Statements
    call: str
    results: tuple[str, ...]
    count: int


def edited(source: str, edits: Sequence[Edit], package: str) -> str:
    """Return a file's text with branches around some of its statements.

    Args:
        source: of the file.
        edits: of statements that do not overlap.
        package: that the kernels are imported from.
    """
    lines = source.splitlines(keepends=True)
    ending = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    for edit in sorted(edits, key=lambda one: one.statements.first_line, reverse=True):
        first, last = edit.statements.first_line - 1, edit.statements.last_line
        own = lines[first:last]
        if edit.statements.is_return:
            lines[first:first] = [f"{line}{ending}" for line in _early_return(edit, package)]
        else:
            lines[first:last] = [
                *(f"{line}{ending}" for line in _assignments(edit, package)),
                *(f"    {line}" if line.strip() else line for line in own),
            ]
    at = _import_line(ast.parse(source))
    lines.insert(at, f"import {package}{ending}")
    return "".join(lines)


def _early_return(edit: Edit, package: str) -> list[str]:
    """Return the lines that go before statements that end in a return."""
    indent = edit.statements.indent
    return [*_question(edit, package), f"{indent}    return {', '.join(edit.results)}"]


def _assignments(edit: Edit, package: str) -> list[str]:
    """Return the lines that go before statements that set names; the statements follow them, further in."""
    indent, results = edit.statements.indent, ", ".join(edit.results)
    if len(edit.results) > 1 and list(edit.results) == [f"fused[{number}]" for number in range(edit.count)]:
        results = "fused"
    return [*_question(edit, package), f"{indent}    {', '.join(edit.statements.leaves)} = {results}", f"{indent}else:"]


def _question(edit: Edit, package: str) -> list[str]:
    indent = edit.statements.indent
    call = f"{package}.{edit.call}({called_with(edit.statements)})"
    return [f"{indent}fused = {call}  # None for a call that was not verified", f"{indent}if fused is not None:"]


def _import_line(tree: ast.Module) -> int:
    """Return after which line the import goes: the last import before the first definition, or the docstring."""
    at = 0
    for place, one in enumerate(tree.body):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
        is_docstring = place == 0 and isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        if isinstance(one, ast.Import | ast.ImportFrom) or is_docstring:
            at = one.end_lineno or one.lineno
    return at


def diff(path: str, before: str, after: str) -> str:
    """Return a unified diff that ``git apply`` takes.

    Args:
        path: of the file, below the folder that the patch is applied in.
        before: its text.
        after: its text with the branches.
    """
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=3)
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{text}"
