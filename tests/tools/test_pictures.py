"""The README's pictures are of the committed run that they say they are of."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

from fusion_advisor.records.serialize import read_report
from fusion_advisor.report.headline import headline
from tools.make_pictures import PICTURES, ROOT, RUN


def test_the_terminals_picture_holds_the_runs_figures_and_loads_nothing() -> None:
    svg = (PICTURES / "terminal.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    assert not re.search(r"url\((?!#)|@import|<script|<image|href=", svg)
    words = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", svg)).replace("\xa0", " "))
    report = read_report(RUN / "report.json")
    assert headline(report).text in words, "python -m tools.make_pictures draws it again"
    for fusion in report.fusions:
        assert fusion.kernel in words
    assert f"fusion-advisor report {RUN.relative_to(ROOT)}" in words


def test_the_pages_picture_is_small_and_the_readme_shows_both() -> None:
    png = (PICTURES / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) < 300_000
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("terminal.svg", "report.png"):
        assert f"({(PICTURES / name).relative_to(ROOT)})" in readme
