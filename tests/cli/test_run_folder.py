"""A run's folder: what cannot be written is said in a sentence, and no two runs write into one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.cli.app import print_error
from fusion_advisor.cli.common import run_dir
from fusion_advisor.cli.common.console import Settings
from fusion_advisor.errors import CannotWrite
from tests.cli.conftest import Core, Ran

Run = Callable[..., Ran]
FULL = Path("/dev/full")


@pytest.mark.parametrize("name", ["log.txt", "request.json"])
def test_a_file_that_cannot_be_written_ends_the_run_with_a_sentence(run: Run, fake: Core, name: str) -> None:
    Path("r", name).mkdir(parents=True)
    ran = run("profile", "org/m", "-o", "r")
    assert ran.code == 5, ran.err
    assert "error[FA306]: cannot write `r`: Is a directory" in ran.err
    assert "bug" not in ran.err


def test_a_file_of_the_run_that_cannot_be_written_later_is_no_bug(run: Run, fake: Core) -> None:
    fake.on_work = lambda progress: Path("r/capture.json.gz").mkdir()
    ran = run("profile", "org/m", "-o", "r")
    assert ran.code == 5, ran.err
    assert "error[FA306]" in ran.err and "r/" in ran.err


@pytest.mark.parametrize(("number", "code"), [(errno.EDQUOT, 5), (errno.EROFS, 5), (errno.ENOENT, 1)])
def test_a_disk_that_takes_no_more_is_no_bug_and_a_missing_file_is_one(run: Run, fake: Core, number: int, code: int) -> None:
    def fail(progress: object) -> None:
        raise OSError(number, "not today", "/elsewhere/file")

    fake.on_work = fail
    ran = run("profile", "org/m", "-o", "r")
    assert ran.code == code, ran.err
    assert ("error[FA306]: cannot write `/elsewhere/file`: not today" in ran.err) is (code == 5)


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_log_on_a_full_disk_hides_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(log_path=FULL)
    settings.write_log("lost")
    print_error(CannotWrite(path="r", detail="No space left on device"), settings)
    assert "error[FA306]: cannot write `r`: No space left on device" in capsys.readouterr().err


def test_two_runs_at_once_do_not_share_a_folder(run: Run, fake: Core) -> None:
    others: list[Ran] = []

    def start_another(progress: object) -> None:
        if not others:
            others.append(run("profile", "org/other", "-o", "r"))

    fake.on_work = start_another
    assert run("profile", "org/m", "-o", "r").code == 0
    assert others[0].code == 2
    assert "error[FA521]: another run is writing to `r` now" in others[0].err
    assert run("profile", "org/other", "-o", "r", "--force").code == 0, "the folder is free again"


def test_runs_that_start_in_one_second_get_different_ids(run: Run, fake: Core) -> None:
    ids = [run_dir.free_run_id("abc123", makes_folder=True) for _ in range(3)]
    assert len(set(ids)) == 3
    assert all((run_dir.RUNS / run_id).is_dir() for run_id in ids)
    assert ids == sorted(ids)
