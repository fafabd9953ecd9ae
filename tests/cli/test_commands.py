from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusion_advisor.cli.commands import doctor
from fusion_advisor.cli.commands.explain import error_classes, explanation
from fusion_advisor.cli.common import core
from fusion_advisor.cli.common.console import build_console, stream_width, wants_color
from fusion_advisor.cli.common.error_examples import EXAMPLES
from fusion_advisor.cli.common.explanations import TEXTS, TITLES
from fusion_advisor.records.serialize import read_report
from tests.cli.conftest import CLEARED, Ran
from tests.report.make_fixtures import DIRECTORY

Run = Callable[..., Ran]
ROOT = Path(__file__).parent.parent.parent


def put_run(name: str, fixture: str = "applied") -> Path:
    directory = Path("fusion-runs") / name
    directory.mkdir(parents=True)
    shutil.copy(DIRECTORY / f"{fixture}.json", directory / "report.json")
    return directory


COMMANDS = ("profile", "plan", "apply", "report", "kernels", "doctor", "explain")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_needs_nothing_heavy(command: tuple[str, ...]) -> None:
    code = (
        "import sys; from fusion_advisor.cli.app import main\n"
        f"code = main({[*command, '--help']!r})\n"
        "heavy = {'torch', 'transformers', 'pandas', 'triton', 'numpy', 'jinja2', 'rich', 'pygments', 'fusion_advisor.records'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_help_groups_options_and_keeps_to_the_terminals_width(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        for command in ((), ("apply",), ("kernels",), ("kernels", "bench")):
            lines = run(*command, "--help").out.splitlines()
            assert max(map(len, lines)) <= width
            assert "..." not in "".join(lines).replace("[ARGS]...", "").replace("@last ...", "")
    lines = run("apply", "--help").out.splitlines()
    heads = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Arguments:", "Input:", "Measure:", "Advise:", "Keep rule:", "Gate:", "Output:", "Options:"]
    under = heads.index("Gate:"), heads.index("Output:")
    gate = "\n".join(lines[lines.index(heads[under[0]]) : lines.index(heads[under[1]])])
    assert "--fail-on GATE" in gate and "--absolute" in gate and "--json" not in gate
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("env", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_help_is_coloured_in_a_terminal_that_takes_it(env: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fusion_advisor", "report", "--help"]
    clean = {name: value for name, value in os.environ.items() if name not in CLEARED.split()}
    done = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**clean, **env}, cwd=ROOT)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a terminal whose other side is closed with an error
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert done.wait(timeout=60) == 0
    assert (b"\x1b[" in shown) is ("NO_COLOR" not in env)
    assert b"--top-kernels" in shown


def test_report_again(run: Run) -> None:
    directory = put_run("20300102-030405-7f3a9c")
    put_run("20290102-030405-aaaaaa", "profiled")
    for name in ((), ("@last",), ("20300102",), (str(directory),), (str(directory / "report.json"),)):
        ran = run("report", *name)
        assert ran.code == 0, ran.err
        assert "1.19× faster than eager" in ran.out
        assert ran.out.endswith(f"wrote: {directory}/report.html\nwrote: {directory}/report.md\n")
    assert "<!doctype html>" in (directory / "report.html").read_text()
    ran = run("report", "2029", "--json")
    assert json.loads(ran.out)["status"] == "profiled"
    assert run("report", "-o", "elsewhere", "--format", "json,md").code == 0
    assert {path.name for path in Path("elsewhere").iterdir()} == {"report.json", "report.md"}
    assert read_report(Path("elsewhere/report.json")) == read_report(directory / "report.json")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("report",), 9, "error[FA504]: no run `@last`: ./fusion-runs holds none"),
        (("report", "nothing"), 9, "no such path, and no run id starts like that"),
        (("report", "."), 9, "the directory holds no report.json"),
        (("apply", "20300101-000000-abcdef"), 9, "error[FA504]"),
        (("apply",), 9, "error[FA504]"),
        (("apply", "@frist"), 9, "no run `@frist`"),
        (("apply", "m", "-o", "taken"), 5, "cannot write `taken`: it is a file"),
        (("profile", "--trace", "no.json"), 2, "--trace no.json: there is no such file"),
        (("fleet", "*.json", "--engine", "ray", "--processes", "3"), 2, "--processes 3 is of --engine local"),
        (("kernels", "check", "swiglu", "--all"), 2, "`swiglu` and --all contradict each other"),
        (("profile", "m", "--format", "pdf"), 2, "--format pdf is not known"),
        (("profile", "m", "-q", "-v"), 2, "contradict"),
        (("profile", "m", "--min-share", "lots"), 2, "is not a share"),
        (("profile", "m", "--dtype", "int3"), 2, "int3"),
        (("profile",), 2, "MODEL_ID"),
        (("nonsense",), 2, "nonsense"),
        (("explain", "FA99"), 2, "error[FA002]: no error has the code `FA99`"),
        (("kernels", "new", "Bad-Name"), 2, "is not a kernel name"),
    ],
)
def test_mistakes(run: Run, arguments: tuple[str, ...], code: int, text: str) -> None:
    Path("taken").touch()
    ran = run(*arguments)
    assert ran.code == code, ran.err
    assert text in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_prefix_that_fits_several(run: Run) -> None:
    put_run("20300102-030405-aaaaaa")
    put_run("20300102-030406-bbbbbb")
    ran = run("report", "2030")
    assert ran.code == 9
    assert "2 runs start like that" in ran.err
    assert "known runs: `20300102-030406-bbbbbb`, `20300102-030405-aaaaaa`" in ran.err


