"""The page that says what was tried, how often, and what failed: ``python -m tools.trust --out trust.md [RECORD.json …]``.

Each thing that is tried leaves a flat record: a name, how many were tried, failed and refused, on which machine. Records are
kept as JSON next to the page, one for each name and machine, so that those of several machines come together: a new one takes the
place of the old one. Without records and without ``--run`` everything runs that this machine can run. The exit code is 1 where a
record says that something failed, or that nothing was tried.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tools.machine import here, today

ROOT = Path(__file__).resolve().parents[1]
MOST_DETAILS = 20
"""Of the failures of one record that the page quotes."""


class BadRecord(Exception):
    """A file that is no record, or a part that left none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one part of the proof came to on one machine.

    Attributes:
        name: of the part.
        tried: graphs, calls, cases or tests.
        failed: wrong numbers, faults that a sanitizer found, or planted faults that nothing saw.
        refused: graphs that the library left as they are, and said why; tests that this machine cannot run.
        kernels: different kernels; 0 where none are counted.
        launches: of generated kernels; 0 where none are counted.
        planted: faults that were planted to see that the part can fail.
        machine: CPU or GPU.
        versions: of Python and torch.
        date: of the run.
        seconds: that it took.
        details: a line for each failure.
    """

    name: str
    tried: int
    failed: int
    machine: str
    refused: int = 0
    kernels: int = 0
    launches: int = 0
    planted: int = 0
    versions: str = ""
    date: str = ""
    seconds: float = 0.0
    details: tuple[str, ...] = ()

    @property
    def is_failing(self) -> bool:
        """Whether something failed; a part that tried nothing shows nothing."""
        return self.failed > 0 or self.tried == 0


def read_record(data: Mapping[str, Any]) -> Record:
    """Read a flat record; what it says beside the fields of :class:`Record` is left out.

    Raises:
        BadRecord: a field is missing or of another kind.
    """
    versions = data.get("versions") or ", ".join(
        f"{word} {data[key]}" for word, key in (("Python", "python"), ("torch", "torch")) if key in data
    )
    try:
        return Record(
            name=str(data["name"]), tried=int(data["tried"]), failed=int(data["failed"]), machine=str(data["machine"]),
            refused=int(data.get("refused", 0)), kernels=int(data.get("kernels", 0)), launches=int(data.get("launches", 0)),
            planted=int(data.get("planted", 0)), versions=str(versions), date=str(data.get("date") or today()),
            seconds=float(data.get("seconds", 0.0)), details=tuple(map(str, data.get("details", ())))[:MOST_DETAILS],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"no record: {type(error).__name__}: {error}") from error


def read_file(path: Path) -> list[Record]:
    """Read a file of one record, or of a list of them.

    Raises:
        BadRecord: it is neither.
    """
    try:
        data = json.loads(path.read_text())
        found = data if isinstance(data, list) else [data]
        return [read_record(one) for one in found]
    except (OSError, json.JSONDecodeError, AttributeError, BadRecord) as error:
        raise BadRecord(f"{path}: {error}") from error


def merged(records: Iterable[Record]) -> list[Record]:
    """Keep the last record of each name and machine, sorted by both."""
    kept = {(record.name, record.machine): record for record in records}
    return [kept[key] for key in sorted(kept)]


# ---------------------------------------------------------------------- running

NAMES = {
    "test_trained": "trained models: perplexity, greedy text and labels",
    "test_planted_faults": "planted faults: wrong kernels that verification must refuse",
    "test_writes": "writes to weights, buffers and inputs after apply",
}
"""Tests by module, in the page's words; others are named after the first line of their docstring."""


