"""``--shapes`` and ``--points``: read before a model is loaded, part of the run, and refused with the reason."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.records import SizeRange
from fusion_advisor.records.serialize import read_report
from tests.cli.conftest import Core, Ran

Run = Callable[..., Ran]
RANGES = (SizeRange(name="batch", least=1, most=16), SizeRange(name="seq", least=1, most=4096))


def asked(fake: Core) -> ApplyOptions:
    options = fake.options[-1]
    assert isinstance(options, ApplyOptions)
    return options


def test_ranges_and_points_reach_the_run_and_its_command_repeats_them(run: Run, fake: Core) -> None:
    points = "batch=1 seq=512; batch=16, seq=1"
    assert run("apply", "org/m", "--shapes", "batch=1..16, seq=1..4096", "--points", points, "-o", "a").code == 0
    first = asked(fake)
    assert first.shapes is not None
    assert first.shapes.ranges == RANGES and first.shape_points == ((1, 512), (16, 1))
    report = read_report(Path("a/report.json"))
    assert report.command.endswith("--shapes batch=1..16,seq=1..4096 --points 'batch=1 seq=512; batch=16 seq=1'")
    assert run(*shlex.split(report.command)[1:], "-o", "b").code == 0
    assert (asked(fake).shapes, asked(fake).shape_points) == (first.shapes, first.shape_points)
    assert run("apply", "org/m", "-o", "c").code == 0
    assert (asked(fake).shapes, asked(fake).shape_points) == (None, ())
    assert read_report(Path("c/report.json")).config_hash != report.config_hash


def test_a_file_may_ask_for_ranges(run: Run, fake: Core) -> None:
    Path("fusion-advisor.toml").write_text('[apply]\nshapes = "batch=1..16,seq=1..4096"\npoints = "batch=2 seq=3"\n')
    assert run("profile", "org/m", "-o", "p").code == 0
    assert run("apply", "p", "-o", "a").code == 0
    request = asked(fake).shapes
    assert request is not None and request.ranges == RANGES and asked(fake).shape_points == ((2, 3),)


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (("--points", "batch=1"), "--points names sizes of --shapes, and there is no --shapes", "write --shapes"),
        (("--shapes", "batch"), "batch has no range", "write --shapes"),
        (("--shapes", "batch=0..4"), "batch begins at 0", ""),
        (("--shapes", "batch=4..2"), "batch=4..2 holds no size", "least size first"),
        (("--shapes", "sequence=1..4"), "`sequence` is no dim", "did you mean seq? use batch, seq"),
        (("--shapes", "rows=1..4"), "`rows` is no dim", "use batch, seq, frames, height, width or cached"),
        (("--shapes", ""), "no range is given", "write --shapes"),
        (("--shapes", "batch=1..4", "--points", "seq=1"), "in `seq=1` batch has no size", "--shapes says batch=1..4"),
        (("--shapes", "batch=1..4", "--points", "batch=5"), "in `batch=5` batch is 5", "--shapes says batch=1..4"),
        (("--shapes", "batch=1..4", "--points", "batch=1 seq=2"), "--shapes has no seq", ""),
        (("--shapes", "batch=1..4", "--points", "batch=1..2"), "`batch=1..2` is no size of a dim", "write --points"),
        (("--shapes", "batch=1..4", "--points", "many"), "`many` is no size of a dim", "write --points"),
        (
            ("--shapes", "batch=1..4", "--phase", "decode"),
            "that step holds a cache of fixed size",
            "--phase forward or prefill",
        ),
        (("--shapes", "batch=1..4", "--phase", "generate"), "hold a cache of fixed size", "--phase forward or prefill"),
        (("--shapes", "batch=1..4", "--phase", "train"), "verified for the sizes of its example", "--phase forward or prefill"),
        (("--shapes", "batch=1..4", "--dry-run"), "a dry run times nothing", "leave one of them out"),
    ],
)
def test_mistakes_end_before_a_model_is_loaded(run: Run, fake: Core, arguments: tuple[str, ...], says: str, hint: str) -> None:
    ran = run("apply", "org/m", *arguments)
    assert ran.code == 2 and "error[FA001]" in ran.err
    assert says in " ".join(ran.err.split()) and hint in " ".join(ran.err.split())
    assert fake.requests == [] and fake.options == []


def test_a_run_that_is_repeated_keeps_its_phase(run: Run, fake: Core) -> None:
    assert run("profile", "org/m", "--phase", "decode", "-o", "p").code == 0
    ran = run("apply", "p", "--shapes", "batch=1..4", "-o", "a")
    assert ran.code == 2 and "that step holds a cache" in " ".join(ran.err.split())
    assert len(fake.requests) == 1
