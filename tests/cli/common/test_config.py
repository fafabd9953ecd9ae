from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.cli.commands import doctor
from fusion_advisor.cli.common.config import COMMANDS
from tests.cli.conftest import Core, Ran

ROOT = Path(__file__).parents[3]
Run = Callable[..., Ran]


def settled(run: Run, *arguments: str) -> dict[str, tuple[object, str]]:
    ran = run(*arguments, "--show-config", "--json")
    assert ran.code == 0, ran.err
    return {row["option"]: (row["value"], row["source"]) for row in json.loads(ran.out)}


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_the_nearest_source_wins(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write("xdg/fusion-advisor/config.toml", 'batch = 1\nseq-len = 1\nruns = 11\ncolor = "never"\n')
    write(
        "fusion-advisor.toml",
        'batch = 2\nseq_len = 2\nfail-on = ["speedup<1.05"]\n[apply]\nseq-len = 3\n[report]\nquiet = true\n',
    )
    monkeypatch.setenv("FUSION_ADVISOR_BATCH", "4")
    monkeypatch.setenv("FUSION_ADVISOR_ONLY", "rms*, gelu*")
    found = settled(run, "apply", "--layers", "5")
    assert found["layers"] == (5, "--layers")
    assert found["batch"] == (4, "FUSION_ADVISOR_BATCH")
    assert found["only"] == (["rms*", "gelu*"], "FUSION_ADVISOR_ONLY")
    assert found["seq-len"] == (3, "./fusion-advisor.toml [apply]")
    assert found["fail-on"] == (["speedup<1.05"], "./fusion-advisor.toml")
    assert found["color"] == ("never", str(Path("xdg/fusion-advisor/config.toml").absolute()))
    assert found["runs"][0] == 11
    assert found["warmup"] == (10, "default")
    assert found["quiet"] == (False, "default")
    assert settled(run, "apply", "--batch", "9")["batch"] == (9, "--batch")
    assert settled(run, "profile")["seq-len"] == (2, "./fusion-advisor.toml")
    write("other.toml", "batch = 7\n")
    monkeypatch.delenv("FUSION_ADVISOR_BATCH")
    found = settled(run, "apply", "--config", "other.toml")
    assert found["batch"] == (7, "other.toml")
    assert found["seq-len"][1].endswith("config.toml")
    assert found["fail-on"] == ([], "default")


def test_what_is_configured_is_what_runs(run: Run, fake: Core) -> None:
    write("pyproject.toml", '[tool.fusion-advisor]\nbatch = 8\nmin-share = 0.01\nskip = ["mul"]\nstrict = true\n')
    assert run("profile", "org/m", "--batch", "3", "-o", "first").code == 0
    assert fake.requests[0].batch == 3
    assert (fake.options[0].min_share, fake.options[0].skip) == (0.01, ("mul",))
    assert run("apply", "org/m").code == 7  # strict
    assert fake.requests[1].batch == 8
    assert run("apply", "first").code == 7  # a run keeps its own shapes, and a configured batch does not contradict it
    assert fake.requests[2].batch == 3
    assert run("apply", "first", "--batch", "4").code == 2


def test_the_table_for_people(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("compare", "--show-config", "-q").out.splitlines()
    assert lines[0].split() == ["Option", "Value", "Source"]
    assert ["quiet", "true", "--quiet"] in [line.split() for line in lines]
    assert ["fail-on", "none", "default"] in [line.split() for line in lines]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_shows_what_it_takes_when_left_out(run: Run, command: str) -> None:
    rows = [line.split() for line in run(command, "--show-config").out.splitlines()[1:]]
    assert [row for row in rows if "–" in row or len(row) < 3] == []
    if command == "profile":
        shown = {row[0]: " ".join(row[1:-1]) for row in rows}
        defaults = {"batch": "1", "dtype": "auto", "phase": "forward", "seed": "0", "weights": "auto", "device": "auto"}
        assert {key: shown[key] for key in defaults} == defaults
        assert shown["seq-len"] == "below the model's maximum" and shown["output"] == "fusion-runs/<run id>"


def test_a_file_s_value_in_another_tool_s_words_gets_a_hint(run: Run) -> None:
    write("fusion-advisor.toml", 'dtype = "float16"')
    ran = run("apply", "org/m")
    assert ran.code == 2 and "`dtype` cannot be `float16`" in ran.err and "did you mean `fp16`?" in ran.err


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("bacth = 3", "`bacth` is no option of any command", "did you mean `batch`?"),
        ("[apply]\nmd-limit = 3", "`md-limit` is no option of `apply`", ""),
        ("[aply]\nbatch = 3", "[aply] is no table of a command", "did you mean [apply]?"),
        ("config = 'x'", "`config` is no option", ""),
        ("trust-remote-code = true", "may only be given on the command line", "pass --trust-remote-code"),
        ("force = true", "may only be given on the command line", ""),
        ("batch = true", "wrong kind of value", "it takes one value"),
        ("only = 3", "wrong kind of value", "it takes a list"),
        ("batch = 'x\x1b'", "is no TOML", ""),
        ("batch = 'many'", "`batch` must be a whole number, not `many`", "see --batch"),
        ("dtype = 'bf17'", "`dtype` cannot be `bf17`", "did you mean `bf16`?"),
        ("batch =", "is no TOML", "https://toml.io"),
        ("\xff", "is no TOML", ""),
    ],
)
def test_mistakes_name_their_file(run: Run, text: str, says: str, hint: str) -> None:
    Path("fusion-advisor.toml").write_bytes(text.encode("latin-1"))
    ran = run("apply", "org/m")
    assert ran.code == 2, ran.err
    assert "error[FA003]: " in ran.err and "fusion-advisor.toml" in ran.err
    assert says in ran.err and hint in ran.err
    assert "\x1b" not in ran.err
    assert run("apply", "--help").code == run("explain", "FA003").code == run("--version").code == 0


def test_mistakes_in_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_ADVISOR_BACTH", "3")
    ran = run("report")
    assert ran.code == 2
    assert "FUSION_ADVISOR_BACTH: it is no option of any command" in ran.err
    assert "help: did you mean `FUSION_ADVISOR_BATCH`?" in ran.err
    monkeypatch.delenv("FUSION_ADVISOR_BACTH")
    monkeypatch.setenv("FUSION_ADVISOR_QUIET", "")
    assert run("report").code == 9  # an empty variable is none
    write("fusion-advisor.toml", "")
    write("pyproject.toml", "[tool.fusion-advisor]\n")
    assert "are both there" in run("report").err
    assert run("report", "--config", "nowhere.toml").code == 2


def test_color_of_every_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_ADVISOR_COLOR", "always")
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("torch", "ok", "2.13")])
    assert "\x1b[" in run("doctor").out
    assert "\x1b[" not in run("doctor", "--color", "never").out


def test_the_documented_workflow_and_configuration_are_valid(run: Run) -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("pull-requests.md", "configuration.md"))
    yaml = pytest.importorskip("yaml")
    (workflow,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    steps = yaml.safe_load(workflow)["jobs"]["speed"]["steps"]
    commands = re.findall(r"fusion-advisor (apply|compare) ([^\n)]*)", "\n".join(s.get("run", "") for s in steps))
    assert len(commands) == 3
    for command, rest in commands:
        assert run(command, *shlex.split(rest), "--show-config").code == 0
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    write("fusion-advisor.toml", toml)
    found = settled(run, "apply")
    assert found["fail-on"] == (["speedup<1.05", "numerics"], "./fusion-advisor.toml [apply]")
