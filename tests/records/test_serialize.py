from __future__ import annotations

import dataclasses
import gzip
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_advisor import records
from fusion_advisor.content import content_dir
from fusion_advisor.errors import UnknownSchema, UnreadableReport
from fusion_advisor.records import Capture, Launch, OpClass, OpNode, Recomputed, Ref, Report, Status
from fusion_advisor.records.json_schema import json_schema
from fusion_advisor.records.serialize import (
    CAPTURE_SCHEMA,
    decode,
    dump_capture,
    dump_report,
    encode,
    load_capture,
    load_report,
    read_capture,
    read_report,
    write_atomic,
    write_capture,
    write_report,
)
from tests.report.fixtures import ALL, applied, failed_numbers, profiled, timing
from tests.report.make_fixtures import DIRECTORY

EXAMPLES = content_dir("reports") / "examples"


def capture(ops: tuple[OpNode, ...] = ()) -> Capture:
    base = profiled()
    return Capture(
        workload=base.workload,
        environment=base.environment,
        ops=ops,
        launches=(Launch(kernel_name="k", op_index=None, duration_ns=5, grid=(1, 2, 3)),),
        eager_launches=(),
        eager_step=timing(1_000),
        bandwidth=base.bandwidth,
        quality=base.quality,
    )


@pytest.mark.parametrize("name", ALL)
def test_report_comes_back_equal(name: str) -> None:
    report = ALL[name]()
    back = load_report(dump_report(report))
    # NaN is unequal to itself, so compare what was written
    assert dump_report(back) == dump_report(report)
    if name != "failed_numbers":
        assert back == report


@pytest.mark.parametrize("name", ALL)
def test_committed_fixture_is_current(name: str) -> None:
    assert dump_report(read_report(DIRECTORY / f"{name}.json")) == dump_report(ALL[name]())


def test_classes_and_enums_come_back_as_themselves() -> None:
    back = load_report(dump_report(applied()))
    assert [type(answer).__name__ for answer in back.answers] == ["Match"] * 4 + ["NoMatch"]
    assert back.fusions[0].status is Status.KEPT
    assert back.fusions[0].step_delta_ci_ns == (-1_530_000, -1_440_000)


def test_no_nan_in_json() -> None:
    text = dump_report(failed_numbers())
    assert json.loads(text, parse_constant=pytest.fail)["model_check"]["fused_rel_l2"] == "nan"
    assert math.isnan(load_report(text).model_check.fused_rel_l2)  # type: ignore[union-attr]


ARGS = st.recursive(
    st.builds(Ref, index=st.integers(0, 99)) | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.text() | st.none(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@given(st.lists(ARGS, max_size=4).map(tuple), st.lists(st.tuples(st.text(), ARGS), max_size=3).map(tuple))
def test_any_argument_comes_back(args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]) -> None:
    op = OpNode(index=0, region=0, target="aten.mul.Tensor", op_class=OpClass.POINTWISE, args=args, kwargs=kwargs)  # type: ignore[arg-type]
    back = decode(json.loads(json.dumps(encode(op), allow_nan=False)), OpNode)
    assert back == op
    assert repr(back) == repr(op)  # 1, 1.0 and True are equal in Python


def test_infinity_and_the_word_inf_stay_apart() -> None:
    op = OpNode(index=0, region=0, target="t", op_class=OpClass.OTHER, args=(math.inf, "inf", -math.inf, "nan"))
    assert decode(json.loads(json.dumps(encode(op))), OpNode).args == op.args


def test_capture_files(tmp_path: Path) -> None:
    given = OpNode(index=0, region=0, target="x", op_class=OpClass.INPUT)
    record = capture((given, OpNode(index=1, region=0, target="y", op_class=OpClass.VIEW, args=((Ref(index=0), 2),))))
    for name in ("capture.json", "capture.json.gz"):
        write_capture(record, tmp_path / name)
        assert read_capture(tmp_path / name) == record
    first = (tmp_path / "capture.json.gz").read_bytes()
    write_capture(record, tmp_path / "capture.json.gz")
    assert (tmp_path / "capture.json.gz").read_bytes() == first
    assert gzip.decompress(first).decode() == dump_capture(record)


def refused(text: str | bytes) -> str:
    with pytest.raises(UnreadableReport) as caught:
        load_report(text, "r.json")
    assert caught.value.code == "FA501"
    assert caught.value.exit_code == 9
    return str(caught.value)


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(dump_report(applied())), **changes})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda made: made["asked"][0].update(least=0), "shapes.asked: batch goes from 0 to 16"),
        (lambda made: made["asked"].clear(), "shapes: no dim varies"),
        (lambda made: made.update(seconds="inf"), "the time that it took is no number"),
        (lambda made: made["pieces"][0]["ranges"][1].update(least=9000), "shapes.pieces[0].ranges: seq goes from 9000 to 4096"),
        (lambda made: made["pieces"][1]["ranges"].pop(), "shapes.pieces[1].ranges: its dims are not those asked for"),
        (lambda made: made["pieces"][0]["points"][1]["sizes"][0].__setitem__(1, 0), "shapes.pieces[0].points[1].sizes"),
        (lambda made: made["pieces"][0]["points"][0]["ours"].update(ci_high_ns=1), "points[0].ours: its median lies outside"),
    ],
)
def test_ranges_that_do_not_hold_together_are_refused(change: Callable[[Any], object], why: str) -> None:
    data = json.loads(dump_report(ALL["sized"]()))
    change(data["shapes"])
    assert why in refused(json.dumps(data))


