from __future__ import annotations

import base64
import json
import re
import signal
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from fusion_advisor.cli.common import console, core
from fusion_advisor.errors import CannotCapture
from fusion_advisor.fuse.baselines.contenders import Contender
from fusion_advisor.fuse.baselines.measure_contenders import measure_all
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import load_report, read_capture, read_report
from fusion_advisor.timing.wall_timer import nothing
from tests.cli.conftest import Core, Ran
from tests.report.fixtures import applied, failed_numbers, with_a_copy

Run = Callable[..., Ran]


def only_run() -> Path:
    (directory,) = Path("fusion-runs").iterdir()
    return directory


def test_profile_writes_a_run(run: Run, fake: Core) -> None:
    ran = run("profile", "org/m", "--batch", "8", "--dtype", "bf16", "--min-share", "1%", "--only", "gelu*", "--only", "mul")
    assert ran.code == 0, ran.err
    directory = only_run()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", directory.name)
    names = {path.name for path in directory.iterdir()}
    assert names == {"report.json", "report.html", "report.md", "capture.json.gz", "request.json", "kernels", "log.txt"}
    assert ran.out.splitlines()[-2:] == [f"report: {directory}/report.html", "next: fusion-advisor apply @last"]
    assert "gelu_tanh" in ran.out
    assert fake.requests[0].batch == 8
    assert fake.requests[0].dtype == "bf16"
    assert fake.requests[0].seq_len is None
    asked = fake.options[0]
    assert (asked.min_share, asked.only, asked.run_dir, asked.run_id) == (0.01, ("gelu*", "mul"), directory, directory.name)
    read_capture(directory / "capture.json.gz")
    report = read_report(directory / "report.json")
    assert report.command == (
        "fusion-advisor profile org/m --revision 0123456789abcdef0123456789abcdef01234567 --dtype bf16 --batch 8 --seed 0 "
        "--min-share 0.01 --only 'gelu*' --only mul"
    )
    assert "1,204 kernels" in (directory / "log.txt").read_text()


def test_progress_goes_to_stderr_as_lines(run: Run, fake: Core) -> None:
    ran = run("profile", "org/m")
    assert "a library that prints" in ran.err
    assert "a library" not in ran.out
    assert [line.split()[:2] for line in ran.err.splitlines() if line[0] in "✓ "] == [
        ["load", "…"],
        ["✓", "load"],
        ["trace", "…"],
        ["✓", "trace"],
        ["report", "…"],
        ["✓", "report"],
    ]
    assert "\x1b" not in ran.err + ran.out


def test_traces_that_the_run_wrote_go_into_the_page(run: Run, fake: Core) -> None:
    def work(progress: core.Progress) -> None:
        directory = fake.options[-1].run_dir
        assert directory is not None
        (directory / "trace.before.json.gz").write_bytes(b"a trace")

    fake.on_work = work
    ran = run("apply", "org/m", "--embed-trace")
    assert ran.code == 0 and "! trace.after.json.gz is not embedded" in ran.err
    assert base64.b64encode(b"a trace").decode() in (only_run() / "report.html").read_text()


def test_the_log_holds_the_traceback_of_a_baseline_that_fails(run: Run, fake: Core) -> None:
    def broken() -> NoReturn:
        raise AssertionError

    def work(progress: core.Progress) -> None:
        fine = Contender(name="eager", make=lambda: nothing, step=applied().before)
        measure_all([fine, Contender(name="peer", make=broken)], needed_bytes=0, on_cuda=False, runs=1, budget_s=0.0)

    fake.on_work = work
    assert run("apply", "org/m").code == 0
    log = (only_run() / "log.txt").read_text()
    assert "fusion_advisor.fuse.baselines.measure_contenders: peer" in log and "Traceback" in log and "in broken" in log


def test_nvtx_prints_the_nsys_line_with_v(run: Run, fake: Core) -> None:
    lines = [line for line in run("profile", "org/m", "--nvtx", "-v").err.splitlines() if "nsys" in line]
    assert len(lines) == 1 and lines[0].startswith("nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi ")
    assert " fusion-advisor profile org/m " in lines[0] and lines[0].endswith(" --nvtx")
    assert "nsys" not in run("profile", "org/m", "--nvtx", "-o", "a").err + run("profile", "org/m", "-v", "-o", "b").err
    assert fake.options[0].nvtx and not fake.options[-1].nvtx


