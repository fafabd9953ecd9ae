"""Documents with one place changed: a value of another type, out of range, missing, repeated or unknown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 10**9, 2**63, -(10**30), 0.5, -1e308, "", "nan", "../../escape", "/etc/passwd", "a\0b", "[red]x[/]",
    "<script>alert(1)</script>", "\x1b[31m", "\n\n", "\u202egnp", "\ud800", "x" * 100_000, [], {}, [[]], [10**9], {"kind": "Ref"},
    {"kind": "float", "value": "nan"},
)  # fmt: skip
_WAYS = ("delete", "add", "repeat", "shift", *["set"] * 6)
_SHIFTS = (-1, 1, 1000)

Place = tuple[Any, ...]


def examples(count: int) -> settings:
    """Return the settings of a test of so many mutations, the same every time; ``HOSTILE_COUNT`` asks for others and more."""
    asked = int(os.environ.get("HOSTILE_COUNT", "0"))
    return settings(
        max_examples=asked or count, derandomize=not asked, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


def places(node: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the way to every value of a document, to the first 40 of a long list."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node[:40]) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def mutations(document: Any) -> st.SearchStrategy[tuple[str, Any]]:
    """Draw what was changed, and the document with it; fields near the root come as often as those of long lists."""
    by_name: dict[Place, list[Place]] = {}
    for path in places(document):
        if path:
            by_name.setdefault(tuple(part if isinstance(part, str) else "*" for part in path), []).append(path)
    chosen = st.sampled_from([by_name[name] for name in sorted(by_name)]).flatmap(st.sampled_from)
    made = st.tuples(chosen, st.sampled_from(_WAYS), st.sampled_from(HOSTILE), st.sampled_from(_SHIFTS))
    return made.map(lambda drawn: _changed(document, *drawn))


def _changed(document: Any, path: Place, way: str, value: Any, shift: int) -> tuple[str, Any]:
    """Change one place of a copy; what lies elsewhere is shared with the document."""
    *steps, last = path
    new = parent = document.copy()
    for step in steps:
        parent[step] = parent[step].copy()
        parent = parent[step]
    if way == "delete":
        del parent[last]
    elif way == "add" and isinstance(parent, dict):
        parent["unheard_of"] = value
    elif way == "repeat" and isinstance(parent, list):
        parent.append(parent[last])
    elif way == "shift" and type(parent[last]) is int:
        value = shift
        parent[last] += shift
    else:
        way = "set"
        parent[last] = value
    return f"{way} {'.'.join(map(str, path))} {str(value)[:40]!r}", new
