"""Rows of training steps: names of the command line, going on where a run ended, the table and the figures."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace

import pytest

from fusion_advisor.records import OURS
from fusion_advisor.records.serialize import dump_report
from fusion_advisor.workload.preset import find_preset
from tests.report.training.test_way_rows import with_ways
from tools.training_rows import ROWS, Row, command, figures, main, row_of, run, table


def test_rows_are_named_or_spelled_out_and_all_resolve_offline():
    assert row_of("gpt2") == Row("gpt2", "openai-community/gpt2", 32, 1024)
    assert row_of("google/vit-base-patch16-224:2") == Row("google-vit-base-patch16-224-2", "google/vit-base-patch16-224", 2)
    assert row_of("distilgpt2:2x16").tokens == 16
    with pytest.raises(ValueError, match="no row"):
        row_of("gpt3")
    assert all(find_preset(row.model) for row in ROWS) and len({row.name for row in ROWS}) == len(ROWS) == 6
    words = command(ROWS[0], ROWS[0].name, ["--quick"])
    assert " ".join(words[4:]) == (
        "meta-llama/Llama-3.2-1B --batch 4 --seq-len 2048 --phase train --weights random --dtype bf16 --offline --drop-logits "
        "--quick -o llama-3.2-1b --force"
    )
    assert "--seq-len" not in command(row_of("vit-base"), "x", ())


def test_a_second_call_goes_on_with_what_is_not_finished(tmp_path, capsys):
    ran, report = [], with_ways()

    def runner(row, to, options, limit_s):
        ran.append((row.name, tuple(options)))
        (to / f"{row.name}.txt").write_text("")
        if row.name == "vit-base" and len(ran) < 3:
            return 1
        status = "interrupted" if row.name == "bert-large" and len(ran) < 4 else "applied"
        (to / row.name).mkdir(exist_ok=True)
        (to / row.name / "report.json").write_text(dump_report(replace(report, status=status)))
        return 0

    words = ["gpt2", "vit-base", "bert-large", "-o", str(tmp_path), "--", "--quick"]
    assert main(words, runner) == 2
    assert "no report" in (tmp_path / "rows.md").read_text() and "; interrupted |" in (tmp_path / "rows.md").read_text()
    assert main(words, runner) == 0
    assert ran == [(name, ("--max-autotune", "--quick")) for name in ("gpt2", "vit-base", "bert-large", "vit-base", "bert-large")]
    assert main([*words[:5], "--for", "0"], runner) == 0 and len(ran) == 5
    assert main(["gpt2", "--no-max-autotune", "-o", str(tmp_path / "quickly")], runner) == 0 and ran[-1] == (
        "gpt2",
        ("--baseline", "compile"),
    )
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [one["name"] for one in found] == ["gpt2", "vit-base", "bert-large"]
    assert capsys.readouterr().out.count("| openai-community/gpt2 | 32 x 1,024 |") == 4


def test_figures_hold_every_way_and_the_ratio_is_against_the_best_that_is_right():
    report = with_ways()
    found = figures(ROWS[0], report)
    assert found["best_other"] == "torch.compile default" and found["ratio"] == 0.915 and found["ratio_of_step"] == 0.897
    assert found["state_gib"] == 5.0 and not found["ways"]["Liger"]["is_right"]
    assert found["ways"][OURS]["with_adamw_ms"] == 75.0 and found["ways"][OURS]["peak_gib"] == 8.0
    line = table([found]).splitlines()[2]
    assert "| 96.0, 100.0, 8.0 GiB | 78.0, 82.0, 8.0 GiB | – | 60.0, 64.0, 8.0 GiB (wrong) | 70.0, 75.0, 8.0 GiB | 0.92 (" in line
    assert "3 of 4 as eager's; Liger wrong: its loss is 14.206" in line
    alone = replace(report, baselines=report.baselines[:2], after=replace(report.after, label="unchanged"))
    assert figures(ROWS[0], alone)["ratio"] is None and "eager stays" in table([figures(ROWS[0], alone)])
    early = table([figures(ROWS[0], replace(report, baselines=(), after=None, status="interrupted"))])
    assert (
        "| 96.0, –" in early
        and "| – | – | – | – | – |" in early
        and "| not checked; interrupted |" in early
        and "eager stays" not in early
    )


def test_a_row_past_its_limit_is_interrupted(tmp_path):
    code = (
        "import time\ntry:\n  time.sleep(60)\nexcept KeyboardInterrupt:\n  print('writes what it has')\n  raise SystemExit(130)"
    )
    script = tmp_path / "slow.py"
    script.write_text(f"print('begun', flush=True)\n{code}")
    words = [sys.executable, str(script)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what runs in the background
    try:
        assert run(ROWS[0], tmp_path, (), 8.0, lambda *_: words) in (130, -signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "writes what it has" in (tmp_path / f"{ROWS[0].name}.txt").read_text()