def tests_of(report: Path, where: Mapping[str, Any], seconds: float) -> list[Record]:
    """Read a JUnit file of pytest: one record for each module.

    Args:
        report: the file.
        where: machine, versions and date.
        seconds: that all took, for modules whose tests do not say.
    """
    found: dict[str, Record] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        module = next((part for part in case.get("classname", "").split(".") if part.startswith("test_")), "") or case.get(
            "name", ""
        )
        one = found.setdefault(module, Record(name=_title(module), tried=0, failed=0, **where))
        kinds = {child.tag for child in case}
        is_failed, is_skipped = bool(kinds & {"failure", "error"}), "skipped" in kinds
        label = f"{module}: {case.get('name')}"
        found[module] = replace(
            one, tried=one.tried + (not is_skipped), failed=one.failed + is_failed, refused=one.refused + is_skipped,
            seconds=round(one.seconds + float(case.get("time", 0.0)), 1),
            details=(*one.details, label)[:MOST_DETAILS] if is_failed else one.details,
        )  # fmt: skip
    if not found:
        found[""] = Record(name="hostile tests", tried=0, failed=0, seconds=seconds, **where)
    return list(found.values())


def _title(module: str) -> str:
    if module in NAMES:
        return NAMES[module]
    for path in (ROOT / "tests").rglob(f"{module}.py"):
        documented = ast.get_docstring(ast.parse(path.read_text())) or ""
        if documented:
            return f"tests: {documented.splitlines()[0].rstrip('.')}"
    return f"tests: {module.removeprefix('test_').replace('_', ' ')}"


def run_tests(paths: Sequence[str], folder: Path) -> list[Record]:
    """Run tests and count them by module."""
    import torch

    started, report = time.perf_counter(), folder / "tests.xml"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "--show-capture=no", "-p", "no:cacheprovider",
            f"--junitxml={report}", *paths,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not report.exists():
        raise BadRecord(f"pytest left no report: {(done.stdout + done.stderr)[-2000:]}")
    return tests_of(report, here(is_on_gpu=torch.cuda.is_available()), time.perf_counter() - started)


def run_command(arguments: Sequence[str], path: Path) -> list[Record]:
    """Run a command of the project that writes a record.

    Args:
        arguments: of ``python``.
        path: where the command was asked to write.
    """
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if not path.exists():
        raise BadRecord(f"python {' '.join(arguments)} left no record: {(done.stdout + done.stderr)[-2000:]}")
    return read_file(path)


def parts(count: int, tests: Sequence[str], folder: Path) -> dict[str, Callable[[], list[Record]]]:
    """Return the parts that this machine can run, by name.

    Args:
        count: of random graphs.
        tests: folders or files of hostile tests.
        folder: for what they write.
    """
    import torch

    found = {"tests": lambda: run_tests(tests, folder)}
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        path = folder / f"graphs-{device}.json"
        command = ["-m", "tests.hostile.random_graphs", "--count", str(count), "--device", device, "--json", str(path)]
        found[f"graphs-{device}"] = lambda command=command, path=path: run_command(command, path)  # type: ignore[misc]
    for language in ("cpp", *(["cuda"] if torch.cuda.is_available() else [])):
        path = folder / f"sanitize-{language}.json"
        command = ["-m", "tools.sanitize", language, "--out", str(path)]
        found[f"sanitize-{language}"] = lambda command=command, path=path: run_command(command, path)  # type: ignore[misc]
    return found


# ---------------------------------------------------------------------- the page

NOT_COVERED = (
    "Models of other people's sizes: what is tried here is small. The reports in this folder are of whole models.",
    "GPUs other than those in the table, and CPUs with other vector units.",
    "Time. Whether a kernel pays is measured in each run of `apply`; this page is about what is computed.",
    "Kernels that torch, cuBLAS or torch.compile bring: the sanitizers look at the project's own.",
    "Races through global memory: racecheck looks at shared memory. Each kernel's results are compared with fp64 instead.",
)
AGAIN = """```sh
python -m tools.trust --out reports/examples/trust.md                         # all that this machine can run
python -m tools.sanitize cpp --out cpp.json                                   # a part by itself
python -m tools.sanitize cuda --out cuda.json                                 # on a machine with a CUDA device
python -m tests.hostile.random_graphs --count 1000 --device cuda --json graphs.json
python -m tools.trust --out reports/examples/trust.md cuda.json graphs.json   # add records of another machine
```"""


