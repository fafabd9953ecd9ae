"""Who may import whom, read off the source; and what importing the package costs."""

from __future__ import annotations

import ast
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


def imports(module):
    """(imported name, whether it is for type checking only) of every import in a module, nested ones included."""
    found = []

    def walk(node, is_typing):
        for child in ast.iter_child_nodes(node):
            inside = is_typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
            if isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.append((child.module or "", inside))
            walk(child, inside)

    walk(ast.parse(MODULES[module].read_text()), False)
    return found


def layer(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


BASE = {
    "records", "errors", "units", "content", "serialize", "collector", "frame_stack", "inside", "regular_file", "soundness",
}  # fmt: skip
"""Imported by all and importing nothing of the layers."""
ALLOWED = {
    "records": set(),
    "errors": set(),
    "content": set(),
    "units": set(),
    "collector": set(),
    "frame_stack": set(),
    "inside": {"errors"},
    "regular_file": set(),
    "soundness": {"records", "errors", "inside"},
    "serialize": {"records", "errors", "regular_file", "soundness"},
    "environment": {"records", "errors", "content"},
    "timing": BASE,
    "capture": BASE | {"timing"},
    "chains": BASE,
    "library": BASE | {"chains", "capture", "timing"},
    "bench": BASE | {"library", "capture", "timing", "environment", "report", "workload"},
    "workload": BASE | {"environment", "capture"},
    "fuse": BASE | {"capture", "chains", "library", "workload", "environment", "timing"},
    "report": BASE,
    "cli": BASE | {"report", "fuse", "library", "chains", "capture", "workload", "environment", "bench"},
    "__main__": {"cli"},
    "": {"fuse", "library", "records", "serialize", "workload"},
}


SHOWN_BY = "fusion_advisor.report.html.notebook"
"""What a report imports when a notebook asks it to show itself, and only then."""


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    own = layer(module)
    names = {name for name, _ in imports(module) if name.split(".")[0] == "fusion_advisor"}
    others = {layer(name) for name in names - ({SHOWN_BY} if own == "records" else set())} - {own, ""}
    assert others <= ALLOWED[own], f"{module} imports {others - ALLOWED[own]}"


def test_every_layer_has_a_rule_and_no_rule_is_a_cycle():
    assert {layer(module) for module in MODULES} == set(ALLOWED)
    seen = []

    def visit(name, path=()):
        assert name not in path, f"cycle: {(*path, name)}"
        for other in ALLOWED[name]:
            visit(other, (*path, name))
        seen.append(name)

    visit("__main__")


def users(package, *, with_typing=False):
    return {
        module
        for module in MODULES
        if any(name.split(".")[0] == package and (with_typing or not typing) for name, typing in imports(module))
    }


def test_torch_stays_where_it_runs():
    allowed = {"workload", "capture", "fuse", "timing", "bench"}
    inner = {"library.patterns", "library.build", "library.nvrtc", "environment", "cli.doctor"}
    inner |= {"library.accuracy", "library.check", "library.check_inputs", "library.source_of", "library.tuning"}
    inner |= {"library.philox", "library.gemv_choose", "library.gemv_torch", "library.gemv_around", "library.resemble"}
    inner |= {"library.gemm_cuda"}
    for module in users("torch"):
        short = module.removeprefix("fusion_advisor.")
        assert layer(module) in allowed or short in inner or short.startswith("library.backend_"), module


def test_what_reads_on_a_laptop_imports_no_torch_however_far():
    code = (
        "import sys\n"
        "import fusion_advisor, fusion_advisor.records, fusion_advisor.errors, fusion_advisor.units, fusion_advisor.records.serialize\n"
        "import fusion_advisor.chains.find, fusion_advisor.chains.rank\n"
        "import fusion_advisor.lowering.lower, fusion_advisor.library.match\n"
        "import fusion_advisor.fuse.plan.plan, fusion_advisor.fuse.plan.options, fusion_advisor.report.shared_rows, fusion_advisor.report.html.page\n"
        "import fusion_advisor.cli.app\n"
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


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("triton", {"library.backend_triton", "library.triton_shape", "library.gemv_triton"}),
        ("cuda", {"library.nvrtc", "library.backend_cuda", "library.gemv_cuda", "library.gemm_cuda", "library.memsets"}),
        ("pandas", {"fuse.steps", "chains.rank", "report.notebook", "records"}),
        (
            "jinja2",
            {
                "library.source",
                "library.backend_triton",
                "library.backend_cuda",
                "library.backend_cpp",
                "report.html",
                "report.markdown",
            },
        ),
        ("nvtx", {"capture.profile"}),
        ("transformers", None),
    ],
)
def test_a_dependency_is_used_in_its_own_place(package, allowed):
    for module in users(package):
        short = module.removeprefix("fusion_advisor.")
        assert layer(module) == "workload" if allowed is None else short in allowed, module


def test_the_terminal_belongs_to_the_command_line():
    for package in ("typer", "rich"):
        for module in users(package, with_typing=True):
            views = {f"fusion_advisor.{name}" for name in ("report.terminal", "report.trace_table", "bench.view")}
            assert layer(module) == "cli" or module in views, module


def test_private_parts_of_torch_are_touched_in_one_file():
    for module in MODULES:
        if module == "fusion_advisor.runtime.torch_internals":
            continue
        private = {name for name, _ in imports(module) if name.startswith("torch._")}
        assert not private, f"{module}: {private}"


def test_records_import_nothing_but_the_standard_library():
    found = imports("fusion_advisor.records")
    assert {name for name, is_typing in found if not is_typing} - {SHOWN_BY} <= {"__future__", "enum", "dataclasses", "typing"}
    assert {name for name, is_typing in found if is_typing} <= {"pandas"}
    code = "import sys, fusion_advisor.records; print(*[n for n in sys.modules if n.startswith('fusion_advisor.report')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
