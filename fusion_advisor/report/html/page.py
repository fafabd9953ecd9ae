"""The HTML report: one file, no network, readable with scripts off.

Everything that came from a model is hostile text: autoescape is on, and every value that a template prints passes
:func:`fusion_advisor.report.escape.visible` first, so that a template cannot forget it. Only our own CSS, our own JavaScript, the
embedded JSON and Pygments' output are marked as safe, all of them in this file and in ``code.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fusion_advisor import units
from fusion_advisor.content import content_dir
from fusion_advisor.records import Fusion, GraphRewrite, Report, StepProfile
from fusion_advisor.records.serialize import dump_report
from fusion_advisor.report import (
    background_rows,
    baseline_rows,
    first_screen,
    kernel_rows,
    quality,
    redact,
    shared_rows,
    waterfall_rows,
)
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.report.headline import headline
from fusion_advisor.report.html import charts, timeline
from fusion_advisor.report.html.data_flow import data_flow
from fusion_advisor.report.html.embed_traces import EmbeddedTrace
from fusion_advisor.report.html.highlight import MAX_LINES, CodePanel, panel, stylesheet
from fusion_advisor.report.html.icicle import icicle, layer_chart
from fusion_advisor.report.html.launch_gaps import bin_names, gap_rows, histogram
from fusion_advisor.report.html.roofline import roofline
from fusion_advisor.report.html.speed_chart import speed_charts
from fusion_advisor.report.html.waterfall import waterfall
from fusion_advisor.report.ranks.rows import ranks_view
from fusion_advisor.report.shapes.view import sizes_view
from fusion_advisor.report.training import rows as training
from fusion_advisor.report.training import step_rows
from fusion_advisor.report.training.memory_chart import memory_chart
from fusion_advisor.report.training.way_rows import way_table

_MEMORY_COLOURS = {
    "activation": charts.COLOURS["gemm"], "gradient": charts.COLOURS["fused"], "working": charts.COLOURS["reduction"],
}  # fmt: skip
MAX_KERNELS = 500
MAX_MODULES = 200
MAX_SITES = 100
MAX_EMBEDDED_BYTES = 4_000_000
MAX_EMBEDDED_LAUNCHES = 20_000
"""A longer timeline is only drawn: its lists as JSON would be larger than the rest of the page."""

SECTIONS = (
    ("quality", "Data quality"),
    ("time", "Where the time went"),
    ("savings", "Saved by each rewrite"),
    ("modules", "By module"),
    ("fusions", "Fusions"),
    ("chains", "Chains"),
    ("rewrites", "Other rewrites"),
    ("timeline", "Timeline"),
    ("gaps", "Launch gaps"),
    ("roofline", "Roofline"),
    ("baselines", "Baselines"),
    ("sizes", "Other sizes"),
    ("numerics", "Numerics"),
    ("kernels", "Kernels"),
    ("method", "Method"),
    ("environment", "Environment"),
    ("glossary", "Glossary"),
)
"""The page's parts in order: (anchor, name)."""


def render_html(report: Report, *, top_kernels: int = MAX_KERNELS, traces: tuple[EmbeddedTrace, ...] = ()) -> str:
    """Return the whole page; ``top_kernels`` is the most rows of the kernels' table, ``traces`` are put into it."""
    source = content_dir("reports") / "html"
    drawn = timeline.strips(report)
    css = (source / "report.css").read_text(encoding="utf-8") + stylesheet()
    has_traces = any(trace.data for trace in traces)
    used = ("theme.js", "report.js", *(("strip.js",) if drawn else ()), *(("trace.js",) if has_traces else ()))
    scripts = [(source / name).read_text(encoding="utf-8") for name in used]
    shown = _without_long_timelines(report)
    data = embedded_json(shown)
    html = (
        environment()
        .get_template("report.html.jinja")
        .render(
            report=report,
            sections=SECTIONS,
            **_first_screen(report),
            **_charts(report),
            **_tables(report, top_kernels),
            **_by_fusion(report),
            strips=drawn,
            strip_data=Markup(_script_json(_strip_data(drawn))) if drawn else None,
            strip_size=(timeline.COLUMNS, timeline.HEIGHT),
            traces=traces,
            trace_data=[Markup(_script_json(base64.b64encode(trace.data).decode())) if trace.data else None for trace in traces],
            is_timeline_left_out=shown is not report,
            data=Markup(data) if len(data) <= MAX_EMBEDDED_BYTES else None,
            css=Markup(css),
            scripts=[Markup(script) for script in scripts],
            policy=content_security_policy(css, scripts),
        )
    )
    return html.encode("utf-8", "backslashreplace").decode("utf-8")


