"""What a model is, in plain values: a class counts by its own source, wherever its file changed."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys

import pytest

from fusion_advisor.export.copied.model_facts import _classes, differences, facts
from tests.tiny import Toy

MODEL = """
from torch import nn

class Part(nn.Module):
    def forward(self, x):
        return x.relu()

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return what a model of a changed file differs in from one of ``MODEL``."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first", "second"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def changed(old, new):
        expected = _facts_of(tmp_path, "first", MODEL, None)
        found = _facts_of(tmp_path, "second", MODEL.replace(old, new), expected["code"])
        return expected, found, differences(expected, found)

    return changed


def _facts_of(folder, name, source, known):
    (folder / f"{name}.py").write_text(source)
    return facts(importlib.import_module(name).Whole(), known)


def test_a_class_that_changed_is_named(written):
    _, _, lines = written("x.relu()", "x.relu() + 0")
    assert lines == ["source of Part is another than when it was exported"]


def test_a_change_elsewhere_in_the_file_is_none(written):
    expected, found, lines = written("from torch import nn", "from torch import nn\n\nLIMIT = 3")
    assert lines == []
    assert expected["code"]["Part"][0] != found["code"]["Part"][0]  # the file
    assert expected["code"]["Part"][1] == found["code"]["Part"][1]


def test_a_file_that_did_not_change_is_not_parsed(written):
    expected, _, _ = written("", "")
    planted = {name: [whole, "planted"] for name, (whole, _) in expected["code"].items()}
    assert facts(importlib.import_module("second").Whole(), planted)["code"] == planted


def test_numbers_that_json_lacks_come_back_from_a_file():
    model, other = Toy(), Toy()
    for one in (model, other):
        one.config = Config()
        one.masked, one.unknown, one.word = -math.inf, math.nan, "inf"
    expected = json.loads(json.dumps(facts(model), allow_nan=False))
    assert differences(expected, facts(other)) == []
    other.masked, other.config.limits = math.inf, (0.0, 5.0)
    assert differences(expected, facts(other)) == [
        "config.limits: [0.0, 5.0], exported with [0.0, 'float inf']",
        "module model: {'masked': 'float inf'}, exported with {'masked': 'float -inf'}",
    ]


class Config:
    """As transformers' configurations are read."""

    limits = (0.0, math.inf)

    def to_dict(self):
        return {"limits": self.limits}


def test_a_class_has_the_source_that_inspect_finds():
    assert _classes(inspect.getsource(inspect.getmodule(Toy)))["Toy"] == inspect.getsource(Toy).rstrip("\n")