def test_json_is_one_document(run: Run, fake: Core) -> None:
    ran = run("apply", "org/m", "--json")
    assert ran.code == 0
    assert load_report(ran.out) == read_report(only_run() / "report.json")


def test_inputs_of_the_users_own_are_part_of_the_run(run: Run, fake: Core) -> None:
    assert run("profile", "org/m", "-o", "made").code == 0
    assert run("profile", "org/m", "--input", "mine.py:fn", "-o", "own").code == 0
    assert [request.input for request in fake.requests] == [None, "mine.py:fn"]
    first, second = read_report(Path("made/report.json")), read_report(Path("own/report.json"))
    assert " --input mine.py:fn " in second.command and first.config_hash != second.config_hash
    assert run("apply", "own", "-o", "again").code == 0
    assert fake.requests[-1].input == "mine.py:fn"
    ran = run("apply", "own", "--input", "other.py:fn", "-o", "no")
    assert ran.code == 2
    assert "--input contradicts the run `own`" in ran.err


def test_how_long_and_how_often_to_measure(run: Run, fake: Core) -> None:
    assert run("profile", "org/m", "--min-time", "500ms", "--steps", "5", "-o", "a").code == 0
    assert run("apply", "org/m", "--min-time", "2", "-o", "b").code == 0
    assert [(options.min_time_s, options.steps) for options in fake.options] == [(0.5, 5), (2.0, 3)]
    assert read_report(Path("a/report.json")).command.endswith(" --min-time 0.5 --steps 5")
    Path("fusion-advisor.toml").write_text("min-time = '0.05ms'\nsteps = 1\n")
    assert run("profile", "org/m", "-o", "c").code == 0
    again = read_report(Path("c/report.json")).command.split()
    assert run(*again[1:], "-o", "d").code == 0
    assert [(options.min_time_s, options.steps) for options in fake.options[2:]] == [(5e-05, 1), (5e-05, 1)]
    for wrong in ("soon", "-1", "nan", "inf", "2h", "3601"):
        ran = run("profile", "org/m", "--min-time", wrong)
        assert (ran.code, "write --min-time 2s or 500ms" in ran.err) == (2, True)
    assert run("profile", "org/m", "--steps", "0").code == 2


def test_limits_of_the_users_own(run: Run, fake: Core) -> None:
    assert run("apply", "org/m", "--rtol", "1e-2", "--atol", "0", "-o", "a").code == 0
    assert run("apply", "org/m", "--atol", "0.5", "-o", "b").code == 0
    assert run("apply", "org/m", "-o", "c").code == 0
    assert [str(options.tolerance)[:33] for options in fake.options] == [  # type: ignore[attr-defined]
        "|error| ≤ 0 + 0.01 × |oracle| for",
        "|error| ≤ 0.5 + 0 × |oracle| for ",
        "None",
    ]
    command = read_report(Path("a/report.json")).command
    assert command.endswith(" --rtol 0.01 --atol 0.0")
    assert run(*command.split()[1:], "-o", "d").code == 0
    assert fake.options[-1].tolerance == fake.options[0].tolerance  # type: ignore[attr-defined]
    for wrong in ("-1", "nan", "inf"):
        ran = run("apply", "org/m", "--rtol", wrong)
        assert (ran.code, f"--rtol {float(wrong)} is no limit" in ran.err) == (2, True)


def test_what_the_headline_compares_with(run: Run, fake: Core) -> None:
    for given in ((), ("--baseline", "compile"), ("--baseline", "both", "--compile")):
        assert run("apply", "org/m", *given, "-o", f"run{len(given)}").code == 0
    assert [(o.baseline, o.compile, o.measures_compile) for o in fake.options] == [  # type: ignore[attr-defined]
        ("eager", None, None),
        ("compile", None, True),
        ("both", True, True),
    ]
    assert " --baseline compile" in read_report(Path("run2/report.json")).command
    ran = run("apply", "org/m", "--baseline", "both", "--no-compile")
    assert (ran.code, "--baseline both and --no-compile contradict each other" in ran.err) == (2, True)
    assert run("apply", "org/m", "--baseline", "liger").code == 2


