"""Patterns on disk: traced once for a user, never from a file that somebody else or an accident changed."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_advisor import content
from fusion_advisor.files import private_folder
from fusion_advisor.files.kept_code import KeptCode
from fusion_advisor.files.private_folder import cache_folder
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.library import kept_patterns as kept
from fusion_advisor.library import patterns as library
from fusion_advisor.library.discover import list_kernels, scaffold
from fusion_advisor.library.manifest import read_spec
from fusion_advisor.library.match import arithmetic_in
from fusion_advisor.records.serialize import read_capture
from tests.tiny import patterns as all_patterns

CAPTURES = Path(__file__).parents[1] / "data" / "captures"


@pytest.fixture
def spec(monkeypatch, tmp_path):
    """A user's kernel, with a cache and a temporary directory of this test's own."""
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    private_folder._say_once.cache_clear()
    private_folder._of_this_process.cache_clear()
    yield read_spec(scaffold("mine", tmp_path))
    private_folder._of_this_process.cache_clear()


@pytest.fixture
def traced(monkeypatch):
    """The kernels that were traced, in order."""
    names, trace = [], library._trace_patterns

    def noted(spec, most_shapes=None):
        names.append(spec.name)
        return trace(spec, most_shapes)

    monkeypatch.setattr(library, "_trace_patterns", noted)
    return names


def as_new_process(spec):
    library._traced.cache_clear()
    return library.kernel_patterns(spec)


def files():
    return sorted(cache_folder("patterns").iterdir())


def test_a_second_process_reads_what_the_first_one_traced(spec, traced):
    first = as_new_process(spec)
    assert first
    assert as_new_process(spec) == first
    assert traced == ["mine"]
    (file,) = files()
    assert file.read_bytes().startswith(b'{\n "schema": "fusion-advisor-patterns/1"')
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(b""), lambda path: os.truncate(path, 100), lambda path: path.write_bytes(bytes(999))]
)
def test_a_damaged_file_is_traced_again_and_said(spec, traced, caplog, damage):
    first = as_new_process(spec)
    damage(files()[0])
    with caplog.at_level(logging.WARNING, "fusion_advisor"):
        assert as_new_process(spec) == first
    assert traced == ["mine", "mine"]
    assert "is damaged (its content is not what was built)" in caplog.text
    assert as_new_process(spec) == first
    assert len(traced) == 2, "the new file is whole"


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": "fusion-advisor-patterns/1"}', '{"schema": "fusion-advisor/1"}'])
def test_a_file_with_the_right_digest_and_other_content_is_traced_again(spec, traced, caplog, text):
    first = as_new_process(spec)
    (file,) = files()
    file.unlink()
    KeptCode(folder=file.parent, suffix=".json").keep_bytes(file.name.partition(".")[0], text.encode())
    with caplog.at_level(logging.WARNING, "fusion_advisor"):
        assert as_new_process(spec) == first
    assert traced == ["mine", "mine"]
    assert "is damaged" in caplog.text


def test_a_folder_that_others_write_to_is_not_read(spec, traced, tmp_path, caplog):
    first = as_new_process(spec)
    (tmp_path / "cache/fusion-advisor/patterns").chmod(0o777)
    with caplog.at_level(logging.WARNING, "fusion_advisor"):
        assert as_new_process(spec) == first
    assert traced == ["mine", "mine"]
    assert "is not used as a cache: others may write" in caplog.text


def test_a_link_in_the_files_place_is_not_followed(spec, traced, tmp_path):
    as_new_process(spec)
    (file,) = files()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    as_new_process(spec)
    assert traced == ["mine", "mine"]
    assert not files()[0].is_symlink()


def test_what_patterns_depend_on_is_in_the_key(spec, monkeypatch):
    source = library._source(spec)
    keys = {kept._key(spec, source, "all")}

    def is_new(changed=spec, content=source, of="all"):
        before = len(keys)
        keys.add(kept._key(changed, content, of))
        return len(keys) > before

    assert not is_new()
    assert not is_new(replace(spec, folder=Path("elsewhere"))), "a copy of the folder has the same patterns"
    assert is_new(content=source + b"#")
    assert is_new(of="first")
    assert is_new(replace(spec, constants=(*spec.constants, ("more", 1.0))))
    with torch.autocast("cpu", torch.bfloat16):
        assert is_new()
    for place, value in ((torch, "2.99.9"), (kept.sys, "4.0")):
        with monkeypatch.context() as patched:
            patched.setattr(place, "__version__" if place is torch else "version", value)
            assert is_new()
    with monkeypatch.context() as patched:
        patched.setattr(content, "package_sources", lambda: [("lowering/lower.py", b"edited")])
        content.package_digest.cache_clear()
        assert is_new()
    content.package_digest.cache_clear()


def test_an_edited_reference_is_traced_again(spec, traced):
    first = as_new_process(spec)
    reference = spec.folder / "reference.py"
    reference.write_text(reference.read_text() + "\n\ndef reference_twice(*tensors):\n    return tensors[0] + tensors[0]\n")
    names = ", ".join(tensor.name for tensor in spec.inputs)
    reference.write_text(reference.read_text().replace("*tensors", names).replace("tensors[0]", spec.inputs[0].name))
    assert {pattern.variant for pattern in as_new_process(spec)} == {pattern.variant for pattern in first} | {"twice"}


def test_a_reference_that_imports_other_code_is_traced_in_each_process(spec, traced, monkeypatch):
    monkeypatch.syspath_prepend(spec.folder)
    (spec.folder / "helper_of_mine.py").write_text("")
    reference = spec.folder / "reference.py"
    reference.write_text(reference.read_text().replace("import torch\n", "import torch\nimport helper_of_mine\n", 1))
    as_new_process(spec)
    as_new_process(spec)
    assert traced == ["mine", "mine"]
    assert files() == []


def test_a_full_disk_stops_nothing(spec, monkeypatch, caplog):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KeptCode, "keep", full)
    with caplog.at_level(logging.WARNING, "fusion_advisor"):
        assert as_new_process(spec)
    assert "patterns of mine are not kept" in caplog.text


def test_files_of_other_versions_go_after_a_month(spec):
    as_new_process(spec)
    (file,) = files()
    young, old = (file.with_name(f"mine-all-{name}.0.json") for name in ("young", "old"))
    other = file.with_name("minerals-all-old.0.json")
    for path in (young, old, other):
        path.write_text("{}")
    for path in (old, other):
        os.utime(path, (0, 0))
    kept.keep_patterns(spec, library._source(spec), library.kernel_patterns(spec), of="all")
    assert files() == sorted([file, young, other])


def test_numbers_that_json_lacks_come_back(spec):
    pattern = library.kernel_patterns(spec)[0]
    numbers = (math.inf, -math.inf, math.nan, -0.0, 0.1, 1e-45)
    odd = replace(pattern, structure=replace(pattern.structure, constants=numbers))
    kept.keep_patterns(spec, b"", (odd,), of="all")
    (read,) = kept.kept_patterns(spec, b"", of="all")
    assert repr(read) == repr(odd)


# -- tracing on demand -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [spec for spec in list_kernels() if spec.gemv is None], ids=lambda spec: spec.name)
def test_a_kernels_first_shapes_tell_the_arithmetic_of_all(spec):
    first = {arithmetic_in(pattern.structure.text) for pattern in library._trace_patterns(spec, 1)}
    assert {arithmetic_in(pattern.structure.text) for pattern in library.kernel_patterns(spec)} == first


@pytest.mark.parametrize("name", ["gpt2-fp32-1x1024-h200", "qwen2.5-7b-bf16-1x512-h200"])
def test_a_plan_on_demand_is_the_plan_of_the_whole_library(name):
    capture = read_capture(CAPTURES / f"{name}.json.gz")
    on_demand, _ = library.library_on_demand()
    plan = make_plan(capture, on_demand, min_share=0.001)
    assert plan.fusions
    assert plan == make_plan(capture, all_patterns(), min_share=0.001)


def test_kernels_of_another_arithmetic_are_not_traced_at_all_shapes(spec, monkeypatch, tmp_path):
    shapes = {}
    trace = library._trace_patterns

    def noted(spec, most_shapes=None):
        shapes.setdefault(spec.name, []).append(most_shapes)
        return trace(spec, most_shapes)

    gelu = next(pattern.structure.text for pattern in all_patterns() if pattern.kernel == "gelu_tanh")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    for cached in (library._traced, library._first_traced, library._arithmetic_of):
        cached.cache_clear()
    monkeypatch.setattr(library, "_trace_patterns", noted)
    on_demand, _ = library.library_on_demand()
    assert "gelu_tanh" in {pattern.kernel for pattern in on_demand(gelu)}
    assert None in shapes["gelu_tanh"]
    assert shapes["layernorm"] == [1]
