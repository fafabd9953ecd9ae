"""Shared steps of ``profile`` and ``apply``: load, make the run directory, run, write, print."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from fusion_advisor.cli.common import core, gates, ranks, run_dir
from fusion_advisor.cli.common.console import Settings, open_page, write_result
from fusion_advisor.cli.common.progress import TerminalProgress
from fusion_advisor.errors import CompileFailed, MachineTooBusy, NothingReplaced, NumericsFailed
from fusion_advisor.files.claim import claimed
from fusion_advisor.files.safe_name import path_inside
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.fuse.plan.training_options import check_options_of_other_phases, check_training_options
from fusion_advisor.records import Capture, Gate, NoMatch, Report, Status
from fusion_advisor.records.serialize import dump_report, read_report, write_atomic, write_capture
from fusion_advisor.report.compare import gate_rules
from fusion_advisor.report.compare.comparison import compare
from fusion_advisor.report.headline import why_busy
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.shared_rows import is_unchanged, reasons
from fusion_advisor.runtime.external_profiler import nsys_profile

INTERRUPTED = 130

OptionsT = TypeVar("OptionsT", bound=ProfileOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where results go."""

    directory: Path | None
    formats: tuple[str, ...]
    as_json: bool
    force: bool
    is_opened: bool = False
    embed_trace: bool = False


def output_of(
    directory: Path | None, formats: Iterable[str] | None, *, embed_trace: bool, as_json: bool, force: bool, is_opened: bool
) -> Output:
    """Return where results go, from a command's options.

    Args:
        directory: of the run.
        formats: asked for, repeated or separated by commas.
        embed_trace: put traces into the HTML.
        as_json: print the report as JSON.
        force: overwrite a run.
        is_opened: open the HTML page.
    """
    return Output(
        directory=directory,
        formats=run_dir.parse_formats(formats, embed_trace=embed_trace),
        as_json=as_json,
        force=force,
        is_opened=is_opened,
        embed_trace=embed_trace,
    )


def run_profile(settings: Settings, request: Any, options: ProfileOptions, output: Output) -> None:
    """Profile a workload and show what was found."""

    def work(loaded: core.Loaded, full: ProfileOptions, progress: TerminalProgress, group: Any) -> Report:
        if group is not None:
            report, capture = core.profile_on_ranks(group, loaded, full, progress)
        elif loaded.record.phase == "generate":
            (report, capture), (part, part_capture) = core.profile_generate(loaded, full, progress)
            _write_part(full, "prefill", part, part_capture, output)
        elif loaded.record.phase == "train":
            report, capture = core.profile_training(loaded, full, progress)
        else:
            report, capture = core.profile_workload(loaded, full, progress)
        if full.run_dir is not None:
            write_capture(capture, full.run_dir / "capture.json.gz")
        return report

    report, directory = _run(settings, "profile", request=request, options=options, output=output, work=work)
    _show(settings, report, directory, output, _after_profile(report, _named(directory, output)))


def run_apply(
    settings: Settings, request: Any, options: ApplyOptions, output: Output, rules: tuple[gate_rules.Rule, ...] = ()
) -> None:
    """Apply the rewrites that pay, show their gains, and end with an error if a gate fails.

    Raises:
        UsageError: an option cannot serve the workload's phase.
    """
    if request.phase == "train":
        check_training_options(options)
    else:
        check_options_of_other_phases(options)

    def work(loaded: core.Loaded, full: ApplyOptions, progress: TerminalProgress, group: Any) -> Report:
        def save(report: Report) -> None:
            if full.run_dir is not None:
                write_atomic(full.run_dir / "report.json", dump_report(report))

        if group is None:
            applied = core.apply_workload(loaded, full, progress, save, compilers)
        else:
            applied = core.apply_on_ranks(group, loaded, full, progress, save)
        try:
            if full.run_dir is not None:
                write_capture(applied.capture, full.run_dir / "capture.json.gz")
                for name, part, capture in applied.parts:
                    _write_part(full, name, part, capture, output)
                if applied.write_start is not None:
                    applied.write_start(full.run_dir)
            return applied.report
        finally:
            applied.revert()

    with contextlib.nullcontext() if ranks.is_several() else core.started_compilers(request.device) as compilers:
        report, directory = _run(
            settings,
            "apply",
            request=request,
            options=options,
            output=output,
            work=work,
            judge=lambda done: replace(done, gates=_judged(done, rules)),
        )
    run = _named(directory, output)
    is_paid = report.after is not None and not is_unchanged(report)
    words = ["compare", f"{run}:eager", run] if is_paid else ["report", run, "-v"]
    hint = shlex.join(["fusion-advisor", *words])
    _show(settings, report, directory, output, hint)
    if options.strict:
        _be_strict(report)
    if report.too_busy is not None:
        raise MachineTooBusy(detail=why_busy(report.too_busy))
    absolute = any(rule.is_absolute for rule in rules)
    gates.end(report.gates, f"{report.command} {shlex.join(gates.words(rules, absolute=absolute))}")


def _judged(report: Report, rules: tuple[gate_rules.Rule, ...]) -> tuple[Gate, ...]:
    """Judge a run's rewritten step against its own eager step."""
    if report.after is None:
        return gate_rules.unjudged(rules, "Nothing was applied in this run.")
    return gate_rules.judge(rules, compare(report, report, "eager", "applied")).gates


def _write_part(options: ProfileOptions, name: str, report: Report, capture: Capture, output: Output) -> None:
    """Write the report of the run's other phase into a subfolder of the run."""
    if options.run_dir is not None:
        folder = path_inside(options.run_dir, name)
        folder.mkdir(parents=True, exist_ok=True)
        write_capture(capture, folder / "capture.json.gz")
        run_dir.write_run(report, folder, output.formats, run_dir.traces_of(report, folder, embed_trace=output.embed_trace))


