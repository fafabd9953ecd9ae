"""The nsys line that ``--nvtx -v`` prints, and that its command sends the ranges which nsys would record.

NVTX hands ranges to whatever library ``NVTX_INJECTION64_PATH`` names: that is how nsys gets them. Here it names a recorder.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.runtime.external_profiler import nsys_profile

ROOT = Path(__file__).parents[2]
RECORDER = ROOT / "tests" / "data" / "nvtx_recorder.c"
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        u = self.up(x)
        return self.norm(0.5 * u * (1.0 + torch.tanh(0.7978845608 * (u + 0.044715 * u**3))) + x)

def make():
    torch.manual_seed(0)
    return nn.Sequential(Block()).eval(), torch.randn(64, 32)
"""
COMMAND = ["fusion-advisor", "apply", "model.py:make", "--device", "cpu", "--seed", "0", "--runs", "6", "--nvtx"]
KNOWN = {
    "--trace": {"cuda", "nvtx", "osrt", "cublas", "cudnn", "none"},
    "--capture-range": {"none", "cudaProfilerApi", "hotkey", "nvtx"},
    "--capture-range-end": {"none", "stop", "stop-shutdown"},
}
"""Options of ``nsys profile`` and values of theirs, after NVIDIA's user guide; ``--nvtx-capture`` takes RANGE@DOMAIN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A range that the process opened."""

    thread: str
    domain: str
    name: str
    is_registered: bool
    payload: str
    above: tuple[str, ...]
    """Names of the ranges open around it, the outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the recorder wrote, and the line that the run printed."""

    line: str
    ranges: tuple[Range, ...]
    pops: int
    still_open: int


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Run the command once, as under nsys."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("the recorder must be compiled, and there is no C or C++ compiler")
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "model.py").write_text(MODEL)
    library, log = folder / "recorder.so", folder / "ranges.txt"
    subprocess.run([*compiler, "-x", "c", "-std=c11", "-shared", "-fPIC", str(RECORDER), "-o", str(library)], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FUSION_ADVISOR_", "NSYS_", "NV_NSIGHT_"))}
    variables = {"NVTX_INJECTION64_PATH": str(library), "NVTX_RECORDER_FILE": str(log), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fusion_advisor", *COMMAND[1:], "-v"]
    done = subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (text for text in done.stderr.splitlines() if text.startswith("nsys "))
    return Recorded(line=line, **_read(log.read_text()))


def _read(text: str) -> dict[str, object]:
    """Pair pushes and pops, each domain of each thread on its own as NVTX does."""
    stacks: dict[tuple[str, str], list[str]] = {}
    ranges, pops = [], 0
    for kind, thread, domain, *rest in (line.split("\t") for line in text.splitlines()):
        stack = stacks.setdefault((thread, domain), [])
        if kind == "pop":
            assert stack, f"a pop without a push in {domain}"
            stack.pop()
            pops += 1
            continue
        name, kept, payload = rest
        ranges.append(
            Range(
                thread=thread, domain=domain, name=name, is_registered=kept == "registered", payload=payload, above=tuple(stack)
            )
        )
        stack.append(name)
    return {"ranges": tuple(ranges), "pops": pops, "still_open": sum(map(len, stacks.values()))}


def options_of(line: str) -> dict[str, str]:
    """The options of the nsys line, which must be ones that ``nsys profile`` documents."""
    words = shlex.split(line)
    assert words[:2] == ["nsys", "profile"]
    end = words.index("fusion-advisor") if "fusion-advisor" in words else len(words)
    found = dict(word.split("=", 1) for word in words[2:end])
    for name, value in found.items():
        if name == "--nvtx-capture":
            assert found["--capture-range"] == "nvtx" and re.fullmatch(r"[^@]+@[^@]+", value)
        else:
            assert set(value.split(",")) <= KNOWN[name], (name, value)
    return found


@pytest.mark.slow
def test_the_line_is_the_command_after_known_options(recorded: Recorded) -> None:
    words = shlex.split(recorded.line)
    assert words[words.index("fusion-advisor") :] == COMMAND
    assert recorded.line.startswith(f"{nsys_profile(on_cuda=False)} ")
    assert "nvtx" in options_of(recorded.line)["--trace"].split(",")


def test_a_recording_begins_with_the_call_that_a_gpu_gets_and_ends_without_ending_the_run() -> None:
    """Where cudaProfilerStart is called: test_under_nsys_the_timed_step_is_marked... of the profile's tests."""
    found = options_of(nsys_profile(on_cuda=True))
    assert found == {"--trace": "cuda,nvtx", "--capture-range": "cudaProfilerApi", "--capture-range-end": "stop"}
    assert options_of(nsys_profile(on_cuda=False))["--capture-range-end"] == "stop"


def test_the_range_that_nsys_waits_for_arrives_as_a_registered_string(recorded: Recorded) -> None:
    """For others nsys does not look at, unless it is told to."""
    wanted = options_of(recorded.line)["--nvtx-capture"]
    (found,) = (one for one in recorded.ranges if f"{one.name}@{one.domain}" == wanted)
    assert found.is_registered and not found.above


def test_every_range_is_closed_and_in_our_domain(recorded: Recorded) -> None:
    assert recorded.still_open == 0
    assert recorded.pops == len(recorded.ranges) > 30
    assert {one.domain for one in recorded.ranges if one.name.startswith("fa:")} == {"fusion_advisor"}
    assert len({one.thread for one in recorded.ranges if one.name.startswith("fa:")}) == 1


def test_phases_steps_modules_and_trials_are_told_apart(recorded: Recorded) -> None:
    ours = [one for one in recorded.ranges if one.domain == "fusion_advisor"]
    phases = [one.name for one in ours if one.name.startswith("fa:") and not one.above]
    assert phases[:3] == ["fa:warmup", "fa:baseline", "fa:trace"]
    assert phases[3:] == ["fa:F1:check", "fa:F1:time"]
    steps = [one for one in ours if one.name == "fa:step"]
    assert [one.payload for one in steps] == [str(number) for number in range(len(steps))] and 3 <= len(steps) <= 6
    assert {one.above for one in steps} == {("fa:baseline",)}
    inside = ("fa:baseline", "fa:step")
    modules = [(*one.above, one.name) for one in ours if one.name.startswith("fa:module:")]
    block = (*inside, "fa:module:0")
    assert modules == [block, (*block, "fa:module:0.up"), (*block, "fa:module:0.norm")] * len(steps)
    assert "0.up linear" in {one.name for one in ours if not one.above}
