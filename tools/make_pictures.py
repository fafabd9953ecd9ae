"""Draw the README's two pictures from a committed run: python -m tools.make_pictures (needs Playwright and Chromium)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fusion_advisor.cli.app import main
from fusion_advisor.records.serialize import read_report
from fusion_advisor.report.html.page import render_html

ROOT = Path(__file__).parents[1]
RUN = ROOT / "reports" / "examples" / "llama3.1-8b-bf16-1x512-h200"
PICTURES = ROOT / "reports" / "examples" / "pictures"
WIDTH = 126
PAGE = (1280, 1000)
"""The first screen: a bar for each way to run the step, our speed against each, the next command."""


def terminal_svg() -> str:
    """Return what ``fusion-advisor report RUN`` prints, as an SVG that loads no font from anywhere."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        before = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = str(WIDTH)
        try:
            code = main(["report", str(RUN), "-o", folder, "--format", "json", "--color", "always"])
        finally:
            os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    assert code == 0
    lines = [line for line in printed.getvalue().splitlines() if not line.startswith("wrote:")]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text(f"$ fusion-advisor report {RUN.relative_to(ROOT)}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    svg = console.export_svg(title="fusion-advisor", unique_id="fa")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def page_png(path: Path) -> None:
    """Photograph the top of the run's HTML report."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        page_path = Path(folder) / "report.html"
        page_path.write_text(render_html(read_report(RUN / "report.json")), encoding="utf-8")
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": PAGE[0], "height": PAGE[1]}, reduced_motion="reduce", color_scheme="light")
        page.goto(page_path.as_uri())
        page.screenshot(path=str(path))
        browser.close()


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "terminal.svg").write_text(terminal_svg(), encoding="utf-8")
    page_png(PICTURES / "report.png")
