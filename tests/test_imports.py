"""Imports run one way between folders, each folder is one subject, and the package costs little to import."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fusion_advisor"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
ENTRY = "entry"
"""The package's own ``__init__`` and ``__main__``: the public functions and the command, above all folders."""


def folder_of(module):
    if module in ("fusion_advisor", "fusion_advisor.__main__"):
        return ENTRY
    path = MODULES[module]
    folder = path.parent.relative_to(PACKAGE)
    return "base" if folder == Path() else ".".join(folder.parts)


@functools.cache
def imports(module):
    """(imported module, whether it is for type checking only): lazy imports and ``import_module("…")`` included."""
    found = []

    def add(name, inside):
        found.append((name, inside))

    def walk(node, is_typing):
        for child in ast.iter_child_nodes(node):
            inside = is_typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
            if isinstance(child, ast.Import):
                for alias in child.names:
                    add(alias.name, inside)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    add(whole if whole in MODULES else child.module or "", inside)
            elif isinstance(child, ast.Call) and getattr(child.func, "id", "") == "import_module" and child.args:
                name = child.args[0]
                if isinstance(name, ast.Constant):
                    add(name.value, inside)
            walk(child, inside)

    walk(ast.parse(MODULES[module].read_text()), False)
    return found


def folder_graph():
    graph = {}
    for module in MODULES:
        own = graph.setdefault(folder_of(module), set())
        own |= {folder_of(name) for name, _ in imports(module) if name in MODULES} - {folder_of(module)}
    return graph


def cycle_in(graph):
    """A path that comes back to where it began, or None."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        for other in sorted(graph.get(name, ())):
            if found := visit(other):
                return found
        done.add(path.pop())
        return None

    return next((found for name in sorted(graph) if (found := visit(name))), None)


def test_imports_run_one_way_between_all_folders():
    graph = folder_graph()
    assert cycle_in(graph) is None
    graph["ir"] = graph["ir"] | {"cli"}  # the check itself: an import upward is found
    assert cycle_in(graph) is not None


def test_what_is_seen_what_is_found_and_what_is_shown_do_not_import_each_other():
    graph = folder_graph()
    parts = {"capture", "chains", "report"}
    for folder, imported in graph.items():
        if (own := folder.split(".")[0]) in parts:
            assert not {other.split(".")[0] for other in imported} & (parts - {own}), folder


def test_base_modules_import_nothing_of_ours():
    for module in MODULES:
        if folder_of(module) == "base":
            assert not [name for name, _ in imports(module) if name.startswith("fusion_advisor")], module


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_folder_is_one_subject(folder):
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 15, f"{folder.name} has {len(modules)} modules"
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert docstring, folder
    if folder != PACKAGE:
        assert len(docstring.splitlines()) <= 12, f"{folder.name}: a few lines say what goes in and what comes out"


def short(module):
    return module.removeprefix("fusion_advisor.")


def users(package, *, with_typing=False):
    return {
        short(module)
        for module in MODULES
        if any(name.split(".")[0] == package and (with_typing or not typing) for name, typing in imports(module))
    }


TORCH_FREE = ("base", "errors", "records", "chains", "ir", "lowering", "lowering.builder", "lowering.rules", "codegen.common",
              "fuse.plan", "report", "report.html", "report.terminal", "report.compare", "report.fleet",
              "report.shapes", "report.training", "report.ranks")  # fmt: skip
"""Folders that a laptop without torch can import."""


def test_torch_stays_where_it_runs():
    for module in users("torch"):
        assert folder_of(f"fusion_advisor.{module}") not in TORCH_FREE, module


def test_reading_on_a_laptop_imports_no_torch():
    names = [module for module in MODULES if folder_of(module) in TORCH_FREE] + ["fusion_advisor.cli.app"]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'triton', 'transformers', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_of_its_parts():
    code = (
        "import sys; import fusion_advisor; print(*sorted(n for n in sys.modules if n.startswith('fusion_advisor')))\n"
        "assert not {'torch', 'typer', 'rich', 'jinja2'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fusion_advisor"]


def test_a_saved_plans_start_imports_nothing_that_times_or_traces_a_step():
    """On an H200's host our own modules took longer to load than a saved plan to start: 2 to 9 ms each."""
    code = (
        "import sys; from fusion_advisor.fuse.live import restore_plan, saved_plan\n"
        "late = ('fuse.decide.instruments', 'fuse.decide.keep_rule', 'fuse.decide.trial', 'capture.trace',\n"
        "        'fuse.live.specialize', 'fuse.stages.try_', 'fuse.stages.scan_kernels', 'fuse.stages.collective_sites')\n"
        "print(*sorted(name for name in sys.modules if name.removeprefix('fusion_advisor.').startswith(late)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()


@pytest.mark.parametrize(
    ("package", "folders"),
    [
        ("triton", {"codegen.triton", "codegen.gemm", "codegen.recurrence"}),
        ("cuda", {"codegen.cuda", "codegen.gemm", "collectives", "export.copied"}),
        ("pandas", {"report.html"}),
        ("jinja2", {"codegen.common", "codegen.triton", "codegen.cuda", "codegen.cpp", "report", "report.html"}),
        ("nvtx", {"capture"}),
        ("transformers", {"workload"}),
        ("typer", {"cli", "cli.commands", "cli.common"}),
        ("rich", {"cli", "cli.commands", "cli.common", "report.terminal", "evaluate.bench"}),
    ],
)
def test_a_dependency_is_used_in_its_own_folders(package, folders):
    for module in users(package, with_typing=package in ("typer", "rich")):
        assert folder_of(f"fusion_advisor.{module}") in folders, module


def test_private_parts_of_torch_are_touched_in_one_folder():
    for module in MODULES:
        if folder_of(module) == "runtime.torch_internals":
            continue
        private = {name for name, _ in imports(module) if name.startswith("torch._")}
        assert not private, f"{module}: {private}"


READERS = ("records.serialize", "records.soundness", "records.hints")
"""They read and check files; all other modules of the folder only describe."""


def test_records_import_nothing_but_the_standard_library_and_each_other():
    standard = {"__future__", "enum", "dataclasses", "typing", "collections.abc"}
    for module in MODULES:
        if folder_of(module) == "records" and short(module) not in READERS:
            found = imports(module)
            assert {
                name for name, is_typing in found if not is_typing and not name.startswith("fusion_advisor.records")
            } <= standard
            assert {name for name, is_typing in found if is_typing} <= {"pandas"}
