from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from fusion_advisor.records import RankRun, RankTime, Report, Status
from fusion_advisor.records.serialize import read_report, write_report
from fusion_advisor.report.compare.comparison import COMPARE_SCHEMA
from tests.cli.conftest import Core, Ran
from tests.report.fixtures import applied, hostile, profiled, timing

Run = Callable[..., Ran]


def put(name: str, report: Report) -> str:
    directory = Path("fusion-runs") / name
    directory.mkdir(parents=True)
    write_report(replace(report, run_id=name), directory / "report.json")
    return name


def slower(report: Report, factor: float) -> Report:
    """The same run with a rewritten step that takes longer; eager stays."""
    assert report.after is not None and report.after.wall is not None
    wall = timing(int(report.after.wall.median_ns * factor), method="wall")
    return replace(report, after=replace(report.after, wall=wall))


def test_a_profile_against_an_applied_run(run: Run) -> None:
    put("20300101-000000-aaaaaa", profiled())
    put("20300102-000000-bbbbbb", applied())
    ran = run("compare", "20300101", "@last")
    assert ran.code == 0, ran.err
    assert "A  20300101-000000-aaaaaa, the eager step" in ran.out
    assert "B  20300102-000000-bbbbbb, with its kept rewrites" in ran.out
    assert "B is 1.19× faster than A: 18.42 ms → 15.52 ms per step (wall time)." in ran.out
    assert "✓ kept in B" in ran.out
    assert ran.err == ""
    assert not list(Path("fusion-runs").rglob("compare.*"))


def test_the_same_run_twice_is_eager_against_applied(run: Run) -> None:
    put("20300102-000000-bbbbbb", applied())
    for names in (("@last", "@last"), ("@last:eager", "@last:applied"), ("fusion-runs/20300102-000000-bbbbbb:eager", "@last")):
        out = run("compare", *names).out
        assert "20300102-000000-bbbbbb, the eager step" in out
        assert "18.42 ms → 15.52 ms" in out
    ran = run("compare", "@last:eager", "@last:compile")
    assert ran.code == 0
    assert "18.42 ms → 16.90 ms" in ran.out  # its fastest mode
    put("20310102-000000-cccccc", replace(applied(), baselines=()))
    ran = run("compare", "@last:eager", "@last:compile")
    assert ran.code == 9
    assert "error[FA508]: the run `@last` has no `compile` step" in ran.err
    assert "only measured with --compile" in ran.err


def on_ranks(count: int, factor: float, way: str = "tensor parallel") -> Report:
    """The made-up run on several ranks, each step ``factor`` times as long."""
    report = slower(applied(), factor)
    assert report.before.wall is not None
    before = replace(report.before, wall=timing(int(report.before.wall.median_ns * factor), method="wall"))
    rows = tuple(
        RankTime(rank=rank, device="cuda", compute_ns=7_000_000, communication_ns=700_000, waiting_ns=0, idle_ns=0)
        for rank in range(count)
    )
    return replace(report, before=before, ranks=RankRun(way=way, rows=rows))


@pytest.mark.parametrize(
    ("way", "factor", "share"),
    [("tensor parallel", 0.625, "80.0% of linear scaling"), ("replicas", 1.25, "80.0% of linear scaling")],
)
def test_other_numbers_of_ranks_are_a_scaling(run: Run, way: str, factor: float, share: str) -> None:
    """Two ranks that share a step would take half its time; two replicas the same."""
    put("20300101-000000-aaaaaa", applied())
    put("20300102-000000-bbbbbb", on_ranks(2, factor, way))
    ran = run("compare", "20300101", "20300102")
    assert ran.code == 0, ran.err
    (line,) = (line for line in ran.out.splitlines() if line.startswith("Ranks "))
    assert line.split()[:3] == ["Ranks", "1", "2"] and share in line
    assert "The eager step itself changed" not in ran.out
    assert json.loads(run("compare", "20300101", "20300102", "--json").out)["scaling"]["b_ranks"] == 2
    assert "Ranks" not in run("compare", "20300101", "20300101").out


