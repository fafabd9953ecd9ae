"""``fusion-advisor explain CODE``: the long text of a code."""

from __future__ import annotations

import re
import textwrap
from importlib import import_module
from typing import Annotated

import typer

from fusion_advisor.cli.common import options
from fusion_advisor.cli.common.console import write_result
from fusion_advisor.cli.common.error_examples import EXAMPLES
from fusion_advisor.cli.common.explanations import SUBJECTS, TEXTS, TITLES
from fusion_advisor.errors import AdvisorError, UnknownCode

MOST_NEIGHBOURS = 12
"""Codes that an answer to an unknown code lists."""


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
        raise UnknownCode(asked=code, near="\n".join(neighbours(code, titles)))
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


def neighbours(asked: str, titles: dict[str, str]) -> list[str]:
    """Return what a reader may have meant: the codes of the same subject, or those whose text has the word.

    Args:
        asked: what was typed: a code that does not exist (``FA399``), or a word (``cuda``).
        titles: every code with its title.
    """
    number = re.fullmatch(r"(?:FA)?(\d)\d*", asked.strip().upper())
    if number is None:
        word = asked.strip().lower()
        about = [name for name in sorted(titles) if word and word in " ".join((titles[name], *TEXTS.get(name, ()))).lower()]
        head = f"these mention `{asked}`:"
    else:
        about = [name for name in sorted(titles) if name[2] == number[1]]
        head = f"codes about {SUBJECTS.get(number[1], '')}:"
    if not about:
        return ["codes by subject:", *(f"FA{digit}xx  {subject}" for digit, subject in SUBJECTS.items())]
    lines = [f"{name}  {titles[name]}" for name in about[:MOST_NEIGHBOURS]]
    return [head, *lines, *(["`fusion-advisor explain` lists all codes"] if len(about) > MOST_NEIGHBOURS else [])]


def explanation(code: str) -> list[str]:
    """Return a code's text as paragraphs: an example of the message, cause, advice, exit code."""
    cls = error_classes().get(code)
    if cls is None:
        return [f"{code}: {TITLES[code]}", *TEXTS.get(code, ()), "A reason in the report, not an error: the run goes on."]
    facts = EXAMPLES.get(code, {})
    parts = [f"{code}: {_title(cls)}", f"Example: {cls.message.format(**facts)}", *TEXTS.get(code, ())]
    for name, text in (("Note", cls.note), ("What to do", cls.hint)):
        if text and not re.fullmatch(r"\{\w+\}", text) and code not in text:
            parts.append(f"{name}: {text.format(**facts)}")
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
