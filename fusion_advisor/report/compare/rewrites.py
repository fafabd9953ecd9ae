"""Which rewrites of two runs ended differently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion_advisor.records import Fusion, GraphRewrite, Report, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteChange:
    """Status of one rewrite in each run."""

    name: str
    a_status: Status | None
    b_status: Status | None
    a_step_delta_ns: int | None
    b_step_delta_ns: int | None
    is_changed: bool | None
    """None where the runs are not comparable."""


def rewrite_changes(a: Report | None, b: Report | None, *, is_blocked: bool) -> Iterable[RewriteChange]:
    """Pair the rewrites of two runs by name, largest difference first; a missing run counts as one without rewrites."""
    left, right = _named_rewrites(a), _named_rewrites(b)
    rows = []
    for name in dict.fromkeys((*left, *right)):
        one, other = left.get(name), right.get(name)
        is_changed = one is None or other is None or one.status is not other.status or _apart(one, other)
        rows.append(
            RewriteChange(
                name=name,
                a_status=one.status if one else None,
                b_status=other.status if other else None,
                a_step_delta_ns=one.step_delta_ns if one else None,
                b_step_delta_ns=other.step_delta_ns if other else None,
                is_changed=None if is_blocked else is_changed,
            )
        )
    return sorted(rows, key=lambda row: -abs((row.b_step_delta_ns or 0) - (row.a_step_delta_ns or 0)))


def _named_rewrites(report: Report | None) -> dict[str, Fusion | GraphRewrite]:
    """Kernels by name and other rewrites by id; where a kernel fuses several chains, the later ones are numbered."""
    found: dict[str, Fusion | GraphRewrite] = {}
    rows: tuple[Fusion | GraphRewrite, ...] = () if report is None else (*report.rewrites, *report.fusions)
    for row in rows:
        name = base = row.kernel if isinstance(row, Fusion) else row.id
        number = 1
        while name in found:
            number += 1
            name = f"{base} ({number})"
        found[name] = row
    return found


def _apart(a: Fusion | GraphRewrite, b: Fusion | GraphRewrite) -> bool:
    x, y = a.step_delta_ci_ns, b.step_delta_ci_ns
    return x is not None and y is not None and (x[1] < y[0] or y[1] < x[0])
