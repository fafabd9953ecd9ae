"""The zoo: every workload builds and runs at tiny widths; rows come from reports, and a crash is a row."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from tools.zoo import run, table
from tools.zoo.workloads import NAMES, Size, attribute_of, family_of, make

TINY = Size(is_tiny=True, layers=0, dtype=torch.float32)
ROW = table.Row(
    name="a", family="decoder", status="applied", seconds=20.0, answer_s=12.0, eager_ms=3.0, ours_ms=1.0, peer="Liger",
    peer_ms=2.0, ratio=0.5, chains_share=0.3, kept=2, refused={"FA401": 2}, predicted_ns=[90, 110], measured_ns=[100, 100],
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_workload_runs(name):
    model, inputs = make(name, TINY)
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


def test_the_zoo_goes_on_and_does_not_run_again_what_has_a_row(tmp_path, monkeypatch):
    ran = []

    def one(name, to, options, environment, limit_s):
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