def test_how_long_torch_compile_is_waited_for(run: Run, fake: Core) -> None:
    assert run("apply", "org/m", "--quick", "--compile-limit", "1500ms", "-o", "a").code == 0
    command = read_report(Path("a/report.json")).command
    assert command.endswith(" --compile-limit 1.5 --quick")
    assert run(*command.split()[1:], "-o", "b").code == 0
    assert [(o.compile_limit_s, o.measures_compile) for o in fake.options] == [(1.5, True), (1.5, True)]  # type: ignore[attr-defined]
    assert run("apply", "org/m", "--thorough", "-o", "c").code == 0
    assert read_report(Path("c/report.json")).command.endswith(" --thorough")
    for given, says in (
        (("0",), "--compile-limit 0 leaves torch.compile no time"),
        (("soon",), "--compile-limit soon is not a time"),
        (("9", "--no-compile"), "--compile-limit and --no-compile contradict each other"),
    ):
        ran = run("apply", "org/m", "--compile-limit", *given)
        assert (ran.code, says in ran.err) == (2, True), ran.err


def test_a_training_step_is_profiled_and_applied(run: Run, fake: Core) -> None:
    ran = run("profile", "org/m", "--phase", "train", "-o", "step")
    assert ran.code == 0, ran.err
    assert "A training step takes " in ran.out and "transformer.h.*.mlp.c_fc" in ran.out
    assert ran.out.splitlines()[-1] == "next: fusion-advisor apply step"
    for number, target in enumerate((("org/m", "--phase", "train"), ("step",))):
        ran = run("apply", *target, "-o", f"applied{number}")
        assert (ran.code, ran.err.count("error[")) == (0, 0), ran.err
        assert "Pass" in ran.out and "backward" in ran.out and "gradients compared with float64" in ran.out
    assert fake.reverted == 2
    assert "--phase train" in read_report(Path("applied1/report.json")).command


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--freeze",), "--freeze cannot be used with --phase train: every step of an optimizer writes the weights"),
        (("--rtol", "1e-3"), "--rtol and --atol cannot be used with --phase train: gradients have no scale of their own"),
        (("--shapes", "batch=1..4"), "--shapes cannot vary the sizes of --phase train"),
    ],
)
def test_what_a_training_step_cannot_serve_is_refused_before_anything_is_loaded(
    run: Run, fake: Core, given: tuple[str, ...], reason: str
) -> None:
    ran = run("apply", "org/m", "--phase", "train", *given)
    assert ran.code == 2 and reason in ran.err and "help: " in ran.err, ran.err
    assert not fake.requests


def test_the_hash_is_stable_and_the_options_count(run: Run, fake: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    for epoch, extra in (("1", ()), ("2", ()), ("3", ("--runs", "9")), ("4", ("--batch", "2"))):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        assert run("profile", "org/m", *extra).code == 0
    first, second, third, fourth = sorted(path.name[-6:] for path in Path("fusion-runs").iterdir()) or [""] * 4
    hashes = [path.name[-6:] for path in sorted(Path("fusion-runs").iterdir())]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    assert {first, second, third, fourth} == set(hashes)


def test_apply_reverts_writes_kernels_and_reports(run: Run, fake: Core) -> None:
    ran = run("apply", "org/m", "--format", "md,json", "--min-gain", "1%", "--strict", "--dry-run")
    assert ran.code == 7  # the fixture holds a kernel with wrong numbers
    assert fake.reverted == 1
    directory = only_run()
    assert not (directory / "report.html").exists()
    assert (directory / "kernels" / "F2_gelu_tanh.py").exists() or (directory / "kernels" / "F1_gelu_tanh.py").exists()
    assert "1.19× faster than eager" in ran.out
    assert ran.err.count("error[FA402]") == 1
    options = fake.options[0]
    assert (options.min_gain, options.strict, options.dry_run) == (0.01, True, True)  # type: ignore[attr-defined]


def test_the_kernels_of_rewrites_are_files_too(run: Run, fake: Core) -> None:
    fake.report = with_a_copy(applied())
    assert run("apply", "org/m").code == 0
    assert "fa_permuted_copy" in (only_run() / "kernels" / "fold-constants_permuted_copy_0a1b2c.cu").read_text()


def test_kernel_paths_cannot_leave_the_run(run: Run, fake: Core, tmp_path: Path) -> None:
    report = applied()
    kernel = replace(report.fusions[0].rendered[0], path="../../../escaped.py")
    fake.report = replace(report, fusions=(replace(report.fusions[0], rendered=(kernel,)),))
    ran = run("apply", "org/m")
    assert (ran.code, "error[FA501]" in ran.err) == (9, True)
    assert not list(tmp_path.rglob("escaped.py"))
    assert not (tmp_path.parent / "escaped.py").exists()


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(Status.BUILD_FAILED, "FA401", 8), (Status.NOT_REPLACED, "FA403", 6), (Status.WITHIN_NOISE, "", 0)],
)
def test_strict(run: Run, fake: Core, status: Status, code: str, exit_code: int) -> None:
    report = applied()
    fake.report = replace(report, fusions=(replace(report.fusions[2], status=status),))
    ran = run("apply", "org/m", "--strict")
    assert ran.code == exit_code
    assert code in ran.err
    assert run("apply", "org/m", "-o", "other").code == 0


