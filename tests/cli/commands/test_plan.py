"""``fusion-advisor plan`` as a user meets it, on the captures of real H200 runs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.cli.common import core
from fusion_advisor.fuse.modes import plan_only
from fusion_advisor.fuse.plan.options import ProfileOptions
from fusion_advisor.library.discover import list_kernels
from fusion_advisor.records import Match, NoMatch, PlanPreview
from fusion_advisor.records.serialize import PLAN_SCHEMA, load_record
from tests.cli.conftest import Ran
from tests.cli.test_golden import GOLDEN, WIDTHS
from tests.tiny import patterns

Run = Callable[..., Ran]
CAPTURES = Path(__file__).parents[2] / "data" / "captures"
GPT2, QWEN = (CAPTURES / f"{name}.json.gz" for name in ("gpt2-fp32-1x1024-h200", "qwen2.5-7b-bf16-1x512-h200"))


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references are traced once for all tests of the process; a user's folder is traced as it is."""
    library = plan_only.library_on_demand
    sources = {spec.name: spec.source for spec in list_kernels()}
    monkeypatch.setattr(plan_only, "library_on_demand", lambda dirs: library(dirs) if dirs else (patterns(), sources))


def planned(run: Run, *arguments: str) -> PlanPreview:
    ran = run("plan", *arguments, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["schema"] == PLAN_SCHEMA
    return load_record(PlanPreview, ran.out, schema=PLAN_SCHEMA, name="stdout")


def test_every_chain_has_a_kernel_and_a_bound_or_a_reason(run: Run) -> None:
    plan = planned(run, str(QWEN))
    tried = {(row.fusion, getattr(row.answer, "kernel", ""), row.launches_after) for row in plan.chains if row.fusion}
    assert {("F1", "add_rmsnorm", 55), ("F2", "rope_qk", 28), ("F3", "swiglu", 28)} <= tried
    for row in plan.chains:
        assert isinstance(row.answer, Match if row.fusion else NoMatch)
        assert row.saving_ns == (row.chain.saving_bound_ns if row.fusion else 0)
    assert any(isinstance(row.answer, NoMatch) and row.answer.code == "FA605" for row in plan.chains)
    assert plan.device_ns == sum(launch.duration_ns for launch in plan_only.read_capture(QWEN).launches)
    assert plan.launch_verdict is not None and plan.launch_verdict.both_floor_ns < plan.step_ns
    assert {row.id for row in plan.candidates} >= {"drop-masks", "group-heads", "fold-constants"}


@pytest.mark.parametrize(
    ("options", "fusions"),
    [
        (("--top", "1"), ["add_rmsnorm"]),
        (("--min-share", "5%"), ["add_rmsnorm", "rope_qk"]),
        (("--only", "swi*"), ["swiglu"]),
        (("--skip", "add_*", "--skip", "emb*", "--min-share", "1%"), ["rmsnorm", "rope_qk", "swiglu"]),
    ],
)
def test_the_options_of_apply_choose(run: Run, options: tuple[str, ...], fusions: list[str]) -> None:
    plan = planned(run, str(QWEN), *options)
    found = [row.answer.kernel for row in plan.chains if row.fusion and isinstance(row.answer, Match)]
    assert [name for name in found if "_" not in name or name in fusions] == fusions


def test_a_rewrite_is_left_out_by_its_id(run: Run) -> None:
    plan = planned(run, str(QWEN), "--top", "1", "--skip", "drop-*", "--skip", "no-such-rewrite")
    assert {row.id for row in plan.candidates}.isdisjoint({"drop-masks"}) and "group-heads" in {row.id for row in plan.candidates}
    assert plan.unused == ("no-such-rewrite",)
    assert [row.fusion for row in plan.chains] == ["F1"]


def test_a_user_s_kernel_is_matched(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "my_gate"
    shutil.copytree(next(spec.folder for spec in list_kernels() if spec.name == "swiglu"), folder)
    manifest = folder / "kernel.toml"
    manifest.write_text(manifest.read_text().replace('name = "swiglu"', 'name = "my_gate"'))
    plan = planned(run, str(QWEN), "--kernels", str(tmp_path / "mine"), "--only", "my_gate", "--only", "swiglu")
    assert [row.answer.kernel for row in plan.chains if isinstance(row.answer, Match)] == ["my_gate"]


@pytest.mark.parametrize("color", ["never", "always"])
def test_tables(run: Run, monkeypatch: pytest.MonkeyPatch, color: str) -> None:
    preview = plan_only.plan_capture(QWEN, ProfileOptions())
    monkeypatch.setattr(core, "plan_capture", lambda path, options: preview)
    pages = []
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        ran = run("plan", str(QWEN), "--color", color)
        assert ran.code == 0, ran.err
        pages.append(f"== {width} columns\n{ran.out}")
    plain = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(pages))
    assert max(map(len, plain.splitlines())) <= max(WIDTHS)
    shown = "\n".join(pages).replace("\x1b", "␛")
    path = GOLDEN / f"plan.{'ansi' if color == 'always' else 'txt'}"
    if os.environ.get("ACCEPT_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


def test_markdown_and_quiet(run: Run) -> None:
    page = run("plan", str(GPT2), "--format", "md").out
    rows = [line for line in page.splitlines() if line.startswith("| ") and "gelu\\_tanh" in line]
    assert rows == [row for row in rows if row.startswith("| F1 ") and row.count(" | ") == 6]
    assert "≤" in rows[0] and "FA605" in page
    quiet = run("plan", str(GPT2), "-q", "--only", "nothing*")
    assert quiet.out == "apply would try 0 kernels for 0.0% of device time, and look at 5 other rewrites.\n"
    assert "`nothing*` of --only or --skip fits no kernel found for a chain and no rewrite" in quiet.err


def test_a_run_directory_leads_to_the_next_command(run: Run) -> None:
    folder = Path("fusion-runs/20300102-030405-7f3a9c")
    folder.mkdir(parents=True)
    shutil.copy(GPT2, folder / "capture.json.gz")
    (folder / "request.json").write_text("{}")
    ran = run("plan", str(folder), "--top", "1")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "next: fusion-advisor apply fusion-runs/20300102-030405-7f3a9c"


def test_mistakes_have_their_codes(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "run"
    empty.mkdir()
    (empty / "report.json").write_text("{}")
    missing = run("plan", str(empty))
    assert missing.code == 9
    assert "error[FA511]" in missing.err and str(empty / "capture.json.gz") in missing.err and "profile MODEL_ID" in missing.err
    assert (unknown := run("plan", "20990101")).code == 9 and "error[FA504]" in unknown.err
    cut = tmp_path / "capture.json.gz"
    cut.write_bytes(GPT2.read_bytes()[:-20])
    assert (broken := run("plan", str(cut))).code == 9 and "error[FA501]" in broken.err
    assert (form := run("plan", str(GPT2), "--format", "pdf")).code == 2 and "error[FA001]" in form.err
