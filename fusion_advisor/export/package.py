"""The files of an exported package. How fast one starts and runs: ``docs/measurements/start_up.md``."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.codegen.common.interface import environment
from fusion_advisor.content import content_dir
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.kernel_ops import KernelOp
from fusion_advisor.export.printed import Printed, ops_listed
from fusion_advisor.export.readme import call_lines, rows, step_sentence
from fusion_advisor.records import Report

COPIED = Path(__file__).parent / "copied"
_TEMPLATES = content_dir("templates") / "export"


def files_of(printed: Printed, report: Report, name: str) -> dict[str, bytes]:
    """Return the content of each file of a package, by its path.

    Args:
        printed: the forward, its kernels and its call.
        report: of the run.
        name: of the package, an identifier.
    """
    context = _context(printed, report, name)
    files = {
        "README.md": _rendered("README.md", context),
        "pyproject.toml": _rendered("pyproject.toml", context),
        "tests/test_package.py": _rendered("test_package.py", context),
        "LICENSE": _rendered("LICENSE", context),
    }
    modules = ("__init__.py", "_adapter.py", "_requirements.py", "bench.py", "example.py", "forward.py")
    files |= {f"{name}/{module}": _rendered(module, context) for module in modules}
    copied = dict(_COPIES) if printed.expected["device"] == "cuda" else {own: its for own, its in _COPIES if its != "_memsets"}
    files |= {f"{name}/{its}.py": _copy_of(own) for own, its in copied.items()}
    if printed.specs:
        files[f"{name}/objects.json"] = (json.dumps(printed.specs, indent=1) + "\n").encode()
    files[f"{name}/expected.json"] = (json.dumps(printed.expected, indent=1, sort_keys=True) + "\n").encode()
    if printed.constants:
        buffer = io.BytesIO()
        torch.save(dict(printed.constants), buffer)
        files[f"{name}/constants.pt"] = buffer.getvalue()
    return files | files_of_ops(printed.ops, name, printed.expected["device"])


def files_of_ops(ops: Sequence[KernelOp], name: str, device: str) -> dict[str, bytes]:
    """Return the files of a package's ops: their kernels, what registers and launches them, and references for the tests.

    Args:
        ops: any.
        name: of the package, an identifier.
        device: type of the device that they run on.
    """
    context = {**ops_listed(ops), "name": name, "device": device}
    own = [f"_{backend}.py" for backend in context["backends"]]  # of backends that need more than torch to launch
    modules = ["_launch.py", "ops.py", "prebuild.py", *(module for module in own if (_TEMPLATES / f"{module}.jinja").is_file())]
    modules += ["_tensor_maps.py"] if context["has_tensor_maps"] else []
    modules += ["_recurrence.py"] if context["has_recurrences"] else []
    files = {f"{name}/{module}": _rendered(module, context) for module in modules}
    files[f"{name}/_kept.py"] = (COPIED / "kept_binaries.py").read_bytes()
    files[f"{name}/kernels/__init__.py"] = b'"""The kernels, one file each."""\n'
    for op in ops:
        files[f"{name}/kernels/{op.file}"] = op.rendered.file_text.encode()
        files[f"tests/references/{op.name}.py"] = op.reference.encode()
    return files


def with_built_kernels(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """Add every kernel's machine code for this machine: the package compiles it in a process of its own.

    Args:
        files: of the package.
        name: of the package.

    Raises:
        CannotExport: a kernel does not compile.
    """
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as place:
        folder = Path(place)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        # -m puts the folder, and not this tool's, on the path
        command = [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, {place!r}); from {name} import prebuild; prebuild.main()",
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=place)
        if done.returncode:
            raise CannotExport(detail=f"its kernels did not compile: {done.stderr.strip().rpartition(chr(10))[2]}")
        built = folder / name / "built"
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(built.rglob("*")) if path.is_file()}
    return {**files, **found}


_COPIES = (
    ("model_facts", "_facts"), ("cuda_graphs", "_graphs"), ("graph_outputs", "_outputs"), ("call_objects", "_objects"),
    ("memset_nodes", "_memsets"),
)  # fmt: skip
"""Modules of ours that a package has copies of, and what they are called in it."""


def _copy_of(module: str) -> bytes:
    """Return a module's text, with what it imports of the others by the names in the package."""
    text = (COPIED / f"{module}.py").read_text(encoding="utf-8")
    for own, its in _COPIES:
        text = text.replace(f"from fusion_advisor.export.copied.{own} import", f"from .{its} import")
    return text.encode()


def _rendered(template: str, context: Mapping[str, Any]) -> bytes:
    return environment().get_template(f"export/{template}.jinja").render(**context).encode()


def _context(printed: Printed, report: Report, name: str) -> dict[str, Any]:
    machine = report.environment
    return {
        **printed.context, **ops_listed(printed.ops), "name": name, "device": printed.expected["device"], "run": report.run_id,
        "torch_version": machine.torch, "tool": machine.tool, "environment": machine, "workload": report.workload,
        "tolerance": "1e-5" if report.workload.dtype == "fp32" else "2e-2",
        "rows": [row for row in rows(report, printed.ops) if not any(f"{row.id} " in line[:40] for line in printed.left_out)],
        "step": step_sentence(report), "left_out": printed.left_out,
        "call": call_lines(printed.tensors, printed.values), "command": report.command,
    }  # fmt: skip
