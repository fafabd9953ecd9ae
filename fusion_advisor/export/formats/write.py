"""Writes a run in one of the formats."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusion_advisor.export.aot_package.stages import Stages
from fusion_advisor.export.aot_package.write_pt2 import export_pt2
from fusion_advisor.export.export import export_package
from fusion_advisor.export.formats.names import KERNELS, PACKAGE, PATCH, PT2, known_format
from fusion_advisor.export.hub_kernels.repository import export_kernels
from fusion_advisor.export.patch.patch import export_patch
from fusion_advisor.fuse.live.saved_plan import SavedPlan, load_plan
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.records import Capture, Report
from fusion_advisor.records.serialize import write_capture, write_report
from fusion_advisor.workload.load import LoadedWorkload

_WRITERS: Mapping[str, Callable[..., tuple[str, ...]]] = {
    PACKAGE: export_package, KERNELS: export_kernels, PT2: export_pt2, PATCH: export_patch,
}  # fmt: skip


def write_plan(
    loaded: LoadedWorkload,
    saved: SavedPlan,
    folder: Path,
    *,
    form: str = PACKAGE,
    force: bool = False,
    with_cache: bool = False,
    within_s: float | None = None,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Write the kept kernels of a run.

    Args:
        loaded: the model of the run, and its call.
        saved: the plan.
        folder: to be written; a package is named after it.
        form: one of :data:`fusion_advisor.export.formats.names.FORMATS`.
        force: replace what is there.
        with_cache: ship a package's compiled kernels too.
        within_s: that it may take; None: as long as it takes.
        progress: is told the stages.

    Returns:
        sentences about kept rewrites that the export does not have.

    Raises:
        UsageError: the format is not known, or has no place for compiled kernels.
        NothingToExport: the run kept no kernel.
        ExportExists: the folder is there, and ``force`` was not given.
        PlanMismatch: the model is not that of the run any more.
        CannotExport: the format cannot hold what was kept, or the time was up in a stage that the message names.
        CannotWrite: the file system refuses.
    """
    write, options = _WRITERS[known_format(form, with_cache=with_cache)], {"with_cache": True} if with_cache else {}
    with Stages(progress, within_s) as stages:
        if form == PT2:
            return write(loaded, saved, folder, force=force, stages=stages)
        with stages.stage("export"):
            return write(loaded, saved, folder, force=force, **options)


def write_run(
    loaded: LoadedWorkload, capture: Capture, report: Report, folder: Path, *, form: str = PACKAGE, **options: Any
) -> tuple[str, ...]:
    """Write what a run of this process kept.

    Args:
        loaded: the model of the run, and its call.
        capture: of the run.
        report: of the run.
        folder: to be written.
        form: of the export.
        options: of :func:`write_plan`.

    Returns:
        sentences about kept rewrites that the export does not have.
    """
    known_format(form, with_cache=options.get("with_cache", False))
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as run_dir:
        write_capture(capture, Path(run_dir) / "capture.json.gz")
        write_report(report, Path(run_dir) / "report.json")
        return write_plan(loaded, load_plan(run_dir), folder, form=form, **options)