def _run(
    settings: Settings,
    verb: str,
    *,
    request: Any,
    options: OptionsT,
    output: Output,
    work: Callable[[core.Loaded, OptionsT, TerminalProgress, Any], Report],
    judge: Callable[[Report], Report] = lambda report: report,
) -> tuple[Report, Path]:
    if output.directory is not None:
        run_dir.refuse_taken(output.directory, force=output.force)
    ranks.quiet_unless_first(settings)
    with (
        contextlib.ExitStack() as claims,
        _kept_apart(settings),
        TerminalProgress(settings, is_patient=True) as progress,
        ranks.joined(request) as group,
    ):
        if options.kernel_dirs:
            progress.phase("kernels")
            core.read_patterns(options.kernel_dirs)
        progress.phase("load")
        loaded = ranks.placed(core.load_workload(request), group)
        for sentence in loaded.notes:
            progress.note(sentence)
        revision = loaded.record.revision
        digest = run_dir.config_hash(verb, request, options, revision)
        run_id = run_dir.free_run_id(digest, makes_folder=output.directory is None and ranks.is_first())
        run_id, folder = ranks.folder_of(group, run_id, output.directory, run_dir.RUNS)
        directory = run_dir.create(run_id, folder, force=output.force)
        claims.enter_context(claimed(directory))
        run_dir.begin(directory, settings, core.dump_request(request))
        full = replace(
            options,
            command=run_dir.command_line(verb, request, options, revision),
            run_dir=directory,
            run_id=run_id,
            config_hash=digest,
        )
        if options.nvtx and settings.verbosity:
            nsys = nsys_profile(on_cuda=loaded.record.device.startswith("cuda"))
            settings.err().print(f"{nsys} {full.command}", soft_wrap=True)  # one line, so that it can be copied
        try:
            report = judge(work(loaded, full, progress, group))
        except KeyboardInterrupt:
            _write_partial(directory, output)
            raise
        except (Exception, SystemExit) as error:
            core.raise_later_failure(loaded, error)
            raise
        progress.phase("report")
        traces = run_dir.traces_of(report, directory, embed_trace=output.embed_trace)
        run_dir.write_run(report, directory, output.formats, traces)
        for sentence in run_dir.trace_warnings(traces, directory):
            progress.warn(sentence)
        if "md" in output.formats:
            run_dir.append_step_summary(render_markdown(report))
    return report, directory


def _write_partial(directory: Path, output: Output) -> None:
    """Write the views of what an interrupted run has found; a second Ctrl-C ends this too."""
    path = directory / "report.json"
    if path.is_file():
        report = read_report(path)
        run_dir.write_run(report, directory, output.formats, run_dir.traces_of(report, directory, embed_trace=output.embed_trace))


@contextlib.contextmanager
def _kept_apart(settings: Settings) -> Iterator[None]:
    """Keep stdout for the result, and what libraries say for the log.

    A model's own code, or a compiler, may print; with ``--json`` one such line would spoil the document.
    """
    handler = _LogHandler(settings)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("fusion_advisor", "py.warnings")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    logging.captureWarnings(settings.verbosity < 2)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.captureWarnings(False)
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _LogHandler(logging.Handler):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def emit(self, record: logging.LogRecord) -> None:
        self._settings.write_log(self.format(record))


def _show(settings: Settings, report: Report, directory: Path, output: Output, hint: str) -> None:
    from fusion_advisor.report.terminal.layout import plain
    from fusion_advisor.report.terminal.result import details, result_table, summary_line

    if not ranks.is_first():
        return
    console = settings.out()
    if output.as_json:
        write_result(dump_report(report))
    elif settings.is_quiet:
        write_result(plain(summary_line(report), console) + "\n")
    else:
        with console.capture() as captured:
            console.print(result_table(report, console))
            if settings.verbosity:
                console.print(details(report, console, with_source=settings.verbosity > 1))
        shown = directory / ("report.html" if "html" in output.formats else "report.json")
        write_result(f"{captured.get()}report: {shown}\nnext: {hint}\n")
    if output.is_opened:
        open_page(settings, directory / "report.html")
    if report.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _after_profile(report: Report, run: str) -> str:
    """Return the command that goes on from a profile: apply what has a kernel, or learn why nothing has."""
    reasons = [answer.code for answer in report.answers if isinstance(answer, NoMatch)]
    if reasons and len(reasons) == len(report.answers):
        return f"fusion-advisor explain {reasons[0]}"
    return f"fusion-advisor apply {shlex.quote(run)}"


def _named(directory: Path, output: Output) -> str:
    return "@last" if output.directory is None else str(directory)


def _be_strict(report: Report) -> None:
    """End with an error where something failed that a run without --strict only reports."""
    wrong = "; ".join(reasons([*report.rewrites, *report.fusions], Status.WRONG_NUMBERS))
    if report.model_check is not None and not report.model_check.is_passed:
        wrong = "; ".join(part for part in (wrong, "the whole model's outputs are outside the limit") if part)
    if wrong:
        raise NumericsFailed(detail=wrong)
    # A rewrite of the graph that was not tried is no failure; a kernel without a site is.
    if failed := reasons(report.fusions, Status.BUILD_FAILED):
        raise CompileFailed(detail="; ".join(failed))
    if idle := reasons(report.fusions, Status.NOT_REPLACED):
        raise NothingReplaced(detail="; ".join(idle))
