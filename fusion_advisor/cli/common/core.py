"""The border to the code that imports torch: the command line imports heavy modules inside these functions only.

So ``--help``, ``report`` and ``explain`` answer at once on a machine without a GPU, and tests replace one module.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fusion_advisor.errors import AdvisorError, MissingExtra, UnknownRun

if TYPE_CHECKING:
    from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
    from fusion_advisor.records import Capture, PlanPreview, Report, TraceReport, Workload
    from fusion_advisor.records.trace import FleetReport

REQUEST_SCHEMA = "fusion-advisor-request/1"


class Progress(Protocol):
    """Messages of a run while it works."""

    def phase(self, name: str) -> None:
        """A phase begins, and the previous phase ends."""

    def note(self, text: str) -> None:
        """The result of the phase, in a few words."""

    def step(self, done: int, total: int, text: str) -> None:
        """How far the phase has come."""

    def warn(self, text: str) -> None:
        """A warning; the run continues."""


class Loaded(Protocol):
    """A model with its inputs."""

    record: Workload
    notes: tuple[str, ...]


class AppliedRun(Protocol):
    """A model with its rewrites in place."""

    report: Report
    capture: Capture
    parts: tuple[tuple[str, Report, Capture], ...]
    write_start: Callable[..., str] | None

    def revert(self) -> None:
        """Put the model back exactly as it was."""


def make_request(**fields: object) -> Any:
    """Return a workload request; fields left out keep the request's own defaults."""
    return import_module("fusion_advisor.workload.request").WorkloadRequest(**fields)


