"""Files that are not what we wrote: every reader, and the command that reads, ends with a coded error or with a result.

Each case takes a real file apart and changes one place: a value of another type, out of range, missing, or unknown.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.autotune.cache import SCHEMA as TUNING_SCHEMA
from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.cli.app import main
from fusion_advisor.cli.common import config, core
from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.content import content_dir
from fusion_advisor.errors import AdvisorError, UnreadableReport, UnsafeName
from fusion_advisor.files.regular_file import MOST_BYTES, unpack
from fusion_advisor.files.safe_name import path_inside, why_unsafe
from fusion_advisor.library.spec import read_spec
from fusion_advisor.records.serialize import load_capture, load_report, read_report
from fusion_advisor.records.soundness import Unsound, check_plan
from tests.report.make_fixtures import DIRECTORY
from tests.traces import Recorder

DATA = Path(__file__).parents[1] / "data"
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 10**9, 2**63, -(10**30), 0.5, -1e308, "", "nan", "../../escape", "/etc/passwd", "a\0b", "[red]x[/]",
    "<script>alert(1)</script>", "\x1b[31m", "\n\n", "\u202egnp", "\ud800", "x" * 100_000, [], {}, [[]], [10**9], {"kind": "Ref"},
    {"kind": "float", "value": "nan"},
)  # fmt: skip
FEW = pytest.param(60, id="few")
MANY = pytest.param(4000, id="many", marks=pytest.mark.slow)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node[:40]) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(document: Any, count: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield ``count`` copies with one place changed each; fields near the root come as often as those of long lists."""
    by_name: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in places(document):
        if path:
            by_name.setdefault(tuple(part if isinstance(part, str) else "*" for part in path), []).append(path)
    draw, names = random.Random(seed), sorted(by_name)
    for _ in range(count):
        path = draw.choice(by_name[draw.choice(names)])
        new = copy.deepcopy(document)
        parent = new
        for part in path[:-1]:
            parent = parent[part]
        how = draw.choice(("delete", "add", "repeat", *["set"] * 7))
        value = draw.choice(HOSTILE)
        if how == "delete":
            del parent[path[-1]]
        elif how == "add" and isinstance(parent, dict):
            parent["unheard_of"] = value
        elif how == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
        elif isinstance(value, int) and not isinstance(value, bool) and isinstance(parent[path[-1]], int) and draw.random() < 0.3:
            parent[path[-1]] += draw.choice((-1, 1, 1000))
        else:
            parent[path[-1]] = copy.deepcopy(value)
        yield f"{how} {'.'.join(map(str, path))} {str(value)[:40]!r}", new


def text_of(document: Any) -> str:
    return json.dumps(document)


def is_sound_end(code: int, err: str, what: str) -> None:
    """A command ends with its result or with a coded error; 1 is what a bug of ours ends with."""
    assert "bug in fusion-advisor" not in err, (what, err)
    assert "Traceback" not in err, (what, err)
    assert code == 0 or "error[FA" in err, (what, code, err)