def test_replicas_and_split_models_have_no_scaling_in_common(run: Run) -> None:
    put("20300101-000000-aaaaaa", on_ranks(2, 0.6))
    put("20300102-000000-bbbbbb", on_ranks(4, 1.0, "replicas"))
    ran = run("compare", "20300101", "20300102")
    assert "linear scaling" not in ran.out and "Ranks" in ran.out


def test_a_state_that_no_run_has(run: Run) -> None:
    put("20300101-000000-aaaaaa", profiled())
    ran = run("compare", "20300101:foo", "20300101")
    assert ran.code == 2
    assert "a run has no state `foo`" in ran.err and "use eager, applied or compile" in ran.err
    assert "no such path" in run("compare", "20400101:foo", "20300101").err


def test_views_are_written_where_asked(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    put("20300101-000000-aaaaaa", profiled())
    put("20300102-000000-bbbbbb", applied())
    ran = run("compare", "20300101", "20300102", "--format", "html,md", "--format", "json", "-o", "out")
    assert "\nwrote: out/compare.html\nwrote: out/compare.md\nwrote: out/compare.json\n" in ran.out
    assert ran.out.endswith("next: fusion-advisor compare 20300101 20300102 --fail-on 'regression>2%'\n")
    assert json.loads(Path("out/compare.json").read_text())["schema"] == COMPARE_SCHEMA
    assert (tmp_path / "summary.md").read_text().strip() == Path("out/compare.md").read_text().strip()
    assert run("compare", "20300101", "20300102", "--format", "md").code == 0
    assert Path("fusion-runs/20300102-000000-bbbbbb/compare.md").is_file()
    printed = run("compare", "20300101", "20300102", "--json")
    assert json.loads(printed.out) == json.loads(Path("out/compare.json").read_text())
    assert run("compare", "20300101", "20300102", "-q").out.startswith("B is 1.19× faster than A")


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("speedup<1.05", 0),
        ("speedup < 1.5x", 10),
        ("regression>2%", 10),
        ("regression>60%", 0),
        ("numerics", 10),  # the fixture holds a kernel with wrong numbers
    ],
)
def test_gates_of_compare(run: Run, gate: str, code: int) -> None:
    put("20300101-000000-aaaaaa", applied())
    put("20300102-000000-bbbbbb", slower(applied(), 1.1))
    ran = run("compare", "20300101", "20300102", "--fail-on", gate)
    assert ran.code == code, ran.err
    assert f"gate {''.join(gate.split())}: " in ran.out
    assert ("error[FA701]: gate failed" in ran.err) == (code == 10)
    if code:
        command = f"reproduce: fusion-advisor compare 20300101 20300102 --fail-on '{''.join(gate.split())}'"
        assert command.replace("'numerics'", "numerics") in ran.err


def test_the_gate_of_numbers_sees_rewrites_of_the_graph(run: Run) -> None:
    base = applied()
    right = replace(base, fusions=tuple(row for row in base.fusions if row.status is not Status.WRONG_NUMBERS))
    put("20300101-000000-aaaaaa", right)
    put("20300102-000000-bbbbbb", replace(right, rewrites=(replace(base.rewrites[0], status=Status.WRONG_NUMBERS),)))
    assert run("compare", "20300101", "20300101", "--fail-on", "numerics").code == 0
    assert run("compare", "20300101", "20300102", "--fail-on", "numerics").code == 10


def test_a_gate_needs_the_whole_interval_past_it(run: Run) -> None:
    base = applied()
    assert base.after is not None
    wide = replace(base, after=replace(base.after, wall=timing(15_520_000, spread=0.4, method="wall")))
    put("20300102-000000-bbbbbb", wide)
    ran = run("compare", "@last", "@last", "--fail-on", "speedup<1.3")
    assert ran.code == 0
    assert "past the limit, but its interval is not: passed" in ran.out
    put("20300103-000000-bbbbbb", base)
    assert run("compare", "@last", "@last", "--fail-on", "speedup<1.3").code == 10


