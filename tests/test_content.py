"""The version of an installation and of a bare checkout."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest

from fusion_advisor import content


def test_a_checkout_that_was_never_installed_has_the_version_of_its_project(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    project = content.content_dir("templates").parent / "pyproject.toml"
    if not project.is_file():
        pytest.skip("the package is installed without its checkout, so no pyproject.toml is next to it")
    named = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    assert content.tool_version() == named and named[0].isdigit()