# -- reports and captures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("name", ["applied", "training"])
def test_a_changed_report_is_shown_or_refused(name, count, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = json.loads((DIRECTORY / f"{name}.json").read_text())
    for number, (what, changes) in enumerate(changed(document, count, seed=1)):
        text = text_of(changes)
        try:
            load_report(text)
        except AdvisorError as error:
            assert error.exit_code == 9, what
            assert str(error), what
            continue
        if number % 6 == 0 or count > 1000:  # the views take a hundred times as long as the reader
            (tmp_path / "report.json").write_text(text)
            for command in (
                ("report", str(tmp_path), "--format", "html,md,csv", "-v"),
                ("compare", str(tmp_path), str(tmp_path)),
            ):
                is_sound_end(main([*command]), capsys.readouterr().err, f"{command[0]}: {what}")
    assert not Path("/tmp/escape").exists()


@pytest.mark.parametrize("count", [pytest.param(25, id="few"), pytest.param(1500, id="many", marks=pytest.mark.slow)])
def test_a_changed_capture_is_read_or_refused(count):
    document = json.loads(gzip.decompress((DATA / "captures" / "gpt2-fp32-1x1024-h200.json.gz").read_bytes()))
    for what, changes in changed(document, count, seed=2):
        try:
            load_capture(text_of(changes))
        except AdvisorError as error:
            assert error.exit_code == 9, what


def plan_documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """A report and a capture that belong together: chains that a search finds in the capture, kept."""
    from fusion_advisor.fuse.plan.plan import make_plan
    from fusion_advisor.records.serialize import encode, read_capture

    capture = read_capture(DATA / "captures" / "gpt2-fp32-1x1024-h200.json.gz")
    found = make_plan(capture, (), top=3)
    report = json.loads((DIRECTORY / "applied.json").read_text())
    one = next(fusion for fusion in report["fusions"] if fusion["rendered"])
    report["chains"] = [encode(chain) for chain in found.chains]
    report["answers"] = [{"kind": type(answer).__name__, **encode(answer)} for answer in found.answers]
    report["fusions"] = [
        {**copy.deepcopy(one), "id": fusion.id, "chain_id": fusion.chain.id, "status": "kept"} for fusion in found.fusions
    ]
    assert report["fusions"]
    ops = json.loads(gzip.decompress((DATA / "captures" / "gpt2-fp32-1x1024-h200.json.gz").read_bytes()))
    return report, ops


@pytest.mark.parametrize("count", [pytest.param(30, id="few"), pytest.param(2000, id="many", marks=pytest.mark.slow)])
def test_a_changed_plan_is_loaded_or_refused(count, tmp_path):
    from fusion_advisor.fuse.live.saved_plan import load_plan

    report, capture = plan_documents()
    packed = gzip.compress(text_of(capture).encode(), 1)
    (tmp_path / "capture.json.gz").write_bytes(packed)
    (tmp_path / "report.json").write_text(text_of(report))
    assert load_plan(tmp_path).fusions
    few = {key: report[key] for key in ("chains", "answers", "fusions", "rewrites")}
    for what, changes in changed(few, count, seed=3):
        (tmp_path / "report.json").write_text(text_of({**report, **changes}))
        try:
            load_plan(tmp_path)
        except AdvisorError as error:
            assert error.exit_code == 9, (what, error)
    (tmp_path / "report.json").write_text(text_of(report))
    for what, changes in changed({"ops": capture["ops"]}, count // 4, seed=4):
        (tmp_path / "capture.json.gz").write_bytes(gzip.compress(text_of({**capture, **changes}).encode(), 1))
        try:
            load_plan(tmp_path)
        except AdvisorError as error:
            assert error.exit_code == 9, (what, error)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("chains", 0, "sites", 0, "op_indices"), [10**6], "op_indices: 1000000 is none of"),
        (("chains", 0, "sites", 0, "op_indices"), [-1], "op_indices"),
        (("chains", 0, "sites", 0, "op_indices"), [], "op_indices"),
        (("fusions", 0, "rendered", 0, "path"), "../../../etc/cron.d/x", "path"),
        (("fusions", 0, "rendered", 0, "path"), "/etc/passwd", "path"),
        (("fusions", 0, "rendered"), [], "has no kernel"),
        (("fusions", 0, "id"), "../F1", "part of a file's name"),
        (("fusions", 0, "chain_id"), "C999", "no chain"),
        (("answers", 0, "operands"), ["x); system(\"id\""], "cannot be a name in source code"),
        (("answers", 0, "kernel"), "x\n#include </etc/passwd>", "cannot be a name in source code"),
    ],
)  # fmt: skip
def test_a_plan_says_what_does_not_hold_together(tmp_path, path, value, says):
    from fusion_advisor.fuse.live.saved_plan import load_plan

    report, capture = plan_documents()
    parent: Any = report
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = value
    (tmp_path / "capture.json.gz").write_bytes(gzip.compress(text_of(capture).encode(), 1))
    (tmp_path / "report.json").write_text(text_of(report))
    with pytest.raises(UnreadableReport) as caught:
        load_plan(tmp_path)
    assert says in str(caught.value)
    assert caught.value.code == "FA501"


