"""What else wants the cores: said where a run could not tell what pays."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fusion_advisor.records import MachineLoad

_PROC = Path("/proc")
_LOOK_S = 0.3
_MOST = 3
_LEAST_CORES = 0.1


def machine_load(proc: Path = _PROC, look_s: float = _LOOK_S) -> MachineLoad:
    """Look at the machine for a moment.

    Args:
        proc: where the system tells about processes; a system without it gives no names.
        look_s: seconds between two readings of each process's CPU time.
    """
    before, started = _cpu_s(proc), time.perf_counter()
    time.sleep(look_s)
    taken_s = max(time.perf_counter() - started, 1e-3)
    used = {pid: (name, (spent - before[pid][1]) / taken_s) for pid, (name, spent) in _cpu_s(proc).items() if pid in before}
    others = sorted((row for pid, row in used.items() if pid != os.getpid()), key=lambda row: -row[1])
    affinity = getattr(os, "sched_getaffinity", None)
    return MachineLoad(
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        busiest=tuple((name, round(cores, 2)) for name, cores in others[:_MOST] if cores > _LEAST_CORES),
        wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
    )


def _cpu_s(proc: Path) -> dict[int, tuple[str, float]]:
    """Return name and CPU seconds of every process that may be read."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
    found = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process ended
            continue
        head, _, rest = text.rpartition(")")  # a name may hold spaces and parentheses
        fields = rest.split()
        found[int(stat.parent.name)] = (head.partition("(")[2], (int(fields[11]) + int(fields[12])) * tick_s)
    return found
