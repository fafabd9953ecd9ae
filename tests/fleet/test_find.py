"""Which files a pattern names."""

from __future__ import annotations

import fsspec
import pytest

from fusion_advisor.errors import NoTraces
from fusion_advisor.fleet.find import find_traces


def test_the_largest_come_first_and_each_once(tmp_path):
    for name, size in (("a/x.json.gz", 10), ("a/b/y.json.gz", 30), ("z.json", 99)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    found = find_traces([f"{tmp_path}/**/*.json.gz", f"{tmp_path}/a/*.json.gz"])
    assert [(source.url, source.size_bytes) for source in found] == [
        (str(tmp_path / "a/b/y.json.gz"), 30),
        (str(tmp_path / "a/x.json.gz"), 10),
    ]
    assert all(source.version for source in found)


def test_other_file_systems_are_fsspecs():
    memory = fsspec.filesystem("memory")
    memory.pipe("/traces/a.json", b"{}")
    assert [source.url for source in find_traces(["memory://traces/*.json"])] == ["memory:///traces/a.json"]


def test_nothing_found_is_said(tmp_path):
    with pytest.raises(NoTraces, match=r"\*\.json"):
        find_traces([f"{tmp_path}/*.json"])
