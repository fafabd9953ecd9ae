"""The zoo: every workload builds and runs at tiny widths; rows come from reports, and a crash is a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from fusion_advisor.timing import alone
from tools.zoo import images, run, table, turn
from tools.zoo.diffusion import DIFFUSION
from tools.zoo.images import IMAGES
from tools.zoo.size import MissingPackage, Size, optional_package
from tools.zoo.workloads import NAMES, attribute_of, family_of, make

TINY = Size(is_tiny=True, layers=0, dtype=torch.float32)
ROW = table.Row(
    name="a", family="decoder", status="applied", seconds=20.0, answer_s=12.0, eager_ms=3.0, ours_ms=1.0, peer="Liger",
    peer_ms=2.0, ratio=0.5, chains_share=0.3, kept=2, refused={"FA401": 2}, predicted_ns=[90, 110], measured_ns=[100, 100],
)  # fmt: skip


def made(name, size=TINY):
    """Build a workload; the test is left out where its package is missing."""
    try:
        return make(name, size)
    except MissingPackage as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_workload_runs(name):
    model, inputs = made(name)
    with torch.no_grad():
        result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    assert result is not None
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000


def test_there_are_forty_workloads_of_many_families():
    assert len(NAMES) >= 40 and len({family_of(name) for name in NAMES}) >= 12
    assert len({attribute_of(name) for name in NAMES}) == len(NAMES)


def test_layers_are_cut():
    assert Size(is_tiny=False, layers=6, dtype=torch.float32).cut(28) == 6
    assert Size(is_tiny=False, layers=0, dtype=torch.float32).cut(28) == 28
    assert TINY.cut(28) == 2 and TINY.cut(1) == 1


MILLIONS = {
    "stable-diffusion-unet": 859.5, "stable-diffusion-decoder": 49.5, "dit-xl-2": 749.8, "flux": 11901.4, "sd3-medium": 2028.3,
    "pixart-alpha": 610.9, "timm-resnet50": 25.6, "timm-efficientnet-b0": 5.3, "timm-mobilenetv3-large": 5.5,
    "timm-convnext-tiny": 28.6, "timm-regnety-032": 19.4, "timm-swin-tiny": 28.3, "timm-maxvit-tiny": 30.9,
    "timm-coatnet-0": 27.4, "timm-vit-base": 86.6, "timm-mixer-b16": 59.9,
}  # fmt: skip
"""Parameters of the published models."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DIFFUSION, *IMAGES])
def test_widths_are_those_of_the_published_model_and_layers_are_cut(name):
    with torch.device("meta"):
        whole, _ = made(name, Size(is_tiny=False, layers=0, dtype=torch.bfloat16))
        cut, _ = made(name, Size(is_tiny=False, layers=1, dtype=torch.bfloat16))
    count, less = (sum(parameter.numel() for parameter in model.parameters()) for model in (whole, cut))
    assert round(count / 1e6, 1) == MILLIONS[name]
    has_stages = name in IMAGES and not images.MODELS[name].is_cut
    assert less == count if has_stages else less < count


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(MissingPackage, match=r"needs no_such_package: pip install 'fusion-advisor\[zoo\]'"):
        optional_package("no_such_package")


