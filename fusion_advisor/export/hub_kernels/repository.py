"""Export as a kernel repository: sources, the built variant, its metadata, and a page that says how to load it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fusion_advisor.errors import CannotExport
from fusion_advisor.export.collect import in_its_place
from fusion_advisor.export.export import check_export, package_name
from fusion_advisor.export.extension.files import extension_context, extension_files
from fusion_advisor.export.hub_kernels.layers import Layer, layer_of_place
from fusion_advisor.export.hub_kernels.linears import linear_functions
from fusion_advisor.export.kernel_files.files import kernel_files, ops_context, rendered
from fusion_advisor.export.kernel_ops import KernelOp
from fusion_advisor.export.patch.collect import PatchSite, in_own_layout, patch_sites
from fusion_advisor.export.patch.frames import NotExpressed
from fusion_advisor.export.patch.patch import NO_CHAIN, PatchedPlace, other_rewrites, places_context, places_of
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.records import Report
from fusion_advisor.workload.load import LoadedWorkload


def export_kernels(loaded: LoadedWorkload, saved: SavedPlan, folder: Path, *, force: bool = False) -> tuple[str, ...]:
    """Write a kernel repository.

    Args:
        loaded: the model of the run, and its call.
        saved: the plan.
        folder: of the repository, whose name becomes the kernel's.
        force: replace what is there.

    Returns:
        sentences about kept chains that are no layer, and kept rewrites that are no kernel of a chain.

    Raises:
        NothingToExport: the run kept no kernel.
        ExportExists: the folder is there, and ``force`` was not given.
        PlanMismatch: the model is not that of the run any more.
        CannotExport: no kept kernel can be an op.
        CannotWrite: the file system refuses.
    """
    check_export(saved, folder, force=force)
    sites = in_its_place(loaded, saved, lambda: patch_sites(loaded, in_own_layout(saved)))
    chains = {one.op.name: one.op for one in sites if one.op is not None}
    ops = list(chains.values())
    linears, why = in_its_place(loaded, saved, lambda: linear_functions(loaded, saved, ops))
    ops += linears
    if not ops:
        reason = f"no kept kernel can be an op: {sites[0].reason}" if sites else NO_CHAIN
        raise CannotExport(detail=reason)
    places, layers, reasons = layers_of(sites)
    left_out = (*reasons, *why, *other_rewrites(saved, {op.fusion_id for op in ops}))
    found = (places, layers, left_out)
    write_folder(repository_files(ops, *found, saved.report, package_name(folder)), folder, force=force)
    return left_out


def layers_of(sites: Sequence[PatchSite]) -> tuple[list[PatchedPlace], list[Layer], tuple[str, ...]]:
    """Return the places that are layers, the layers, and a sentence for each reason why sites are none.

    Args:
        sites: of the run.
    """
    places, sentences = places_of(sites)
    found: list[PatchedPlace] = []
    layers: list[Layer] = []
    reasons = [f"no layer for {sentence}" for sentence in sentences]
    for place in places:
        kernel = f"{place.sites[0].fusion_id} {place.sites[0].kernel}"
        try:
            layer = layer_of_place(place)
        except NotExpressed as reason:
            reasons.append(f"no layer for {kernel}, {len(place.sites)} of its sites: {reason}")
            continue
        if any(layer.name == other.name for other in layers):
            reasons.append(f"no layer for {kernel}, {len(place.sites)} of its sites: `{layer.name}` is a layer already")
            continue
        found.append(place)
        layers.append(layer)
    return found, layers, tuple(reasons)


def repository_files(
    ops: Sequence[KernelOp], places: Sequence[PatchedPlace], layers: Sequence[Layer], left_out: Sequence[str], report: Report,
    name: str,
) -> dict[str, bytes]:  # fmt: skip
    """Return the content of each file of a repository, by its path.

    Args:
        ops: its kernels.
        places: that are layers.
        layers: in the same order.
        left_out: sentences about what is no layer or not in the repository.
        report: of the run.
        name: of the package, an identifier.
    """
    context = ops_context(ops, report, name) | {
        "places": places_context(places), "layers": layers, "left_out": left_out, "below": ' / "torch-ext"',
        "kernel_name": name.replace("_", "-").strip("-"),
    }  # fmt: skip
    context |= extension_context(ops, context, report.environment.capability)
    modules = {
        "__init__.py": rendered("export/hub_kernels/__init__.py", context),
        "layers.py": rendered("export/hub_kernels/layers.py", context),
        "_site.py": rendered("export/patch/_site.py", context),
        "sites.py": rendered("export/patch/sites.py", context),
        **kernel_files(ops, context, ""),
    }
    if context["launches"]:
        modules["_extension.py"] = rendered("export/extension/_extension.py", context)
    variant = f"build/torch-{context['device']}"
    files = {
        "README.md": rendered("export/hub_kernels/README.md", context),
        "build.toml": rendered("export/hub_kernels/build.toml", context),
        "LICENSE": rendered("export/LICENSE", context),
        "tests/test_kernels.py": rendered("export/patch/test_kernels.py", context),
        f"{variant}/metadata.json": _metadata(modules, str(context["kernel_name"]), str(context["device"])),
    }
    files |= {f"tests/references/{op.name}.py": op.reference.encode() for op in ops}
    files |= extension_files(ops, context)
    files |= {f"torch-ext/{name}/{path}": content for path, content in modules.items()}
    return files | {f"{variant}/{path}": content for path, content in modules.items()}


def _metadata(modules: Mapping[str, bytes], name: str, device: str) -> bytes:
    """Return ``metadata.json``; the id differs for other content, so that a process can load several versions."""
    digest = hashlib.sha256(b"\0".join(part for path in sorted(modules) for part in (path.encode(), modules[path]))).hexdigest()
    content = {
        "name": name, "id": f"_{name.replace('-', '_')}_{device}_{digest[:12]}", "version": 1, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": device},
    }  # fmt: skip
    return (json.dumps(content, indent=2) + "\n").encode()
