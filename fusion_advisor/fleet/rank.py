"""The ranking over all parts: SQL that DuckDB runs on the Parquet files.

A trace's time counts as GPU-hours: its own device time, or its share of the hours that ``--weights`` gives its job. ``per_ns``
turns each of its nanoseconds into hours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from fusion_advisor.errors import UsageError
from fusion_advisor.fleet.identity import job_in
from fusion_advisor.fleet.parts import part_path
from fusion_advisor.fleet.skew import RankTimes, skewed
from fusion_advisor.fleet.weights import Weight
from fusion_advisor.records.trace import ChainRow, FailedTrace, FleetReport, GroupRow, Interval, TraceLink

IDLE_LIMIT_SHARE = 0.2
"""Above this share of idle time a job is called launch-bound, as a single step is."""
_LINKS = 5
_GROUPS = 200
_CHAIN_CLASSES = ("pointwise", "reduction", "memory")

_TRACES = """
create temp table traces as
with one as (
    select listed.url as listed_url, listed.job as listed_job, part.*
    from listed join read_parquet($files) as part using (digest)
    where part.error_code = ''
), named as (
    select * replace (case when listed_job <> '' then listed_job else job end as job), span_ns / read_share as whole_ns from one
), summed as (
    select *, sum(whole_ns) over (partition by job) as job_ns from named
)
select
    digest, listed_url as url, job, coalesce(nullif(weight.model, ''), summed.model) as model, rank, world_size, gpu, taken_at_ns,
    read_share, launches, span_ns, compute_ns, communication_ns, collectives_ns, has_shapes, classes, chains,
    case
        when not $is_weighted then whole_ns / 3.6e12
        else coalesce(weight.gpu_hours, 0) * case when job_ns > 0 then whole_ns / job_ns else 0 end
    end as hours,
    case when span_ns > 0 then hours / span_ns else 0 end as per_ns
from summed left join weight using (job)
"""
_CHAINS = """
create temp table chains as
select digest, url, job, model, gpu, taken_at_ns, has_shapes, chain.ops as ops, chain.kernel as kernel,
    chain.launches as launches, chain.device_ns * per_ns as hours,
    chain.saving_low_ns * per_ns as low, chain.saving_ns * per_ns as middle, chain.saving_high_ns * per_ns as high
from (select *, unnest(chains) as chain from traces)
"""
_RANKED = """
select ops, max(kernel) as kernel, count(distinct job) as jobs, count(distinct digest) as traces,
    sum(launches)::bigint as launches, sum(hours) as hours,
    sum(low) as low, sum(middle) as middle, sum(high) as high,
    sum(case when middle is not null then hours else 0 end) as known,
    (select list(model order by most desc, model)[1:8] from (
        select model, sum(hours) as most from chains as own where own.ops = chains.ops and model <> '' group by model
    )) as models,
    list_sort(list(distinct gpu) filter (gpu <> ''))[1:8] as gpus
from chains group by ops order by hours desc, ops
"""
_LINKED = """
select url, job, sum(hours) as hours from chains where ops = $ops group by url, job order by hours desc, url limit $most
"""
_GROUPED = """
with own as (
    select digest, sum(hours) as hours, sum(low) as low, sum(middle) as middle, sum(high) as high from chains group by digest
)
select {key} as name, count(distinct job) as jobs, count(*) as traces, sum(traces.hours) as hours,
    sum(coalesce(own.hours, 0)) as chain_hours, sum(low) as low, sum(middle) as middle, sum(high) as high,
    sum((span_ns - compute_ns - communication_ns) * per_ns) as idle
from traces left join own using (digest)
where {where}
group by name order by hours desc, name limit {most}
"""
_CLASSES = """
select class.category as category, sum(class.device_ns * per_ns) as hours
from (select per_ns, unnest(classes) as class from traces) group by category order by hours desc, category
"""
_DAY = "strftime(make_timestamp(taken_at_ns // 1000), '%Y-%m-%d')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is ranked."""

    parts: Path
    digests: Mapping[str, str]
    """URL of each trace and its part."""
    failed: tuple[FailedTrace, ...] = ()
    """Traces that have no part."""
    weights: Sequence[Weight] | None = None
    patterns: tuple[str, ...] = ()
    job_pattern: re.Pattern[str] | None = None
    min_share: float = 0.001
    top: int = 30
    tool: str = ""


