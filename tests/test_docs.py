"""Documents name files, commands and options that exist, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusion_advisor.fuse.passes.registry import REWRITES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "docs").rglob("*.md"),
]
PLACES = (ROOT, ROOT / "fusion_advisor", ROOT / "fusion_advisor" / "cli")
"""Paths are written from the top, or from the package."""
_LINK = re.compile(r"\]\(([^)#\s]+)(#[\w-]+)?\)")
_PATH = re.compile(r"`((?:[a-z_]+/)+(?:[\w.-]+)?)`")
_PLACEHOLDER = ("my_gelu", "runs/", "run-1")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file = page.parent / target
        assert file.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor[1:] in anchors(file), f"{name_of(page)} links to {target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_paths_exist(page: Path) -> None:
    for path in _PATH.findall(page.read_text(encoding="utf-8")):
        if not path.startswith(_PLACEHOLDER) and "my_gelu" not in path:
            assert any((place / path).exists() for place in PLACES), f"{name_of(page)} names {path}"


def test_every_folder_of_the_package_is_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+)`", text))
    folders = {
        path.parent.relative_to(ROOT / "fusion_advisor").as_posix() + "/"
        for path in (ROOT / "fusion_advisor").rglob("__init__.py")
    }
    assert folders - {"./", "fuse/"} <= named


def test_docstrings_point_at_measurement_logs_that_exist() -> None:
    logs = {path.name for path in (ROOT / "docs" / "measurements").glob("*.md")}
    named = {
        name
        for path in (ROOT / "fusion_advisor").rglob("*.py")
        for name in re.findall(r"docs/measurements/([\w.]+\.md)", path.read_text(encoding="utf-8"))
    }
    assert named == logs


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500


_PRIVATE = ("beside", "behind", "told", "bought", "dearest", "anew", "that of", "those of")
"""Words that a reader stumbles over; each has a plainer one."""
WRITTEN = [*PAGES[:1], *(ROOT / "docs").glob("*.md"), *(ROOT / "reports").glob("*/*.jinja")]


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_pages_and_reports_use_plain_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8").lower()
    assert [word for word in _PRIVATE if re.search(rf"\b{word}\b", text)] == []


def test_the_readme_marks_the_place_of_its_sample_and_the_sample_kept_something() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sample = text.partition("<!-- the two-core sample")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert "✓ kept" in sample and all(line.startswith("    ") for line in sample.splitlines())


def test_rewrites_in_documents_exist() -> None:
    known = {rewrite.id for rewrite in REWRITES}
    found = re.findall(r'id="([\w-]+)"', (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert found and set(found) <= known
