"""Records of many runs in one small file: what predictions are made of and judged by, without kernels, traces and baselines."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fusion_advisor.records import Chain, Fusion, Report, StepProfile, Timing
from fusion_advisor.records.serialize import dump_report, load_report
from tools.rerun_examples import compact

SUFFIX = ".jsonl.gz"


def slim(report: Report) -> Report:
    """Return a report without what no prediction needs.

    Args:
        report: of a run.
    """
    return replace(
        report,
        before=_slim_step(report.before),
        captured=None if report.captured is None else _slim_step(report.captured),
        after=None if report.after is None else _slim_step(report.after),
        chains=tuple(map(_slim_chain, report.chains)),
        fusions=tuple(map(_slim_fusion, report.fusions)),
        rewrites=tuple(replace(row, rendered=()) for row in report.rewrites),
        baselines=(),
        findings=(),
        notes=(),
        warnings=(),
    )


def write_records(path: Path, reports: Mapping[str, Report]) -> None:
    """Write slim reports, a line for each: the run's name, a tab, the report.

    Args:
        path: ends with ``SUFFIX``.
        reports: by the run's name.
    """
    lines = [f"{name}\t{compact(dump_report(slim(report))).strip()}" for name, report in sorted(reports.items())]
    path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def read_records(path: Path) -> Iterator[tuple[str, Report]]:
    """Yield the names and reports of a file that :func:`write_records` wrote.

    Args:
        path: of the file.

    Raises:
        UnreadableReport: a line is no report.
    """
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        name, _, report = line.partition("\t")
        yield name, load_report(report, name)


def _slim_step(step: StepProfile) -> StepProfile:
    return replace(step, timeline=None, kernels=(), wall=_slim(step.wall), rested=_slim(step.rested), device=_slim(step.device))


def _slim_chain(chain: Chain) -> Chain:
    """Let one site stand for all."""
    return replace(chain, sites=tuple(replace(site, runs=chain.runs) for site in chain.sites[:1]))


def _slim_fusion(fusion: Fusion) -> Fusion:
    return replace(
        fusion, rendered=(), original_source=(), chain_before=_slim(fusion.chain_before), chain_after=_slim(fusion.chain_after)
    )


def _slim(timing: Timing | None) -> Timing | None:
    return None if timing is None else replace(timing, times_ns=())
