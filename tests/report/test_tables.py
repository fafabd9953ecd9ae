from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from fusion_advisor import units
from fusion_advisor.records import Report
from fusion_advisor.report import kernel_rows, tables
from fusion_advisor.report.html.page import render_html
from tests.report.fixtures import ALL, HOSTILE, applied, hostile, profiled, real, shapes, sized

UNITS = ("_ns", "_bytes", "_s", "_ratio")


def rows_of(report: Report, name: str) -> list[dict[str, tables.Cell]]:
    shown = tables.table(report, name)
    return [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]


@pytest.mark.parametrize("name", [*ALL, "real"])
def test_rows_are_as_long_as_their_head(name: str) -> None:
    report = real() if name == "real" else ALL[name]()
    made = tables.tables(report)
    assert tuple(made) == tables.NAMES
    for shown in made.values():
        assert len(set(shown.columns)) == len(shown.columns)
        assert {len(row) for row in shown.rows} <= {len(shown.columns)}


def test_every_figure_is_the_reports_own() -> None:
    report = applied()
    by_id = {row["id"]: row for row in rows_of(report, "rewrites")}
    assert list(by_id) == ["fold-constants", "drop-masks", "F1", "F2", "F3", "F4"]
    for fusion in report.fusions:
        row = by_id[fusion.id]
        assert row["step_delta_ns"] == fusion.step_delta_ns
        assert (row["step_delta_low_ns"], row["step_delta_high_ns"]) == (fusion.step_delta_ci_ns or (None, None))
        assert row["site_after_ns"] == (fusion.chain_after.median_ns if fusion.chain_after else None)
        assert row["fused_rel_l2"] == (fusion.numerics.fused_rel_l2 if fusion.numerics else None)
        assert (row["sites_found"], row["status"]) == (fusion.receipt.sites_found, fusion.status.value)
    assert by_id["fold-constants"]["held_bytes"] == report.rewrites[0].held_bytes
    assert by_id["fold-constants"]["predicted_saving_ns"] == report.rewrites[0].predicted_saving_ns
    for name, row in (("fold-constants", report.rewrites[0]), ("F1", report.fusions[0])):
        ends = (by_id[name]["predicted_low_ns"], by_id[name]["predicted_high_ns"])
        assert ends == (row.predicted_low_ns, row.predicted_high_ns) and None not in ends

    chains = rows_of(report, "chains")
    assert [row["device_ns"] for row in chains] == [chain.device_ns for chain in report.chains]
    assert [row["saving_bound_ns"] for row in chains] == [chain.saving_bound_ns for chain in report.chains]
    assert len(rows_of(report, "sites")) == sum(len(chain.sites) for chain in report.chains)


def test_each_point_of_the_ranges_has_a_row_and_so_has_a_piece_without_any() -> None:
    rows = rows_of(sized(), "sizes")
    made = [point for piece in shapes().pieces for point in piece.points]
    for row, point in zip(rows, made, strict=False):
        assert row["eager_ns"] == (point.eager.median_ns if point.eager else None)
        assert row["ours_ns"] == (point.ours.median_ns if point.ours else None)
        assert (row["fused_rel_l2"], row["rewrites"], row["reason"]) == (point.rel_l2, ", ".join(point.rewrites), point.reason)
        assert (row["speedup_ratio"] is None) is (point.eager is None)
    assert [row["point"] for row in rows] == [1, 2, 3, 4, 5, 6, None]
    assert rows[-1]["piece"] == "batch 1, seq 1" and rows[-1]["reason"] == shapes().pieces[-1].refusal
    assert rows_of(applied(), "sizes") == []


def test_kernels_and_categories_add_up_to_the_step() -> None:
    report = real()
    assert report.after is not None
    kernels = rows_of(report, "kernels")
    for side, step in (("before", report.before), ("after", report.after)):
        assert sum(row[f"{side}_ns"] for row in kernels) == step.device_ns  # type: ignore[misc]
        assert sum(row[f"{side}_count"] for row in kernels) == sum(row[2] for row in step.kernels)  # type: ignore[misc]
    eager = [row for row in rows_of(report, "categories") if row["step"] == "eager"]
    assert sum(row["device_ns"] for row in eager) == report.before.device_ns  # type: ignore[misc]


def test_what_was_not_measured_is_none_and_not_nought() -> None:
    report = profiled()
    assert all(row["after_ns"] is None for row in rows_of(report, "kernels"))
    liger = next(row for row in rows_of(applied(), "baselines") if row["name"] == "Liger")
    assert liger["wall_ns"] is None and liger["against_ours_ratio"] is None and liger["note"]
    by_step = {row["step"]: row for row in rows_of(replace(report, before=replace(report.before, wall=None)), "steps")}
    assert by_step["eager"]["wall_ns"] is None


def test_figures_name_their_units() -> None:
    counts = {"sites", "sites_found", "sites_replaced", "launches", "launches_before", "launches_after", "elements", "kernels"}
    counts |= {"before_count", "after_count", "source_line", "share"}
    for report in (applied(), real()):
        for shown in tables.tables(report).values():
            for at, column in enumerate(shown.columns):
                is_figure = any(type(row[at]) in (int, float) for row in shown.rows)
                assert not is_figure or column.endswith((*UNITS, "rel_l2", "max_abs")) or column in counts, column


def test_csv_reads_back_and_runs_nothing() -> None:
    shown = tables.table(real(), "rewrites")
    head, *rows = csv.reader(io.StringIO(tables.csv_text(shown)))
    assert tuple(head) == shown.columns
    for read, row in zip(rows, shown.rows, strict=True):
        assert [cell == ("" if had is None else str(had)) or cell.startswith("'") for cell, had in zip(read, row, strict=True)]
        at = shown.columns.index("step_delta_ns")
        assert read[at] == ("" if row[at] is None else str(row[at]))

    formula = '=HYPERLINK("http://example.org")'
    attacked = replace(hostile(), chains=tuple(replace(chain, dtype=formula) for chain in hostile().chains))
    text = tables.csv_text(tables.table(attacked, "chains"))
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert f"'{formula}" in cells and formula not in cells
    assert all(char not in text for char in ("\x1b", "\u202e", "\x00"))
    assert any(HOSTILE[:8] in cell for cell in cells)


def test_a_kernel_without_a_chain_tells_its_own_bytes() -> None:
    report = applied()
    base = next(fusion for fusion in report.fusions if fusion.chain_after is not None)
    assert base.chain_after is not None
    gemv = replace(base, id="G1", chain_id="", kernel_bytes=8_000_000)
    found = kernel_rows.traffic(report, gemv)
    assert found is not None
    assert (found.bytes_before, found.bytes_after) == ("not known", "8.00 MB")
    assert found.speed_after == units.bandwidth(8e15 / base.chain_after.median_ns)
    assert kernel_rows.traffic(report, replace(gemv, kernel_bytes=None)) is None
    assert "8.00 MB" in render_html(replace(report, fusions=(gemv,)))
