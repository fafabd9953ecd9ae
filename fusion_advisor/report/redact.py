"""A report without what its reader must not see: source code, file paths, or the machine.

Figures stay as they are. All views are made from the returned report, so they agree with the JSON in the same folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from fusion_advisor.records import Environment, Fusion, GraphRewrite, RenderedKernel, Report

PARTS = ("source", "paths", "env")
"""Parts that can be removed: code of the model and of kernels; names of files and folders; the machine except its device."""
_IN_WORDS = {"source": "source code", "paths": "names of files and folders", "env": "the machine except its device"}

T = TypeVar("T")

_SUFFIXES = "py|pyc|pyi|ipynb|cu|cuh|cpp|cc|c|h|hpp|so|json|gz|toml|yaml|yml|txt|log|safetensors|bin|pt|pth|whl"
_PATH = re.compile(
    r"(?<![\w/\\.:~])(?:(?:[A-Za-z]:[\\/]|~[\\/]|\.{1,2}[\\/]|[\\/])[^\s'\"`<>|:;,()\[\]{}]+"  # begins like a path
    rf"|[^\s'\"`<>|:;,()\[\]{{}}=]+\.(?:{_SUFFIXES})\b)"  # or ends like a file
)
"""A path in a sentence; a Hub id (``org/name``) is none."""


def redact(report: Report, parts: tuple[str, ...]) -> Report:
    """Return the report without the parts named.

    Args:
        report: any report.
        parts: of :data:`PARTS`. ``source`` drops the model's source lines and the kernels' code; ``paths`` replaces each file or
            folder, wherever a text names it, by ``<file 1>`` and so on, the same file by the same number; ``env`` leaves only
            the device and the versions of torch, triton and CUDA, without which the figures mean nothing.
    """
    if "source" in parts:
        report = _without_source(report)
    if "env" in parts:
        report = replace(report, environment=_device_only(report.environment))
    if "paths" in parts:
        report = _each_text(report, _Labels(_known_paths(report)))
        report = replace(report, folder="<folder>" if report.folder else "")
    left_out = ", ".join(_IN_WORDS[part] for part in PARTS if part in parts)
    return replace(report, notes=(*report.notes, f"Left out of this copy: {left_out}.")) if left_out else report


def has_source(report: Report) -> bool:
    """Whether any source code is in the report."""
    rows: list[Fusion | GraphRewrite] = [*report.fusions, *report.rewrites]
    rendered = [kernel for row in rows for kernel in row.rendered]
    return (
        any(kernel.source for kernel in rendered)
        or any(fusion.original_source for fusion in report.fusions)
        or any(site.source_text for chain in report.chains for site in chain.sites)
    )


def _without_source(report: Report) -> Report:
    chains = tuple(replace(chain, sites=tuple(replace(site, source_text="") for site in chain.sites)) for chain in report.chains)
    fusions = tuple(replace(row, original_source=(), rendered=_names_only(row.rendered)) for row in report.fusions)
    rewrites = tuple(replace(row, rendered=_names_only(row.rendered)) for row in report.rewrites)
    return replace(report, chains=chains, fusions=fusions, rewrites=rewrites)


def _names_only(rendered: tuple[RenderedKernel, ...]) -> tuple[RenderedKernel, ...]:
    return tuple(replace(kernel, source="") for kernel in rendered)


def _device_only(env: Environment) -> Environment:
    return replace(env, python="", transformers="", driver="", compiler="", os="", cores=0, commit="", container="")


def _known_paths(report: Report) -> tuple[str, ...]:
    """Names that are paths because of where they stand, longest first, so that none is replaced in part."""
    found = {site.source_file for chain in report.chains for site in chain.sites}
    name = report.workload.model_id.partition(":")[0]
    if _PATH.fullmatch(name):
        found.add(name)
    return tuple(sorted((path for path in found if path), key=lambda path: (-len(path), path)))


class _Labels:
    """Replaces paths in a text, each by a label of its own."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self._labels: dict[str, str] = {}
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(self._label, text)
        return _PATH.sub(self._label, text)

    def _label(self, found: re.Match[str]) -> str:
        return self._labels.setdefault(found[0], f"<file {len(self._labels) + 1}>")


def _each_text(value: T, change: Callable[[str], str]) -> T:
    """Return a record with every string in it changed."""
    found: Any = value
    if isinstance(found, str) and type(found) is str:  # a status is a string too, and stays
        found = change(found)
    elif isinstance(found, tuple):
        found = tuple(_each_text(item, change) for item in found)
    elif is_dataclass(found) and not isinstance(found, type):
        old = {item.name: getattr(found, item.name) for item in fields(found)}
        new = {name: _each_text(item, change) for name, item in old.items()}
        found = replace(found, **{name: item for name, item in new.items() if item is not old[name]})
    changed: T = found
    return changed
