from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusion_advisor.cli.app import main
from fusion_advisor.cli.common import core
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.records import Capture, Report
from fusion_advisor.records.serialize import load_record
from tests.report.fixtures import applied, profiled, timing, trained, training

CLEARED = (
    "NO_COLOR FORCE_COLOR TTY_COMPATIBLE COLUMNS TERM CI GITHUB_ACTIONS GITHUB_STEP_SUMMARY "
    "SOURCE_DATE_EPOCH HF_TOKEN HF_HUB_OFFLINE"
)


@dataclass(frozen=True, kw_only=True)
class FakeRequest:
    """The workload request's fields, without what it checks."""

    model_id: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    batch: int = 1
    seq_len: int | None = None
    input: str | None = None
    phase: str = "forward"
    context: int | None = None
    new_tokens: int | None = None
    layers: int | None = None
    seed: int = 0
    weights: str = "auto"
    trust_remote_code: bool = False
    offline: bool = False


@dataclass
class Core:
    """What the fake core was asked, and what it answers."""

    requests: list[FakeRequest] = field(default_factory=list)
    options: list[ProfileOptions] = field(default_factory=list)
    reverted: int = 0
    report: Report | None = None
    on_work: Callable[[core.Progress], None] = lambda progress: None


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in CLEARED.split():
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("FUSION_ADVISOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Core:
    state = Core()

    def load_workload(request: FakeRequest) -> object:
        state.requests.append(request)
        print("a library that prints")  # noqa: T201 - must not reach stdout
        record = applied().workload
        record = replace(record, phase="train") if request.phase == "train" else record
        return SimpleNamespace(record=record, notes=(), model=SimpleNamespace(modules=lambda: ()))

    def finish(report: Report, options: ProfileOptions) -> Report:
        named = state.report or report
        return replace(named, run_id=options.run_id, config_hash=options.config_hash, command=options.command)

    def work(options: ProfileOptions, progress: core.Progress) -> None:
        state.options.append(options)
        progress.phase("trace")
        progress.step(1, 2, "kernel [/] of two")
        progress.note("1,204 kernels")
        state.on_work(progress)

    def profile_workload(loaded: object, options: ProfileOptions, progress: core.Progress) -> tuple[Report, Capture]:
        work(options, progress)
        report = finish(profiled(), options)
        return report, captured(report)

    def profile_training(loaded: object, options: ProfileOptions, progress: core.Progress) -> tuple[Report, Capture]:
        work(options, progress)
        report = finish(training(), options)
        return report, captured(report)

    def captured(report: Report) -> Capture:
        return Capture(
            workload=report.workload,
            environment=report.environment,
            ops=(),
            launches=(),
            eager_launches=(),
            eager_step=timing(1000),
            bandwidth=report.bandwidth,
            quality=report.quality,
        )

    def apply_workload(
        loaded: SimpleNamespace,
        options: ApplyOptions,
        progress: core.Progress,
        on_report: Callable[[Report], None],
        compilers: object,
    ) -> object:
        on_report(replace(finish(applied(), options), status="interrupted"))
        work(options, progress)

        def revert() -> None:
            state.reverted += 1

        report = finish(trained() if loaded.record.phase == "train" else applied(), options)
        return SimpleNamespace(report=report, capture=captured(report), parts=(), write_start=None, revert=revert)

    monkeypatch.setattr(core, "make_request", FakeRequest)
    monkeypatch.setattr(
        core, "load_request", lambda text, name: load_record(FakeRequest, text, schema=core.REQUEST_SCHEMA, name=name)
    )
    monkeypatch.setattr(core, "load_workload", load_workload)
    monkeypatch.setattr(core, "profile_workload", profile_workload)
    monkeypatch.setattr(core, "profile_training", profile_training)
    monkeypatch.setattr(core, "apply_workload", apply_workload)
    return state


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*arguments: str) -> Ran:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call