def test_strict_sees_a_rewrite_of_the_graph_with_wrong_numbers(run: Run, fake: Core) -> None:
    report = applied()
    wrong = replace(report.rewrites[0], status=Status.WRONG_NUMBERS, reason="off by 0.1%")
    fake.report = replace(report, fusions=(), rewrites=(wrong, *report.rewrites[1:]))
    ran = run("apply", "org/m", "--strict")
    assert (ran.code, ran.err.count("error[FA402]")) == (7, 1)
    assert f"{wrong.id} {wrong.name}: off by 0.1%" in " ".join(ran.err.split())


def test_an_interrupted_report_exits_130(run: Run, fake: Core) -> None:
    fake.report = failed_numbers()
    ran = run("apply", "org/m")
    assert ran.code == 130
    assert "The run was interrupted." in ran.out or "The numbers changed." in ran.out
    assert "interrupted; partial results are in fusion-runs" in ran.err
    assert (only_run() / "report.html").exists()


def test_ctrl_c(run: Run, fake: Core) -> None:
    def stop(progress: core.Progress) -> None:
        raise KeyboardInterrupt

    fake.on_work = stop
    ran = run("profile", "org/m")
    assert ran.code == 130
    assert "Traceback" not in ran.err
    assert "✗ trace" in ran.err


def test_a_run_is_repeated_with_its_own_request(run: Run, fake: Core) -> None:
    run("profile", "org/m", "--batch", "8", "--trust-remote-code", "-o", "mine")
    run("profile", "org/other", "--batch", "3")
    assert run("apply").code == 0
    assert fake.requests[-1].model_id == "org/other"
    assert run("apply", "mine", "-o", "again").code == 0
    assert (fake.requests[-1].model_id, fake.requests[-1].batch) == ("org/m", 8)
    assert not fake.requests[-1].trust_remote_code  # a file may not switch it on
    assert run("apply", "mine", "--trust-remote-code", "-o", "third").code == 0
    assert fake.requests[-1].trust_remote_code
    assert run("apply", "@last", "-o", "fourth").code == 0
    ran = run("apply", "mine", "--batch", "4")
    assert ran.code == 2
    assert "--batch contradicts the run `mine`" in ran.err


def test_a_run_is_not_overwritten(run: Run, fake: Core) -> None:
    assert run("profile", "org/m", "-o", "here").code == 0
    ran = run("profile", "org/m", "-o", "here")
    assert ran.code == 2
    assert "error[FA505]: `here` already holds a run" in ran.err
    assert len(fake.requests) == 1  # a large model takes minutes to load
    assert run("profile", "org/m", "-o", "here", "--force").code == 0


def test_errors_have_rustcs_shape(run: Run, fake: Core) -> None:
    def fail(progress: core.Progress) -> None:
        raise CannotCapture(model_id="org/m\x1b[2J", detail="line one")

    fake.on_work = fail
    ran = run("profile", "org/m")
    assert ran.code == 4
    lines = ran.err.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("error["))
    assert lines[at] == "error[FA303]: `org/m\\x1b[2J` could not be captured: line one"
    assert lines[at + 1].startswith("  note: TorchDynamo")
    assert lines[at + 2].startswith("  help: ")
    assert lines[at + 3] == f"  log:  {only_run()}/log.txt"
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert "Traceback" in (only_run() / "log.txt").read_text()


def test_a_bug_is_a_sentence(run: Run, fake: Core) -> None:
    def fail(progress: core.Progress) -> None:
        raise ZeroDivisionError("oops\nsecond line")

    fake.on_work = fail
    for flags in ((), ("-v",)):
        ran = run("profile", "org/m", "-o", f"d{len(flags)}", *flags)
        assert ran.code == 1
        assert "error: bug in fusion-advisor: ZeroDivisionError: oops" in ran.err
        assert "Traceback" not in ran.err
        assert "log:  d" in ran.err
    ran = run("profile", "org/m", "-o", "d3", "-vv")
    assert ran.code == 1
    assert "Traceback" in ran.err


