"""The facts of a measurement as JSON-ready rows and as markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = {
    "package": "package", "package_graph": "package, CUDA graph", "plan": "saved plan", "eager": "eager",
    "compile_cold": "torch.compile, cold caches", "compile": "torch.compile, warm caches", "aoti": "AOTInductor, plain model",
    "pt2": "pt2 (weights inside)", "pt2_graph": "pt2, CUDA graph",
}  # fmt: skip
_IMPORTS = ("torch", "transformers")


def facts_of(folder: Path, way: str) -> list[dict[str, Any]]:
    """Read what a process wrote down.

    Args:
        folder: of the measurement.
        way: of the process.
    """
    path = folder / f"{way}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def rest_s(phases: Mapping[str, float]) -> float:
    """Return what a start takes beyond weight loading and the imports of torch and transformers (s).

    Args:
        phases: seconds by phase, from the start of the process to the end of its first step.
    """
    return sum(seconds for phase, seconds in phases.items() if phase not in (*_IMPORTS, "weights"))


def markdown(title: str, facts: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return three tables: starts, steps next to the fused model, exports.

    Args:
        title: of the measurement.
        facts: by way.
    """
    lines = [
        f"# {title}", "",
        "Seconds of wall time, one start each, in a process of its own. Rest: all but weights and the imports of torch and"
        " transformers. The first fused step is in it. In brackets: processor time.", "",
        "| Way | Total | torch | transformers | Weights | Own imports | Put in | First step | Rest | Step |",
        "|--|--|--|--|--|--|--|--|--|--|",
        *(_start(name, facts.get(way, [])) for way, name in _NAMES.items() if way in facts),
        "", "Steps in turn with the fused model in place, medians:", "",
        "| Way | In place | This way | Ratio |", "|--|--|--|--|",
    ]  # fmt: skip
    apply = facts.get("apply", [])
    lines += [_against(fact) for fact in apply if "against" in fact]
    lines += ["", "| Export | Seconds | Not in it |", "|--|--|--|"]
    lines += [_export(fact) for fact in apply if "export" in fact]
    failures = [f"- {way}: {fact['failed']}" for way, rows in facts.items() for fact in rows if is_failure(fact)]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else []), ""])


def is_failure(fact: Mapping[str, Any]) -> bool:
    """Whether a fact is why a process has no figures, and not why one of its comparisons or exports has none.

    Args:
        fact: that a process wrote down.
    """
    return "failed" in fact and "against" not in fact and "export" not in fact


def _start(name: str, facts: list[dict[str, Any]]) -> str:
    wall: dict[str, float] = next((fact["wall_s"] for fact in facts if "wall_s" in fact), {})
    cpu: dict[str, float] = next((fact["cpu_s"] for fact in facts if "cpu_s" in fact), {})
    if not wall:
        return f"| {name} | {next((fact['failed'] for fact in facts if 'failed' in fact), 'not run')} |" + " |" * 8
    phases = ("torch", "transformers", "weights", "own imports", "put in", "first step")
    shown = " | ".join(f"{wall[phase]:.2f}" if phase in wall else "–" for phase in phases)
    step = next((f"{fact['step_ms']:.3f} ms" for fact in facts if "step_ms" in fact), "–")
    return f"| {name} | {sum(wall.values()):.2f} | {shown} | {rest_s(wall):.2f} ({rest_s(cpu):.2f}) | {step} |"


def _against(fact: Mapping[str, Any]) -> str:
    name = _NAMES[fact["against"]]
    if "failed" in fact:
        return f"| {name} | – | {fact['failed']} | – |"
    return f"| {name} | {fact['in_place_ms']:.3f} ms | {fact['other_ms']:.3f} ms | {fact['ratio']:.3f} |"


def _export(fact: Mapping[str, Any]) -> str:
    return f"| {fact['export']} | {fact.get('seconds', '–')} | {fact.get('failed') or '; '.join(fact['left_out']) or '–'} |"
