"""A report's rows as plain figures, each column named with its unit: what ``to_frame`` and ``report --format csv`` give.

Nothing is formatted and little is reckoned: a cell is a figure of report.json, a count of its entries, or their sum. Text is left
as the model wrote it; a spreadsheet's formulas are disarmed only where a spreadsheet is the reader (:func:`csv_text`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass

from fusion_advisor.records import Fusion, GraphRewrite, Match, Report, StepProfile, Timing
from fusion_advisor.report import baseline_rows, kernel_rows, shared_rows
from fusion_advisor.report.escape import visible
from fusion_advisor.report.shapes import rows as size_rows
from fusion_advisor.report.training import rows as training

Cell = str | int | float | bool | None
"""None: not measured, or it does not apply."""
_FORMULA = ("=", "+", "-", "@")
_LONGEST_TEXT = 10_000


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def tables(report: Report) -> dict[str, Table]:
    """Return every table by name, in the order of :data:`NAMES`."""
    return {name: make(report) for name, make in _MAKERS.items()}


def table(report: Report, name: str) -> Table:
    """Return one table.

    Raises:
        KeyError: there is none of that name.
    """
    return _MAKERS[name](report)


def result_name(report: Report) -> str:
    """The table that the terminal prints for this report: what was tried, or for a profile what was found."""
    if training.is_profile(report):
        return "modules"
    return "rewrites" if report.fusions or report.rewrites else "chains"


def csv_text(shown: Table) -> str:
    """Return a table as CSV (RFC 4180) that a spreadsheet opens without running anything.

    A cell of text that begins like a formula gets an apostrophe in front; what is not measured is an empty cell.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(shown.columns)
    writer.writerows([_csv_cell(cell) for cell in row] for row in shown.rows)
    return out.getvalue()


