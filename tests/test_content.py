"""The version of a checkout that was never installed."""

from __future__ import annotations

from pathlib import Path

from fusion_advisor.content import project_version


def test_its_project_names_the_version(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "7.8.9"\n', encoding="utf-8")
    assert project_version(tmp_path) == "7.8.9"


def test_a_package_without_its_project_has_none(tmp_path: Path) -> None:
    assert project_version(tmp_path) == "unknown"