def test_what_a_package_itself_lacks_is_named(tmp_path, monkeypatch):
    (tmp_path / "lacks_another.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match="needs lacks_another, which imports no_such_package"):
        optional_package("lacks_another")


def test_a_second_process_has_its_turn_when_the_first_has_ended(tmp_path):
    code = (
        "import os, time; from pathlib import Path; from tools.zoo.turn import wait_for_turn; wait_for_turn(os.environ); "
        "here = Path(os.environ['ZOO_TURN_STARTED']); "
        "[time.sleep(0.05) for _ in range(400) if not here.with_name('go').exists()]; here.with_suffix('.end').touch()"
    )
    ways = [{**os.environ, turn.FILE: str(tmp_path / "gpu"), turn.STARTED: str(tmp_path / name)} for name in ("a", "b")]
    processes = [subprocess.Popen([sys.executable, "-c", code], env=way) for way in ways]
    try:
        while not any(turn.started_at(way) for way in ways):
            time.sleep(0.05)
        first = 0 if turn.started_at(ways[0]) else 1
        assert turn.started_at(ways[1 - first]) is None
        (tmp_path / "go").touch()
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    second = Path(ways[1 - first][turn.STARTED])
    assert Path(ways[first][turn.STARTED]).with_suffix(".end").stat().st_mtime_ns <= second.stat().st_mtime_ns


def test_a_workload_is_stopped_by_its_limit_from_its_turn_on(tmp_path):
    environment = {turn.FILE: str(tmp_path / "gpu"), turn.STARTED: str(tmp_path / "a")}
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run._wait(subprocess.Popen(sleeper), environment, limit_s=0.1, wait_s=0.1)[0] == table.TOOK_TOO_LONG
    (tmp_path / "a").write_text(str(time.monotonic() - 1000))
    code, seconds = run._wait(subprocess.Popen(sleeper), environment, limit_s=1.0, wait_s=1e6)
    assert code == table.TOOK_TOO_LONG and seconds >= 1000


@pytest.mark.slow
def test_of_two_tiny_workloads_one_waits_for_its_turn(tmp_path):
    names = ["llama-by-hand", "dit-by-hand"]
    words = ["--device", "cpu", "--no-compile", "--runs", "3"]
    run.main(["--to", str(tmp_path), "--tiny", "--dtype", "float32", "--ahead", "1", *names, "--", *words])
    rows = {row["name"]: row["status"] for row in json.loads((tmp_path / "zoo.json").read_text())}
    assert set(rows) == set(names) and set(rows.values()) <= set(table.ENDED_WELL)
    first, second = sorted(names, key=lambda name: turn.started_at({turn.STARTED: str(tmp_path / name / "turn.txt")}))
    report, began = tmp_path / first / "report.json", tmp_path / second / "turn.txt"
    assert report.stat().st_mtime_ns <= began.stat().st_mtime_ns


def test_a_row_is_read_from_a_report(tmp_path):
    def way(name, ns):
        return {"name": name, "step": {"wall": {"median_ns": ns}}}

    rewrite = {
        "status": "kept", "predicted_saving_ns": 900_000, "step_delta_ns": -1_000_000, "predicted_low_ns": 700_000,
        "predicted_high_ns": 1_100_000,
    }  # fmt: skip
    report = {
        "before": {"wall": {"median_ns": 4_000_000}}, "after": {"wall": {"median_ns": 1_500_000}, "peak_memory_bytes": 7},
        "fusions": [rewrite, {"status": "slower"}], "rewrites": [], "chains": [{"share": 0.25}, {"share": 0.05}],
        "baselines": [way("eager", 4_000_000), way("torch.compile default", 2_000_000), {"name": "Liger", "step": None},
                      way("ours", 1_500_000), way("ours + torch.compile", 1_000_000)],
        "answers": [{"code": "FA401"}, {"kernel": "gelu"}, {"code": "FA401"}],
        "answer_s": 7.5,
        "durations_s": [["bandwidth", 1.0], ["profile", 3.0], ["fusions", 4.5], ["baselines", 60.0]],
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    row = table.row_of("a", "decoder", tmp_path, code=0, seconds=99.0)
    assert (row.status, row.kept, row.peer, row.peer_ms, row.ours_ms) == ("applied", 1, "torch.compile default", 2.0, 1.5)
    assert (row.ratio, row.answer_s, row.chains_share, row.refused) == (0.75, 7.5, pytest.approx(0.3), {"FA401": 2})
    assert (row.predicted_ns, row.measured_ns) == ([900_000], [1_000_000])
    assert (row.predicted_low_ns, row.predicted_high_ns) == ([700_000], [1_100_000])
    report["rewrites"] = [{"status": "kept", "predicted_saving_ns": 5, "step_delta_ns": -5}]  # as an older version wrote it
    (tmp_path / "report.json").write_text(json.dumps(report))
    older = table.row_of("a", "decoder", tmp_path, code=0, seconds=99.0)
    assert (older.predicted_ns, older.predicted_low_ns, older.predicted_high_ns) == ([900_000, 5], [], [])


def test_at_its_end_the_zoo_stops_what_runs_and_begins_no_more(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(run.OutOfTime):
        run._wait(sleeper, {}, limit_s=500.0, wait_s=0.0, end=time.monotonic() + 0.5)
    assert sleeper.poll() is not None
    found = run.run_all(["gpt2", "bert", "vit"], tmp_path, [], os.environ, limit_s=500.0, ahead=1, end=time.monotonic())
    assert list(found) == []
    assert not list(tmp_path.iterdir())


def test_a_crash_and_a_run_that_takes_too_long_are_rows(tmp_path):
    crashed = table.row_of("a", "decoder", tmp_path, code=3, seconds=5.0, last_words="error FA501:\n no")
    late = table.row_of("b", "decoder", tmp_path, code=table.TOOK_TOO_LONG, seconds=600.0)
    assert (crashed.status, crashed.detail, late.status) == ("exit code 3", "error FA501: no", "took too long")
    shown = table.markdown([ROW, crashed, late])
    assert "**exit code 3**" in shown and "1 of 3 workloads ended well" in shown


def test_what_all_rows_say_together():
    slower = replace(ROW, name="b", ratio=2.0)
    text = table.summary([ROW, slower])
    assert "best other way 1.00" in text and "slower than another way: b" in text and "missed by 10%" in text
    assert "within their intervals" not in text
    sure = replace(ROW, predicted_low_ns=[80, 105], predicted_high_ns=[105, 120])
    assert "missed by 10% (median of 4), 1 of 2 within their intervals" in table.summary([ROW, sure])
    assert table.markdown([ROW, slower]).index("| b |") < table.markdown([ROW, slower]).index("| a |")
    assert len(ElementTree.fromstring(table.picture([ROW, slower])).findall(".//{*}rect")) == 3


def test_what_ran_beside_others_has_no_time_to_an_answer():
    beside = replace(ROW, name="b", is_alone=False, answer_s=999.0, compile_s=888.0, seconds=1000.0)
    assert "999" not in table.markdown([ROW, beside]) and "888" not in table.markdown([ROW, beside])
    assert table.summary([ROW, beside]).count(f"an answer {ROW.answer_s:.0f} s") == 1
    assert "answer" not in table.summary([beside]) and "1000 s beside others" in table.line(beside)


def test_workloads_that_share_a_gpu_have_one_folder_for_it(tmp_path):
    found = run.places(tmp_path, gpus=2, ahead=0, share=3)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in found] == ["0"] * 3 + ["1"] * 3
    assert [place[alone.FOLDER] for place in found] == [str(tmp_path / f"alone-{number}") for number in (0, 0, 0, 1, 1, 1)]
    assert run.places(tmp_path, gpus=0, ahead=0, share=1) == [{}]
    assert run.places(tmp_path, gpus=0, ahead=1, share=1) == [{turn.FILE: str(tmp_path / "turn-0")}] * 2


@pytest.mark.slow
def test_two_tiny_workloads_run_side_by_side(tmp_path):
    words = ["--device", "cpu", "--no-compile", "--runs", "3"]
    names = ["llama-by-hand", "dit-by-hand"]
    assert run.main(["--to", str(tmp_path), "--tiny", "--dtype", "float32", "--share", "2", *names, "--", *words]) == 0
    rows = json.loads((tmp_path / "zoo.json").read_text())
    assert not any(row["is_alone"] for row in rows)
    began = [(tmp_path / name / "printed.txt").stat().st_ctime for name in names]
    assert sum(row["seconds"] for row in rows) > max(began) - min(began)
    assert not alone.groups_in(tmp_path / "alone-0")


def test_the_zoo_goes_on_and_does_not_run_again_what_has_a_row(tmp_path, monkeypatch):
    ran = []

    def one(name, to, options, environment, limit_s, wait_s, end):
        ran.append((name, tuple(options), environment["ZOO_TINY"], environment["ZOO_LAYERS"]))
        (to / name).mkdir(parents=True)
        return replace(ROW, name=name, status="exit code 1" if name == "opt" else "applied")

    monkeypatch.setattr(run, "run_one", one)
    words = ["--to", str(tmp_path), "--tiny", "--layers", "3", "gpt2", "opt", "--", "--no-compile"]
    assert run.main(words) == 1 and run.main(words) == 1
    assert ran == [("gpt2", ("--no-compile",), "1", "3"), ("opt", ("--no-compile",), "1", "3")]
    assert [row["name"] for row in json.loads((tmp_path / "zoo.json").read_text())] == ["gpt2", "opt"]
    with pytest.raises(SystemExit):
        run.main(["--to", str(tmp_path), "nothing-like-it"])
    ran.clear()
    assert run.main(["--to", str(tmp_path / "rows"), "--examples", "--", "--quick"]) == 0
    assert len(ran) == 14 and {one[1] for one in ran} == {("--quick",)} and not {one[0] for one in ran} & set(NAMES)
    with pytest.raises(SystemExit):
        run.main(["--to", str(tmp_path), "--examples", "gpt2"])


def test_an_example_is_run_by_its_own_command(tmp_path):
    words = run.command("vit-bf16-1-h200", tmp_path, ["--max-autotune"])
    assert words[3:5] == ["apply", "google/vit-base-patch16-224"] and words[-3:] == ["-o", str(tmp_path), "--max-autotune"]
    assert run.command("gpt2", tmp_path, [])[3:5] == ["apply", "tools.zoo.workloads:gpt2"]
