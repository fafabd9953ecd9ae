"""What ``kernels bench`` measured: one row per kernel, variant, dtype and sizes; one timing per contender.

Units: ``_ns`` nanoseconds of one call, ``_bytes`` bytes; a share is a fraction, a speedup is before divided by after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.codegen.registry import NAMES
from fusion_advisor.records import Bandwidth, Environment, Timing
from fusion_advisor.records.serialize import dump_record, load_record, read_document

SCHEMA = "fusion-advisor-bench/1"
PEERS = ("eager", "compile", "liger", "cublas")
OURS = (*NAMES, "chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One way to compute a row, and what it took."""

    name: str
    """``eager`` (the reference as written, or the kernel's baseline), ``compile``, ``liger``, ``cublas``, a backend's name
    or ``chosen``."""
    timing: Timing | None = None
    """Of one call; None where it could not be run or its numbers were wrong, and then the note says why."""
    rel_l2: float | None = None
    """‖out − fp64‖ / ‖fp64‖, the worst of its outputs; None also where it draws random numbers of its own."""
    note: str = ""
    tuning: str = ""
    """Launch parameters of one of ours, and where they come from."""
    build_ns: int = 0
    """First call of ``compile``; render, compile and bind of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One kernel at one shape and dtype."""

    kernel: str
    variant: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    moved_bytes: int
    """Each input read once, each output written once."""
    limit_ns: int
    """moved_bytes over the copy bandwidth of this run, plus one empty launch."""
    input_sets: int
    """Copies of the inputs that the calls rotate over."""
    is_past_cache: bool
    """Whether those inputs together exceed three times the last-level cache, so that each call reads from memory."""
    entrants: tuple[Entrant, ...]
    winner: str = ""
    """Fastest median of all; empty when nothing was timed."""
    best_ours: str = ""
    of_limit: float | None = None
    """limit_ns over the median of our best: the share of what the memory allows."""
    best_peer: str = ""
    speedup: float | None = None
    """Median of the best peer over the median of our best; above 1 we are faster."""

    def timing_of(self, name: str) -> Timing | None:
        """One contender's timing."""
        return next((entrant.timing for entrant in self.entrants if entrant.name == name), None)

    @property
    def size_text(self) -> str:
        """``R=2048 C=4096``."""
        return " ".join(f"{letter}={size}" for letter, size in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """Everything that one call of ``kernels bench`` measured."""

    environment: Environment
    bandwidth: Bandwidth
    cache_bytes: int
    """Last-level cache of the device."""
    method: tuple[str, ...]
    """How the figures came about, in sentences."""
    peers: tuple[tuple[str, str], ...]
    """(package, version) of the contenders that are not ours; empty where one is missing."""
    rows: tuple[BenchRow, ...]


def limit_ns(moved_bytes: int, bandwidth: Bandwidth) -> int:
    """The time below which no kernel that moves these bytes can fall on this device, launch included."""
    return round(moved_bytes * 1e9 / bandwidth.copy_bytes_per_s) + bandwidth.launch_ns


def judged(entrants: Sequence[Entrant], limit: int) -> dict[str, object]:
    """The verdict fields of a row: who is fastest, and our best against the limit and against the best peer."""
    medians = {entrant.name: max(entrant.timing.median_ns, 1) for entrant in entrants if entrant.timing is not None}
    ours = min((name for name in medians if name in OURS), key=medians.__getitem__, default="")
    peer = min((name for name in medians if name in PEERS), key=medians.__getitem__, default="")
    return {
        "winner": min(medians, key=medians.__getitem__, default=""),
        "best_ours": ours,
        "of_limit": limit / medians[ours] if ours else None,
        "best_peer": peer,
        "speedup": medians[peer] / medians[ours] if ours and peer else None,
    }


def dump_run(run: BenchRun) -> str:
    """Return ``bench.json``'s text."""
    return dump_record(run, SCHEMA)


def read_run(path: Path) -> BenchRun:
    """Read ``bench.json``.

    Raises:
        UnreadableReport, UnknownSchema: it is no such file.
    """
    return load_record(BenchRun, read_document(path), schema=SCHEMA, name=str(path))
