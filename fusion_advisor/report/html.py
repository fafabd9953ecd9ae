"""The HTML report: one file, no network, readable with scripts off.

Everything that came from a model is hostile text: autoescape is on, and every value that a template prints passes
:func:`fusion_advisor.report.text.visible` first, so that a template cannot forget it. Only our own CSS, our own JavaScript, the
embedded JSON and Pygments' output are marked as safe, all of them in this file and in ``code.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fusion_advisor import units
from fusion_advisor.content import content_dir
from fusion_advisor.records import Fusion, Report
from fusion_advisor.report import charts, view
from fusion_advisor.report.code import MAX_LINES, CodePanel, panel, stylesheet
from fusion_advisor.report.text import plural, visible
from fusion_advisor.serialize import dump_report

MAX_KERNELS = 200
MAX_SITES = 100
MAX_EMBEDDED_BYTES = 8_000_000


def render_html(report: Report) -> str:
    """Return the whole page."""
    source = content_dir("reports") / "html"
    css = (source / "report.css").read_text(encoding="utf-8") + stylesheet()
    scripts = [(source / name).read_text(encoding="utf-8") for name in ("theme.js", "report.js")]
    data = embedded_json(report)
    rows, kernels_left, kernels_left_ns = view.kernel_rows(report, MAX_KERNELS)
    page = environment().get_template("report.html.jinja")
    html = page.render(
        report=report,
        headline=view.headline(report),
        generation=view.generation_lines(report),
        caveats=view.caveats(report),
        context=view.context_line(report),
        device=view.device_word(report),
        quality=view.quality(report),
        findings=view.finding_lines(report),
        comparisons=view.comparisons(report),
        launch_line=view.launch_line(report),
        baselines=view.baseline_rows(report),
        run_lines=[line for line in (view.prediction_line(report), view.warm_up_line(report), view.cost_line(report)) if line],
        predicted=view.predicted,
        steps=view.steps(report),
        categories=view.category_rows(report),
        time_chart=charts.where_time_went(report),
        floor_chart=charts.chain_floors(report),
        gain_chart=charts.step_gains(report),
        fusions_by_chain=view.fusion_by_chain(report),
        chains_by_id={chain.id: chain for chain in report.chains},
        kernel_cell={chain.id: view.kernel_cell(report, chain) for chain in report.chains},
        panels={fusion.id: _panels(fusion) for fusion in report.fusions},
        strips_of={fusion.id: charts.timing_strips(fusion.chain_before, fusion.chain_after) for fusion in report.fusions},
        verdicts=view.VERDICTS,
        kernels=rows,
        kernels_left=kernels_left,
        kernels_left_ns=kernels_left_ns,
        environment_rows=view.environment_rows(report),
        data=Markup(data) if len(data) <= MAX_EMBEDDED_BYTES else None,
        max_sites=MAX_SITES,
        max_lines=MAX_LINES,
        css=Markup(css),
        scripts=[Markup(script) for script in scripts],
        policy=content_security_policy(css, scripts),
    )
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
    made.filters["short"] = visible
    return made


def content_security_policy(css: str, scripts: list[str]) -> str:
    """Return the page's policy: nothing is fetched, and only the inline code that we wrote may run."""
    allowed = " ".join(_source_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_source_hash(css)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def embedded_json(report: Report) -> str:
    """Return report.json as text that cannot end the script element that holds it."""
    compact = json.dumps(json.loads(dump_report(report)), separators=(",", ":"), ensure_ascii=True)
    return compact.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("'", "\\u0027")


def _panels(fusion: Fusion) -> tuple[CodePanel | None, tuple[CodePanel, ...]]:
    numbers = tuple(number for number, _ in fusion.original_source)
    text = "\n".join(visible(line) for _, line in fusion.original_source)
    original = panel(text, "python", numbers) if numbers else None
    return original, tuple(panel(kernel.source, kernel.backend) for kernel in fusion.rendered)


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _finalize(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
