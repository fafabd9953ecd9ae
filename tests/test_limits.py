"""No giants: functions have up to 60 lines and 25 branches, modules up to 400 lines."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "fusion_advisor"
MOST_LINES, MOST_BRANCHES, MOST_MODULE_LINES = 60, 25, 400
MOST_PATCHES = 150
"""Calls of ``monkeypatch.setattr`` in all tests: a patch breaks when its module moves, a parameter does not."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case)


def branches_of(function):
    """Decisions of a function and of those inside it: statements, conditional expressions, ``and``/``or``, comprehensions."""
    found = 0
    for node in ast.walk(function):
        found += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
    return found


def lines_of(function):
    """Lines of a function; a command's options are its signature, which does not count."""
    is_command = any(argument.annotation and "typer" in ast.unparse(argument.annotation) for argument in function.args.args
                     + function.args.kwonlyargs)  # fmt: skip
    start = function.body[0].lineno if is_command else function.lineno
    return function.end_lineno - start + 1


def large_functions(source):
    """(qualified name, lines, branches) of every function over a limit."""
    found = []

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            name = prefix + child.name if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else ""
            if isinstance(child, FUNCTIONS):
                lines, branches = lines_of(child), branches_of(child)
                if lines > MOST_LINES or branches > MOST_BRANCHES:
                    found.append((name, lines, branches))
            walk(child, f"{name}." if name else prefix)

    walk(ast.parse(source), "")
    return found


def paths():
    return [(path, path.relative_to(PACKAGE).as_posix()) for path in sorted(PACKAGE.rglob("*.py"))]


def all_large():
    """Every function of the package over a limit, with its size."""
    return {
        f"{short}:{name}": (lines, branches)
        for path, short in paths()
        for name, lines, branches in large_functions(path.read_text(encoding="utf-8"))
    }


def all_long():
    """Every module of the package over the limit, with its lines."""
    lengths = {short: len(path.read_text(encoding="utf-8").splitlines()) for path, short in paths()}
    return {short: lines for short, lines in lengths.items() if lines > MOST_MODULE_LINES}


def patches_in(source):
    """Count calls of ``setattr`` on a ``MonkeyPatch``, whatever it is called."""
    tree = ast.parse(source)
    names = {"monkeypatch", *names_of_patches(tree)}
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "setattr"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in names
        for node in ast.walk(tree)
    )


def names_of_patches(tree):
    """Names that a ``with`` block or an assignment binds to a ``MonkeyPatch``, and parameters of that type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and node.optional_vars is not None and "MonkeyPatch" in ast.unparse(node.context_expr):
            yield ast.unparse(node.optional_vars)
        elif isinstance(node, ast.Assign) and "MonkeyPatch" in ast.unparse(node.value):
            yield from map(ast.unparse, node.targets)
        elif isinstance(node, ast.arg) and node.annotation is not None and "MonkeyPatch" in ast.unparse(node.annotation):
            yield node.arg


def test_tests_patch_few_attributes():
    found = {path.relative_to(TESTS).as_posix(): patches_in(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}
    most = sorted(found.items(), key=lambda item: -item[1])[:5]
    assert sum(found.values()) <= MOST_PATCHES, f"most in {most}"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def test(monkeypatch):\n    monkeypatch.setattr(a, 'b', 1)\n    monkeypatch.setattr('a.b', 1)", 2),
        ("def test(monkeypatch):\n    monkeypatch.setenv('A', '1')\n    other.setattr(a, 'b', 1)  # monkeypatch.setattr", 0),
        ("with pytest.MonkeyPatch.context() as patch:\n    patch.setattr(a, 'b', 1)", 1),
        ("patch = pytest.MonkeyPatch()\npatch.setattr(a, 'b', 1)", 1),
        ("def test(patch: pytest.MonkeyPatch):\n    patch.setattr(a, 'b', 1)", 1),
    ],
)
def test_patches_are_counted(source, count):
    assert patches_in(source) == count


def test_functions_stay_small():
    assert not all_large()


def test_modules_stay_short():
    assert not all_long()


@pytest.mark.parametrize(
    ("body", "is_large"),
    [
        ("x = 1\n" * (MOST_LINES - 1), False),
        ("x = 1\n" * MOST_LINES, True),
        ("x = a if b else c\n" * MOST_BRANCHES, False),
        ("x = a if b else c\n" * (MOST_BRANCHES + 1), True),
        ("x = " + " and ".join("a" * (MOST_BRANCHES + 2)), True),
        ("def inner():\n" + "    x = 1\n" * MOST_LINES, True),
    ],
)
def test_the_measure_sees_giants(body, is_large):
    source = "class Some:\n    def method(self):\n" + textwrap.indent(body, " " * 8)
    assert ("Some.method" in [name for name, _, _ in large_functions(source)]) is is_large


def test_a_commands_options_do_not_count():
    options = "".join(f"    option{n}: Annotated[int, typer.Option()] = 0,\n" for n in range(MOST_LINES))
    assert not large_functions(f"def command(\n{options}) -> None:\n    return\n")
    assert large_functions(f"def function(\n{options.replace('Annotated[int, typer.Option()]', 'int')}) -> None:\n    return\n")