def test_quiet(run: Run, fake: Core) -> None:
    fake.on_work = lambda progress: progress.warn("clocks moved [/]")
    ran = run("apply", "org/m", "-q")
    assert ran.out.startswith("1.19× faster than eager")
    assert len(ran.out.splitlines()) == 1
    assert ran.err.splitlines() == ["a library that prints", "! clocks moved [/]"]


def test_github_actions(run: Run, fake: Core, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    fake.on_work = lambda progress: progress.warn("100% busy\nnext")
    ran = run("apply", "org/m")
    assert "::warning::100%25 busy next" in ran.err
    assert "### fusion-advisor:" in (tmp_path / "summary.md").read_text()


def test_request_is_readable_json(run: Run, fake: Core) -> None:
    run("profile", "org/m")
    data = json.loads((only_run() / "request.json").read_text())
    assert data["schema"] == core.REQUEST_SCHEMA
    assert data["model_id"] == "org/m"


@pytest.fixture
def listening() -> Iterator[None]:
    """Python listens to Ctrl-C, which it does not in a job that a shell has put into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_the_first_ctrl_c_waits_for_the_step_and_leaves_a_report(run: Run, fake: Core) -> None:
    steps: list[int] = []

    def interrupted(progress: core.Progress) -> None:
        for step in range(1, 9):
            progress.step(step, 8, "a step that must come to its end")
            if step == 2:
                signal.raise_signal(signal.SIGINT)
            steps.append(step)

    fake.on_work = interrupted
    before = signal.getsignal(signal.SIGINT)
    ran = run("apply", "org/m")
    assert ran.code == 130
    assert steps == [1, 2]
    assert signal.getsignal(signal.SIGINT) is before
    directory = only_run()
    assert ran.err.endswith(f"interrupted; partial results are in {directory}\n  next: fusion-advisor report {directory}\n")
    assert "The run was interrupted." in (directory / "report.md").read_text()
    assert (directory / "report.html").is_file()
    assert ran.out == ""


@pytest.mark.usefixtures("listening")
def test_the_second_ctrl_c_stops_at_once(run: Run, fake: Core) -> None:
    steps: list[int] = []

    def interrupted(progress: core.Progress) -> None:
        for step in range(1, 9):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append(step)

    fake.on_work = interrupted
    ran = run("profile", "org/m")
    assert ran.code == 130
    assert steps == []
    assert f"interrupted before anything was measured; the log is {only_run()}/log.txt" in ran.err


def test_progress_modes(run: Run, fake: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.on_work = lambda progress: progress.warn("clocks moved")
    assert run("profile", "org/m", "--progress", "none", "-o", "a").err.splitlines() == [
        "a library that prints",
        "! clocks moved",
    ]
    assert "✓ trace" in run("profile", "org/m", "--progress", "plain", "-o", "b").err
    assert "\x1b[?25l" in run("profile", "org/m", "--progress", "bar", "-o", "c").err
    monkeypatch.setenv("NO_COLOR", "1")
    colourless = run("profile", "org/m", "--progress", "bar", "-o", "d").err  # a bar needs the cursor, not colours
    assert "\x1b[?25l" in colourless
    assert not re.search(r"\x1b\[[\d;]*m", colourless)


def test_verbose_says_why(run: Run, fake: Core) -> None:
    fake.report = applied()
    plain, more, most = (run("apply", "org/m", *flags, "-o", str(len(flags))).out for flags in ((), ("-v",), ("-v", "-v")))
    refusal = "model.layers.23.mlp.act: its input is written in place between the ops."
    assert refusal not in plain and refusal in more
    assert "no kernel: cat joins two tensors" in more
    assert "tl.store(" not in more and "tl.store(" in most
    assert plain.splitlines()[:5] == more.splitlines()[:5]


def test_open_says_where_it_cannot(run: Run, fake: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def browser(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", browser)
    assert (
        "! --open: there is no terminal with a display here; it lies in a/report.html"
        in run("apply", "org/m", "--open", "-o", "a").err
    )
    assert "add html to --format" in run("apply", "org/m", "--open", "-o", "b", "--format", "md").err
    monkeypatch.setattr(console, "is_tty", lambda stream: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("BROWSER", "true")
    assert "--open" not in run("apply", "org/m", "--open", "-o", "c").err
    assert opened == [(Path("c") / "report.html").absolute().as_uri()]