def test_milliseconds_are_only_judged_when_asked(run: Run) -> None:
    base = applied()
    assert base.before.wall is not None
    put("20300101-000000-aaaaaa", base)
    both = slower(base, 1.5)  # a slower machine: eager too takes half as long again
    put("20300102-000000-bbbbbb", replace(both, before=replace(base.before, wall=timing(27_630_000, method="wall"))))
    ran = run("compare", "20300101", "20300102", "--fail-on", "regression>2%")
    assert ran.code == 0, ran.err
    assert "The eager step itself changed by +50.0% between the runs" in " ".join(ran.out.split())
    assert run("compare", "20300101", "20300102", "--fail-on", "regression>2%", "--absolute").code == 10
    assert run("compare", "20300101", "20300102", "--fail-on", "step>20ms", "--absolute").code == 10
    assert run("compare", "20300101", "20300102", "--fail-on", "step>30 ms", "--absolute").code == 0
    ran = run("compare", "20300101", "20300102", "--fail-on", "step>20ms")
    assert ran.code == 2
    assert "add --absolute" in ran.err


@pytest.mark.parametrize(
    "gate", ["speedup>1.05", "speedup<fast", "regression>2", "speed<2", "", "numerics>1", "step>15", "speedup<1.05ms"]
)
def test_what_is_no_gate(run: Run, gate: str) -> None:
    ran = run("compare", "x", "y", "--fail-on", gate, "--absolute")
    assert ran.code == 2
    assert f"--fail-on '{gate}' is not a gate" in ran.err


def unlike() -> tuple[Report, Report]:
    """Two applied runs on different devices, with one rewrite kept in one of them alone and a step half as long again."""
    base = applied()
    kept = base.fusions[0]
    assert kept.status is Status.KEPT
    fusions = (replace(kept, status=Status.WITHIN_NOISE), *base.fusions[1:])
    other = replace(base, environment=replace(base.environment, device_name="NVIDIA H100", torch="2.11.0"), fusions=fusions)
    return slower(other, 1.5), base


def test_unlike_runs_are_not_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = unlike()
    put("20300101-000000-aaaaaa", first)
    put("20300102-000000-bbbbbb", second)
    ran = run("compare", "20300101", "20300102")
    assert ran.code == 0
    assert "Not comparable: device NVIDIA H100 vs Synthetic Accelerator 9000." in ran.out
    assert "Differs: torch 2.11.0 vs 2.13.0." in ran.out
    assert "next:" not in ran.out
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    ran = run("compare", "20300101", "20300102", "--fail-on", "regression>2%")
    assert ran.code == 6
    assert "error[FA702]" in ran.err
    assert "::error::error[FA702]: gate could not be judged: regression>2%25" in ran.err
    ran = run("compare", "20300101", "20300102", "--fail-on", "regression>2%", "--fail-on", "speedup<3")
    assert ran.code == 10
    assert "::warning::gate regression>2%25 could not be judged" in ran.err
    assert "::error::error[FA701]: gate failed: speedup<3" in ran.err


