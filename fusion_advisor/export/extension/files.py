"""The extension's files in a kernel repository: kernels, launches, ops, the script that builds them, sections of build.toml."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from fusion_advisor.export.extension.source import in_extension, launches_of, native_op, why_not
from fusion_advisor.export.kernel_files.files import rendered
from fusion_advisor.export.kernel_ops import KernelOp


def extension_context(ops: Sequence[KernelOp], context: Mapping[str, Any], capability: str) -> dict[str, Any]:
    """Return the names that templates need where some ops have CUDA C++ kernels; ``launches`` is empty where none has.

    Args:
        ops: of the repository, in the order of ``context["ops"]``.
        context: of :func:`fusion_advisor.export.kernel_files.files.ops_context`, with ``kernel_name``.
        capability: of the GPU that the run was on, as ``9.0``.
    """
    arch = capability.replace(".", "")
    native = in_extension(ops)
    by_op = {op.name: launches_of(op, arch) for op in native}
    launches = [launch for op in native for launch in by_op[op.name]]
    rows = [{**row, "register": "extension_op"} if op.name in by_op else row for row, op in zip(context["ops"], ops, strict=True)]
    return {
        "ops": rows, "native_ops": [native_op(op, by_op[op.name]) for op in native], "launches": launches, "arch": arch,
        "sections": _sections(launches, str(context["name"])), "library_kind": "FRAGMENT" if launches else "DEF",
        "not_native": [(op.name, op.fusion_id, reason) for op in ops if launches and (reason := why_not(op))],
    }  # fmt: skip


def extension_files(ops: Sequence[KernelOp], context: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files outside the Python package, by path; none where no op has a CUDA C++ kernel.

    Args:
        ops: of the repository.
        context: with the names of :func:`extension_context`.
    """
    if not context["launches"]:
        return {}
    name = context["name"]
    files = library_sources(ops, context)
    digest = hashlib.sha256(b"\0".join(part for path in sorted(files) for part in (path.encode(), files[path]))).hexdigest()
    namespace = f"_{name}_cuda_stable_{digest[:12]}"
    metadata = {
        "name": context["kernel_name"], "id": namespace, "version": 1, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cuda"},
    }  # fmt: skip
    files["build.py"] = rendered("export/extension/build.py", {**context, "namespace": namespace, "metadata": metadata})
    files["tests/test_extension.py"] = rendered("export/extension/test_extension.py", context)
    return files


def library_sources(ops: Sequence[KernelOp], context: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the library's own sources, by path: kernels, their launches, the ops.

    Args:
        ops: of the export.
        context: with the names of :func:`extension_context`.
    """
    files = {f"csrc/{op.rendered.entry}.cuh": f"#pragma once\n\n{op.rendered.source}".encode() for op in in_extension(ops)}
    for launch in context["launches"]:
        facts = launch.facts | {
            "function": launch.function, "op": launch.op, "note": launch.note, "entry": launch.entry, "header": launch.header,
            "name": context["name"],
        }  # fmt: skip
        files[launch.file] = rendered("export/extension/launch.cu", facts)
    for file in ("torch_binding.cpp", "torch_binding.h"):
        files[f"torch-ext/{file}"] = rendered(f"export/extension/{file}", context)
    return files


def _sections(launches: Sequence[Any], name: str) -> list[dict[str, Any]]:
    """Return the ``kernel`` sections of build.toml: one for each set of architectures."""
    found: dict[str, list[str]] = {}
    for launch in launches:
        found.setdefault(launch.arch, []).extend((launch.file, f"csrc/{launch.header}"))
    return [
        {
            "name": f"{name}_{arch}" if arch else name, "src": list(dict.fromkeys(files)),
            "capability": f"{arch[:-2]}.{arch[-2:]}" if arch else "",
        }
        for arch, files in found.items()
    ]  # fmt: skip
