"""Run the committed examples again, one at a time on each GPU: python -m tools.rerun_examples [--to DIR] [NAME ...]

Each run is a process of its own with caches of its own, and takes the command that its report names; the end of what a failed
one printed is shown. Without --to, a run that ends well takes the place of the committed one, and the README's table is written
anew; with it, DIR keeps the runs and nothing else is touched. On two H200s the fourteen take about twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.gpus import visible_gpus
from tools import readme_table

EXAMPLES = readme_table.ROOT / "reports" / "examples"
COMMITTED = ("kernels", "report.json", "report.md", "request.json")
"""What of a run is committed: not its traces and its log."""
SHOWN = "llama3.1-8b-bf16-1x512-h200"
"""The run whose HTML is committed too; `fusion-advisor report DIR` writes it for the others."""
LONGEST_FIRST = ("2048", "decode", "llama", "qwen")
"""Words in the names of runs that take longest: begun last, one of them would keep a GPU when all others are idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A committed run and what made it."""

    folder: Path
    words: tuple[str, ...]
    """Of the command, without the program's name."""


def examples(names: Sequence[str] = ()) -> list[Example]:
    """Return the committed runs, or those of these names, the longest first.

    Raises:
        SystemExit: there is none of that name.
    """
    there = {path.parent.name: path for path in sorted(EXAMPLES.glob("*/report.json"))}
    if unknown := set(names) - set(there):
        raise SystemExit(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    chosen = [there[name] for name in names or there]
    found = [
        Example(folder=path.parent, words=tuple(shlex.split(json.loads(path.read_text(encoding="utf-8"))["command"])[1:]))
        for path in chosen
    ]
    return sorted(found, key=lambda one: min((n for n, word in enumerate(LONGEST_FIRST) if word in one.folder.name), default=9))


def run(example: Example, gpu: str, to: Path) -> bool:
    """Run one example on one GPU; whether it ended well."""
    name, started = example.folder.name, time.monotonic()
    caches = to / "caches" / name
    places = {"XDG_CACHE_HOME": caches, "TORCHINDUCTOR_CACHE_DIR": caches / "inductor", "TRITON_CACHE_DIR": caches / "triton"}
    places["HF_HOME"] = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))  # what was downloaded stays there
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, **{key: str(path) for key, path in places.items()}}
    command = [sys.executable, "-m", "fusion_advisor", *example.words, "-o", str(to / name)]
    with (to / f"{name}.log").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    shutil.rmtree(caches, ignore_errors=True)
    said = f"{name}: exit code {code}, {time.monotonic() - started:.0f} s on GPU {gpu}"
    if code:
        said += "\n" + "\n".join((to / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
    print(said, flush=True)
    return code == 0


def run_all(chosen: Sequence[Example], gpus: Sequence[str], runner: Callable[[Example, str], bool]) -> list[Example]:
    """Give each GPU the next example when it is done with one; return those that ended well."""
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def next_one(example: Example) -> bool:
        gpu = free.get()
        try:
            return runner(example, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as threads:
        done = list(threads.map(next_one, chosen))
    return [example for example, is_good in zip(chosen, done, strict=True) if is_good]


def install(made: Path, example: Example) -> None:
    """Put a run in the place of the committed one: its JSON without indents, its HTML for one run only."""
    for name in (*COMMITTED, *(["report.html"] if example.folder.name == SHOWN else [])):
        old, new = example.folder / name, made / name
        if old.is_dir():
            shutil.rmtree(old)
        if new.is_dir():
            shutil.copytree(new, old)
        elif new.suffix == ".json":
            old.write_text(compact(new.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(new, old)


def compact(document: str) -> str:
    """Return the same JSON document without indents: its keys, their order and all figures stay."""
    return json.dumps(json.loads(document), separators=(",", ":"), allow_nan=False) + "\n"


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders under reports/examples; all by default")
    parser.add_argument("--to", type=Path, metavar="DIR", help="keep the runs here and leave the committed ones alone")
    asked = parser.parse_args()
    chosen, gpus = examples(asked.names), visible_gpus()
    if not gpus:
        raise SystemExit("no GPU to run on")
    with tempfile.TemporaryDirectory() as folder:
        to = asked.to or Path(folder)
        to.mkdir(parents=True, exist_ok=True)
        good = run_all(chosen, gpus, lambda example, gpu: run(example, gpu, to))
        if asked.to is None:
            for example in good:
                install(to / example.folder.name, example)
            readme_table.main()
    return 0 if len(good) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