# -- names ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\..\\b", "C:\\x", "a\0b", "a\nb", ".hidden", "-rf", "CON",
     "kernels/nul.py", "com1.txt", "a.", "a/b/c/d/e", "x" * 300, "~/x", "$HOME", "\u202ex", "a b"],
)  # fmt: skip
def test_a_name_is_no_route(tmp_path, name):
    with pytest.raises(UnsafeName) as caught:
        path_inside(tmp_path, name)
    assert caught.value.code == "FA501"
    assert caught.value.exit_code == 9


def test_names_of_ours_are_names():
    for path in content_dir("reports").glob("examples/*/report.json"):
        for fusion in read_report(path).fusions:
            assert [why_unsafe(kernel.path) for kernel in fusion.rendered] == [""] * len(fusion.rendered)


@pytest.mark.parametrize("link", ["kernels", "kernels/F1.py"])
def test_a_link_leads_nowhere(tmp_path, link):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(outside if link == "kernels" else outside / "victim")
    with pytest.raises(UnsafeName, match="symbolic link"):
        path_inside(run, "kernels/F1.py")


def test_a_run_directory_that_is_reached_by_a_link_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert path_inside(tmp_path / "link", "kernels/F1.py") == tmp_path / "link" / "kernels" / "F1.py"


@pytest.mark.parametrize("path", ["../victim", "/victim", "kernels/victim"])
def test_writing_a_run_overwrites_nothing_outside(tmp_path, path):
    from fusion_advisor.cli.common.run_dir import write_run

    (tmp_path / "victim").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "kernels").symlink_to(tmp_path)
    document = json.loads((DIRECTORY / "applied.json").read_text())
    for fusion in document["fusions"]:
        for kernel in fusion["rendered"]:
            kernel["path"] = path
    with pytest.raises(UnsafeName):
        write_run(load_report(text_of(document)), run, ())
    assert (tmp_path / "victim").read_text() == "precious"


def test_csv_through_a_link_is_refused(tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.json").write_bytes((DIRECTORY / "applied.json").read_bytes())
    (run / "csv").symlink_to(outside)
    assert main(["report", str(run), "--format", "csv"]) == 9
    assert "symbolic link" in capsys.readouterr().err
    assert list(outside.iterdir()) == []


def test_a_planted_pyc_does_not_run(tmp_path):
    """A run directory that was given away may hold ``__pycache__``; an unchecked one would be taken for the kernel."""
    import importlib.util
    import py_compile

    from fusion_advisor.codegen.common.interface import Rendered
    from fusion_advisor.codegen.triton.backend import load_source

    pytest.importorskip("triton")
    path, evil = tmp_path / "kernels" / "F1.py", tmp_path / "evil.py"
    path.parent.mkdir()
    path.symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("precious")
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(evil), cfile=importlib.util.cache_from_source(str(path)), invalidation_mode=mode)
    rendered = Rendered(backend="triton", entry="fa_x", source="VALUE = 7\n", suffix=".py")
    assert load_source(rendered, path).VALUE == 7
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "victim").read_text() == "precious"
    assert path.read_text() == "VALUE = 7\n"


# -- requests, manifests, configuration, tunings, traces -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_changed_request_is_read_or_refused(count):
    document = json.loads((content_dir("reports") / "examples/gpt2-bf16-8x512-h200/request.json").read_text())
    for what, changes in changed(document, count, seed=5):
        try:
            core.load_request(text_of(changes), "request.json")
        except AdvisorError as error:
            assert error.exit_code in (2, 9), what


