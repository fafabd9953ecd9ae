"""The files of an exported package."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.codegen.common.header_comment import wrap
from fusion_advisor.codegen.common.interface import environment
from fusion_advisor.content import content_dir
from fusion_advisor.export.printed import Printed, laid
from fusion_advisor.export.readme import call_lines, rows, step_sentence
from fusion_advisor.records import Report

_COPIED = Path(__file__).parent / "copied"
_TEMPLATES = content_dir("templates") / "export"


def files_of(printed: Printed, report: Report, name: str) -> dict[str, bytes]:
    """Return the content of each file of a package, by its path.

    Args:
        printed: the forward, its kernels and its call.
        report: of the run.
        name: of the package, an identifier.
    """
    context = _context(printed, report, name)

    def rendered(template: str) -> bytes:
        return environment().get_template(f"export/{template}.jinja").render(**context).encode()

    files = {
        "README.md": rendered("README.md"),
        "pyproject.toml": rendered("pyproject.toml"),
        "tests/test_package.py": rendered("test_package.py"),
        "LICENSE": rendered("LICENSE"),
    }
    modules = ["__init__.py", "_adapter.py", "_launch.py", "_requirements.py", "bench.py", "example.py", "forward.py", "ops.py"]
    own = [f"_{backend}.py" for backend in context["backends"]]  # of backends that need more than torch to launch
    modules += [module for module in own if (_TEMPLATES / f"{module}.jinja").is_file()]
    files |= {f"{name}/{module}": rendered(module) for module in modules}
    files[f"{name}/_facts.py"] = (_COPIED / "model_facts.py").read_bytes()
    files[f"{name}/expected.json"] = (json.dumps(printed.expected, indent=1, sort_keys=True) + "\n").encode()
    if printed.constants:
        buffer = io.BytesIO()
        torch.save(dict(printed.constants), buffer)
        files[f"{name}/constants.pt"] = buffer.getvalue()
    files[f"{name}/kernels/__init__.py"] = b'"""The kernels, one file each."""\n'
    for op in printed.ops:
        files[f"{name}/kernels/{op.file}"] = op.rendered.file_text.encode()
        files[f"tests/references/{op.name}.py"] = op.reference.encode()
    return files


def _context(printed: Printed, report: Report, name: str) -> dict[str, Any]:
    backends = sorted({op.rendered.backend for op in printed.ops})
    machine = report.environment
    return {
        **printed.context, "name": name, "run": report.run_id, "backends": backends,
        "ops": [
            {
                "name": op.name, "comment": wrap(f"{op.fusion_id}: {op.summary}"), "file": op.file,
                "launch": list(op.launch.items()), "launcher": f"{op.rendered.backend}_launcher",
                "inputs": [laid(one, meta) for one, meta in op.inputs],
                "outputs": [laid(one, meta) for one, meta in op.outputs],
            }
            for op in printed.ops
        ],
        "device": printed.expected["device"],
        "flags": {op.file: op.rendered.flags for op in printed.ops if op.rendered.flags},
        "torch_version": machine.torch, "tool": machine.tool, "environment": machine, "workload": report.workload,
        "tolerance": "1e-5" if report.workload.dtype == "fp32" else "2e-2",
        "rows": [row for row in rows(report, printed.ops) if not any(f"{row.id} " in line[:40] for line in printed.left_out)],
        "step": step_sentence(report), "left_out": printed.left_out,
        "call": call_lines(printed.tensors, printed.values), "command": report.command,
    }  # fmt: skip
