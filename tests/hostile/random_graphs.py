"""Fuse random graphs and count what went wrong: ``python -m tests.hostile.random_graphs --count 2000 --seed 0``.

Prints each failure as the smallest script that shows it, then one JSON record of the counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.hostile.draw import draw
from tests.hostile.harness import DOORS, Outcome, try_programs
from tests.hostile.programs import Program
from tests.hostile.shrink import shrink

SIDE_BY_SIDE = 12
_SHRINK_TRIES = 60
NOTE = (
    "The check of the whole model is made to pass, so that wrong kernels reach the judge: "
    "`refused` counts no graph that this check would have refused."
)


@dataclass(slots=True)
class Counts:
    """What a run has found so far."""

    tried: int = 0
    reported: int = 0
    """Graphs that went through ``fa.apply``, whose report tells each graph's kernels."""
    fused: int = 0
    """Those of them that kept kernels of ours."""
    kernels: int = 0
    launches: int = 0
    noisy: int = 0
    """Graphs that only pass because rounding noise moves their results as far."""
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one program."""
        self.tried += 1
        self.reported += outcome.door == "apply"
        self.fused += outcome.kernels > 0
        self.kernels += outcome.kernels
        self.launches += outcome.launches
        self.noisy += outcome.is_noisy
        if outcome.refused:
            self.refused[outcome.refused] += 1
        if outcome.wrong:
            self.failures.append(outcome)


def run(
    seeds: Sequence[int], doors: Sequence[str], *, device: str = "cpu", seconds: float | None = None, most_lines: int = 12,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> Counts:  # fmt: skip
    """Draw, fuse and judge the programs of some seeds.

    Args:
        seeds: one program each.
        doors: of :data:`DOORS`; batches take turns.
        device: ``cpu`` or ``cuda``.
        seconds: start nothing new after so many.
        most_lines: of a program.
        tell: given each failure when it is found.
    """
    counts, started = Counts(), time.perf_counter()
    for number, programs in enumerate(_batches(seeds, device, most_lines)):
        if seconds is not None and time.perf_counter() - started > seconds:
            break
        for outcome in try_programs(programs, doors[number % len(doors)], device):
            counts.add(outcome)
            if outcome.wrong:
                tell(outcome)
    return counts


def _batches(seeds: Sequence[int], device: str, most_lines: int) -> Iterator[list[Program]]:
    """Programs that write to their inputs go apart from the others: the backend leaves a graph alone that has one."""
    waiting: dict[bool, list[Program]] = {False: [], True: []}
    for seed in seeds:
        program = draw(seed, device=device, most_lines=most_lines)
        part = waiting[program.writes_inputs(device)]
        part.append(program)
        if len(part) == SIDE_BY_SIDE:
            yield list(part)
            part.clear()
    yield from (part for part in waiting.values() if part)


def smallest(outcome: Outcome, device: str = "cpu") -> Program:
    """Shrink a failure as long as it fails in the same way: an exception stays one, wrong numbers stay wrong numbers."""
    kind = _kind(outcome)

    def fails(program: Program) -> bool:
        again = try_programs([program], outcome.door, device)[0]
        return bool(again.wrong) and _kind(again) == kind

    return shrink(outcome.program, fails, most_tries=_SHRINK_TRIES)


def _kind(outcome: Outcome) -> str:
    """The fault without its numbers."""
    return "".join(letter for letter in outcome.wrong[0].split(" at (")[0] if not letter.isdigit())[:60]


def record(counts: Counts, *, device: str, seconds: float) -> dict[str, object]:
    """Return the counts as one flat record."""
    return {
        "name": "random graphs", "tried": counts.tried, "fused": counts.fused,
        "fused_of": counts.reported, "kernels": counts.kernels,
        "launches": counts.launches, "failed": len(counts.failures), "refused": sum(counts.refused.values()),
        "refused_by_reason": dict(counts.refused), "note": NOTE, "noisy": counts.noisy,
        "device": device, "machine": _machine(device), "torch": torch.__version__,
        "python": platform.python_version(), "seconds": round(seconds, 1),
    }  # fmt: skip


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the answer is 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="graphs")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph; the others follow")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--door", choices=(*DOORS, "both"), default="both", help="fa.apply, torch.compile's backend, or both in turn"
    )
    parser.add_argument("--seconds", type=float, help="start nothing new after so many")
    parser.add_argument("--lines", type=int, default=12, help="most lines of a graph")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    parser.add_argument("--json", type=Path, help="where to write the record")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    started = time.perf_counter()

    def tell(outcome: Outcome) -> None:
        small = outcome.program if given.no_shrink else smallest(outcome, given.device)
        print(f"\n# FAILED through {outcome.door}: {'; '.join(outcome.wrong)}\n{small}\n", flush=True)

    counts = run(
        range(given.seed, given.seed + given.count), DOORS if given.door == "both" else (given.door,), device=given.device,
        seconds=given.seconds, most_lines=given.lines, tell=tell,
    )  # fmt: skip
    made = json.dumps(record(counts, device=given.device, seconds=time.perf_counter() - started), indent=2)
    print(made)
    if given.json:
        given.json.write_text(made + "\n")
    return 1 if counts.failures else 0


if __name__ == "__main__":
    sys.exit(main())