def test_a_budget_that_has_ops_kept_in_place_of_others_can_be_read_again() -> None:
    made = ALL["trained"]()
    assert made.training is not None
    rows = (
        Recomputed(op="mul", module="h.*.mlp", ops=12, saved_bytes=3000, again_ns=7),
        Recomputed(op="mm", module="h.*", ops=0, saved_bytes=-1000, again_ns=0),
    )
    report = replace(made, training=replace(made.training, recomputed=rows))
    assert load_report(dump_report(report)) == report and schema_errors(dump_report(report)) == []
    data = json.loads(dump_report(made))
    data["rewrites"][0]["saved_bytes"] = -1
    assert "rewrites[0].saved_bytes: -1 is negative" in refused(json.dumps(data))


def test_truncated_files_are_refused_with_the_place() -> None:
    text = dump_report(profiled())
    for at in range(1, len(text) - 3, 997):
        assert "`r.json`" in refused(text[:at])
    assert "ends early at line" in refused(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("hello", "Expecting value"),
        ("[]", 'no "schema" key'),
        ("{}", 'no "schema" key'),
        ('{"traceEvents": []}', 'no "schema" key'),
        (b"\xff\xfe\x00", "not UTF-8"),
        ('{"schema": "fusion-advisor/1", "x": NaN}', "NaN"),
        ('{"schema": "fusion-advisor/1", "schema": "fusion-advisor/1"}', "twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_foreign_files_are_refused(text: str | bytes, why: str) -> None:
    assert why in refused(text)


def test_wrong_contents_are_refused_with_their_path() -> None:
    report = json.loads(dump_report(applied()))
    assert 'unknown key "surprise"' in refused(edited(surprise=1))
    assert 'the key "run_id" is missing' in refused(json.dumps({k: v for k, v in report.items() if k != "run_id"}))
    report["chains"][2]["sites"][1]["device_ns"] = "soon"
    assert 'chains[2].sites[1].device_ns: expected an integer, found "soon"' in refused(json.dumps(report))
    assert "expected an integer, found true" in refused(edited(workload={**report["workload"], "batch": True}))
    assert "expected an integer, found 1.5" in refused(edited(workload={**report["workload"], "batch": 1.5}))
    assert '"kind" must be one of Match, NoMatch' in refused(edited(answers=[{"kind": "Maybe"}]))
    assert "found an object" in refused(edited(chains={}))
    assert "found null" in refused(edited(before=None))


def test_a_timing_without_passed_numbers_is_refused() -> None:
    report = json.loads(dump_report(applied()))
    report["fusions"][0]["numerics"]["is_passed"] = False
    assert "only where numbers passed" in refused(json.dumps(report))


def test_fields_with_defaults_may_be_missing() -> None:
    report = json.loads(dump_report(profiled()))
    del report["notes"], report["warm_up"]
    assert load_report(json.dumps(report)) == replace(profiled(), notes=())


def test_another_schema_is_refused() -> None:
    for schema in ("fusion-advisor/2", CAPTURE_SCHEMA):
        with pytest.raises(UnknownSchema, match="this version reads `fusion-advisor/1`"):
            load_report(edited(schema=schema))
    with pytest.raises(UnknownSchema):
        load_capture(dump_report(profiled()))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnreadableReport, match="No such file"):
        read_report(tmp_path / "no.json")
    path = tmp_path / "capture.json.gz"
    write_capture(capture(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableReport, match=r"gzip ends early at byte \d+"):
        read_capture(path)
    path.write_bytes(b"not gzip")
    with pytest.raises(UnreadableReport, match="not a gzip file"):
        read_capture(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write_report(profiled(), path)
    old = path.read_bytes()

    def refuse(self: Path, target: Path) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "half")
    assert path.read_bytes() == old
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; from fusion_advisor.records.serialize import read_report; import fusion_advisor.report.html.page\n"
        f"read_report(__import__('pathlib').Path({str(DIRECTORY / 'applied.json')!r}))\n"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_report_type_is_what_the_hint_says() -> None:
    assert isinstance(load_report(dump_report(applied()).encode()), Report)


def schema_errors(text: str) -> list[str]:
    found = jsonschema.Draft202012Validator(json_schema()).iter_errors(json.loads(text))
    return [f"{error.json_path}: {error.message[:100]}" for error in found]


@pytest.mark.parametrize("name", [*ALL, "qwen2.5-7b-bf16-1x512-h200", "gpt2-fp32-1x1024-h200"])
def test_every_report_follows_the_schema_that_is_printed(name: str) -> None:
    text = dump_report(ALL[name]()) if name in ALL else (EXAMPLES / name / "report.json").read_text()
    assert schema_errors(text) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda data: data.update(schema="fusion-advisor/2"), "$.schema"),
        (lambda data: data.update(extra=1), "$"),
        (lambda data: data.pop("chains"), "$"),
        (lambda data: data["fusions"][0].update(status="splendid"), "$.fusions[0].status"),
        (lambda data: data["answers"][0].pop("kind"), "$.answers[0]"),
        (lambda data: data["before"].update(device_ns="12"), "$.before.device_ns"),
        (lambda data: data["fusions"][0].update(step_delta_ci_ns=[1]), "$.fusions[0].step_delta_ci_ns"),
    ],
)
def test_the_schema_refuses_what_reading_refuses(change: Callable[[Any], object], where: str) -> None:
    data = json.loads(dump_report(applied()))
    assert schema_errors(json.dumps(data)) == []
    change(data)
    assert [error for error in schema_errors(json.dumps(data)) if error.startswith(f"{where}:")]
    with pytest.raises((UnreadableReport, UnknownSchema)):
        load_report(json.dumps(data))


def test_the_schema_is_one_itself_and_names_every_field() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == {"schema", *(item.name for item in dataclasses.fields(records.Report))}
    assert schema["$defs"]["Numerics"]["required"] == [
        item.name for item in dataclasses.fields(records.Numerics) if item.default is dataclasses.MISSING
    ]
