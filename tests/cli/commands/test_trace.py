"""``fusion-advisor profile --trace FILE`` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.fuse.modes import trace_profile
from fusion_advisor.records import TraceReport
from fusion_advisor.records.serialize import TRACE_SCHEMA, load_record
from tests.cli.conftest import Ran
from tests.traces import Recorder, of_capture, write

Run = Callable[..., Ran]
KNOWN = {
    ("add", "to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul"): "add_rmsnorm",
    ("mul", "neg", "cat", "mul", "add"): "rope",
    ("silu", "mul"): "swiglu",
}
TABLE = """\
#  Chain                                                 Sites  Kernels  GPU ms  Share  Looks like
1  add → to → pow → mean → add → rsqrt → mul → to → mul     56    504→?    2.19  14.3%  add_rmsnorm
2  mul → neg → cat → mul → add                              56    280→?    1.26   8.2%  rope
3  silu → [gemm] → mul                                      28     56→?    0.71   4.6%  swiglu
27.1% of GPU time is in 3 chains that repeat.
"""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_profile, "library_sequences", lambda kernel_dirs: KNOWN)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    document, _ = of_capture("qwen2.5-7b-bf16-1x512-h200", steps=1)
    return write(tmp_path_factory.mktemp("trace") / "qwen.json.gz", document)


def test_tables(run: Run, qwen: Path) -> None:
    ran = run("profile", "--trace", str(qwen), "--top", "3")
    assert ran.code == 0
    assert TABLE in ran.out
    first, *_ = ran.out.splitlines()
    assert first.startswith("qwen.json.gz · NVIDIA H200 · 1 step · ")
    assert "This trace cannot tell:\n- whether one kernel may replace a chain" in ran.out
    assert "more kernels; --top N shows more" in ran.out
    assert ran.out.splitlines()[-1].startswith("next: fusion-advisor profile MODEL_ID")
    assert "✓ read" in ran.err
    assert not Path("fusion-runs").exists()


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_line_is_wider_than_the_terminal(run: Run, qwen: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = run("profile", "--trace", str(qwen))
    table = [line for line in ran.out.splitlines() if not line.startswith("next:")]
    assert max(map(len, table)) <= width
    assert "Chain" in ran.out and "Share" in ran.out


def test_json_and_quiet(run: Run, qwen: Path) -> None:
    ran = run("profile", "--trace", str(qwen), "--json")
    assert json.loads(ran.out)["schema"] == TRACE_SCHEMA
    report = load_record(TraceReport, ran.out, schema=TRACE_SCHEMA, name="stdout")
    assert [chain.kernel for chain in report.chains] == ["add_rmsnorm", "rope", "swiglu"]
    assert run("profile", "--trace", str(qwen), "-q").out == "27.1% of GPU time is in 3 chains that repeat.\n"


def test_a_folder_has_a_row_for_each_rank(run: Run, tmp_path: Path) -> None:
    for rank, us in ((0, 30.0), (1, 10.0)):
        recorder = Recorder().op("aten::linear", ("nvjet", 60.0 - us)).op("", ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", us))
        write(tmp_path / f"rank{rank}.json", recorder.document(distributedInfo={"rank": rank, "world_size": 2}))
    ran = run("profile", "--trace", str(tmp_path))
    assert ran.code == 0
    assert "2 ranks: communication takes 16" in ran.out and "waiting for one another 16" in ran.out
    assert "Rank 1 computes 66.7% longer than rank 0." in " ".join(ran.out.split())
    cells = [line.split() for line in ran.out.splitlines() if line.startswith(("0 ", "1 "))]
    assert [line[0] for line in cells] == ["0", "1"] and "Hidden" in ran.out
    assert cells[0][3:9] == ["30.0", "µs", "10.0", "µs", "20.0", "µs"]


def test_mistakes_have_their_codes(run: Run, tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.json.gz", Recorder().op("aten::add", "add_kernel").document())
    broken.write_bytes(broken.read_bytes()[:-20])
    ran = run("profile", "--trace", str(broken))
    assert ran.code == 9
    assert "error[FA501]" in ran.err and "gzip ends early at byte" in ran.err and "help: export it again" in ran.err
    lost = Recorder().op("aten::add", "add_kernel").op("aten::mul", "mul_kernel")
    lost.events = [one for one in lost.events if one["name"] != "mul_kernel"]
    ran = run("profile", "--trace", str(write(tmp_path / "lost.json", lost.document())))
    assert ran.code == 6
    assert "error[FA502]: the trace has 1 of 2 launched kernels; shares would be wrong" in ran.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "there is nothing to profile"),
        (("gpt2", "--trace", "t.json"), "takes no MODEL_ID"),
        (("--trace", "t.json", "--batch", "4", "-o", "out"), "takes no --batch, --output"),
    ],
)
def test_a_trace_takes_no_model_and_nothing_that_describes_one(run: Run, arguments: tuple[str, ...], named: str) -> None:
    ran = run("profile", *arguments)
    assert ran.code == 2
    assert "error[FA001]" in ran.err and named in ran.err


def test_hostile_names_are_inert(run: Run, tmp_path: Path) -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder.op("aten::mm", "gemm").op("aten::add", "[/bold]\x1b[31m\u202eelementwise").op(
            "aten::mul", "</script>\ud800functor"
        )
    ran = run(
        "profile", "--trace", str(write(tmp_path / "t.json", recorder.document(deviceProperties=[{"name": "\x07"}, 3, {}])))
    )
    assert ran.code == 0
    assert "\x1b" not in ran.out and "\u202e" not in ran.out and "\x07" not in ran.out
    assert "[/bold]\\x1b[31m\\u202eelementwise" in ran.out
