"""The pictures of modules, layers and data flow: their sums are the report's, their labels lie within them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fusion_advisor import units
from fusion_advisor.records import Report, Status
from fusion_advisor.records.serialize import read_report
from fusion_advisor.report import shared_rows
from fusion_advisor.report.html import charts
from fusion_advisor.report.html.data_flow import data_flow
from fusion_advisor.report.html.icicle import icicle, layer_chart
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.html.roofline import roofline
from fusion_advisor.report.html.text_width import fitted, text_width
from fusion_advisor.report.module_tree import Branch, folded_path, layers, tree
from tests.report.fixtures import EXAMPLES, applied, hostile, profiled, real

REPORTS = {"applied": applied(), "hostile": hostile(), "profiled": profiled(), "real": real()} | {
    path.parent.name: read_report(path) for path in EXAMPLES
}


def leaves(branch: Branch) -> list[Branch]:
    return [branch] if not branch.children else [leaf for child in branch.children for leaf in leaves(child)]


@pytest.mark.parametrize("report", [report for name, report in REPORTS.items() if name.endswith("h200")])
def test_the_branches_add_up_to_both_steps_and_each_to_its_children(report: Report) -> None:
    found = tree(report)
    assert found is not None and report.captured is not None and report.after is not None
    assert (found.before_ns, found.after_ns) == (report.captured.device_ns, report.after.device_ns)
    for rows, whole in ((found.branches, found), *((b.children, b) for b in found.branches if b.children)):
        assert sum(row.before_ns for row in rows) == whole.before_ns
        assert sum(row.after_ns or 0 for row in rows) == (whole.after_ns or 0)
    chains = sum(leaf.before_ns for branch in found.branches for leaf in leaves(branch) if leaf.kind == "chain")
    assert chains == sum(site.device_ns for chain in report.chains for site in chain.sites)
    assert (
        next(row.before_ns for row in found.branches if row.name == "gemm")
        == {name: ns for name, _, ns in report.captured.categories}["gemm"]
    )


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_every_label_of_the_icicle_lies_in_its_box_and_every_box_in_the_chart(report: Report) -> None:
    drawn = icicle(report)
    assert drawn is not None
    page = render_html(report)
    for box in drawn.boxes:
        assert text_width(box.label, charts.LABEL_SIZE) + 6 <= max(box.width, 6) + 0.1
        assert box.x >= 0 and box.x + box.width <= charts.WIDTH + 0.5 and box.y + 30 <= drawn.height
        assert not box.target or f'<details id="{box.target}"' in page
    for a, b in itertools.combinations(drawn.boxes, 2):
        assert a.y != b.y or a.x + a.width <= b.x + 0.1 or b.x + b.width <= a.x + 0.1


def test_a_branch_leads_to_its_kernel() -> None:
    page = render_html(applied())
    for fusion in (row for row in applied().fusions if row.status is Status.KEPT):
        assert f'<a href="#{fusion.id}">its kernel</a>' in page


@pytest.mark.parametrize(
    ("path", "parts"),
    [("model.layers.3.mlp", ("model", "layers.*", "mlp")), ("", ("(top level)",)), ("blocks.1.2.act", ("blocks.*.*", "act"))],
)
def test_equal_layers_are_one_part(path: str, parts: tuple[str, ...]) -> None:
    assert folded_path(path) == parts


def test_a_layer_is_the_sum_of_its_fused_sites() -> None:
    report = REPORTS["qwen2.5-7b-bf16-1x512-h200"]
    kept = {row.chain_id for row in report.fusions if row.status is Status.KEPT}
    found = layers(report)
    assert [layer for layer, _, _ in found] == list(range(28))
    sites = [site for chain in report.chains if chain.id in kept for site in chain.sites]
    assert found[7][1] == sum(site.device_ns for site in sites if ".7" in site.module_path)
    assert all(after < before for _, before, after in found)
    assert layer_chart(profiled()) is None and layer_chart(replace(report, after=None)) is None


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_the_data_flow_shows_every_op_and_both_sides_bytes(report: Report) -> None:
    chains = {chain.id: chain for chain in report.chains}
    for fusion in report.fusions:
        drawn = data_flow(report, fusion)
        assert (drawn is None) is (fusion.chain_id not in chains or not chains[fusion.chain_id].sites)
        if drawn is None:
            continue
        chain = chains[fusion.chain_id]
        assert len(drawn.nodes) == min(len(chain.ops), 41)
        assert units.size(chain.moved_bytes / chain.runs) in drawn.before
        assert units.size(chain.floor_bytes / chain.runs) in drawn.after
        for node in (*drawn.nodes, drawn.kernel):
            assert text_width(node.label, charts.LABEL_SIZE) <= node.width
            assert node.x + node.width <= charts.WIDTH and node.y + 28 <= drawn.height
        for long, text in ((drawn.bytes_before, drawn.before), (drawn.bytes_after, drawn.after)):
            assert 100 + long + text_width(text, charts.LABEL_SIZE, is_bold=True) <= charts.WIDTH
        ratio = chain.floor_bytes / chain.moved_bytes
        assert drawn.bytes_after / drawn.bytes_before == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_no_label_of_the_roofline_covers_another_or_leaves_the_chart(report: Report) -> None:
    roof = roofline(report)
    arrows = roof.arrows if roof is not None else ()
    boxes = [
        (row.label_x, row.label_y - 11, row.label_x + text_width(row.label, charts.LABEL_SIZE, is_bold=True), row.label_y + 3)
        for row in arrows
    ]
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert all(roof is not None and roof.left < box[0] and box[2] < charts.WIDTH and box[3] < roof.base for box in boxes)


def test_a_text_is_cut_in_its_middle_to_the_width() -> None:
    name = "embedding_embedding_add_layer_norm_8d2f"
    short = fitted(name, 120, 12.5)
    assert text_width(short, 12.5) <= 120 and short.startswith("emb") and short.endswith("8d2f") and "…" in short
    assert fitted(name, 4, 12.5) == "" and fitted(name, 1000, 12.5) == name


def test_an_unchanged_run_has_one_side() -> None:
    report = applied()
    drawn = icicle(replace(report, after=replace(report.before, label=shared_rows.UNCHANGED)))
    assert drawn is not None and len(drawn.captions) == 1
