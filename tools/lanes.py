"""Run several measurements on one GPU at a time: ``python -m tools.lanes --for SECONDS FILE``.

Each line of FILE is a lane: a shell command in a process group of its own. While one of them times something, the others are
stopped (``fusion_advisor/timing/alone.py``). Compilers, traces and builds of all of them share the CPU in between. So ratios and
step times are as of one run by itself. How long a whole run took is not: it has waited for the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from fusion_advisor.timing import alone

_ROOT = Path(__file__).resolve().parents[1]
_LOOK_S = 0.2


def start(words: Sequence[str], environment: Mapping[str, str], printed: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """Start a run in a group of its own, which the runs of its folder stop while they time.

    Args:
        words: its command; it runs in the repository.
        environment: of its process; it names the folder, or none.
        printed: gets what it prints; None: this process's own output does.
    """
    process = subprocess.Popen(
        words, cwd=_ROOT, env=dict(environment), start_new_session=True, stdout=printed,
        stderr=None if printed is None else subprocess.STDOUT,
    )  # fmt: skip
    if folder := environment.get(alone.FOLDER):
        (Path(folder) / str(process.pid)).touch()
    return process


def end(process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    """Kill what is left of a run, and let the others go on: it may have ended while they stood still."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if folder := environment.get(alone.FOLDER):
        (Path(folder) / str(process.pid)).unlink(missing_ok=True)
        alone.signal_all(alone.groups_in(Path(folder)), signal.SIGCONT)


@contextlib.contextmanager
def shared(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Give an environment that names a folder for turns: a new one, where there is none yet."""
    if environment.get(alone.FOLDER):
        yield dict(environment)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield {**environment, alone.FOLDER: folder}


def run(lanes: Sequence[str], environment: Mapping[str, str], seconds: float) -> list[int]:
    """Run lanes side by side and return their exit codes; what runs after the seconds is killed.

    Args:
        lanes: shell commands.
        environment: of them all.
        seconds: for all.
    """
    deadline = time.monotonic() + seconds
    with shared(environment) as given:
        running = [start(["bash", "-c", lane], given) for lane in lanes]
        left = list(running)
        while left:
            for process in [one for one in left if one.poll() is not None or time.monotonic() >= deadline]:
                end(process, given)
                left.remove(process)
            time.sleep(_LOOK_S)
    return [process.returncode for process in running]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lanes of a file; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--for", type=float, required=True, dest="seconds", help="for all lanes; what runs then is killed")
    asked = parser.parse_args(arguments)
    lanes = [line for line in asked.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    codes = run(lanes, os.environ, asked.seconds)
    for lane, code in zip(lanes, codes, strict=True):
        print(f"exit code {code}: {lane}", flush=True)
    return sum(code != 0 for code in codes)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
