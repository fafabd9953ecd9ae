"""``fusion-advisor explain CODE``: the long text of a code."""

from __future__ import annotations

import difflib
import re
import textwrap
from importlib import import_module
from typing import Annotated

import typer

from fusion_advisor.cli.common import options
from fusion_advisor.cli.common.console import write_result
from fusion_advisor.cli.common.explanations import TEXTS, TITLES
from fusion_advisor.errors import AdvisorError, UnknownCode


def explain(
    context: typer.Context,
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="Such as FA201; all codes when left out.")] = None,
    color: options.ColorOpt = options.Color.AUTO,
) -> None:
    """Explain a code: its meaning, its cause and what to do."""
    settings = options.apply_output(context, color=color)
    from fusion_advisor.report.terminal.layout import plain

    console = settings.out()
    known = error_classes()
    titles = {**{name: _title(cls) for name, cls in known.items()}, **TITLES}
    if code is None:
        lines = [f"{name}  {title}" for name, title in sorted(titles.items())]
        write_result("".join(plain(line, console) + "\n" for line in lines))
        return
    asked = code.strip().upper()
    if asked not in titles:
        near = difflib.get_close_matches(asked, titles, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(f'`{name}`' for name in near)}?" if near else "`fusion-advisor explain` lists all codes"
        raise UnknownCode(asked=code, near=hint)
    write_result(plain_text(explanation(asked), console.width, lambda line: plain(line, console)))


def error_classes() -> dict[str, type[AdvisorError]]:
    """Return every error class by its code."""
    import_module("fusion_advisor.library.discover")  # the library's own classes; needs no torch
    found: dict[str, type[AdvisorError]] = {}
    waiting = [AdvisorError]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls is not AdvisorError:
            found.setdefault(cls.code, cls)
    return found


def explanation(code: str) -> list[str]:
    """Return a code's text as paragraphs: message, cause, advice, exit code."""
    cls = error_classes().get(code)
    if cls is None:
        return [f"{code}: {TITLES[code]}", *TEXTS.get(code, ()), "A reason in the report, not an error: the run goes on."]
    parts = [f"{code}: {_title(cls)}", f"It reads: {_without_facts(cls.message)}"]
    parts += TEXTS.get(code, ())
    if cls.note:
        parts.append(f"Also known: {_without_facts(cls.note)}")
    if cls.hint and not re.fullmatch(r"\{\w+\}", cls.hint):
        parts.append(f"What to do: {_without_facts(cls.hint)}")
    parts.append(f"Exit code: {cls.exit_code}")
    return parts


def plain_text(paragraphs: list[str], width: int, shown: object) -> str:
    """Return paragraphs wrapped to a width, with an empty line between them."""
    clean = shown if callable(shown) else str
    blocks = []
    for paragraph in paragraphs:
        lines = [line for part in paragraph.split("\n") for line in textwrap.wrap(clean(part), min(width, 100)) or [""]]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _title(cls: type[AdvisorError]) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0].replace("``", "`").rstrip(".")


def _without_facts(text: str) -> str:
    return re.sub(r"\{(\w+)[^}]*\}", lambda found: "<" + found[1].replace("_", " ") + ">", text)