def test_a_copy_without_source_and_paths(run: Run) -> None:
    directory = put_run("20300102-030405-7f3a9c")
    source = "modeling_synthetic"
    assert source in (directory / "report.json").read_text()
    ran = run("report", "--redact", "paths", "--no-source", "-o", "copy", "--format", "html,md,json,csv")
    assert ran.code == 0, ran.err
    written = [path for path in Path("copy").rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"report.html", "report.md", "report.json", "rewrites.csv", "kernels.csv"}
    assert not [path for path in written if source in path.read_text()]
    assert not any(fusion.original_source for fusion in read_report(Path("copy/report.json")).fusions)
    refused = run("report", "--redact", "paths")
    assert refused.code == 2 and "next to fusion-runs/20300102-030405-7f3a9c/report.json" in refused.err
    assert "pass -o DIR" in refused.err
    assert run("report", "--redact", "names", "-o", "copy").code == 2


def test_traces_go_into_the_page(run: Run) -> None:
    directory = put_run("20300102-030405-7f3a9c")
    (directory / "trace.before.json.gz").write_bytes(b"not read, only carried")
    ran = run("report", "--embed-trace", "-o", "copy")
    assert ran.code == 0, ran.err
    assert base64.b64encode(b"not read, only carried").decode() in Path("copy/report.html").read_text()
    assert "! trace.after.json.gz is not embedded: the run directory does not hold it." in ran.err
    assert run("report").code == 0 and "data-trace" not in (directory / "report.html").read_text()
    refused = run("report", "--embed-trace", "--format", "md")
    assert refused.code == 2 and "add html to --format" in refused.err
    refused = run("report", "--embed-trace", "--redact", "env", "-o", "away")
    assert refused.code == 2 and "--redact does not change traces" in refused.err and not Path("away").exists()


def test_the_schema_needs_no_run(run: Run) -> None:
    ran = run("report", "--schema")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["title"] == "fusion-advisor/1"


def test_tables_as_csv_and_fewer_kernels(run: Run) -> None:
    directory = put_run("20300102-030405-7f3a9c")
    assert run("report", "--format", "csv,html", "--top-kernels", "2").code == 0
    lines = (directory / "csv" / "kernels.csv").read_text().splitlines()
    report = read_report(directory / "report.json")
    assert lines[0] == "kernel,category,before_count,before_ns,after_count,after_ns"
    assert len(lines) > 4 and str(report.before.kernels[0][3]) in lines[1]
    assert f"{len(lines) - 3} more kernel names" in (directory / "report.html").read_text()
    assert run("compare", "@last:eager", "@last", "--format", "csv").code == 2


