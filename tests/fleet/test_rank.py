"""The ranking, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.errors import UsageError
from fusion_advisor.fleet.parts import write_part
from fusion_advisor.fleet.rank import Question, rank_fleet, read_job_pattern
from fusion_advisor.fleet.weights import Weight
from fusion_advisor.records.trace import ClassTime, FleetChain, TracePart

HOUR_NS = 3_600_000_000_000


def chain(ops, device_ns, *, kernel="", saving=None):
    low, middle, high = saving or (None, None, None)
    return FleetChain(
        ops=ops, kernel=kernel, sites=2, launches=4, device_ns=device_ns,
        saving_low_ns=low, saving_ns=middle, saving_high_ns=high,
    )  # fmt: skip


def part(number, job, *, span=HOUR_NS, busy=HOUR_NS, chains=(), **facts):
    small = sum(each.device_ns for each in chains)
    large = ClassTime(category="gemm", kernels=1, device_ns=busy - small)
    known = {"size_bytes": 1, "version": "1", "json_bytes": 1, "span_ns": span, "compute_ns": busy, "chains": tuple(chains)}
    classes = (large, ClassTime(category="pointwise", kernels=4, device_ns=small))
    return TracePart(digest=f"{number:064x}", url=f"{job}/{number}.json", job=job, classes=classes, **known, **facts)


def ranked(folder, parts, **asked):
    for each in parts:
        write_part(folder, each)
    return rank_fleet(Question(parts=folder, digests={each.url: each.digest for each in parts}, **asked))


A = part(1, "a", chains=[chain("x → y", HOUR_NS // 10, kernel="k", saving=(10, 20, 30))], model="m", gpu="H200")
B = part(2, "b", chains=[chain("x → y", HOUR_NS // 20), chain("z → z", HOUR_NS // 5, saving=(0, 5, 9))], gpu="H100")


def test_without_weights_time_is_the_traces_own(tmp_path):
    report = ranked(tmp_path, [A, B])
    assert report.gpu_hours == pytest.approx(2) and not report.is_weighted
    assert [(row.ops, row.kernel, row.jobs) for row in report.chains] == [("z → z", "", 1), ("x → y", "k", 2)]
    assert [row.gpu_hours for row in report.chains] == [pytest.approx(0.2), pytest.approx(0.15)]
    assert [row.share for row in report.chains] == [pytest.approx(0.1), pytest.approx(0.075)]
    saving = report.chains[1].saving
    assert (saving.low, saving.middle, saving.high) == pytest.approx((10 / HOUR_NS, 20 / HOUR_NS, 30 / HOUR_NS))
    assert report.chains[1].saving_share_known == pytest.approx(2 / 3)
    assert [link.url for link in report.chains[1].links] == ["a/1.json", "b/2.json"]
    assert report.chains[1].gpus == ("H100", "H200")


def test_weights_turn_the_ranking_around(tmp_path):
    report = ranked(tmp_path, [A, B], weights=[Weight(job="a", gpu_hours=90.0), Weight(job="b", gpu_hours=10.0, model="n")])
    assert report.gpu_hours == pytest.approx(100) and report.is_weighted
    assert [(row.ops, round(row.gpu_hours, 6)) for row in report.chains] == [("x → y", 9.5), ("z → z", 2.0)]
    assert {row.name: round(row.gpu_hours) for row in report.by_model} == {"m": 90, "n": 10}


def test_the_traces_of_a_job_share_its_hours(tmp_path):
    longer = replace(part(3, "a", span=3 * HOUR_NS, chains=[chain("x → y", HOUR_NS)]), rank=1)
    report = ranked(tmp_path, [A, longer], weights=[Weight(job="a", gpu_hours=40.0)])
    assert report.gpu_hours == pytest.approx(40)
    assert report.chains[0].gpu_hours == pytest.approx(40 * (0.1 + 1) / 4)


def test_jobs_without_a_weight_count_nothing_and_are_named(tmp_path):
    report = ranked(tmp_path, [A, B], weights=[Weight(job="a", gpu_hours=1.0)])
    assert report.unweighted_jobs == ("b",) and report.gpu_hours == pytest.approx(1)
    assert [row.ops for row in report.chains] == ["x → y"]


def test_a_part_of_a_trace_stands_for_the_whole(tmp_path):
    half = replace(A, read_share=0.5)
    report = ranked(tmp_path, [half])
    assert report.sampled == 1 and report.gpu_hours == pytest.approx(2)
    assert report.chains[0].gpu_hours == pytest.approx(0.2)


def test_shares_of_the_coverage_sum_to_one(tmp_path):
    idle = part(4, "c", span=2 * HOUR_NS, busy=HOUR_NS, chains=[chain("q → q", HOUR_NS // 3)])
    report = ranked(tmp_path, [A, B, idle])
    assert sum(share for _, share in report.coverage) == pytest.approx(1)
    assert dict(report.coverage)["idle"] == pytest.approx(1 / 4)
    assert [row.name for row in report.launch_bound] == ["c"]


def test_equal_files_count_once(tmp_path):
    write_part(tmp_path, A)
    report = rank_fleet(Question(parts=tmp_path, digests={"x/1.json": A.digest, "y/1.json": A.digest}))
    assert (report.traces, report.same) == (1, 1) and report.gpu_hours == pytest.approx(1)


def test_a_pattern_names_the_jobs(tmp_path):
    report = ranked(tmp_path, [A, B], job_pattern=read_job_pattern(r"/(\d)\."))
    assert [row.name for row in report.by_job] == ["1", "2"]
    with pytest.raises(UsageError, match="no regular expression"):
        read_job_pattern("(")


def test_days_show_only_where_there_are_two(tmp_path):
    day = 86_400_000_000_000
    first = replace(A, taken_at_ns=1_790_000_000_000_000_000)
    assert ranked(tmp_path, [first, B]).by_day == ()
    later = replace(B, taken_at_ns=first.taken_at_ns + day)
    assert [row.name for row in ranked(tmp_path, [first, later]).by_day] == ["2026-09-21", "2026-09-22"]


def test_failed_traces_are_listed_and_count_nothing(tmp_path):
    failed = TracePart(digest="e" * 64, url="bad.json", size_bytes=1, version="1", json_bytes=0, error_code="FA501", error="cut")
    report = ranked(tmp_path, [A, failed])
    assert [(row.url, row.code) for row in report.failed] == [("bad.json", "FA501")]
    assert report.gpu_hours == pytest.approx(1)
    assert ranked(tmp_path, [failed]).traces == 0


def test_names_are_values_and_never_sql(tmp_path):
    name = "'; drop table traces; --"
    report = ranked(tmp_path, [replace(A, job=name, model=name, gpu=name), B], weights=[Weight(job=name, gpu_hours=3.0)])
    assert report.by_job[0].name == name and report.by_job[0].gpu_hours == pytest.approx(3)


def test_small_chains_and_those_beyond_top_are_left_out(tmp_path):
    many = part(9, "d", chains=[chain(f"c{number} → d", HOUR_NS // 100 * (number + 1)) for number in range(9)])
    report = ranked(tmp_path, [many], min_share=0.05, top=2)
    assert [row.ops for row in report.chains] == ["c8 → d", "c7 → d"] and report.chains_left_out == 3
