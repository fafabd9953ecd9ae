"""Options by keyword: what a newcomer types is served or named, never taken for something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets, ProfileOptions
from fusion_advisor.fuse.plan.python_options import read_options
from fusion_advisor.fuse.plan.size_ranges import read_shapes


def test_options_become_the_record_that_the_command_line_makes():
    given = {"only": ("rms*", "gelu*"), "min_gain": 0.01, "budgets": Budgets(wall_s=1), "shapes": "batch=1..4", "top": 3}
    expected = ApplyOptions(
        only=("rms*", "gelu*"), min_gain=0.01, budgets=Budgets(wall_s=1), shapes=read_shapes("batch=1..4"), top=3
    )
    assert read_options(ApplyOptions, given) == expected
    assert read_options(ProfileOptions, {}) == ProfileOptions()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"only": "gelu*"}, ApplyOptions(only=("gelu*",))),
        ({"skip": ["gelu*"]}, ApplyOptions(skip=("gelu*",))),
        ({"kernel_dirs": "mine"}, ApplyOptions(kernel_dirs=(Path("mine"),))),
        ({"kernel_dirs": [Path("mine"), "yours"]}, ApplyOptions(kernel_dirs=(Path("mine"), Path("yours")))),
        ({"run_dir": "runs"}, ApplyOptions(run_dir=Path("runs"))),
        ({"min_gain": 0}, ApplyOptions(min_gain=0.0)),
    ],
    ids=["one pattern", "a list", "one folder", "folders", "a path", "a whole number"],
)
def test_what_is_meant_is_clear(given, expected):
    assert read_options(ApplyOptions, given) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quick", 'in Python it is effort="quick"'),
        ("min_gains", "did you mean min_gain"),
        ("zzz", "there are warmup, runs"),
        ("dtype", "the model and the inputs"),
    ],
    ids=["of the command line", "mistyped", "unknown", "of the model"],
)
def test_an_option_that_does_not_exist_is_named_with_what_does(name, words):
    with pytest.raises(TypeError, match=f"no option '{name}'.*{words}"):
        read_options(ApplyOptions, {name: True})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"effort": "fast"}, "effort: 'fast' is none of 'quick', 'usual', 'thorough'"),
        ({"min_gain": "1%"}, "min_gain: expected `float`, got `str`"),
        ({"only": 3}, "only: expected a list, got `int`"),
        ({"graph": "no"}, "graph: expected `bool`"),
        ({"run_dir": 3}, "run_dir: expected `Path`, got `int`"),
        ({"shape_points": "batch=1"}, "shape_points: expected a list"),
        ({"runs": 0}, "runs is 0"),
        ({"top": -1}, "top is -1"),
        ({"min_share": 1.5}, "min_share 1.5 is no share"),
        ({"min_gain": 1.5}, "min_gain 1.5 is no share"),
        ({"shapes": "batch=0..4"}, "batch begins at 0"),
    ],
    ids=["literal", "text for a share", "list", "bool", "path", "points", "no runs", "top", "min_share", "min_gain", "shapes"],
)
def test_a_value_that_no_run_can_use_is_refused(given, words):
    with pytest.raises(UsageError) as caught:
        read_options(ApplyOptions, given)
    assert words in str(caught.value)
