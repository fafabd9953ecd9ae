"""The seam to the part that imports torch: every heavy import of the command line happens inside these functions.

So ``--help``, ``report`` and ``explain`` answer at once on a machine without a GPU, and tests put fakes behind one place.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fusion_advisor.fuse.options import ApplyOptions, ProfileOptions
from fusion_advisor.records import Capture, Report, Workload
from fusion_advisor.serialize import dump_record, load_record

REQUEST_SCHEMA = "fusion-advisor-request/1"


class Progress(Protocol):
    """What the core says while it works."""

    def phase(self, name: str) -> None:
        """A phase begins, and with it the last one ends."""

    def note(self, text: str) -> None:
        """What the phase found, in a few words."""

    def step(self, done: int, total: int, text: str) -> None:
        """How far the phase has come."""

    def warn(self, text: str) -> None:
        """Something the user should know, though the run goes on."""


class Loaded(Protocol):
    """A model with its inputs."""

    record: Workload
    notes: tuple[str, ...]


class AppliedRun(Protocol):
    """A model with its rewrites in place."""

    report: Report
    capture: Capture

    def revert(self) -> None:
        """Put the model back exactly as it was."""


def make_request(**fields: object) -> Any:
    """Return a workload request; fields left out keep the request's own defaults."""
    return import_module("fusion_advisor.workload.request").WorkloadRequest(**fields)


def dump_request(request: Any) -> str:
    """Return ``request.json``'s text."""
    return dump_record(request, REQUEST_SCHEMA)


def load_request(text: str | bytes, name: str) -> Any:
    """Read ``request.json``."""
    cls = import_module("fusion_advisor.workload.request").WorkloadRequest
    return load_record(cls, text, schema=REQUEST_SCHEMA, name=name)


def load_workload(request: Any) -> Loaded:
    """Make the model and its inputs."""
    loaded: Loaded = import_module("fusion_advisor.workload.load").load_workload(request)
    return loaded


def profile_workload(loaded: Loaded, options: ProfileOptions, progress: Progress) -> tuple[Report, Capture]:
    """Measure, capture, rank and match."""
    report, capture = import_module("fusion_advisor.fuse.pipeline").profile_workload(loaded, options, progress)
    return report, capture


def apply_workload(loaded: Loaded, options: ApplyOptions, progress: Progress, on_report: Callable[[Report], None]) -> AppliedRun:
    """Profile, then render, build, check, time and keep or drop every rewrite; ``on_report`` gets the report after each."""
    applied: AppliedRun = import_module("fusion_advisor.fuse.pipeline").apply_workload(loaded, options, progress, on_report)
    return applied


def list_kernels() -> list[Any]:
    """Return the library's kernels."""
    return list(import_module("fusion_advisor.library.discover").list_kernels())


def load_kernel(name: str) -> Any:
    """Return one kernel of the library."""
    return import_module("fusion_advisor.library.discover").load_kernel(name)


def scaffold_kernel(name: str, directory: Path) -> Any:
    """Write a new kernel's folder."""
    return import_module("fusion_advisor.library.discover").scaffold(name, directory)


def check_kernel(name: str, progress: Progress) -> list[Any]:
    """Run a kernel's own cases."""
    return list(import_module("fusion_advisor.library.check").check_kernel(name, progress))


def plan_bench(name: str | None, **asked: Any) -> Any:
    """Turn what ``kernels bench`` was asked into jobs."""
    return import_module("fusion_advisor.library.bench_cases").plan_bench(name, **asked)


def bench_kernels(plan: Any, progress: Progress, on_progress: Callable[[Any], None]) -> Any:
    """Measure a plan's jobs; ``on_progress`` gets the run so far after every row."""
    return import_module("fusion_advisor.library.bench").bench(plan.jobs, plan.options, progress, on_progress=on_progress)


def run_contender(plan: Any, name: str, iterations: int) -> str:
    """Run one contender of a plan's first job in a loop; return what was run."""
    ran: str = import_module("fusion_advisor.library.bench").run_first(plan.jobs, plan.options, name, iterations)
    return ran
