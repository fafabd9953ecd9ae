"""Export of a run: load its model, put its plan in again, print it, write it."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from fusion_advisor.errors import CannotExport, LicenceForbids, NothingToExport, UsageError
from fusion_advisor.export.collect import is_kept, rewritten
from fusion_advisor.export.package import files_of, with_built_kernels
from fusion_advisor.export.printed import Printed, printed
from fusion_advisor.files.whole_folder import refuse_existing, write_folder
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.records import Status
from fusion_advisor.workload.factory import FILE_MODULE
from fusion_advisor.workload.load import LoadedWorkload

_PASSED_ON = (
    "Apache-2.0", "MIT", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Unlicense", "CC0-1.0", "Zlib", "0BSD",
)  # fmt: skip
"""Licences under which a package may hold a kernel, with the notice in the kernel's file."""


def check_export(saved: SavedPlan, folder: Path, *, force: bool) -> None:
    """Refuse what can be refused before the model is loaded.

    Args:
        saved: the plan.
        folder: of the package.
        force: replace what is there.

    Raises:
        NothingToExport: the run kept no kernel.
        LicenceForbids: a kernel may not be passed on.
        ExportExists: the folder is there, and ``force`` was not given.
        UsageError: the run lies in the folder.
    """
    if not is_kept(saved):
        raise NothingToExport(run=saved.run_dir.name)
    kept = {row.chain_id for row in saved.report.fusions if row.status is Status.KEPT}
    for planned in saved.fusions:
        licence = planned.match.license
        if planned.chain.id in kept and licence and licence not in _PASSED_ON:
            raise LicenceForbids(kernel=planned.match.kernel, licence=licence)
    refuse_existing(folder, force=force)
    if saved.run_dir.resolve().is_relative_to(folder.resolve()):
        detail = f"`{folder}` holds the run `{saved.run_dir.name}`, which --force would delete"
        raise UsageError(detail=detail, help="choose another folder with --to")


def export_package(
    loaded: LoadedWorkload, saved: SavedPlan, folder: Path, *, force: bool = False, with_cache: bool = False
) -> tuple[str, ...]:
    """Write a package with the kept kernels of a run.

    Args:
        loaded: the model of the run, and its call.
        saved: the plan.
        folder: of the package, whose name becomes the package's.
        force: replace what is there.
        with_cache: ship the kernels' machine code for this machine too.

    Returns:
        sentences about kept rewrites that the package does not have.

    Raises:
        NothingToExport: the run kept no kernel.
        ExportExists: the folder is there, and ``force`` was not given.
        PlanMismatch: the model is not that of the run any more.
        CannotExport: the graph or the call holds what a package cannot.
        CannotWrite: the file system refuses.
    """
    check_export(saved, folder, force=force)
    found = printed(loaded, rewritten(loaded, saved))
    _refuse_classes_of_files(found)
    files = files_of(found, saved.report, package_name(folder))
    write_folder(with_built_kernels(files, package_name(folder)) if with_cache else files, folder, force=force)
    return found.left_out


def _refuse_classes_of_files(found: Printed) -> None:
    """Refuse an output of a class that a package cannot import: that of a factory's file, which is no module elsewhere."""
    for line in found.context["imports"]:
        _, home, _, kind = line.split()
        if home.startswith(FILE_MODULE):
            place = f"{home.removeprefix(FILE_MODULE)}.py"
            raise CannotExport(
                detail=f"its output is a `{kind}` of {place}, and a package imports modules alone: where the file can be"
                f" imported, name the model {place.removesuffix('.py')}:FACTORY"
            )


def package_name(folder: Path) -> str:
    """Return the name of the package in a folder.

    Args:
        folder: ``out/gpt2-fused``, say.
    """
    name = re.sub(r"\W+", "_", folder.resolve().name, flags=re.ASCII).strip("_").lower()
    is_taken = keyword.iskeyword(name) or name in sys.stdlib_module_names or name in _IMPORTED
    return name if name.isidentifier() and not is_taken else f"fused_{name}".rstrip("_")


_IMPORTED = ("torch", "triton", "transformers", "numpy", "kernels", "tests")
"""What a package or its user imports by these names."""
