"""Files that are not what we wrote: every reader, and the command that reads, ends with a coded error or with a result.

Each case takes a real file apart and changes one place. The readers get hundreds of cases here, the views and commands dozens;
``HOSTILE_COUNT=5000 pytest tests/hostile/test_readers.py`` gives each test so many, and other ones every time.
"""

from __future__ import annotations

import functools
import gzip
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_advisor.autotune.cache import SCHEMA as TUNING_SCHEMA
from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.cli.app import main
from fusion_advisor.cli.common import core
from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.content import content_dir
from fusion_advisor.errors import AdvisorError, UnreadableReport
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.library.manifest import read_spec
from fusion_advisor.records.serialize import dump_capture, encode, load_capture, load_report, read_capture
from fusion_advisor.records.soundness import Unsound, check_plan
from fusion_advisor.report.markdown import LIMIT, render_markdown
from tests.hostile.mutate import examples, mutations
from tests.report.make_fixtures import DIRECTORY
from tests.traces import Recorder

DATA = Path(__file__).parents[1] / "data"


def text_of(document: Any) -> str:
    return json.dumps(document)


def is_sound_end(code: int, err: str, what: str) -> None:
    """A command ends with its result or with a coded error; 1 is what a bug of ours ends with."""
    assert "bug in fusion-advisor" not in err, (what, err)
    assert "Traceback" not in err, (what, err)
    assert code == 0 or "error[FA" in err, (what, code, err)


# -- reports and captures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["applied", "training"])
def test_a_changed_report_is_read_or_refused(name):
    document = json.loads((DIRECTORY / f"{name}.json").read_text())

    @examples(150)
    @given(mutations(document))
    def check(change):
        what, changes = change
        try:
            report = load_report(text_of(changes))
        except AdvisorError as error:
            assert error.exit_code == 9, what
            assert str(error), what
        else:  # what the reader takes, a view can show
            assert render_markdown(report, LIMIT), what

    check()


def test_a_changed_report_is_shown_or_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    @examples(24)
    @given(mutations(json.loads((DIRECTORY / "training.json").read_text())))
    def check(change):
        what, changes = change
        (tmp_path / "report.json").write_text(text_of(changes))
        for command in (("report", str(tmp_path), "--format", "md,csv", "-v"), ("compare", str(tmp_path), str(tmp_path))):
            is_sound_end(main([*command]), capsys.readouterr().err, f"{command[0]}: {what}")

    check()
    assert not Path("/tmp/escape").exists()


def test_a_changed_report_is_a_page_or_refused(tmp_path, capsys):
    @examples(4)
    @given(mutations(json.loads((DIRECTORY / "training.json").read_text())))
    def check(change):
        what, changes = change
        (tmp_path / "report.json").write_text(text_of(changes))
        is_sound_end(main(["report", str(tmp_path), "--format", "html"]), capsys.readouterr().err, what)

    check()


_RULES: tuple[tuple[tuple[Any, ...], Any, str], ...] = (
    (("before", "wall", "median_ns"), -5, "negative"),
    (("before", "wall", "median_ns"), 10**18, "outside its interval"),
    (("before", "wall", "ci_high_ns"), 2**63, "64 bits"),
    (("before", "timeline", "kernel", 0), 10**6, "is none of"),
    (("before", "timeline", "start_ns"), [1], "differ in length"),
    (("chains", 0, "sites"), [], "occurs nowhere"),
    (("chains", 0, "share"), "nan", "is no share"),
    (("chains", 0, "sites", 0, "op_indices"), [-1], "is negative"),
    (("chains", 1, "id"), "C1", "two have one id"),
    (("fusions", 0, "numerics", "fused_ulps"), [1], "bins are not"),
)


@pytest.mark.parametrize(("path", "value", "says"), _RULES)
def test_a_report_says_what_does_not_hold_together(path, value, says):
    document = json.loads((DIRECTORY / "applied.json").read_text())
    parent = document
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = value
    with pytest.raises(UnreadableReport, match=says):
        load_report(text_of(document))


def test_a_changed_capture_is_read_or_refused():
    report, capture = plan_documents()
    del report

    @examples(300)
    @given(mutations(capture))
    def check(change):
        what, changes = change
        try:
            found = load_capture(text_of(changes))
        except AdvisorError as error:
            assert error.exit_code == 9, what
        else:
            make_plan(found, (), top=3)

    check()


@functools.cache
def _plan_texts() -> tuple[str, str]:
    """A report and a capture that belong together: the first ops of GPT-2, with the chains that a search finds in them, kept."""
    capture = read_capture(DATA / "captures" / "gpt2-fp32-1x1024-h200.json.gz")
    first, last = next(op.index for op in capture.ops if op.role == "op"), 200
    assert first < last
    near = {
        name: tuple(one for one in getattr(capture, name) if one.op_index is not None and one.op_index < last)
        for name in ("launches", "eager_launches")
    }
    capture = replace(capture, ops=capture.ops[:last], **near)
    found = make_plan(capture, (), top=3)
    report = json.loads((DIRECTORY / "applied.json").read_text())
    one = next(fusion for fusion in report["fusions"] if fusion["rendered"])
    report["chains"] = [encode(chain) for chain in found.chains]
    report["answers"] = [{"kind": type(answer).__name__, **encode(answer)} for answer in found.answers]
    report["fusions"] = [{**one, "id": fusion.id, "chain_id": fusion.chain.id, "status": "kept"} for fusion in found.fusions]
    assert report["fusions"]
    return text_of(report), dump_capture(capture)


def plan_documents() -> tuple[dict[str, Any], dict[str, Any]]:
    report, capture = map(json.loads, _plan_texts())
    return report, capture


