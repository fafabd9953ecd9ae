from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_advisor import __main__ as program
from fusion_advisor.cli.app import main
from fusion_advisor.cli.common import completion
from fusion_advisor.workload.preset import preset_ids
from tests.cli.test_commands import ROOT, put_run

HOSTILE = "2030$(touch pwned)'\";:`x`"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "hf/hub/models--some-org--some-model").mkdir(parents=True)
    (tmp_path / "hf/hub/datasets--some-org--data").mkdir(parents=True)


def asked(shell: str, line: str) -> dict[str, str]:
    words = line.split(" ")
    if shell == "bash":
        return {completion.VARIABLE: "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    return {completion.VARIABLE: f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


def offered(line: str) -> list[str]:
    answer = completion.complete(asked("bash", line))
    assert answer is not None and answer[1] == 0
    return answer[0].split("\n")


def test_what_is_offered() -> None:
    put_run("20300102-030405-aaaaaa")
    put_run("20300103-030405-bbbbbb")
    (Path("fusion-runs") / "unfinished").mkdir()
    put_run(HOSTILE)
    both = ["20300103-030405-bbbbbb", "20300102-030405-aaaaaa"]
    assert offered("fusion-advisor report ") == ["@last", *both]
    assert offered("fusion-advisor compare 20300102-030405-aaaaaa 2030") == both
    assert offered("fusion-advisor report 20300103") == both[:1]
    assert offered("fusion-advisor profile some") == ["some-org/some-model"]
    assert offered("fusion-advisor profile ") == ["some-org/some-model", *preset_ids()]
    assert offered("fusion-advisor apply @") == ["@last"]
    assert "gpt2" in offered("fusion-advisor apply gp")
    assert offered("fusion-advisor kernels show gelu_t") == ["gelu_tanh"]
    assert offered("fusion-advisor report zzz") == [""]


@pytest.mark.parametrize(
    "line",
    [
        "fusion-advisor ",
        "fusion-advisor re",
        "fusion-advisor report --for",
        "fusion-advisor report -o ",
        "fusion-advisor kernels ",
        "fusion-advisor report 'x",
    ],
)
def test_the_rest_is_typers(line: str) -> None:
    assert completion.complete(asked("bash", line)) is None
    assert completion.complete(asked("zsh", line)) is None or line.endswith("'x")


def test_no_shell_evaluates_a_folders_name() -> None:
    put_run(HOSTILE)
    assert completion.runs("2030") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    "line",
    ["fusion-advisor report 2030", "fusion-advisor kernels check ", "fusion-advisor profile gpt2", "fusion-advisor report zzz"],
)
def test_the_answer_is_what_typer_would_give(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_run("20300102-030405-aaaaaa")
    for name, value in asked(shell, line).items():
        monkeypatch.setenv(name, value)
    assert program.main() == 0
    ours = capsys.readouterr().out
    assert main([]) == 0
    assert ours.split() == capsys.readouterr().out.split()
    if shell == "fish":
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "is-args")
        assert program.main() == main([]) == (1 if "zzz" in line else 0)


def test_a_word_costs_no_heavy_import() -> None:
    code = (
        "import sys; from fusion_advisor.__main__ import main\n"
        "assert main() == 0\n"
        "heavy = {'typer', 'click', 'rich', 'torch', 'transformers', 'jinja2', 'fusion_advisor.records'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for line in ("fusion-advisor kernels show r", "fusion-advisor apply gp", "fusion-advisor report 2"):
        env = {**os.environ, **asked("bash", line), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
