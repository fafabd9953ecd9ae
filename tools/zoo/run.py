"""Run the zoo: ``python -m tools.zoo.run --to DIR [--tiny] [--layers N] [--gpus N] [--ahead N] [NAME ...] [-- OPTIONS]``.

Each workload is an ``apply`` in a process of its own, with compilers' caches of its own, and the zoo goes on after a crash or
when one takes too long. With ``--gpus N`` N workloads run at a time, each on a GPU of its own. With ``--ahead N`` N more for each
GPU build their models on the CPU meanwhile and wait for their turn; waiting counts neither for the limit nor for the row. With
``--share N`` N run on each GPU at a time, and while one of them times something the others stand still (``tools/lanes.py``). A
workload that DIR has a row for is not run again. With ``--for S`` all ends after so many seconds: what runs then is stopped,
and has no row. With ``--examples`` the committed examples run in place of the zoo, by their own commands, against more ways than
their reports have, say: ``-- --max-autotune``. At the end DIR has ``zoo.json``, ``zoo.md`` and ``zoo.svg``. Figures:
``docs/measurements/zoo.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from fusion_advisor.timing import alone
from tools import lanes
from tools.rerun_examples import examples
from tools.zoo import table, turn
from tools.zoo.workloads import NAMES, attribute_of, family_of

EXAMPLE = "committed example"
"""The family of what is no workload of the zoo."""
_TAIL = 400
"""Characters of what a failed run printed last that its row shows."""
_LOOK_S = 0.1
"""Seconds between two looks at whether a workload has its turn, or has had it for too long."""


class OutOfTime(Exception):
    """The seconds for the whole zoo are over."""


def command(name: str, folder: Path, options: Sequence[str]) -> list[str]:
    """Return the command of one workload, or of a committed example."""
    words = ("apply", f"tools.zoo.workloads:{attribute_of(name)}") if name in NAMES else examples([name])[0].words
    return [sys.executable, "-m", "fusion_advisor", *words, "-o", str(folder), *options]


def run_one(
    name: str, to: Path, options: Sequence[str], environment: Mapping[str, str], limit_s: float, wait_s: float = 0.0,
    end: float = math.inf,
) -> table.Row:  # fmt: skip
    """Run one workload and return its row; what it printed is in its folder's ``printed.txt``.

    Args:
        name: of the workload.
        to: folder of all runs.
        options: of ``apply``.
        environment: of its process.
        limit_s: from its turn on.
        wait_s: for its turn, on top of the limit.
        end: of the zoo, by ``time.monotonic``.

    Raises:
        OutOfTime: the zoo ended before it did.
    """
    folder, caches = to / name, to / "caches" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = {"XDG_CACHE_HOME": caches, "TORCHINDUCTOR_CACHE_DIR": caches / "inductor", "TRITON_CACHE_DIR": caches / "triton"}
    given = {**environment, **{key: str(path) for key, path in own.items()}, turn.STARTED: str(folder / "turn.txt")}
    with (folder / "printed.txt").open("w", encoding="utf-8") as printed:
        words = command(name, folder, options)
        process = lanes.start(words, given, printed)
        try:
            code, seconds = _wait(process, given, limit_s=limit_s, wait_s=wait_s, end=end)
        finally:
            lanes.end(process, given)
    shutil.rmtree(caches, ignore_errors=True)
    said = (folder / "printed.txt").read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    is_alone = not given.get(alone.FOLDER)
    family = family_of(name) if name in NAMES else EXAMPLE
    return table.row_of(name, family, folder, code=code, seconds=seconds, last_words=said, is_alone=is_alone)


def _wait(
    process: subprocess.Popen[bytes], environment: Mapping[str, str], *, limit_s: float, wait_s: float, end: float = math.inf
) -> tuple[int, float]:
    """Wait for a workload's end, or stop it; returns its exit code and the seconds from its turn on.

    A workload that never gets its turn is stopped after the limit and ``wait_s``.

    Raises:
        OutOfTime: it was stopped at the end of the zoo.
    """
    began = time.monotonic()

    def turn_began() -> float | None:
        return turn.started_at(environment) if turn.FILE in environment else began

    while True:
        try:
            code = process.wait(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            since, is_over = turn_began(), time.monotonic() >= end
            if not is_over and time.monotonic() < (began + wait_s if since is None else since) + limit_s:
                continue
            process.kill()
            process.wait()
            if is_over:
                raise OutOfTime from None
            code = table.TOOK_TOO_LONG
        return code, time.monotonic() - (turn_began() or began)


def places(to: Path, *, gpus: int, ahead: int, share: int) -> list[dict[str, str]]:
    """Return what is in the environment of each workload that runs at a time.

    Args:
        to: folder of all runs.
        gpus: that there are; 0: a workload sees what there is.
        ahead: for each GPU so many more build their models meanwhile.
        share: on each GPU so many run at a time.
    """
    found = []
    for number in range(gpus or 1):
        place = {"CUDA_VISIBLE_DEVICES": str(number)} if gpus else {}
        place |= {turn.FILE: str(to / f"turn-{number}")} if ahead else {}
        place |= {alone.FOLDER: str(to / f"alone-{number}")} if share > 1 else {}
        found += [place] * ((1 + ahead) * share)
    return found


def run_all(
    names: Sequence[str],
    to: Path,
    options: Sequence[str],
    environment: Mapping[str, str],
    *,
    limit_s: float,
    gpus: int = 0,
    ahead: int = 0,
    share: int = 1,
    end: float = math.inf,
) -> Iterator[table.Row]:
    """Run workloads and yield each one's row as it ends.

    Args:
        names: of the workloads.
        to: folder of all runs.
        options: of ``apply``.
        environment: of its processes.
        limit_s: for one workload.
        gpus: so many run at a time, each sees one GPU; 0: one at a time, which sees what there is.
        ahead: for each GPU so many more build their models meanwhile.
        share: on each GPU so many run at a time.
        end: when all of it ends, by ``time.monotonic``.
    """
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    found = places(to, gpus=gpus, ahead=ahead, share=share)
    for place in found:
        if folder := place.get(alone.FOLDER):
            Path(folder).mkdir(parents=True, exist_ok=True)
        free.put(place)

    def run(name: str) -> table.Row | None:
        sees = free.get()
        try:
            if time.monotonic() >= end:
                return None
            row = run_one(name, to, options, {**environment, **sees}, limit_s, ahead * limit_s, end)
        except OutOfTime:
            return None
        finally:
            free.put(sees)
        (to / name / "row.json").write_text(json.dumps(asdict(row), indent=1) + "\n", encoding="utf-8")
        return row

    with ThreadPoolExecutor(len(found)) as workers:
        for done in as_completed([workers.submit(run, name) for name in names]):
            if (row := done.result()) is not None:
                yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads of the command line; returns how many failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a workload; none: all of them")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--examples", action="store_true", help="the committed examples, not the zoo")
    parser.add_argument("--tiny", action="store_true", help="widths for a CPU")
    parser.add_argument("--layers", type=int, default=0, help="at most so many layers; 0: all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpus", type=int, default=0, help="so many workloads at a time, each on a GPU of its own")
    parser.add_argument("--ahead", type=int, default=0, help="for each GPU, so many more workloads build their models meanwhile")
    parser.add_argument("--share", type=int, default=1, help="so many run on each GPU at a time, and take turns while they time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one workload")
    parser.add_argument("--for", type=float, default=math.inf, dest="total", help="seconds for all; what runs then is stopped")
    asked = parser.parse_args(words[:split])
    end = time.monotonic() + asked.total
    known = tuple(example.folder.name for example in examples()) if asked.examples else NAMES
    if unknown := sorted(set(asked.names) - set(known)):
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(known)}")
    environment = {**os.environ, "ZOO_TINY": str(int(asked.tiny)), "ZOO_LAYERS": str(asked.layers), "ZOO_DTYPE": asked.dtype}
    names = asked.names or known
    to = asked.to.resolve()  # processes run in another folder
    kept = [path for name in names if (path := to / name / "row.json").is_file()]
    rows = [table.Row(**json.loads(path.read_text(encoding="utf-8"))) for path in kept]
    left = [name for name in names if name not in {row.name for row in rows}]
    to.mkdir(parents=True, exist_ok=True)
    options = words[split + 1 :]
    how = {"gpus": asked.gpus, "ahead": asked.ahead, "share": asked.share}
    for row in run_all(left, to, options, environment, limit_s=asked.limit, end=end, **how):
        rows.append(row)
        print(table.line(row), flush=True)
        table.write(to, rows)
    table.write(to, rows)
    return sum(row.status not in table.ENDED_WELL for row in rows)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
