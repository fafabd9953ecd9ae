"""Compiled kernels on disk: what the package brought comes first, and nothing is compiled twice."""

from __future__ import annotations

import json

import pytest

from fusion_advisor.export.copied.kept_binaries import INTO, Binaries, digest


@pytest.fixture
def binaries(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "built").mkdir()
    return Binaries(tmp_path / "built", "some_package")


def test_what_was_shipped_is_not_made(binaries, tmp_path):
    (tmp_path / "built" / "a.so").write_bytes(b"shipped")
    assert binaries.kept("a.so", lambda path: pytest.fail("made")).read_bytes() == b"shipped"
    assert not (tmp_path / "cache").exists()


def test_a_file_is_made_once(binaries, tmp_path):
    made = []

    def make(path):
        made.append(path)
        path.write_bytes(b"made")

    for _ in range(2):
        assert binaries.kept("b.so", make).read_bytes() == b"made"
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "cache" / "some_package").iterdir()] == ["b.so"]
    binaries.own("b.so", make, is_broken=True)
    assert len(made) == 2


def test_a_folder_of_others_is_not_used(binaries, tmp_path):
    (tmp_path / "cache" / "some_package").mkdir(parents=True)
    (tmp_path / "cache" / "some_package").chmod(0o777)
    assert binaries.folder.parent != tmp_path / "cache"


def test_what_is_compiled_to_be_shipped_goes_there(tmp_path, monkeypatch):
    monkeypatch.setenv(INTO, str(tmp_path))
    assert Binaries(tmp_path, "some_package").own("c.so", lambda path: path.write_bytes(b"c")).parent == tmp_path


def test_tritons_cache_gets_what_it_lacks_with_paths_of_its_own(binaries, tmp_path):
    for name in ("KEY1", "KEY2"):
        folder = tmp_path / "built" / "triton" / name
        folder.mkdir(parents=True)
        (folder / "k.cubin").write_bytes(b"code")
        group = {"child_paths": {"k.cubin": f"/where/it/was/{name}/k.cubin"}}
        (folder / "__grp__k.json").write_text(json.dumps(group))
    cache = tmp_path / "triton_cache"
    (cache / "KEY2").mkdir(parents=True)
    assert binaries.give_to_triton(cache) == 1
    (path,) = json.loads((cache / "KEY1" / "__grp__k.json").read_text())["child_paths"].values()
    assert path == str(cache / "KEY1" / "k.cubin")
    assert (cache / "KEY1" / "k.cubin").read_bytes() == b"code"
    assert list((cache / "KEY2").iterdir()) == []
    assert binaries.give_to_triton(cache) == 0


def test_a_digest_depends_on_every_part():
    assert len({digest("a", "bc"), digest("ab", "c"), digest("a", "bc", "")}) == 3