def test_a_changed_plan_is_loaded_or_refused(tmp_path):
    report, capture = plan_documents()
    (tmp_path / "capture.json.gz").write_bytes(gzip.compress(text_of(capture).encode(), 1))
    (tmp_path / "report.json").write_text(text_of(report))
    assert load_plan(tmp_path).fusions
    few = {key: report[key] for key in ("chains", "answers", "fusions", "rewrites")}

    @examples(60)
    @given(mutations(few))
    def check(change):
        what, changes = change
        (tmp_path / "report.json").write_text(text_of({**report, **changes}))
        is_loaded_or_refused(tmp_path, what)

    check()


def test_a_plan_of_a_changed_graph_is_loaded_or_refused(tmp_path):
    report, capture = plan_documents()
    (tmp_path / "report.json").write_text(text_of(report))

    @examples(60)
    @given(mutations({"ops": capture["ops"]}))
    def check(change):
        what, changes = change
        (tmp_path / "capture.json.gz").write_bytes(gzip.compress(text_of({**capture, **changes}).encode(), 1))
        is_loaded_or_refused(tmp_path, what)

    check()


def is_loaded_or_refused(folder: Path, what: str) -> None:
    try:
        load_plan(folder)
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


# -- requests, manifests, configuration, tunings, traces -----------------------------------------------------------------------


def test_a_changed_request_is_read_or_refused():
    document = json.loads((content_dir("reports") / "examples/gpt2-bf16-8x512-h200/request.json").read_text())

    @examples(300)
    @given(mutations(document))
    def check(change):
        what, changes = change
        try:
            core.load_request(text_of(changes), "request.json")
        except AdvisorError as error:
            assert error.exit_code in (2, 9), what

    check()


def toml_of(value: Any) -> str:
    """Write a document as TOML; None and lone surrogates, which TOML lacks, become texts."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return json.dumps("none" if value is None or value == "\ud800" else value).replace("e+", "e")


@pytest.mark.parametrize("kernel", ["rope", "rmsnorm_linear"])
def test_a_changed_manifest_is_read_or_refused(kernel, tmp_path, capsys):
    document = tomllib.loads((content_dir("kernels") / kernel / "kernel.toml").read_text())
    document["name"] = "mine"
    folder = tmp_path / "mine"
    folder.mkdir()

    @examples(150)
    @given(mutations(document), st.integers(0, 39))
    def check(change, turn):
        what, changes = change
        lines = "".join(f"{json.dumps(key)} = {toml_of(value)}\n" for key, value in changes.items())
        (folder / "kernel.toml").write_text(lines)
        try:
            read_spec(folder)
        except AdvisorError as error:
            assert error.exit_code == 9, what
        if turn == 0:
            is_sound_end(main(["kernels", "list", "--kernels", str(tmp_path)]), capsys.readouterr().err, what)

    check()


def test_a_changed_configuration_is_read_or_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    document = {
        "batch": 2, "steps": 3, "min-share": "1%", "dtype": "fp32", "color": "never", "kernels": ["k"], "fast-math": True,
        "apply": {"confidence": 0.9, "runs": 5, "baseline": "eager", "rtol": 0.1},
    }  # fmt: skip

    @examples(40)
    @given(mutations(document))
    def check(change):
        what, changes = change
        lines = "".join(f"{json.dumps(key)} = {toml_of(value)}\n" for key, value in changes.items())
        Path("fusion-advisor.toml").write_text(lines)
        is_sound_end(main(["apply", "gpt2", "--show-config"]), capsys.readouterr().err, what)

    check()


@pytest.mark.parametrize("name", ["BATCH", "KERNELS", "MIN_SHARE", "COLOR", "CONFIDENCE", "NO_SUCH", "TRUST_REMOTE_CODE"])
@pytest.mark.parametrize("value", ["", "nan", "-1", "9" * 5000, "\x1b[31m", "../..", "[red]", "\udc80", "true", ",,,"])
def test_a_strange_variable_is_taken_or_refused(name, value, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"FUSION_ADVISOR_{name}", value)
    is_sound_end(main(["apply", "gpt2", "--show-config"]), capsys.readouterr().err, f"{name}={value[:20]!r}")


def test_a_changed_tuning_file_is_ignored_with_a_sentence(tmp_path):
    path = tmp_path / "tuning.json"
    store = TuningStore(path)
    store.put("key", Tuning(num_warps=8), median_ns=1, default_ns=2)
    document = json.loads(path.read_text())
    assert document["schema"] == TUNING_SCHEMA

    @examples(150)
    @given(mutations(document))
    def check(change):
        what, changes = change
        path.write_text(text_of(changes))
        said: list[str] = []
        found = TuningStore(path, said.append).get("key")
        assert found is None or isinstance(found, Tuning), what

    check()


def test_a_changed_trace_is_ranked_or_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    for number in range(6):
        start = recorder.now
        recorder.op("aten::linear>aten::addmm", "sm90_gemm", inputs=([[8, 8], [8, 8]], ["float", "float"]))
        recorder.op("aten::gelu", ("gelu_kernel", 3.0), inputs=([[8, 8]], ["float"])).step(number, start)
    document = recorder.document(record_shapes=1)

    def check(change, *, is_ranked):
        what, changes = change
        Path("trace.json").write_text(text_of(changes))
        try:
            list(TraceFile(Path("trace.json")))
        except AdvisorError as error:
            assert error.exit_code == 9, what
        if is_ranked:
            is_sound_end(main(["profile", "--trace", "trace.json"]), capsys.readouterr().err, what)

    examples(200)(given(mutations(document))(lambda change: check(change, is_ranked=False)))()
    examples(20)(given(mutations(document))(lambda change: check(change, is_ranked=True)))()


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