def test_damaged_reports(run: Run) -> None:
    directory = put_run("20300102-030405-7f3a9c")
    path = directory / "report.json"
    text = path.read_text()
    path.write_text(text[:1000])
    ran = run("report")
    assert ran.code == 9
    assert "error[FA501]" in ran.err
    assert "ends early at line" in ran.err
    path.write_text(text.replace("fusion-advisor/1", "fusion-advisor/9"))
    ran = run("report")
    assert ran.code == 9
    assert "error[FA503]" in ran.err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_columns_are_honoured(run: Run, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    put_run("20300102-030405-7f3a9c", "hostile")
    monkeypatch.setenv("COLUMNS", str(width))
    ran = run("report")
    assert ran.code == 0
    assert max(len(line) for line in ran.out.splitlines() if not line.startswith("wrote:")) <= width
    assert "\x1b" not in ran.out


def test_color(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    put_run("20300102-030405-7f3a9c")
    assert "\x1b" not in run("report").out
    assert "\x1b[" in run("report", "--color", "always").out
    monkeypatch.setenv("FORCE_COLOR", "0")
    assert "\x1b" not in run("report").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("report").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("report").out
    assert "\x1b[" in run("report", "--color", "always").out


class Tty:
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return


def test_a_terminal_is_coloured_unless_it_is_dumb() -> None:
    tty = Tty()
    assert wants_color(tty, "auto", {"TERM": "xterm"})  # type: ignore[arg-type]
    assert not wants_color(tty, "auto", {"TERM": "dumb"})  # type: ignore[arg-type]
    assert not wants_color(tty, "auto", {"TERM": "xterm", "NO_COLOR": "1"})  # type: ignore[arg-type]
    assert not wants_color(tty, "never", {"FORCE_COLOR": "1"})  # type: ignore[arg-type]
    assert stream_width(sys.stdout, {"COLUMNS": "77"}) == 77
    assert stream_width(sys.stdout, {"COLUMNS": "x"}) == 120
    assert build_console(tty, "never", {"COLUMNS": "50"}).color_system is None  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_no_bug(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusion_advisor", "explain", "FA605"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path, check=False)
    assert ran.returncode == 5
    assert ran.stderr.startswith("error[FA306]: cannot write `standard output`") and "bug" not in ran.stderr


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    put_run("20300102-030405-7f3a9c", "hostile")
    command = f"{sys.executable} -m fusion_advisor report --json | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip() == "0"
    assert done.stderr == ""


def test_every_code_is_explained(run: Run) -> None:
    classes = error_classes()
    for code in [*classes, *TITLES]:
        text = "\n".join(explanation(code))
        assert "{" not in text, f"{code} shows a blank"
        assert code in TEXTS, f"{code} has no long text"
        assert run("explain", code.lower()).code == 0
    ran = run("explain")
    assert [line[:5] for line in ran.out.splitlines()] == sorted({*classes, *TITLES})


def test_every_error_has_an_example_with_all_its_facts() -> None:
    for code, cls in error_classes().items():
        wanted = set(re.findall(r"\{(\w+)", f"{cls.message} {cls.note} {cls.hint}"))
        assert set(EXAMPLES.get(code, {})) == wanted, code


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("FA599", ("codes about files", "FA501", "FA511")),
        ("fa3", ("codes about running the model", "FA301")),
        ("FA999", ("codes by subject", "FA4xx  kernels", "FA7xx  gates", "FA8xx  several ranks")),
        ("profiler", ("these mention `profiler`", "FA502", "FA509")),
        ("zebra", ("codes by subject",)),
    ],
)
def test_an_unknown_code_is_answered_with_its_neighbours_by_meaning(run: Run, asked: str, says: tuple[str, ...]) -> None:
    ran = run("explain", asked)
    assert ran.code == 2
    for text in says:
        assert text in ran.err
    assert ("FA309" in ran.err) is (asked == "fa3")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("profile", "m", "--dtype", "float16"),
            ("--dtype cannot be `float16`", "did you mean `fp16`? use auto, fp32, fp16 or bf16"),
        ),
        (("profile", "m", "--dtype=bfloat16"), ("--dtype cannot be `bfloat16`", "did you mean `bf16`?")),
        (("profile", "m", "--phase", "training"), ("--phase cannot be `training`", "did you mean `train`?")),
        (("profile", "m", "--batch", "0"), ("--batch must be at least 1, not `0`",)),
        (("profile", "m", "--batch", "many"), ("--batch must be a whole number, not `many`",)),
        (("apply", "m", "--confidence", "2"), ("--confidence must be above 0.5 and below 1, not `2`",)),
        (("apply", "m", "--min-gain", "x"), ("--min-gain x is not a share", "write --min-gain 0.5% or 0.005")),
        (("apply", "m", "--min-time", "x"), ("--min-time x is not a time", "write --min-time 2s or 500ms")),
        (("kernels", "show", "swiglu", "--backend", "c++"), ("--backend cannot be `c++`", "did you mean `cpp`?")),
        (("kernels", "show", "gelu"), ("did you mean `gelu_erf` or `gelu_tanh`?",)),
        (("kernels", "show", "layer_norm"), ("did you mean `layernorm`",)),
    ],
)
def test_a_refused_value_is_named_with_the_meant_value(run: Run, arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert ran.code == 2 and ran.err.startswith("error[FA"), ran.err
    for text in says:
        assert text in ran.err


def test_codes_are_unique() -> None:
    from fusion_advisor.errors import AdvisorError

    def below(cls: type[AdvisorError]) -> list[type[AdvisorError]]:
        return [cls, *(found for child in cls.__subclasses__() for found in below(child))]

    # A trace that cannot be read has the code of a report that cannot: a kind of the same mistake declares none of its own.
    codes = [cls.code for cls in below(AdvisorError) if "code" in vars(cls)]
    assert len(codes) == len(set(codes))


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        doctor.Finding("torch", "ok", "2.13"),
        doctor.Finding("cuda", "missing", "no device", "get one"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    ran = run("doctor")
    assert ran.code == 0
    assert "! cuda" in ran.out
    assert "→ get one" in ran.out
    assert json.loads(run("doctor", "--json").out)[1]["fix"] == "get one"
    findings.append(doctor.Finding("torch", "broken", "not importable"))
    assert run("doctor").code == 3


def test_kernels(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "gelu"
    folder.mkdir()
    (folder / "kernel.toml").write_text('name = "gelu"\n')
    (folder / "reference.py").write_text("def gelu(x):\n    return x\x1b\n")
    kernel = SimpleNamespace(name="gelu", summary="GELU, the tanh form", backends=("triton", "cpp"), dtypes=("float32",))
    monkeypatch.setattr(core, "list_kernels", lambda dirs: [kernel])
    monkeypatch.setattr(core, "load_kernel", lambda name, dirs: SimpleNamespace(spec=SimpleNamespace(folder=folder)))
    monkeypatch.setattr(core, "scaffold_kernel", lambda name, directory: directory / name)
    assert "GELU, the tanh form" in run("kernels", "list").out
    assert json.loads(run("kernels", "list", "--json").out)[0]["backends"] == ["triton", "cpp"]
    shown = run("kernels", "show", "gelu").out
    assert shown.index("# kernel.toml") < shown.index("# reference.py")
    assert "\\x1b" in shown
    assert "next: fusion-advisor kernels check mine --kernels kernels\n" in run("kernels", "new", "mine").out
    rows = [("rows", "cpp", "float32", "passed", ""), ("rows", "cuda", "float32", "skipped", "no device")]
    monkeypatch.setattr(core, "check_kernel", lambda name, progress, kernel_dirs, backends: rows)
    assert run("kernels", "check", "gelu").code == 0
    assert run("kernels", "check").code == run("kernels", "check", "gelu", "--all").code == 2
    assert json.loads(run("kernels", "check", "--all", "--json").out)[1]["kernel"] == "gelu"
    rows.append(("wide", "cpp", "float16", "failed", "rel L2 0.1"))
    ran = run("kernels", "check", "gelu")
    assert ran.code == 10
    assert "rel L2 0.1" in ran.out
    assert "error[FA404]: `gelu` failed 1 of 3 cases" in ran.err


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("fusion-advisor ")
