"""Source text as highlighted HTML: classes only, no inline style, so that the page's policy can forbid styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import PythonLexer, get_lexer_by_name
from pygments.token import Keyword, Number, Operator

from fusion_advisor.codegen.registry import BACKENDS
from fusion_advisor.report.escape import visible_lines

MAX_LINES = 200
_QUOTES = '"""'
_LEXERS = {one.name: one.lexer for one in BACKENDS}


@dataclass(frozen=True, slots=True)
class CodePanel:
    """Highlighted lines with their numbers."""

    lines: tuple[tuple[int, Markup], ...]
    left_out: int
    """Lines beyond :data:`MAX_LINES`."""


def panel(source: str, language: str, numbers: tuple[int, ...] = ()) -> CodePanel:
    """Highlight a source text line by line.

    Args:
        source: The text; control characters in it come out spelled.
        language: ``python``, or a backend's name.
        numbers: Line numbers; counted from 1 when empty.
    """
    lines, left_out = visible_lines(source, MAX_LINES)
    lexer = get_lexer_by_name(_LEXERS.get(language, "python"), stripnl=False, ensurenl=False)
    opening = _opening(lines, lexer)
    # the formatter closes every span at a line's end, so each line is whole by itself; Pygments escapes the text
    marked = highlight("\n".join((*opening, *lines)), lexer, HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")[len(opening) :]
    marked += [""] * (len(lines) - len(marked))
    at = numbers or tuple(range(1, len(lines) + 1))
    return CodePanel(tuple((number, Markup(line)) for number, line in zip(at, marked, strict=False)), left_out)


def _opening(lines: Sequence[str], lexer: Lexer) -> tuple[str, ...]:
    """Return a docstring's opening quotes if the lines begin inside of one, else nothing.

    An excerpt may begin anywhere. With the wrong guess all code after the quotes would be a string, so the guess that finds more
    code wins.
    """
    if not isinstance(lexer, PythonLexer) or "\n".join(lines).count(_QUOTES) % 2 == 0:
        return ()

    def code_tokens(text: str) -> int:
        return sum(kind in Keyword or kind in Operator or kind in Number for kind, _ in lexer.get_tokens(text))

    return max(((), (_QUOTES,)), key=lambda opening: code_tokens("\n".join((*opening, *lines))))


def stylesheet() -> str:
    """Return the rules for both themes; both styles pass WCAG AA on the page's own backgrounds."""
    light = _rules("xcode", [".hl"])
    dark_chosen = _rules("monokai", [":root[data-theme=dark] .hl"])
    dark_system = _rules("monokai", [":root:not([data-theme=light]) .hl"])
    return f"{light}\n{dark_chosen}\n@media screen and (prefers-color-scheme: dark) {{\n{dark_system}\n}}\n"


def _rules(style: str, prefixes: list[str]) -> str:
    rules = HtmlFormatter(style=style).get_style_defs(prefixes).splitlines()
    # line-number rules and the panel's own background are the page's business
    kept = [rule for rule in rules if rule.startswith(prefixes[0] + " .") and "background" not in rule.split("/*")[0]]
    return "\n".join(kept)
