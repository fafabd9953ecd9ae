"""Runs that were applied and saved, with what a start without a trace needs."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.start.record import NAME
from fusion_advisor.fuse.start.untraced_call import UntracedCall
from fusion_advisor.workload.load import describe_live
from tests.fuse.live.test_saved_plan import save
from tests.fuse.start import network
from tests.fuse.test_pipeline import keep_all, verdicts


def run_of(loaded, options):
    """Apply and save; returns why there is no start without a trace."""
    run = apply_workload(loaded, options, instruments=verdicts(keep_all))
    why = ""
    save(run, options.run_dir)
    why = run.write_start(options.run_dir)
    run.revert()
    return why


def a_network(seed=1, length=48, module=network):
    """Another instance than the one that was applied."""
    model, args = module.made(seed=seed, length=length)
    return describe_live(model, args)


def traced(plan):
    """The same plan, whose model is traced."""
    return replace(plan, start="it is not to be used")


def frames():
    """How many frames dynamo has compiled."""
    return dict(torch._dynamo.utils.counters["frames"])


def untraced_calls(fused):
    """What has made calls without a trace."""
    found = [call.shortcut for call in fused._verified.values()]
    found += [piece.untraced for table in fused.shapes for piece in table.pieces]
    return [one for one in found if isinstance(one, UntracedCall) and one._is_unchanged is not None]


def edit(folder, change):
    """Change what a start is read from."""
    path = folder / NAME
    start = json.loads(gzip.decompress(path.read_bytes()))
    change(start)
    path.write_bytes(gzip.compress(json.dumps(start).encode()))


def put_in(loaded, folder):
    """Load a saved plan and put it in."""
    return apply_plan(loaded, load_plan(folder))


def assert_no_frame(script):
    """Run a script that makes ``fused`` in a process of its own; dynamo may compile nothing there, and kernels have to run."""
    judged = """
from tests.fuse.start.saved import frames
assert fused.traced_because == "" and fused.fallbacks == {} and frames() == {}, (fused.traced_because, frames())
assert fused.launches > 0
print("no frame")
"""
    done = subprocess.run(
        [sys.executable, "-c", script + judged], capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False
    )
    assert done.stdout.endswith("no frame\n"), done.stderr[-2000:]
