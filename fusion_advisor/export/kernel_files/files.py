"""The kernels of a package: one file each, torch ops over them, how they are launched, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusion_advisor.codegen.common.interface import environment
from fusion_advisor.content import content_dir
from fusion_advisor.export.kernel_ops import KernelOp
from fusion_advisor.export.package import COPIED
from fusion_advisor.export.printed import ops_listed
from fusion_advisor.records import Report

_TEMPLATES = content_dir("templates") / "export"


def ops_context(ops: Sequence[KernelOp], report: Report, name: str) -> dict[str, Any]:
    """Return the names that the templates of ops and launchers use.

    Args:
        ops: of the package.
        report: of the run.
        name: of the package, an identifier.
    """
    machine = report.environment
    return {
        **ops_listed(ops), "name": name, "run": report.run_id, "device": machine.device_kind,
        "torch_version": machine.torch, "tool": machine.tool, "environment": machine, "workload": report.workload,
        "aten_ops": [], "class_name": report.workload.model_id,
    }  # fmt: skip


def kernel_files(ops: Sequence[KernelOp], context: Mapping[str, Any], folder: str) -> dict[str, bytes]:
    """Return ``ops.py``, the launchers and the kernels of a package, by path.

    Args:
        ops: of the package.
        context: of :func:`ops_context`.
        folder: of the package's modules, with a slash at its end.
    """
    modules = ["_launch.py", "_requirements.py", "ops.py"]
    own = [f"_{backend}.py" for backend in context["backends"]]  # of backends that need more than torch to launch
    modules += [module for module in own if (_TEMPLATES / f"{module}.jinja").is_file()]
    modules += ["_tensor_maps.py"] if context["has_tensor_maps"] else []
    files = {f"{folder}{module}": rendered(f"export/{module}", context) for module in modules}
    files[f"{folder}_kept.py"] = (COPIED / "kept_binaries.py").read_bytes()
    files[f"{folder}kernels/__init__.py"] = b'"""The kernels, one file each."""\n'
    return files | {f"{folder}kernels/{op.file}": op.rendered.file_text.encode() for op in ops}


def rendered(template: str, context: Mapping[str, Any]) -> bytes:
    """Return the file that a template makes.

    Args:
        template: its path, without ``.jinja``.
        context: the names that it uses.
    """
    return environment().get_template(f"{template}.jinja").render(**context).encode()