def _first_screen(report: Report) -> dict[str, object]:
    """Values of the band at the top."""
    return {
        "headline": headline(report),
        "context": shared_rows.context_line(report),
        "sentence": first_screen.sentence,
        "clock": _clock(report),
        "ways": first_screen.ways(report),
        "tiles": shared_rows.tiles(report),
        "next_steps": first_screen.next_steps(report),
        "generation": shared_rows.step_lines(report),
        "caveats": shared_rows.caveats(report),
        "quality": quality.verdict(report),
        "bad_quality": quality.warnings(report),
        "has_source": redact.has_source(report),
    }


def _clock(report: Report) -> str:
    pair = shared_rows.step_pair(report)
    name = "wall time" if pair is None or pair[0] == waterfall_rows.DEVICE_TIME else pair[0]
    return f"{name[0].upper()}{name[1:]}"


def _charts(report: Report) -> dict[str, object]:
    """Drawings, and the sentences that stand with them."""
    gaps = gap_rows(report)
    return {
        "time_chart": charts.where_time_went(report),
        "floor_chart": charts.chain_floors(report),
        "fall": waterfall(report),
        "sum_line": waterfall_rows.sum_line(report),
        "is_unchanged": shared_rows.is_unchanged(report),
        "icicle": icicle(report),
        "layer_chart": layer_chart(report),
        "gaps": gaps,
        "gap_chart": histogram(gaps),
        "gap_bins": bin_names(),
        "roof": roofline(report),
        "speed_charts": speed_charts(report.shapes) if report.shapes else (),
        "memory_chart": memory_chart(
            report.training.memory if report.training else (), width=charts.WIDTH, colours=_MEMORY_COLOURS
        ),
    }


def _tables(report: Report, top_kernels: int) -> dict[str, object]:
    """Rows of the tables that are not a fusion's."""
    rows, kernels_left, kernels_left_ns = kernel_rows.kernel_rows(report, top_kernels)
    return {
        "device": shared_rows.device_word(report),
        "modules": training.module_rows(report, MAX_MODULES),
        "part_rows": step_rows.part_rows(report),
        "part_lines": step_rows.part_lines(report),
        "training_ways": way_table(report),
        "memory_lines": step_rows.memory_lines(report),
        "holder_rows": step_rows.holder_rows,
        "recomputed_rows": step_rows.recomputed_rows(report),
        "recomputed_line": step_rows.recomputed_line(report),
        "findings": shared_rows.finding_lines(report),
        "comparisons": shared_rows.comparisons(report),
        "launch_line": shared_rows.launch_line(report),
        "baselines": baseline_rows.baseline_rows(report),
        "gradient_line": training.gradient_line(report.model_check) if report.model_check else "",
        "likeliest": quality.likeliest_line(report.model_check) if report.model_check else "",
        "has_rested": baseline_rows.has_rested(report),
        "run_lines": baseline_rows.run_lines(report),
        "predicted": baseline_rows.predicted,
        "predicted_interval": baseline_rows.predicted_interval,
        "steps": shared_rows.steps(report),
        "categories": shared_rows.category_rows(report),
        "unmatched": shared_rows.unmatched(report),
        "verdicts": shared_rows.VERDICTS,
        "kernels": rows,
        "kernels_left": kernels_left,
        "kernels_left_ns": kernels_left_ns,
        "sizes": sizes_view(report.shapes) if report.shapes else None,
        "ranks": ranks_view(report.ranks),
        "environment_rows": background_rows.environment_rows(report),
        "glossary": background_rows.GLOSSARY,
        "max_sites": MAX_SITES,
        "max_lines": MAX_LINES,
    }