def toml_of(value: Any) -> str:
    """Write a document as TOML; None and lone surrogates, which TOML lacks, become texts."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return json.dumps("none" if value is None or value == "\ud800" else value).replace("e+", "e")


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("kernel", ["rope", "rmsnorm_linear"])
def test_a_changed_manifest_is_read_or_refused(count, kernel, tmp_path, capsys):
    document = tomllib.loads((content_dir("kernels") / kernel / "kernel.toml").read_text())
    document["name"] = "mine"
    folder = tmp_path / "mine"
    folder.mkdir()
    for number, (what, changes) in enumerate(changed(document, count, seed=6)):
        lines = "".join(f"{json.dumps(key)} = {toml_of(value)}\n" for key, value in changes.items())
        (folder / "kernel.toml").write_text(lines)
        try:
            read_spec(folder)
        except AdvisorError as error:
            assert error.exit_code == 9, what
        if number % 40 == 0:
            is_sound_end(main(["kernels", "list", "--kernels", str(tmp_path)]), capsys.readouterr().err, what)


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_changed_configuration_is_read_or_refused(count, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    document = {
        "batch": 2, "steps": 3, "min-share": "1%", "dtype": "fp32", "color": "never", "kernels": ["k"], "fast-math": True,
        "apply": {"confidence": 0.9, "runs": 5, "baseline": "eager", "rtol": 0.1},
    }  # fmt: skip
    for what, changes in changed(document, count, seed=7):
        lines = "".join(f"{json.dumps(key)} = {toml_of(value)}\n" for key, value in changes.items())
        Path("fusion-advisor.toml").write_text(lines)
        is_sound_end(main(["apply", "gpt2", "--show-config"]), capsys.readouterr().err, what)


@pytest.mark.parametrize("name", ["BATCH", "KERNELS", "MIN_SHARE", "COLOR", "CONFIDENCE", "NO_SUCH", "TRUST_REMOTE_CODE"])
@pytest.mark.parametrize("value", ["", "nan", "-1", "9" * 5000, "\x1b[31m", "../..", "[red]", "\udc80", "true", ",,,"])
def test_a_strange_variable_is_taken_or_refused(name, value, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"FUSION_ADVISOR_{name}", value)
    is_sound_end(main(["apply", "gpt2", "--show-config"]), capsys.readouterr().err, f"{name}={value[:20]!r}")


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_changed_tuning_file_is_ignored_with_a_sentence(count, tmp_path):
    path = tmp_path / "tuning.json"
    store = TuningStore(path)
    store.put("key", Tuning(num_warps=8), median_ns=1, default_ns=2)
    document = json.loads(path.read_text())
    assert document["schema"] == TUNING_SCHEMA
    for what, changes in changed(document, count, seed=8):
        path.write_text(text_of(changes))
        said: list[str] = []
        found = TuningStore(path, said.append).get("key")
        assert found is None or isinstance(found, Tuning), what


@pytest.mark.parametrize("count", [pytest.param(30, id="few"), MANY])
def test_a_changed_trace_is_ranked_or_refused(count, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    for number in range(6):
        start = recorder.now
        recorder.op("aten::linear>aten::addmm", "sm90_gemm", inputs=([[8, 8], [8, 8]], ["float", "float"]))
        recorder.op("aten::gelu", ("gelu_kernel", 3.0), inputs=([[8, 8]], ["float"])).step(number, start)
    document = recorder.document(record_shapes=1)
    for number, (what, changes) in enumerate(changed(document, count, seed=9)):
        Path("trace.json").write_text(text_of(changes))
        try:
            list(TraceFile(Path("trace.json")))
        except AdvisorError as error:
            assert error.exit_code == 9, what
        if number % 2 == 0:
            is_sound_end(main(["profile", "--trace", "trace.json"]), capsys.readouterr().err, what)


# -- files that are no documents ----------------------------------------------------------------------------------------------


READERS = {
    "report": read_report,
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
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "dangling", "missing"])
def test_what_is_no_file_is_refused_at_once(tmp_path, reader, kind):
    path = tmp_path / "kernel.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "dangling":
        path.symlink_to("nowhere")
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


def test_a_billion_dims_are_no_memory():
    document = json.loads(gzip.decompress((DATA / "captures" / "gpt2-fp32-1x1024-h200.json.gz").read_bytes()))
    document["ops"][3]["outputs"][0]["shape"] = [10**9, 10**9, 10**9]
    document["ops"][3]["outputs"][0]["stride"] = [1, 1, 1]
    with pytest.raises(UnreadableReport, match="no memory has that many elements"):
        load_capture(text_of(document))


def test_check_plan_takes_what_belongs_together():
    report, capture = plan_documents()
    check_plan(load_capture(text_of(capture)), load_report(text_of(report)))
    report["chains"][0]["sites"][0]["op_indices"][0] = 10**6
    with pytest.raises(Unsound):
        check_plan(load_capture(text_of(capture)), load_report(text_of(report)))
