"""Jobs, ranks, models and dates, from facts that anybody may have written."""

from __future__ import annotations

import re

import pytest

from fusion_advisor.fleet.identity import identify, job_in

RANKS = {"distributedInfo": {"rank": 3, "world_size": 8, "nccl_version": "2.27.5"}}


def test_a_trace_says_whose_it_is():
    facts = RANKS | {"job": "train-7", "model": "gpt2", "baseTimeNanoseconds": 1_790_000_000_000_000_000}
    who = identify(facts | {"deviceProperties": [{"name": "NVIDIA H200"}]}, "s3://bucket/a/b.json.gz")
    assert (who.job, who.model, who.rank, who.world_size, who.gpu) == ("train-7", "gpt2", 3, 8, "NVIDIA H200")
    assert who.taken_at_ns == 1_790_000_000_000_000_000
    assert who.versions == "NCCL 2.27.5"


@pytest.mark.parametrize(
    ("facts", "url", "job", "rank"),
    [
        ({}, "runs/a/trace.json.gz", "trace.json.gz", 0),
        (RANKS, "runs/a/trace.json.gz", "a", 3),
        ({}, "runs/a/rank5.json.gz", "a", 5),
        ({}, "gs://bucket/a/worker_rank-12.json", "a", 12),
        (RANKS, "rank1.json.gz", "rank1.json.gz", 3),
    ],
)
def test_without_a_name_the_path_tells_the_job(facts, url, job, rank):
    who = identify(facts, url)
    assert (who.job, who.rank) == (job, rank)


@pytest.mark.parametrize(
    "facts",
    [
        {"distributedInfo": [1], "job": 7, "model": None, "deviceProperties": 3, "baseTimeNanoseconds": "soon"},
        {"distributedInfo": {"rank": -1, "world_size": 1e9}, "baseTimeNanoseconds": 10**400},
        {"distributedInfo": {"rank": "x", "world_size": None}, "deviceProperties": [7, {"name": []}]},
    ],
)
def test_facts_of_other_types_count_as_none(facts):
    who = identify(facts, "a/trace.json")
    assert (who.job, who.model, who.rank, who.world_size, who.gpu, who.taken_at_ns) == ("trace.json", "", 0, 1, "", 0)


def test_a_clock_that_counts_since_boot_is_no_date():
    assert identify({"baseTimeNanoseconds": 90_000_000_000_000}, "a").taken_at_ns == 0


def test_names_lose_what_a_terminal_would_obey():
    who = identify({"job": "a\x1b[2Jb\u202ec" + "d" * 500, "model": "\ud800"}, "a")
    assert who.job.startswith("a?[2Jb?cd") and len(who.job) == 200
    who.model.encode()


@pytest.mark.parametrize(
    ("pattern", "job"), [(r"runs/([^/]+)/", "a"), (r"(?P<day>\d+)/(?P<job>\w+)", "b"), (r"\d+", "12"), ("none", "")]
)
def test_a_pattern_finds_the_job_in_the_path(pattern, job):
    assert job_in("runs/a/12/b.json", re.compile(pattern)) == job