def _by_fusion(report: Report) -> dict[str, object]:
    """The cards: everything that is looked up by a fusion's, a rewrite's or a chain's id."""
    fusions = report.fusions
    return {
        "groups": shared_rows.fusion_groups(report),
        "traffic": {fusion.id: kernel_rows.traffic(report, fusion) for fusion in fusions},
        "reproduce": {fusion.id: kernel_rows.reproduce_one(report, fusion) for fusion in fusions},
        "flows": {fusion.id: data_flow(report, fusion) for fusion in fusions},
        "bits": {fusion.id: kernel_rows.bits_line(report, fusion) for fusion in fusions},
        "special": {fusion.id: kernel_rows.special_line(fusion) for fusion in fusions},
        "ulp_rows": {fusion.id: kernel_rows.ulp_rows(fusion) for fusion in fusions},
        "panels": {fusion.id: _panels(fusion) for fusion in fusions},
        "rewrite_panels": {row.id: _kernel_panels(row) for row in report.rewrites},
        "strips_of": {fusion.id: charts.timing_strips(fusion.chain_before, fusion.chain_after) for fusion in fusions},
        "fusions_by_chain": shared_rows.fusion_by_chain(report),
        "chains_by_id": {chain.id: chain for chain in report.chains},
        "kernel_cell": {chain.id: shared_rows.kernel_cell(report, chain) for chain in report.chains},
    }


def render_still(template: str, **values: object) -> str:
    """Return a page of another template with the report's style sheet; it loads nothing and runs nothing."""
    css = (content_dir("reports") / "html" / "report.css").read_text(encoding="utf-8")
    page = environment().get_template(template)
    html = page.render(**values, css=Markup(css), policy=content_security_policy(css, []))
    return html.encode("utf-8", "backslashreplace").decode("utf-8")


def environment() -> Environment:
    """Return the jinja environment of the HTML templates."""
    made = Environment(
        loader=FileSystemLoader(content_dir("reports") / "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    made.globals.update(u=units, plural=plural, chart_width=charts.WIDTH)
    made.filters.update(short=visible, path=_path, coded=coded)
    return made


def content_security_policy(css: str, scripts: list[str]) -> str:
    """Return the page's policy: nothing is fetched, and only the inline code that we wrote may run."""
    allowed = " ".join(_source_hash(script) for script in scripts) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_source_hash(css)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def embedded_json(report: Report) -> str:
    """Return report.json as text that cannot end the script element that holds it."""
    return _script_json(json.loads(dump_report(report)))


def _script_json(data: object) -> str:
    compact = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return compact.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("'", "\\u0027")


def _strip_data(drawn: timeline.Strips) -> dict[str, object]:
    return {"span_ns": drawn.span_ns, "colours": charts.COLOURS, "sides": [side.data for side in drawn.sides]}


def _without_long_timelines(report: Report) -> Report:
    def shorter(step: StepProfile | None) -> StepProfile | None:
        is_long = step is not None and step.timeline is not None and len(step.timeline.kernel) > MAX_EMBEDDED_LAUNCHES
        return replace(step, timeline=None) if step is not None and is_long else step

    short = replace(
        report,
        before=shorter(report.before) or report.before,
        captured=shorter(report.captured),
        after=shorter(report.after),
        baselines=tuple(replace(row, step=shorter(row.step)) for row in report.baselines),
    )
    return report if short == report else short


def _panels(fusion: Fusion) -> tuple[CodePanel | None, tuple[CodePanel, ...]]:
    numbers = tuple(number for number, _ in fusion.original_source)
    text = "\n".join(visible(line) for _, line in fusion.original_source)
    original = panel(text, "python", numbers) if numbers else None
    return original, _kernel_panels(fusion)


def _kernel_panels(row: Fusion | GraphRewrite) -> tuple[CodePanel, ...]:
    return tuple(panel(kernel.source, kernel.backend) for kernel in row.rendered)


def _path(drawn: str) -> Markup:
    """Let an SVG path pass uncut: it may be long, and holds nothing but commands and numbers."""
    if not re.fullmatch(r"[MLHVhvz0-9 .-]*", drawn):
        raise ValueError("this is no path of ours")
    return Markup(drawn)


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def coded(text: str) -> Markup:
    """Return a sentence for a page: what stands between backticks as code. Of an odd number of them all stay as they are."""
    parts = visible(text).split("`")
    if len(parts) % 2 == 0:
        return escape(visible(text))
    return Markup("").join(Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in enumerate(parts))


def _finalize(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
