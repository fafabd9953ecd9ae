"""Export as a patch: the kept sites in the model's source, a package with their kernels, and a page that says how to use both."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_advisor.capture.graph.fx_nodes import relative_path
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.collect import in_its_place
from fusion_advisor.export.export import check_export, package_name
from fusion_advisor.export.kernel_files.files import kernel_files, ops_context, rendered
from fusion_advisor.export.kernel_ops import KernelOp
from fusion_advisor.export.patch.collect import PatchSite, in_own_layout, patch_sites
from fusion_advisor.export.patch.edit import Edit, diff, edited
from fusion_advisor.export.patch.express import Expressed
from fusion_advisor.export.patch.site_source import variant_lines
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.workload.load import LoadedWorkload

NO_CHAIN = "the run kept no kernel of a chain, and this format holds no others; use --format package"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedPlace:
    """Statements of the model that ask the kernels first.

    Attributes:
        path: of the file, below the folder that the patch is applied in.
        name: of the package's function.
        edit: of the file.
        sites: that the statements compute; equal ones share a variant.
    """

    path: str
    name: str
    edit: Edit
    sites: tuple[PatchSite, ...]

    @property
    def variants(self) -> tuple[Expressed, ...]:
        """The different ways in which the sites are called."""
        by_text = {"\n".join(variant_lines(one.expressed)): one.expressed for one in self.sites if one.expressed}
        return tuple(by_text.values())


def export_patch(loaded: LoadedWorkload, saved: SavedPlan, folder: Path, *, force: bool = False) -> tuple[str, ...]:
    """Write a patch of the model's source and the package that it imports.

    Args:
        loaded: the model of the run, and its call.
        saved: the plan.
        folder: of the export, whose name becomes the package's.
        force: replace what is there.

    Returns:
        sentences about kept rewrites that the patch does not have.

    Raises:
        NothingToExport: the run kept no kernel.
        ExportExists: the folder is there, and ``force`` was not given.
        PlanMismatch: the model is not that of the run any more.
        CannotExport: no kept site can be expressed in the source.
        CannotWrite: the file system refuses.
    """
    check_export(saved, folder, force=force)
    name = f"{package_name(folder)}_kernels"
    sites = in_its_place(loaded, saved, lambda: patch_sites(loaded, in_own_layout(saved)))
    places, left_out = places_of(sites)
    if not places:
        reason = f"no kept chain can be expressed in the model's source. {left_out[0]}" if left_out else NO_CHAIN
        raise CannotExport(detail=reason)
    left_out = (*left_out, *other_rewrites(saved))
    write_folder(_files(places, left_out, saved, name), folder, force=force)
    return left_out


def places_of(sites: Sequence[PatchSite]) -> tuple[list[PatchedPlace], tuple[str, ...]]:
    """Return the places of a patch, and a sentence for each reason why sites are not in it.

    Args:
        sites: of the run.
    """
    groups: dict[tuple[str, int, int], list[PatchSite]] = {}
    refused: dict[tuple[str, str, str], list[str]] = {}
    for site in sites:
        why = site.reason
        if site.statements is not None and site.expressed is not None:
            key = (site.file, site.statements.first_line, site.statements.last_line)
            own = groups.get(key, [])
            why = _conflict(site, own, key, groups)
            if not why:
                groups.setdefault(key, []).append(site)
        if why:
            refused.setdefault((site.fusion_id, site.kernel, why), []).append(site.module or "model")
    taken: set[str] = set()
    places = []
    for (file, _, _), own in groups.items():
        first = own[0]
        assert first.statements is not None
        assert first.expressed is not None
        name = _free(first.expressed.op.name, taken)
        edit = Edit(
            statements=first.statements, call=name, results=first.expressed.results, count=len(first.expressed.op.outputs)
        )
        places.append(PatchedPlace(path=_shown(file), name=name, edit=edit, sites=tuple(own)))
    sentences = [
        f"{fusion} {kernel}, {len(paths)} of its sites ({', '.join(paths[:3])}{' …' if len(paths) > 3 else ''}): {why}"
        for (fusion, kernel, why), paths in refused.items()
    ]
    return places, tuple(sentences)


def _conflict(
    site: PatchSite, own: Sequence[PatchSite], key: tuple[str, int, int], groups: dict[tuple[str, int, int], list[PatchSite]]
) -> str:
    """Say why a site cannot stand in the patch with those before it; empty where it can."""
    assert site.expressed is not None
    file, first, last = key
    if own and own[0].expressed is not None and own[0].expressed.results != site.expressed.results:
        return "another site of the same statements leaves its results in other names"
    overlaps = [one for one in groups if one != key and one[0] == file and one[1] <= last and first <= one[2]]
    return f"another kernel stands for line {overlaps[0][1]} already" if overlaps else ""


def _free(wanted: str, taken: set[str]) -> str:
    name = next(one for number in range(1, 10_000) if (one := wanted if number == 1 else f"{wanted}_{number}") not in taken)
    taken.add(name)
    return name


def _shown(file: str) -> str:
    path = relative_path(file)
    return Path(path).name if Path(path).is_absolute() else path


def other_rewrites(saved: SavedPlan, exported: Collection[str] = ()) -> tuple[str, ...]:
    """Return a sentence for each kept rewrite that is no kernel of a chain.

    Args:
        saved: the plan.
        exported: ids of kernels that the export has all the same.
    """
    linears = [row for row in saved.linears if row.id not in exported]
    rows = [f"{row.id} {row.kernel}: this kernel of a linear layer is not exported" for row in linears]
    rows += [f"{row.id} {row.kernel}: a kernel in which ranks meet is not exported" for row in saved.sums]
    return (*rows, *(f"{row.id} ({row.name}): it is no kernel of a chain" for row in saved.rewrites.values()))


def _files(places: Sequence[PatchedPlace], left_out: Sequence[str], saved: SavedPlan, name: str) -> dict[str, bytes]:
    ops: dict[str, KernelOp] = {one.op.name: one.op for place in places for one in place.variants}
    context = ops_context(list(ops.values()), saved.report, name)
    patches = []
    for path in dict.fromkeys(place.path for place in places):
        own = [place for place in places if place.path == path]
        file = own[0].sites[0].file
        before = _text(file)
        patches.append(diff(path, before, edited(before, [place.edit for place in own], name)))
    context |= {"places": places_context(places), "left_out": left_out, "below": ""}
    files = {
        f"{name}.patch": "".join(patches).encode(),
        "README.md": rendered("export/patch/README.md", context),
        "pyproject.toml": rendered("export/pyproject.toml", context),
        "LICENSE": rendered("export/LICENSE", context),
        f"{name}/__init__.py": rendered("export/patch/__init__.py", context),
        f"{name}/_site.py": rendered("export/patch/_site.py", context),
        f"{name}/sites.py": rendered("export/patch/sites.py", context),
        "tests/test_kernels.py": rendered("export/patch/test_kernels.py", context),
    }
    files |= {f"tests/references/{op.name}.py": op.reference.encode() for op in ops.values()}
    return files | kernel_files(list(ops.values()), context, f"{name}/")


def places_context(places: Sequence[PatchedPlace]) -> list[dict[str, Any]]:
    """Return what the template of ``sites.py`` prints for each place.

    Args:
        places: of the package.
    """
    return [
        {
            "name": place.name, "path": place.path, "function": place.edit.statements.function.name,
            "first": place.edit.statements.first_line, "last": place.edit.statements.last_line,
            "variants": [variant_lines(one) for one in place.variants], "fusions": sorted({one.fusion_id for one in place.sites}),
            "sites": len(place.sites), "reads": ", ".join(place.edit.statements.reads),
        }
        for place in places
    ]  # fmt: skip


def _text(file: str) -> str:
    """Read a source file with its own encoding and its own line ends."""
    data = Path(file).read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding)
