"""Measure how fast a model starts and runs from each thing that a run leaves: ``python -m tools.start_up MODEL --to DIR``.

One process applies the model, saves the plan and exports it in every format. Then each way has a process of its own: the package,
the saved plan, torch.compile with warm caches, AOTInductor of the plain model, and more. The table shows the imports, the weights
and the rest of the time from the start of the process to the end of its first step. A way that fails has its reason there.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fusion_advisor
from fusion_advisor.timing import alone
from tools import lanes
from tools.start_up.table import facts_of, is_failure, markdown

WAYS = ("apply", "package", "plan", "package_graph", "eager", "compile_cold", "compile", "aoti_make", "aoti", "pt2", "pt2_graph")


BY_CLOCK = frozenset({"package", "plan", "package_graph", "eager", "compile", "aoti", "pt2", "pt2_graph"})
"""Ways of which a whole start is timed: other runs on the machine stand still until it ends."""


def run_way(folder: Path, way: str, limit_s: float) -> None:
    """Run a way in a process, and end it where it takes too long.

    Args:
        folder: of the measurement.
        way: one of :data:`WAYS`.
        limit_s: of wall time.
    """
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    waits = alone.alone() if way in BY_CLOCK else contextlib.nullcontext()
    with (folder / f"{way}.txt").open("w") as printed, waits:
        environment = {**os.environ, **own}
        command = [sys.executable, "-m", "tools.start_up.child", way, str(folder), str(time.time())]
        process = lanes.start(command, environment, printed)
        try:
            code = process.wait(limit_s)
            reason = f"its process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"over its limit of {limit_s:.0f} s"
        finally:
            lanes.end(process, environment)
    if reason:
        note(folder, way, reason)


def note(folder: Path, way: str, reason: str) -> None:
    """Write down why a way has no figures."""
    with (folder / f"{way}.jsonl").open("a") as file:
        file.write(json.dumps({"failed": reason}) + "\n")


def measure(folder: Path, ways: list[str], *, total_s: float, limit_s: float, apply_s: float) -> None:
    """Run the ways one after the other.

    Args:
        folder: with the settings.
        ways: to run.
        total_s: for all.
        limit_s: for each.
        apply_s: for the process that applies and exports.
    """
    started = time.monotonic()
    for way in ways:
        left = total_s - (time.monotonic() - started)
        if left < 5:
            note(folder, way, f"no time was left of {total_s:.0f} s")
            continue
        run_way(folder, way, min(left, apply_s if way == "apply" else limit_s))
        failed = [fact["failed"] for fact in facts_of(folder, way) if is_failure(fact)]
        print(f"{time.monotonic() - started:6.1f} s  {way}: {failed[0] if failed else 'done'}", flush=True)


def settings_of(asked: Any) -> dict[str, Any]:
    """Return what the processes need: the request of the model, and the options of ``apply``."""
    names = ("dtype", "device", "batch", "seq_len", "phase", "context", "layers")
    request = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    weights = "local" if Path(asked.model).is_dir() else "random"
    return {
        "request": {"model_id": asked.model, "weights": weights, "offline": True, **request},
        "options": {"effort": "quick", "compile": False, **json.loads(asked.options)},
        "formats": asked.formats.split(","),
        "within_s": asked.within,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write ``start_up.json`` and ``start_up.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hub id that the package has a configuration of, or a folder of save_pretrained")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="an empty folder, or one that is made")
    parser.add_argument("--phase", default="forward", choices=("forward", "prefill", "decode"))
    for name in ("batch", "seq-len", "context", "layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--options", default="{}", help='options of apply as JSON: \'{"backend": "cuda"}\'')
    parser.add_argument("--ways", default=",".join(WAYS), help="which, in this order; apply comes first")
    parser.add_argument("--formats", default="package,kernels,patch,pt2", help="which are exported, in this order")
    parser.add_argument("--within", type=float, help="seconds for each export; its stages are printed")
    parser.add_argument("--total", type=float, default=235.0, help="seconds for all of it")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each process")
    parser.add_argument("--apply-limit", type=float, default=150.0, help="seconds for the process that applies and exports")
    asked: Any = parser.parse_args(arguments)
    folder = asked.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    ways = asked.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no way is called {sorted(unknown)[0]}")
    settings = settings_of(asked)
    (folder / "settings.json").write_text(json.dumps(settings))
    compileall.compile_dir(Path(fusion_advisor.__file__).parent, quiet=1)  # as pip does: half of our imports
    measure(folder, ways, total_s=asked.total, limit_s=asked.limit, apply_s=asked.apply_limit)
    facts = {way: facts_of(folder, way) for way in ways}
    (folder / "start_up.json").write_text(json.dumps({"settings": settings, "facts": facts}, indent=1) + "\n")
    shapes = ", ".join(f"{name} {value}" for name, value in settings["request"].items() if name not in ("model_id", "offline"))
    (folder / "start_up.md").write_text(markdown(f"{Path(asked.model).name}: {shapes}", facts))
    print((folder / "start_up.md").read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
