"""Run the zoo: ``python -m tools.zoo.run --to DIR [--tiny] [--layers N] [--dtype NAME] [--gpus N] [NAME ...] [-- OPTIONS]``.

Each workload is an ``apply`` in a process of its own, with compilers' caches of its own, and the zoo goes on after a crash or
when one takes too long. With ``--gpus N`` N workloads run at a time, each on a GPU of its own. A workload that DIR has a row for
is not run again. At the end DIR has ``zoo.json``, ``zoo.md`` and ``zoo.svg``.
"""

from __future__ import annotations

import argparse
import json
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

from tools.zoo import table
from tools.zoo.workloads import NAMES, attribute_of, family_of

_ROOT = Path(__file__).resolve().parents[2]
_TAIL = 400
"""Characters of what a failed run printed last that its row shows."""


def command(name: str, folder: Path, options: Sequence[str]) -> list[str]:
    """Return the command of one workload."""
    factory = f"tools.zoo.workloads:{attribute_of(name)}"
    return [sys.executable, "-m", "fusion_advisor", "apply", factory, "-o", str(folder), *options]


def run_one(name: str, to: Path, options: Sequence[str], environment: Mapping[str, str], limit_s: float) -> table.Row:
    """Run one workload and return its row; what it printed is in its folder's ``printed.txt``."""
    folder, caches, started = to / name, to / "caches" / name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = {"XDG_CACHE_HOME": caches, "TORCHINDUCTOR_CACHE_DIR": caches / "inductor", "TRITON_CACHE_DIR": caches / "triton"}
    with (folder / "printed.txt").open("w", encoding="utf-8") as printed:
        try:
            code = subprocess.run(
                command(name, folder, options), cwd=_ROOT, env={**environment, **{key: str(path) for key, path in own.items()}},
                stdout=printed, stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = table.TOOK_TOO_LONG
    shutil.rmtree(caches, ignore_errors=True)
    words = (folder / "printed.txt").read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    return table.row_of(name, family_of(name), folder, code=code, seconds=time.monotonic() - started, last_words=words)


def run_all(
    names: Sequence[str], to: Path, options: Sequence[str], environment: Mapping[str, str], *, limit_s: float, gpus: int = 0
) -> Iterator[table.Row]:
    """Run workloads and yield each one's row as it ends.

    Args:
        names: of the workloads.
        to: folder of all runs.
        options: of ``apply``.
        environment: of its processes.
        limit_s: for one workload.
        gpus: so many run at a time, each sees one GPU; 0: one at a time, which sees what there is.
    """
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    for sees in [{"CUDA_VISIBLE_DEVICES": str(number)} for number in range(gpus)] or [{}]:
        free.put(sees)

    def run(name: str) -> table.Row:
        sees = free.get()
        try:
            row = run_one(name, to, options, {**environment, **sees}, limit_s)
        finally:
            free.put(sees)
        (to / name / "row.json").write_text(json.dumps(asdict(row), indent=1) + "\n", encoding="utf-8")
        return row

    with ThreadPoolExecutor(gpus or 1) as workers:
        for done in as_completed([workers.submit(run, name) for name in names]):
            yield done.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads of the command line; returns how many failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a workload; none: all of them")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="widths for a CPU")
    parser.add_argument("--layers", type=int, default=0, help="at most so many layers; 0: all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpus", type=int, default=0, help="so many workloads at a time, each on a GPU of its own")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one workload")
    asked = parser.parse_args(words[:split])
    if unknown := sorted(set(asked.names) - set(NAMES)):
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    environment = {**os.environ, "ZOO_TINY": str(int(asked.tiny)), "ZOO_LAYERS": str(asked.layers), "ZOO_DTYPE": asked.dtype}
    names = asked.names or NAMES
    kept = [path for name in names if (path := asked.to / name / "row.json").is_file()]
    rows = [table.Row(**json.loads(path.read_text(encoding="utf-8"))) for path in kept]
    left = [name for name in names if name not in {row.name for row in rows}]
    for row in run_all(left, asked.to, words[split + 1 :], environment, limit_s=asked.limit, gpus=asked.gpus):
        rows.append(row)
        print(table.line(row), flush=True)
        table.write(asked.to, rows)
    table.write(asked.to, rows)
    return sum(row.status not in table.ENDED_WELL for row in rows)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
