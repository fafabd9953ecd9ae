"""Whose trace it is: job, rank, model, GPU, versions and date, from the trace's own facts or its path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

_JOB_KEYS = ("job", "job_id", "job_name")
_MODEL_KEYS = ("model", "model_id", "model_name")
_LONGEST = 200
_FIRST_DATE_NS = 1_420_070_400_000_000_000  # 2015: an earlier base is no date but a clock since boot
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,5})", re.IGNORECASE)
_RUBBISH = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Job and place of one trace."""

    job: str
    model: str
    rank: int
    world_size: int
    gpu: str
    versions: str
    taken_at_ns: int


def identify(facts: Mapping[str, Any], url: str) -> Identity:
    """Return whose trace it is.

    The job is the trace's own ``job`` (``profiler.add_metadata("job", …)``); else, for one of several ranks, the folder; else the
    file itself.

    Args:
        facts: the trace's top-level keys; any JSON value may stand there.
        url: where it lies.
    """
    distributed = facts.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    path = PurePosixPath(url.split("://", 1)[-1])
    in_name = _RANK_IN_NAME.search(path.name)
    rank = _count(distributed.get("rank"), int(in_name[1]) if in_name else 0)
    world = max(1, _count(distributed.get("world_size"), 1))
    is_rank = world > 1 or in_name is not None
    job = _text(facts, _JOB_KEYS) or (path.parent.name if is_rank else "") or path.name
    base = facts.get("baseTimeNanoseconds")
    return Identity(
        job=job[:_LONGEST],
        model=_text(facts, _MODEL_KEYS),
        rank=rank,
        world_size=world,
        gpu=_gpu(facts),
        versions=_versions(facts, distributed),
        taken_at_ns=base if type(base) is int and _FIRST_DATE_NS < base < 1 << 62 else 0,
    )


def clean(text: str) -> str:
    """Return a name without control and direction characters, cut to 200 characters."""
    return _RUBBISH.sub("?", text).encode("utf-8", "replace").decode()[:_LONGEST]


def job_in(url: str, pattern: re.Pattern[str]) -> str:
    """Return the job that ``--job`` finds in a URL: the group ``job``, else the first group, else the match; empty: none."""
    found = pattern.search(url)
    if found is None:
        return ""
    groups = found.groupdict()
    return clean(groups.get("job") or (found[1] if found.groups() else found[0]) or "")


def _text(facts: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return next((clean(facts[key]) for key in keys if isinstance(facts.get(key), str) and facts[key]), "")


def _count(value: object, otherwise: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 6:
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 20 else otherwise


def _gpu(facts: Mapping[str, Any]) -> str:
    listed = facts.get("deviceProperties")
    names = [entry.get("name") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return next((clean(name) for name in names if isinstance(name, str) and name), "")


def _versions(facts: Mapping[str, Any], distributed: Mapping[str, Any]) -> str:
    known = [
        ("torch", facts.get("torch_version", facts.get("pytorch_version"))),
        ("CUDA runtime", facts.get("cuda_runtime_version")),
        ("CUDA driver", facts.get("cuda_driver_version")),
        ("NCCL", distributed.get("nccl_version")),
    ]
    return "; ".join(f"{name} {clean(str(value))}" for name, value in known if isinstance(value, str | int))[:_LONGEST]