def _csv_cell(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    text = visible(cell, _LONGEST_TEXT)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _rewrites(report: Report) -> Table:
    columns = (
        *("id", "kind", "name", "chain", "status", "reason", "sites_found", "sites_replaced"),
        *("launches_before", "launches_after", "step_delta_ns", "step_delta_low_ns", "step_delta_high_ns"),
        *("predicted_saving_ns", "predicted_low_ns", "predicted_high_ns", "site_before_ns", "site_after_ns"),
        *("fused_rel_l2", "eager_rel_l2", "fused_max_abs", "eager_max_abs", "elements", "is_passed", "held_bytes"),
        "training_pass",
    )
    return Table(columns, (*map(_graph_rewrite, report.rewrites), *map(_fusion, report.fusions)))


def _fusion(row: Fusion) -> tuple[Cell, ...]:
    low, high = row.step_delta_ci_ns or (None, None)
    checked = row.numerics
    errors: tuple[Cell, ...] = (None,) * 6
    if checked is not None:
        errors = (checked.fused_rel_l2, checked.eager_rel_l2, checked.fused_max_abs, checked.eager_max_abs)
        errors += (checked.elements, checked.is_passed)
    did = row.receipt
    return (
        *(row.id, "fusion", row.kernel, row.chain_id, row.status.value, row.reason, did.sites_found, did.sites_replaced),
        *(did.launches_before, did.launches_after, row.step_delta_ns, low, high),
        *(baseline_rows.predicted_ns(row), row.predicted_low_ns, row.predicted_high_ns),
        *(_median(row.chain_before), _median(row.chain_after)),
        *(*errors, None, row.training_pass or None),
    )


def _graph_rewrite(row: GraphRewrite) -> tuple[Cell, ...]:
    low, high = row.step_delta_ci_ns or (None, None)
    return (
        *(row.id, "graph rewrite", row.name, None, row.status.value, row.reason, row.sites, None),
        *(None, None, row.step_delta_ns, low, high),
        *(row.predicted_saving_ns, row.predicted_low_ns, row.predicted_high_ns, None, None),
        *(*((None,) * 6), row.held_bytes, row.training_pass or None),
    )


def _chains(report: Report) -> Table:
    columns = (
        *("id", "ops", "sites", "launches", "device_ns", "share", "moved_bytes", "floor_bytes", "floor_ns", "saving_bound_ns"),
        *("is_reduction", "dtype", "shape", "kernel", "is_library", "code", "reason", "training_pass"),
    )
    replies, rows = shared_rows.answers(report), []
    for chain in report.chains:
        answer = replies.get(chain.id)
        reply: tuple[Cell, ...] = (None,) * 4
        if isinstance(answer, Match):
            reply = (answer.kernel, answer.is_library, None, None)
        elif answer is not None:
            reply = (None, None, answer.code, answer.reason)
        figures = (chain.device_ns, chain.share, chain.moved_bytes, chain.floor_bytes, chain.floor_ns, chain.saving_bound_ns)
        shape = " × ".join(map(str, chain.shape))
        begin = (chain.id, " → ".join(chain.ops), len(chain.sites), chain.launches)
        rows.append((*begin, *figures, chain.is_reduction, chain.dtype, shape, *reply, chain.training_pass or None))
    return Table(columns, tuple(rows))


def _sites(report: Report) -> Table:
    columns = ("chain", "module", "source_file", "source_line", "source_text", "device_ns")
    rows = (
        (chain.id, site.module_path, site.source_file, site.source_line, site.source_text, site.device_ns)
        for chain in report.chains
        for site in chain.sites
    )
    return Table(columns, tuple(rows))


def _kernels(report: Report) -> Table:
    columns = ("kernel", "category", "before_count", "before_ns", "after_count", "after_ns")
    rows, _, _ = kernel_rows.kernel_rows(
        report, limit=len(report.before.kernels) + len(report.after.kernels if report.after else ())
    )
    is_compared = report.after is not None

    def after(row: kernel_rows.KernelRow) -> tuple[Cell, Cell]:
        return (row.after_count, row.after_ns) if is_compared else (None, None)

    return Table(columns, tuple((row.name, row.category, row.before_count, row.before_ns, *after(row)) for row in rows))


def _categories(report: Report) -> Table:
    rows = ((step.label, *category) for step in _own_steps(report) for category in step.categories)
    return Table(("step", "category", "kernels", "device_ns"), tuple(rows))


_STEP = ("wall_ns", "wall_low_ns", "wall_high_ns", "rested_ns", "replay_ns", "kernels_ns", "launches", "peak_memory_bytes")


def _steps(report: Report) -> Table:
    return Table(("step", *_STEP), tuple((step.label, *_step(step)) for step in _own_steps(report)))


def _baselines(report: Report) -> Table:
    own = baseline_rows.own_wall(report)
    rows: list[tuple[Cell, ...]] = []
    for row in report.baselines:
        wall = row.step.wall if row.step else None
        against = wall.median_ns / max(own.median_ns, 1) if wall and own else None
        whole_ns = row.with_optimizer.median_ns if row.with_optimizer else None
        wrong = None if row.check is None else row.check.reason
        rows.append((row.name, *_step(row.step), against, row.first_call_s, row.note, whole_ns, row.optimizer_peak_bytes, wrong))
    more = ("against_ours_ratio", "first_call_s", "note", "with_optimizer_ns", "optimizer_peak_memory_bytes", "wrong")
    return Table(("name", *_STEP, *more), tuple(rows))


def _own_steps(report: Report) -> tuple[StepProfile, ...]:
    return tuple(step for step in (report.before, report.captured, report.after) if step is not None)


def _step(step: StepProfile | None) -> tuple[Cell, ...]:
    if step is None:
        return (None,) * len(_STEP)
    wall = step.wall
    walls = (wall.median_ns, wall.ci_low_ns, wall.ci_high_ns) if wall else (None,) * 3
    single = (_median(step.rested), _median(step.device))
    return (*walls, *single, step.device_ns or None, step.launches or None, step.peak_memory_bytes or None)


def _median(timing: Timing | None) -> int | None:
    return None if timing is None else timing.median_ns


def _modules(report: Report) -> Table:
    rows = () if report.training is None else report.training.modules
    return Table(
        ("module", "modules", "launches", "forward_ns", "backward_ns"),
        tuple((row.path, row.modules, row.launches, row.forward_ns, row.backward_ns) for row in rows),
    )


def _sizes(report: Report) -> Table:
    columns = (
        *("point", "sizes", "elements", "piece", "piece_sizes", "eager_ns", "ours_ns", "speedup_ratio", "speedup_low_ratio"),
        *("speedup_high_ratio", "fused_rel_l2", "eager_rel_l2", "rewrites", "reason"),
    )
    if report.shapes is None:
        return Table(columns, ())
    pieces = size_rows.piece_rows(report.shapes)
    points = [point for piece in report.shapes.pieces for point in piece.points]
    made: list[tuple[Cell, ...]] = []
    for row, point in zip(size_rows.point_rows(report.shapes), points, strict=True):
        found, piece = row.compared, pieces[row.piece - 1]
        speed = (found.ratio, found.ratio_low, found.ratio_high) if found else (None,) * 3
        begin = (row.number, row.sizes, row.elements, piece.sizes, piece.count, _median(point.eager), _median(point.ours))
        errors = (point.rel_l2, point.eager_rel_l2)
        made.append((*begin, *speed, *errors, ", ".join(point.rewrites), point.reason))
    # A piece without points has a row of its own, so that its reason is there.
    made += [(None, None, None, piece.sizes, piece.count, *((None,) * 8), piece.refusal) for piece in pieces if piece.refusal]
    return Table(columns, tuple(made))


_MAKERS: dict[str, Callable[[Report], Table]] = {
    "rewrites": _rewrites,
    "chains": _chains,
    "sites": _sites,
    "kernels": _kernels,
    "categories": _categories,
    "steps": _steps,
    "baselines": _baselines,
    "modules": _modules,
    "sizes": _sizes,
}
NAMES = tuple(_MAKERS)