def rank_fleet(question: Question) -> FleetReport:
    """Rank the chains of all traces."""
    by_digest: dict[str, str] = {}
    for url, digest in sorted(question.digests.items()):
        by_digest.setdefault(digest, url)
    with duckdb.connect() as db:
        db.register("listed", _listed(by_digest, question.job_pattern))
        db.register("weight", _weight_table(question.weights or ()))
        files = [str(part_path(question.parts, digest)) for digest in by_digest]
        failed = [*question.failed, *_failed(db, files)]
        if files:
            db.execute(_TRACES, {"files": files, "is_weighted": question.weights is not None})
            db.execute(_CHAINS)
            return _report(db, question, failed, same=len(question.digests) - len(by_digest))
    return _empty(question, failed)


def read_job_pattern(text: str) -> re.Pattern[str] | None:
    """Read ``--job``; None where it is empty.

    Raises:
        UsageError: it is no regular expression.
    """
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise UsageError(
            detail=f"--job `{text}` is no regular expression: {error}", help="for example 'runs/([^/]+)/'"
        ) from error


def _listed(by_digest: Mapping[str, str], pattern: re.Pattern[str] | None) -> pa.Table:
    jobs = [job_in(url, pattern) if pattern else "" for url in by_digest.values()]
    return pa.table({"digest": list(by_digest), "url": list(by_digest.values()), "job": pa.array(jobs, pa.string())})


def _weight_table(weights: Sequence[Weight]) -> pa.Table:
    return pa.table(
        {
            "job": pa.array([weight.job for weight in weights], pa.string()),
            "gpu_hours": pa.array([weight.gpu_hours for weight in weights], pa.float64()),
            "model": pa.array([weight.model for weight in weights], pa.string()),
        }
    )


def _failed(db: duckdb.DuckDBPyConnection, files: list[str]) -> list[FailedTrace]:
    if not files:
        return []
    rows = db.execute(
        "select listed.url, error_code, error from listed join read_parquet($files) using (digest) "
        "where error_code <> '' order by 1",
        {"files": files},
    ).fetchall()
    return [FailedTrace(url=url, code=code, error=error) for url, code, error in rows]


def _rows(db: duckdb.DuckDBPyConnection, sql: str, values: dict[str, object] | None = None) -> list[dict[str, Any]]:
    found = db.execute(sql, values or {})
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _report(db: duckdb.DuckDBPyConnection, question: Question, failed: list[FailedTrace], *, same: int) -> FleetReport:
    totals = _rows(
        db,
        "select count(*) as traces, count(distinct job) as jobs, coalesce(sum(hours), 0) as hours, "
        "count(*) filter (read_share < 1) as sampled, "
        "coalesce(sum((span_ns - compute_ns - communication_ns) * per_ns), 0) as idle from traces",
    )[0]
    hours = totals["hours"]
    ranked = [row for row in _rows(db, _RANKED) if row["hours"] >= question.min_share * hours > 0]
    named = {weight.job for weight in question.weights or ()}
    jobs = [row["job"] for row in _rows(db, "select distinct job from traces order by job")]
    by_job = _groups(db, "job", "true", hours)
    return FleetReport(
        tool=question.tool,
        patterns=question.patterns,
        traces=totals["traces"],
        same=same,
        failed=tuple(failed),
        jobs=totals["jobs"],
        gpu_hours=hours,
        is_weighted=question.weights is not None,
        unweighted_jobs=() if question.weights is None else tuple(job for job in jobs if job not in named),
        sampled=totals["sampled"],
        coverage=_coverage(db, hours, totals["idle"]),
        chains=tuple(_chain(db, row, hours) for row in ranked[: question.top]),
        chains_left_out=max(0, len(ranked) - question.top),
        by_job=by_job,
        by_model=_groups(db, "model", "model <> ''", hours),
        by_gpu=_groups(db, "gpu", "gpu <> ''", hours),
        by_day=_days(db, hours),
        ranks=skewed(_rank_times(db)),
        launch_bound=tuple(row for row in by_job if row.idle_share > IDLE_LIMIT_SHARE),
    )


