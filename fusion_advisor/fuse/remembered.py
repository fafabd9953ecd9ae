"""What earlier runs on this machine decided, on disk, so that a second apply of the same step times no rewrite again.

A decision is found by a digest of all that it depends on: the workload, the options of the keep rule, the device, its driver, the
versions, torch's settings, our own sources and templates. Weights are not among them, as no verdict depends on their values.
The graph itself is compared when the decision is put in (``restore_plan``), and every number is checked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.content import package_digest
from fusion_advisor.errors import AdvisorError
from fusion_advisor.files.private_folder import cache_folder
from fusion_advisor.fuse.live.saved_plan import SavedPlan, load_plan
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.records import Capture, Environment, Report, Status, Workload
from fusion_advisor.records.serialize import encode, write_capture, write_report

MOST = 64
"""Decisions that are kept; the one unused for longest goes first."""
_OF_THE_RUN = (
    "command", "run_dir", "run_id", "config_hash", "bandwidth", "remembers", "baseline", "compile", "compile_limit_s",
    "max_autotune",
)  # fmt: skip
"""Options without an effect on verdicts: names of the run, and the other ways to run the step that it is compared with."""
_OF_THE_CHECKOUT = ("tool", "commit", "templates", "container")
"""Facts of the environment in whose place the sources themselves count."""


def is_wanted(options: ApplyOptions) -> bool:
    """Whether a run's decision is looked up and remembered: times decide it, and nothing is traced or run from elsewhere.

    Args:
        options: of the run.
    """
    return options.remembers and options.is_timed and not (options.dry_run or options.nvtx or options.kernel_dirs)


def decision_key(workload: Workload, environment: Environment, options: ApplyOptions, settings: Any, content: str) -> str:
    """Return a digest of everything that a decision depends on, except for the graph.

    Args:
        workload: model, shapes, dtype and device.
        environment: device and versions.
        options: of the run.
        settings: torch's own, which choose other kernels for the same ops.
        content: digest of templates and library kernels.
    """
    facts = {
        "workload": encode(workload),
        "environment": {name: value for name, value in encode(environment).items() if name not in _OF_THE_CHECKOUT},
        "options": {
            field.name: encode(getattr(options, field.name)) for field in fields(options) if field.name not in _OF_THE_RUN
        },
        "settings": [repr(settings), torch.get_num_threads()],
        "sources": [package_digest(), content],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def find(key: str, warn: Callable[[str], object]) -> SavedPlan | None:
    """Return the decision of this key; None where there is none, or where it cannot be read any more.

    Args:
        key: from :func:`decision_key`.
        warn: gets a sentence where a decision was dropped.
    """
    folder = cache_folder("decisions") / key
    if not folder.is_dir():
        return None
    try:
        saved = load_plan(folder)
    except AdvisorError as error:
        warn(f"a remembered decision cannot be read and was dropped: {error}")
        forget(key)
        return None
    os.utime(folder)
    return saved


def keeps_any(report: Report) -> bool:
    """Whether a run left any rewrite in the model.

    Args:
        report: of the run.
    """
    statuses = [row.status for row in report.fusions] + [row.status for row in report.rewrites]
    return Status.KEPT in statuses


def remember(key: str, capture: Capture, report: Report) -> None:
    """Keep what a run decided, unless nothing was kept, its numbers did not pass or the machine was too busy to tell.

    Args:
        key: from :func:`decision_key`.
        capture: of the run.
        report: of the run, complete.
    """
    is_right = report.model_check is not None and report.model_check.is_passed
    if report.status != "applied" or not keeps_any(report) or not is_right or report.too_busy is not None:
        return
    home = cache_folder("decisions")
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
    try:
        write_capture(capture, made / "capture.json.gz")
        write_report(report, made / "report.json")
        forget(key)
        made.rename(home / key)
    except OSError:  # another run's decision of the same key stands there by now, or the disk is full: nothing is lost
        shutil.rmtree(made, ignore_errors=True)
    known = sorted((path for path in home.iterdir() if not path.name.startswith(".")), key=lambda path: path.stat().st_mtime)
    for oldest in known[:-MOST]:
        shutil.rmtree(oldest, ignore_errors=True)


def forget(key: str) -> None:
    """Drop a decision; nothing happens where there is none.

    Args:
        key: from :func:`decision_key`.
    """
    shutil.rmtree(cache_folder("decisions") / key, ignore_errors=True)