@pytest.mark.parametrize("width", ["40", "80", "120"])
def test_unlike_runs_get_figures_and_no_judgement_in_any_view(run: Run, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    first, second = unlike()
    put("20300101-000000-aaaaaa", first)
    put("20300102-000000-bbbbbb", second)
    ran = run("compare", "20300101", "20300102", "-v", "--format", "html,md,json", "-o", "out")
    page, text = unescape(Path("out/compare.html").read_text()), Path("out/compare.md").read_text()
    for shown in (ran.out, page.partition("<body>")[2], text):
        one = " ".join(shown.split())
        assert "23.28 ms" in one and "15.52 ms" in one and "not compared" in one  # the rewritten steps
        assert "kept in B" in one and "kept in A and B" in one and "kept in neither" in one
        assert "Nothing is judged across these runs and no gate passes" in one
        for word in ("faster", "slower", "✓ kept", "not kept", "no change", "unchanged", "other gain", "Change", "Range", "−33"):
            assert word not in one, word
    record = json.loads(Path("out/compare.json").read_text())
    rows = (*record["steps"], *record["changes"])
    assert {row["verdict"] for row in rows} == {"not compared"} and len(rows) > 5
    assert {row["is_changed"] for row in record["rewrites"]} == {None}


@pytest.mark.parametrize("gate", ["regression>99%", "speedup<1.05", "numerics", "step>99ms"])
def test_no_gate_passes_on_unlike_runs(run: Run, gate: str) -> None:
    first, second = unlike()
    put("20300101-000000-aaaaaa", first)
    put("20300102-000000-bbbbbb", replace(second, fusions=second.fusions[:3]))
    assert run("compare", "20300102:eager", "20300102", "--fail-on", gate, "--absolute").code == 0
    ran = run("compare", "20300101", "20300102", "--fail-on", gate, "--absolute")
    assert ran.code == 6, ran.err
    assert f"! gate {gate}: The runs are not comparable: device NVIDIA H100 vs Synthetic Accelerator 9000." in ran.out
    assert ("B by itself: " in ran.out) == (not gate.startswith("regression"))


def test_two_models_are_both_named(run: Run) -> None:
    base = applied()
    put("20300101-000000-aaaaaa", replace(base, workload=replace(base.workload, model_id="org/first")))
    put("20300102-000000-bbbbbb", replace(base, workload=replace(base.workload, model_id="org/second")))
    assert run("compare", "20300101", "20300102", "--format", "html", "-o", "out").code == 0
    assert "<h1>org/first and org/second: two runs</h1>" in Path("out/compare.html").read_text()


def test_hostile_runs_are_inert(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    put("20300101-000000-aaaaaa", profiled())
    put("20300102-000000-bbbbbb", hostile())
    ran = run("compare", "20300101", "20300102", "--format", "html,md", "-v")
    assert ran.code == 0, ran.err
    page = Path("fusion-runs/20300102-000000-bbbbbb/compare.html").read_text()
    text = Path("fusion-runs/20300102-000000-bbbbbb/compare.md").read_text()
    for shown in (ran.out, page, text):
        assert "\x1b" not in shown and "\u202e" not in shown and "\x07" not in shown
    assert "<img" not in page and "<script" not in page
    assert "script-src 'none'" in unescape(page)
    assert "49" not in page.partition("{{7*7}}")[2][:20]
    tables = [found.splitlines() for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert tables and all(len({line.count("|") - line.count("\\|") for line in table}) == 1 for table in tables)
    assert max(len(line) for line in ran.out.splitlines() if not line.startswith(("wrote:", "next:"))) <= 100


def test_apply_has_gates(run: Run, fake: Core, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    fake.report = replace(applied(), fusions=applied().fusions[:3])
    ran = run("apply", "org/m", "--fail-on", "speedup<1.05", "--fail-on", "numerics", "-o", "good")
    assert ran.code == 0, ran.err
    assert "✓ gate speedup<1.05: 1.19× " in ran.out
    ran = run("apply", "org/m", "--fail-on", "speedup<2", "--fail-on", "regression>1%", "-o", "bad")
    assert ran.code == 10
    assert "Gate failed: speedup<2." in ran.out
    assert "reproduce: fusion-advisor apply org/m" in ran.err
    assert "--fail-on 'speedup<2' --fail-on 'regression>1%'" in ran.err
    gates = read_report(Path("bad/report.json")).gates
    assert [(gate.rule, gate.state, gate.limit) for gate in gates] == [
        ("speedup<2", "failed", 2.0),
        ("regression>1%", "passed", 0.01),
    ]
    assert "### fusion-advisor: Gate failed: speedup" in (tmp_path / "summary.md").read_text()
    assert run("apply", "org/m", "--fail-on", "speed", "-o", "none").code == 2
    assert not Path("none").exists()  # a mistake in a gate must not cost a run


def test_a_run_that_kept_nothing_is_no_speedup(run: Run, fake: Core) -> None:
    base = applied()
    fake.report = replace(
        base, fusions=(replace(base.fusions[2], status=Status.WITHIN_NOISE),), after=replace(base.before, label="unchanged")
    )
    assert run("apply", "org/m", "--fail-on", "speedup<1.01").code == 10
    fake.report = replace(profiled(), status="applied")
    ran = run("apply", "org/m", "--fail-on", "speedup<1.01", "-o", "dry")
    assert ran.code == 6
    assert "Nothing was applied in this run" in ran.err