def _chain(db: duckdb.DuckDBPyConnection, row: dict[str, Any], hours: float) -> ChainRow:
    links = _rows(db, _LINKED, {"ops": row["ops"], "most": _LINKS})
    return ChainRow(
        ops=row["ops"],
        kernel=row["kernel"],
        jobs=row["jobs"],
        traces=row["traces"],
        launches=row["launches"],
        gpu_hours=row["hours"],
        share=row["hours"] / hours,
        saving=_interval(row),
        saving_share_known=row["known"] / row["hours"],
        links=tuple(TraceLink(url=link["url"], job=link["job"], gpu_hours=link["hours"]) for link in links),
        models=tuple(row["models"] or ()),
        gpus=tuple(row["gpus"] or ()),
    )


def _interval(row: dict[str, Any]) -> Interval | None:
    return None if row["middle"] is None else Interval(low=row["low"], middle=row["middle"], high=row["high"])


def _groups(db: duckdb.DuckDBPyConnection, key: str, where: str, hours: float) -> tuple[GroupRow, ...]:
    sql = _GROUPED.format(key=key, where=where, most=_GROUPS)
    return tuple(
        GroupRow(
            name=row["name"],
            jobs=row["jobs"],
            traces=row["traces"],
            gpu_hours=row["hours"],
            chains_share=row["chain_hours"] / row["hours"],
            saving=_interval(row),
            idle_share=max(0.0, row["idle"] / row["hours"]),
        )
        for row in _rows(db, sql)
        if row["hours"] > 0 and hours > 0
    )


def _days(db: duckdb.DuckDBPyConnection, hours: float) -> tuple[GroupRow, ...]:
    found = sorted(_groups(db, _DAY, "taken_at_ns > 0", hours), key=lambda row: row.name)
    return tuple(found) if len(found) > 1 else ()


def _coverage(db: duckdb.DuckDBPyConnection, hours: float, idle: float) -> tuple[tuple[str, float], ...]:
    """Split all time: chains come out of the classes that chains are made of, and what is left of these stays a row."""
    if not hours:
        return ()
    sums = {row["category"]: row["hours"] for row in _rows(db, _CLASSES)}
    chains = _rows(db, "select coalesce(sum(hours), 0) as hours from chains")[0]["hours"]
    small = sum(sums.pop(name, 0.0) for name in _CHAIN_CLASSES)
    rows = [("chains", chains), ("small kernels outside chains", small - chains), *sums.items(), ("idle", idle)]
    return tuple((name, value / hours) for name, value in rows if value > 0)


def _rank_times(db: duckdb.DuckDBPyConnection) -> list[RankTimes]:
    rows = _rows(
        db,
        "select job, rank, url, span_ns, compute_ns, communication_ns, collectives_ns, "
        "row_number() over (partition by job, rank order by taken_at_ns, url) as number "
        "from traces where job in (select job from traces group by job having count(distinct rank) > 1) "
        "order by job, rank, number",
    )
    return [
        RankTimes(
            job=row["job"],
            rank=row["rank"],
            number=row["number"],
            span_ns=row["span_ns"],
            compute_ns=row["compute_ns"],
            communication_ns=row["communication_ns"],
            collectives_ns=tuple(row["collectives_ns"] or ()),
        )
        for row in rows
    ]


def _empty(question: Question, failed: list[FailedTrace]) -> FleetReport:
    return FleetReport(
        tool=question.tool,
        patterns=question.patterns,
        traces=0,
        same=0,
        failed=tuple(failed),
        jobs=0,
        gpu_hours=0.0,
        is_weighted=question.weights is not None,
        unweighted_jobs=(),
        sampled=0,
        coverage=(),
        chains=(),
        chains_left_out=0,
        by_job=(),
        by_model=(),
        by_gpu=(),
        by_day=(),
        ranks=(),
        launch_bound=(),
    )
