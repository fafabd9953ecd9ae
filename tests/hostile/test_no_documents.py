"""Files that are no documents: empty, damaged, endless, folders, pipes, devices, or not ours to read."""

from __future__ import annotations

import errno
import gzip
import os
import random
from pathlib import Path

import pytest

from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.cli.app import main
from fusion_advisor.cli.common import config
from fusion_advisor.errors import AdvisorError, UnreadableReport
from fusion_advisor.files.regular_file import MOST_BYTES, unpack
from fusion_advisor.library.manifest import read_spec
from fusion_advisor.records.serialize import read_capture, read_report
from tests.report.make_fixtures import DIRECTORY

DATA = Path(__file__).parents[1] / "data"


def forbid(path, monkeypatch):
    """Make a file that may not be read, by root neither."""
    opened = os.open

    def refuse(name, *args, **kwargs):
        if Path(name) == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return opened(name, *args, **kwargs)

    path.write_text("{}")
    monkeypatch.setattr(os, "open", refuse)


def make_none(path, kind, monkeypatch):
    """Put something that is no readable file where a file should be."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "forbidden":
        forbid(path, monkeypatch)


READERS = {
    "report": read_report,
    "capture": read_capture,
    "trace": lambda path: list(TraceFile(path)),
    "config": lambda path: config.read_settings(path.parent, {}, path),
    "manifest": lambda path: read_spec(path.parent),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"[" * 100_000, b"a = " + b"[" * 50_000, b"9" * 10_000,
     b"a = " + b"9" * 10_000,
     b'{"schema": "fusion-advisor/1", "x": 1e999}',
     b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\x1f\x8b\x08\0", random.Random(1).randbytes(64)],
)  # fmt: skip
def test_what_is_no_document_is_refused(tmp_path, reader, content):
    path = tmp_path / "kernel.toml"
    path.write_bytes(content)
    try:
        READERS[reader](path)
    except AdvisorError as error:
        assert error.exit_code in (2, 9)
    else:
        assert reader == "config" and not content.strip()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "dangling", "missing", "forbidden"])
def test_what_is_no_file_is_refused_at_once(tmp_path, reader, kind, monkeypatch):
    path = tmp_path / "kernel.toml"
    make_none(path, kind, monkeypatch)
    with pytest.raises(AdvisorError) as caught:
        READERS[reader](path)
    assert caught.value.exit_code in (2, 9)


def test_a_gzip_bomb_is_not_unpacked(monkeypatch, tmp_path):
    with pytest.raises(OSError, match="unpacked it has more than 1,000 bytes"):
        unpack(gzip.compress(bytes(100_000)), 1000)
    assert MOST_BYTES <= 2**28
    monkeypatch.setattr("fusion_advisor.records.serialize.unpack", lambda packed: unpack(packed, 1000))
    from fusion_advisor.records.serialize import read_capture

    (tmp_path / "capture.json.gz").write_bytes(gzip.compress(b" " * 100_000))
    with pytest.raises(UnreadableReport, match="more than 1,000 bytes"):
        read_capture(tmp_path / "capture.json.gz")


def test_a_value_without_end_in_a_trace_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fusion_advisor.capture.trace.chrome_trace._LONGEST", 1 << 21)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": ["' + b"x" * (1 << 23), 1))
    with pytest.raises(AdvisorError, match="longer than 2,097,152 characters"):
        list(TraceFile(tmp_path / "trace.json.gz"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "forbidden"])
def test_tunings_that_cannot_be_read_are_measured_again(tmp_path, kind, monkeypatch):
    path, said = tmp_path / "tuning.json", []
    make_none(path, kind, monkeypatch)
    assert TuningStore(path, said.append).get("key") is None
    assert len(said) == 1 and str(path) in said[0]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("reader", ["capture", "trace"])
def test_a_truncated_gzip_is_refused(tmp_path, reader, share):
    packed = (DATA / "captures" / "gpt2-fp32-1x1024-h200.json.gz").read_bytes()
    path = tmp_path / "file.json.gz"
    path.write_bytes(packed[: int(share * len(packed))])
    with pytest.raises(AdvisorError) as caught:
        READERS[reader](path)
    assert caught.value.exit_code == 9 and str(path) in str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "forbidden"])
@pytest.mark.parametrize("name", ["report.json", "capture.json.gz"])
def test_a_plan_whose_file_is_none_is_refused(tmp_path, name, kind, monkeypatch):
    from fusion_advisor.fuse.live.saved_plan import load_plan

    (tmp_path / "capture.json.gz").write_bytes((DATA / "captures" / "gpt2-fp32-1x1024-h200.json.gz").read_bytes())
    (tmp_path / "report.json").write_bytes((DIRECTORY / "applied.json").read_bytes())
    path = tmp_path / name
    path.unlink()
    make_none(path, kind, monkeypatch)
    with pytest.raises(UnreadableReport, match=name):
        load_plan(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "forbidden"])
def test_a_command_names_the_file_that_is_none(tmp_path, kind, capsys, monkeypatch):
    path = tmp_path / "report.json"
    make_none(path, kind, monkeypatch)
    assert main(["report", str(tmp_path)]) == 9
    assert "report.json" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("name", ["report.md", "report.html", "csv/kernels.csv"])
def test_a_full_disk_is_said_of_the_file_that_did_not_fit(tmp_path, name, capsys, monkeypatch):
    (tmp_path / "report.json").write_bytes((DIRECTORY / "training.json").read_bytes())
    moved = Path.replace

    def full(path, target):
        if Path(target) == tmp_path / name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return moved(path, target)

    monkeypatch.setattr(Path, "replace", full)
    kind = Path(name).suffix[1:]
    assert main(["report", str(tmp_path), "--format", kind]) == 5
    said = "".join(capsys.readouterr().err.split())
    assert "Nospaceleft" in said and "".join(str(tmp_path / name).split()) in said
    assert not list(tmp_path.rglob("*.tmp"))