def workload_fields(**values: object) -> dict[str, object]:
    """Return the workload options that were given, enumerations as their values."""
    given = {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def request_defaults() -> dict[str, object]:
    """Return what a workload request takes where an option is left out, by the option's name."""
    made = make_request(model_id="-")
    return {field.name.replace("_", "-"): getattr(made, field.name) for field in fields(made) if field.name != "model_id"}


def dump_request(request: Any) -> str:
    """Return ``request.json``'s text."""
    text: str = import_module("fusion_advisor.records.serialize").dump_record(request, REQUEST_SCHEMA)
    return text


def load_request(text: str | bytes, name: str) -> Any:
    """Read ``request.json``."""
    cls = import_module("fusion_advisor.workload.request").WorkloadRequest
    return import_module("fusion_advisor.records.serialize").load_record(cls, text, schema=REQUEST_SCHEMA, name=name)


def load_workload(request: Any) -> Loaded:
    """Make the model and its inputs, and see that it runs; the library's patterns are traced meanwhile."""
    with import_module("fusion_advisor.library.trace_ahead").traced_ahead():
        with _imports():
            load = import_module("fusion_advisor.workload.load")
            smoke_run = import_module("fusion_advisor.workload.smoke_run")
        loaded: Loaded = load.load_workload(request)
        smoke_run.first_call(loaded)
    return loaded


def raise_later_failure(loaded: Loaded, error: BaseException) -> None:
    """Say that the user's model raised after its first call; does nothing where something else raised.

    Raises:
        LaterCallFailed: it did.
    """
    failure: AdvisorError | None = import_module("fusion_advisor.workload.smoke_run").later_failure(loaded, error)
    if failure is not None:
        raise failure from error


def profile_on_ranks(ranks: Any, loaded: Loaded, options: ProfileOptions, progress: Progress) -> tuple[Report, Capture]:
    """Profile as one rank of several."""
    report, capture = import_module("fusion_advisor.ranks.run").profile_on_ranks(ranks, loaded, options, progress)
    return report, capture


def apply_on_ranks(
    ranks: Any, loaded: Loaded, options: ApplyOptions, progress: Progress, on_report: Callable[[Report], None]
) -> AppliedRun:
    """Apply as one rank of several: the verdicts are equal on all."""
    applied: AppliedRun = import_module("fusion_advisor.ranks.run").apply_on_ranks(ranks, loaded, options, progress, on_report)
    return applied


def profile_workload(loaded: Loaded, options: ProfileOptions, progress: Progress) -> tuple[Report, Capture]:
    """Measure, capture, rank and match."""
    report, capture = import_module("fusion_advisor.fuse.pipeline").profile_workload(loaded, options, progress)
    return report, capture


def profile_trace(path: Path, progress: Progress, **options: Any) -> TraceReport:
    """Rank what a trace holds, or the traces of all ranks in a folder, without its model."""
    modes = "fusion_advisor.fuse.modes"
    module, function = ("rank_traces", "profile_rank_traces") if path.is_dir() else ("trace_profile", "profile_trace")
    report: TraceReport = getattr(import_module(f"{modes}.{module}"), function)(path, progress=progress, **options)
    return report


def run_fleet(say: Any, **options: Any) -> FleetReport:
    """Read traces that are new, and rank the chains of all."""
    try:
        run = import_module("fusion_advisor.fleet.run")
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("duckdb", "fsspec", "isal", "pyarrow"):
            raise
        raise MissingExtra(command="fleet", library=library, extra="fleet") from error
    report: FleetReport = run.run_fleet(run.FleetOptions(**options), say)
    return report


def plan_capture(path: Path, options: ProfileOptions) -> PlanPreview:
    """Rank, match and plan a captured step; nothing runs on a device."""
    preview: PlanPreview = import_module("fusion_advisor.fuse.modes.plan_only").plan_capture(path, options)
    return preview


def _imports() -> AbstractContextManager[None]:
    """Import without full collections: seven of them walked what was there of torch, sympy and dynamo (0.8 s of CPU time)."""
    paused: AbstractContextManager[None] = import_module("fusion_advisor.runtime.gc_pause").collector_paused()
    return paused


def started_compilers(device: str) -> AbstractContextManager[Any]:
    """Start the processes that compile kernels for a GPU, which take seconds to load; gives None where none will be wanted."""
    started: AbstractContextManager[Any] = import_module("fusion_advisor.autotune.start_compilers").started_early(device)
    return started


def apply_workload(
    loaded: Loaded, options: ApplyOptions, progress: Progress, on_report: Callable[[Report], None], compilers: Any = None
) -> AppliedRun:
    """Profile, then render, build, check, time and keep or drop every rewrite; ``on_report`` gets the report so far.

    Both steps of ``generate`` are applied to, and the prefill's report is among the run's ``parts``. Of a training step forward
    and backward are. ``compilers`` are from :func:`started_compilers`.
    """
    place, name = _APPLY.get(loaded.record.phase, ("pipeline", "apply_workload"))
    with _imports():
        work = getattr(import_module(f"fusion_advisor.fuse.{place}"), name)
    applied: AppliedRun = work(loaded, options, progress, on_report, started=compilers)
    return applied


_APPLY = {"generate": ("modes.generate", "apply_generate"), "train": ("modes.apply_training", "apply_training")}
"""Module and function of phases that are not applied to as one forward pass."""


def profile_generate(
    loaded: Loaded, options: ProfileOptions, progress: Progress
) -> tuple[tuple[Report, Capture], tuple[Report, Capture]]:
    """Profile both steps of ``generate``; return (report, capture) of the decode step and of the prefill."""
    decode, prefill = import_module("fusion_advisor.fuse.modes.generate").profile_generate(loaded, options, progress)
    return decode, prefill


def profile_training(loaded: Loaded, options: ProfileOptions, progress: Progress) -> tuple[Report, Capture]:
    """Time and trace forward and backward."""
    report, capture = import_module("fusion_advisor.fuse.modes.training").profile_training(loaded, options, progress)
    return report, capture


def export_run(
    run: Path, folder: Path, *, force: bool, trust_remote_code: bool, form: str = "package", **options: Any
) -> tuple[str, ...]:
    """Load a run's model again, and write its kept kernels in a format; return sentences about what is left out.

    Args:
        run: its directory.
        folder: to be written.
        force: replace what is there.
        trust_remote_code: run the code that comes with a model.
        form: of the export.
        options: of :func:`fusion_advisor.export.formats.write.write_plan`.
    """
    export = import_module("fusion_advisor.export.export")
    saved = import_module("fusion_advisor.fuse.live.saved_plan").load_plan(run)
    export.check_export(saved, folder, force=force)
    request = replace(stored_request(run), trust_remote_code=trust_remote_code)
    write = import_module("fusion_advisor.export.formats.write").write_plan
    left_out: tuple[str, ...] = write(load_workload(request), saved, folder, form=form, force=force, **options)
    return left_out


def stored_request(run: Path) -> Any:
    """Return what a run was made of.

    Raises:
        UnknownRun: its directory does not say.
    """
    path = run / "request.json"
    if not path.is_file():
        detail = "it holds no request.json, so its model cannot be made again"
        raise UnknownRun(name=run.name, detail=detail, known="name the model instead: fusion-advisor apply MODEL_ID")
    return load_request(import_module("fusion_advisor.records.serialize").read_document(path), str(path))


def read_patterns(kernel_dirs: Sequence[Path]) -> None:
    """Read, import and trace the user's kernels, so that a broken kernel is reported before a long run."""
    discover, patterns = (import_module(f"fusion_advisor.library.{name}") for name in ("discover", "patterns"))
    for spec in discover.list_kernels(kernel_dirs):
        if spec.folder.parent not in kernel_dirs:
            continue
        try:
            tuple(patterns.kernel_patterns(spec))
        except AdvisorError:
            raise
        except Exception as error:  # the reference is the user's code: it may raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            detail = f"cannot be traced: {type(error).__name__}: {lines[0]}"
            raise discover.BadReference(file=spec.folder / "reference.py", detail=detail) from error


def list_kernels(kernel_dirs: Sequence[Path]) -> list[Any]:
    """Return the library's kernels and the user's own."""
    return list(import_module("fusion_advisor.library.discover").list_kernels(kernel_dirs))


def load_kernel(name: str, kernel_dirs: Sequence[Path]) -> Any:
    """Return one kernel."""
    return import_module("fusion_advisor.library.discover").load_kernel(name, kernel_dirs)


def scaffold_kernel(name: str, directory: Path) -> Any:
    """Write a new kernel's folder."""
    return import_module("fusion_advisor.library.discover").scaffold(name, directory)


def render_kernel(kernel: Any, backend: str, dtype: str) -> str:
    """Return a kernel's source for one backend and dtype."""
    source: str = import_module("fusion_advisor.evaluate.render").render_kernel(kernel, backend, dtype).file_text
    return source


def check_kernel(
    name: str, progress: Progress, *, kernel_dirs: Sequence[Path] = (), backends: Sequence[str] | None = None
) -> list[Any]:
    """Run a kernel's own cases."""
    check = import_module("fusion_advisor.evaluate.check").check_kernel
    return list(check(name, progress, kernel_dirs=kernel_dirs, backends=backends))


def plan_bench(name: str | None, **asked: Any) -> Any:
    """Turn the options of ``kernels bench`` into jobs."""
    return import_module("fusion_advisor.evaluate.bench.cases").plan_bench(name, **asked)


def bench_kernels(plan: Any, progress: Progress, on_progress: Callable[[Any], None]) -> Any:
    """Measure a plan's jobs; ``on_progress`` gets the run so far after every row."""
    return import_module("fusion_advisor.evaluate.bench.run").bench(plan.jobs, plan.options, progress, on_progress=on_progress)


def run_contender(plan: Any, name: str, iterations: int) -> str:
    """Run one contender of a plan's first job in a loop; return what was run."""
    ran: str = import_module("fusion_advisor.evaluate.bench.run").run_first(plan.jobs, plan.options, name, iterations)
    return ran
