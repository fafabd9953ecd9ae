"""The page in a browser: what a reader sees, presses and hears. Skipped where there is no Chromium or no Playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.records import Report
from fusion_advisor.report.html.charts import LABEL_SIZE, TICK_SIZE
from fusion_advisor.report.html.embed_traces import read_traces
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.html.text_width import text_width
from tests.report.fixtures import applied, hostile, padded_shapes, profiled, real, sized

pytestmark = pytest.mark.browser


def short() -> Report:
    """Every kind of part with few rows: axe measures the contrast of each piece of text."""
    report = applied()
    return replace(report, chains=tuple(replace(chain, sites=chain.sites[:2]) for chain in report.chains))


def long_names() -> Report:
    """Kernels named after their ops, as generated ones are."""
    report = applied()
    names = ("embedding_embedding_add_layer_norm_8d2f", "embedding_add_embedding_add_add_layer_norm_gelu_4400")
    fusions = [replace(fusion, kernel=names[number % 2]) for number, fusion in enumerate(report.fusions)]
    return replace(report, fusions=tuple(fusions))


def padded() -> Report:
    """Ranges in several ways to call the model, so that its tables are wide."""
    return replace(sized(), shapes=padded_shapes())


REPORTS: dict[str, Callable[[], Report]] = {
    "applied": applied, "hostile": hostile, "short": short, "real": real, "long names": long_names,
    "sized": sized, "padded": padded,
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    for name, make in REPORTS.items():
        (folder / f"{name}.html").write_text(render_html(make()), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in REPORTS}


@pytest.fixture
def visit(browser: Any, files: dict[str, str]) -> Iterator[Callable[..., Any]]:
    contexts = []

    def opened(name: str, **options: Any) -> Any:
        context = browser.new_context(**{"reduced_motion": "reduce", "viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.goto(files[name])
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "theme", "width"),
    [
        ("short", "light", 1280),
        ("short", "dark", 1280),
        ("short", "dark", 320),
        ("hostile", "light", 320),
        ("sized", "light", 1280),
        ("padded", "dark", 320),
    ],
)
def test_axe_finds_nothing(visit: Callable[..., Any], name: str, theme: str, width: int) -> None:
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed: pip install '.[browser]'")
    # axe itself is a script that the page's policy would refuse
    page = visit(name, color_scheme=theme, viewport={"width": width, "height": 900}, bypass_csp=True)
    page.evaluate("document.querySelectorAll('details').forEach(item => { item.open = true })")
    page.add_script_tag(path=str(resources.files(package) / "axe.min.js"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert [(row["id"], [node["html"][:120] for node in row["nodes"]]) for row in found["violations"]] == []


@pytest.mark.parametrize("name", ["applied", "hostile"])
def test_nothing_is_asked_for_and_no_policy_is_broken(browser: Any, files: dict[str, str], name: str) -> None:
    context = browser.new_context(offline=True, reduced_motion="reduce")
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.add_init_script("addEventListener('securitypolicyviolation', event => console.log('policy', event.violatedDirective))")
    page.goto(files[name])
    page.wait_for_selector("#strips[data-ready]")
    page.locator("#theme").click()
    page.locator("#kernel-table thead button").first.click()
    page.locator("#filter").fill("gemm")
    assert said == []
    assert asked == [files[name]]
    context.close()


@pytest.mark.parametrize("name", ["applied", "hostile", "real", "sized"])
def test_a_narrow_screen_needs_no_sideways_scrolling(visit: Callable[..., Any], name: str) -> None:
    page = visit(name, viewport={"width": 320, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach(item => { item.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_speeds_of_sizes_are_seen_without_scrolling_and_rows_keep_their_heads(visit: Callable[..., Any]) -> None:
    scrolled = "[...document.querySelectorAll('#sizes .scroll')].map(one => one.scrollWidth > one.clientWidth)"
    assert visit("padded").evaluate(scrolled)[0] is False
    page = visit("padded", viewport={"width": 400, "height": 900})
    right = "[...document.querySelectorAll('#sizes table thead th')].find(one => one.textContent == 'Speedup')"
    assert page.evaluate(f"{right}.getBoundingClientRect().right") <= 400
    matrix = page.locator("#sizes .scroll").last
    matrix.evaluate("one => one.scrollTo(10000, 0)")
    head = matrix.locator("tbody th").first.evaluate("one => one.getBoundingClientRect().left")
    assert matrix.evaluate("one => one.scrollLeft") > 0 and head == matrix.evaluate("one => one.getBoundingClientRect().left")


@pytest.mark.parametrize("name", ["applied", "hostile", "real", "long names"])
def test_every_name_in_the_waterfall_lies_within_it(visit: Callable[..., Any], name: str) -> None:
    page = visit(name)
    left = page.evaluate("[...document.querySelector('#c-fall-t').parentNode.querySelectorAll('text')].map(t => t.getBBox().x)")
    assert len(left) > 4 and min(left) >= 0


@pytest.mark.parametrize("name", ["applied", "real", "long names", "hostile", "sized"])
def test_text_takes_no_more_than_its_measure(visit: Callable[..., Any], name: str) -> None:
    page = visit(name)
    page.evaluate("document.querySelectorAll('details').forEach(item => { item.open = true })")
    wide = page.evaluate("""[...document.querySelectorAll('svg.chart text')].map(one => [
        one.textContent, one.getBBox().width, one.classList.contains('figure'), one.classList.contains('tick')])""")
    assert len(wide) > 20
    for text, width, is_bold, is_tick in wide:
        assert width <= text_width(text.strip(), TICK_SIZE if is_tick else LABEL_SIZE, is_bold=is_bold) + 0.5, text


def test_a_box_of_the_icicle_opens_its_branch(visit: Callable[..., Any]) -> None:
    page = visit("applied")
    link = page.locator(".icicle a").first
    branch = page.locator(link.get_attribute("href"))
    assert branch.get_attribute("open") is None
    link.click()
    page.locator(".branch:target[open]").wait_for()
    assert branch.get_attribute("open") is not None


def test_the_next_commands_are_copied(browser: Any, files: dict[str, str]) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(files["applied"])
    commands = {"next-code": "fa.load_plan(", "next-code-2": "fusion-advisor export "}
    assert page.locator("[data-copy]").count() == len(commands)
    for place, text in commands.items():
        button = page.locator(f"[data-copy={place}]")
        button.click()
        button.and_(page.get_by_text("Copied", exact=True)).wait_for()
        assert text in page.evaluate("navigator.clipboard.readText()")
    context.close()


def test_the_search_counts_the_kernels_of_each_strip(visit: Callable[..., Any]) -> None:
    page = visit("applied")
    page.wait_for_selector("#strips[data-ready]")
    page.locator("#strip-search").fill("gelu")
    words = page.locator("#strip-found").text_content()
    counts = [
        sum("gelu" in side.kernels[at][0] for at in side.timeline.kernel)
        for side in (applied().before, applied().after)
        if side is not None and side.timeline is not None
    ]
    assert all(f"{count} kernel" in words for count in counts), words


def test_tables_sort_and_filter(visit: Callable[..., Any]) -> None:
    page = visit("applied")
    report = applied()
    rows = "() => [...document.querySelectorAll('#kernel-table tbody tr:not([hidden]) th')].map(cell => cell.textContent)"
    head = page.locator("#kernel-table thead th").nth(2)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert "vectorized_elementwise" in page.evaluate(rows)[0]
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert "fa_gelu_tanh" in page.evaluate(rows)[0]
    page.locator(".chip", has_text="gemm").click()
    assert page.evaluate(rows) == ["sm90_xmma_gemm_bf16bf16_bf16f32_tn_n_tilesize128x128x64"]
    assert page.locator("#filter-count").text_content() == f"1 of {len(report.before.kernels) + 1} kernel names."
    page.locator("#filter").fill("nothing like it")
    assert page.evaluate(rows) == []


def test_the_strip_follows_the_keyboard(visit: Callable[..., Any]) -> None:
    page = visit("applied")
    report = applied()
    assert report.before.timeline is not None
    page.wait_for_selector("#strips[data-ready]")
    page.locator(".strip canvas").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    name, category, *_ = report.before.kernels[report.before.timeline.kernel[1]]
    said = page.locator("#strip-note").text_content()
    assert said.startswith(f"eager, 2 of {len(report.before.timeline.kernel)}: {name} ({category}), ")
    end = page.locator(".strip-axis text").last
    whole = end.text_content()
    page.keyboard.press("+")
    assert end.text_content() != whole
    page.keyboard.press("Home")
    assert end.text_content() == whole
    page.keyboard.press("Enter")
    assert page.locator("#strip-note").text_content().endswith(", pinned")


def test_the_theme_stays_chosen(visit: Callable[..., Any]) -> None:
    page = visit("applied", color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


def test_a_link_opens_its_card(visit: Callable[..., Any]) -> None:
    page = visit("applied")
    assert not page.locator("#F3").is_visible()
    page.locator("#fusions table a", has_text="F3").first.click()
    page.locator("#F3").wait_for(state="visible")


def test_the_saved_json_is_the_report(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit("applied")
    with page.expect_download() as waiting:
        page.locator("#save-json").click()
    waiting.value.save_as(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["run_id"] == applied().run_id


def test_without_scripts_everything_is_there(visit: Callable[..., Any]) -> None:
    page = visit("applied", java_script_enabled=False)
    assert page.locator(".strip svg").first.is_visible()
    assert page.locator("#kernel-table tbody tr").count() == len(applied().before.kernels) + 1
    assert not page.locator("#theme").is_visible()
    assert not page.locator("#filter").is_visible()
    page.locator("summary", has_text="F3").click()
    assert page.locator("#F3").is_visible()


def test_paper_shows_what_is_folded(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit("applied", color_scheme="dark")
    page.pdf(path=str(tmp_path / "report.pdf"))
    assert page.evaluate("[...document.querySelectorAll('details')].every(item => item.open)")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#strips svg").first.is_visible()


def test_a_trace_is_saved_from_the_page(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.before.json.gz").write_bytes(bytes(range(256)) * 12_000)  # above what a browser takes as a data: address
    (tmp_path / "page.html").write_text(render_html(profiled(), traces=read_traces(tmp_path, profiled())), encoding="utf-8")
    page = browser.new_context(accept_downloads=True).new_page()
    page.goto((tmp_path / "page.html").as_uri())
    with page.expect_download() as waiting:
        page.click("button[data-trace]")
    assert waiting.value.suggested_filename == "trace.before.json.gz"
    waiting.value.save_as(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == (tmp_path / "trace.before.json.gz").read_bytes()
