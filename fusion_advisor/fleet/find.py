"""Finds the traces that patterns name, here or in an object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fsspec

from fusion_advisor.errors import NoTraces
from fusion_advisor.records.trace import TraceSource

_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")


def find_traces(patterns: Sequence[str]) -> list[TraceSource]:
    """Return the files of all patterns, each once, the largest first.

    Args:
        patterns: ``traces/**/*.json.gz``, ``s3://bucket/**/*.json.gz``; whatever fsspec opens here.

    Raises:
        NoTraces: nothing matches.
    """
    found: dict[str, TraceSource] = {}
    for pattern in patterns:
        system, path = fsspec.core.url_to_fs(pattern)
        listed: dict[str, dict[str, Any]] = system.glob(path, detail=True)
        for name, facts in listed.items():
            if facts.get("type") != "file":
                continue
            url = name if "file" in _protocols(system) else system.unstrip_protocol(name)
            version = next((str(facts[key]) for key in _VERSIONS if facts.get(key)), "")
            found[url] = TraceSource(url=url, size_bytes=int(facts.get("size") or 0), version=version)
    if not found:
        raise NoTraces(patterns=", ".join(f"`{pattern}`" for pattern in patterns))
    return sorted(found.values(), key=lambda source: (-source.size_bytes, source.url))


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
