"""Completions for runs, kernels and models; this module imports neither typer nor torch.

Building the command line takes typer longer than a person waits between two keys, so the words that are looked up most are
answered here, before any of it is imported (:func:`complete`). Everything else, options above all, is left to typer, which asks
the same functions. Nothing is fetched: a model is one that is cached or whose configuration is shipped.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "_FUSION_ADVISOR_COMPLETE"
"""Set by the script that ``--install-completion`` leaves in the shell."""
_SAFE = re.compile(r"[A-Za-z0-9._/@-]+")
"""The shell evaluates what is printed, and a folder may have any name."""


def runs(incomplete: str) -> list[str]:
    """Return the ids of runs below the working directory, the latest first, and ``@last``."""
    folder = Path("fusion-runs")
    names = sorted((path.parent.name for path in folder.glob("*/report.json")), reverse=True)
    return _fitting([*(["@last"] if names else []), *names], incomplete)


def kernels(incomplete: str) -> list[str]:
    """Return the library's kernels, and those in ``./kernels``, where ``kernels new`` puts them."""
    from fusion_advisor.content import content_dir

    names = {path.parent.name for folder in (content_dir("kernels"), Path("kernels")) for path in folder.glob("*/kernel.toml")}
    return _fitting(sorted(names), incomplete)


def models(incomplete: str) -> list[str]:
    """Return the models in the Hub's cache, then those whose configuration is shipped."""
    from fusion_advisor.workload.preset import preset_ids

    cached = sorted(
        path.name.removeprefix("models--").replace("--", "/")
        for path in _hub_cache(os.environ).glob("models--*")
        if path.is_dir()
    )
    return _fitting(list(dict.fromkeys([*cached, *preset_ids()])), incomplete)


def models_and_runs(incomplete: str) -> list[str]:
    """Return the runs and models that ``apply`` takes."""
    return [*runs(incomplete), *models(incomplete)]


_BY_COMMAND: dict[tuple[str, ...], Callable[[str], list[str]]] = {
    ("profile",): models,
    ("plan",): runs,
    ("apply",): models_and_runs,
    ("report",): runs,
    ("compare",): runs,
    ("kernels", "show"): kernels,
    ("kernels", "check"): kernels,
    ("kernels", "bench"): kernels,
}


def complete(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Answer the shell if the word is an argument that is known here.

    Args:
        env: As typer's completion scripts set it.

    Returns:
        What to print and the exit code; None leaves the question to typer.
    """
    asked = _words(env)
    if asked is None:
        return None
    shell, before, incomplete = asked
    names = tuple(before[:2] if before[:1] == ["kernels"] else before[:1])
    look_up = _BY_COMMAND.get(names)
    if look_up is None or incomplete.startswith("-") or before[-1].startswith("-"):
        return None
    found = look_up(incomplete)
    if shell == "bash":
        return "\n".join(found), 0
    if shell == "zsh":
        listed = "\n".join(f'"{name}"' for name in found)
        return (f"_arguments '*: :(({listed}))'" if found else "_files"), 0
    if env.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":  # fish asks first whether files are to be offered instead
        return "", 0 if found else 1
    return "\n".join(found), 0


def _words(env: Mapping[str, str]) -> tuple[str, list[str], str] | None:
    """Return the shell, the finished words after the program's name, and the one being typed."""
    action, _, shell = env.get(VARIABLE, "").partition("_")
    if action != "complete" or shell not in ("bash", "zsh", "fish"):
        return None
    line = env.get("COMP_WORDS" if shell == "bash" else "_TYPER_COMPLETE_ARGS", "")
    try:
        words = shlex.split(line)
        at = int(env.get("COMP_CWORD", "")) if shell == "bash" else len(words) - (not line.endswith(" "))
    except ValueError:  # an open quote, or no number
        return None
    if not 0 < at <= len(words):
        return None
    return shell, words[1:at], words[at] if at < len(words) else ""


def _fitting(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete) and _SAFE.fullmatch(name)]


def _hub_cache(env: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models, by its own variables; importing it to ask would take longer than the answer may."""
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"])
    base = env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "")) / ".cache"
    return Path(env.get("HF_HOME") or Path(base) / "huggingface") / "hub"