def page(records: Sequence[Record]) -> str:
    """Write the page.

    Args:
        records: merged ones.
    """
    failing = [record for record in records if record.is_failing]
    verdict = f"**{len(failing)} of them failed.**" if failing else "None failed."
    lines = [
        "# What was tried, and what failed",
        "",
        "`python -m tools.trust` wrote this page; `trust.json` next to it holds its records. "
        f"{len(records)} parts ran on {len({record.machine for record in records})} machines. {verdict}",
        "",
        "*Refused* graphs keep their own ops, and the report says why; refused tests need another machine. *Planted* faults are "
        "wrong on purpose: a part that does not see one of them counts it as a failure.",
        "",
        "| What | Tried | Failed | Refused | Planted | Kernels | Launches | Machine | Versions | Date | Seconds |",
        "|---|--:|--:|--:|--:|--:|--:|---|---|---|--:|",
        *map(_row, records),
        "",
    ]
    if failing:
        lines += ["## Failures", ""]
        for record in failing:
            lines += [f"**{_cell(record.name)}**, {_cell(record.machine)}: {_failure(record)}", ""]
            lines += [f"- `{_quoted(detail)}`" for detail in record.details]
            lines += [""] if record.details else []
    lines += ["## What is not covered", "", *(f"- {sentence}" for sentence in NOT_COVERED), ""]
    lines += ["## How to run it again", "", AGAIN]
    return "\n".join(lines) + "\n"


def _failure(record: Record) -> str:
    if record.tried == 0:
        return "nothing was tried."
    quoted = f"; the first {len(record.details)}:" if len(record.details) < record.failed and record.details else "."
    return f"{record.failed:,} failed{quoted}"


def _row(record: Record) -> str:
    failed = f"**{record.failed:,}**" if record.failed else "0"
    tried = f"{record.tried:,}" if record.tried else "**0**"
    counts = [f"{count:,}" if count else "" for count in (record.planted, record.kernels, record.launches)]
    words = [_cell(text) for text in (record.machine, record.versions, record.date)]
    cells = [_cell(record.name), tried, failed, f"{record.refused:,}", *counts, *words, f"{record.seconds:,.0f}"]
    return f"| {' | '.join(cells)} |"


def _quoted(text: str) -> str:
    return " ".join(text.replace("`", " ").split())


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, collect and write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.trust", description="Write the page of what was tried.")
    parser.add_argument("records", nargs="*", type=Path, help="files of records to add")
    parser.add_argument("--out", type=Path, required=True, help="the page; its records are kept next to it as JSON")
    parser.add_argument(
        "--run", action="append", default=[], help="a part to run (repeatable): tests, graphs-cpu, sanitize-cpp …"
    )
    parser.add_argument("--count", type=int, default=200, help="random graphs")
    parser.add_argument("--tests", action="append", default=[], help="tests to count (repeatable); tests/hostile by default")
    asked = parser.parse_args(arguments)
    kept = asked.out.with_suffix(".json")
    try:
        records = read_file(kept) if kept.exists() else []
        records += [record for path in asked.records for record in read_file(path)]
        if asked.run or not asked.records:
            records += run_parts(asked.run, asked.count, asked.tests or ["tests/hostile"])
    except BadRecord as error:
        print(error, file=sys.stderr)
        return 2
    records = merged(records)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([asdict(record) for record in records], separators=(",", ":")) + "\n")
    asked.out.write_text(page(records))
    for record in records:
        state = "FAILED" if record.is_failing else "ok"
        print(f"{state:6} {record.name}, {record.machine}: {record.failed} of {record.tried} failed")
    return int(any(record.is_failing for record in records))


def run_parts(wanted: Sequence[str], count: int, tests: Sequence[str]) -> list[Record]:
    """Run parts by name, all by default; return their records.

    Raises:
        BadRecord: there is no such part on this machine, or one left no record.
    """
    with tempfile.TemporaryDirectory() as folder:
        known = parts(count, tests, Path(folder))
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise BadRecord(f"this machine cannot run {', '.join(unknown)}; it can run {', '.join(known)}")
        found: list[Record] = []
        for name in wanted or known:
            print(f"running {name}", flush=True)
            found += known[name]()
        return found


if __name__ == "__main__":
    sys.exit(main())
