"""``--help`` in plain text: typer's own formatter draws boxes with rich, whose import takes longer than the whole answer may."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fusion_advisor.cli.common.bad_values import refuse_value
from fusion_advisor.cli.common.console import wants_color

_WIDEST_NAME = 26
_WHOLE = 400


class Command(TyperCommand):
    """A command that prints its options under their headings (``rich_help_panel``), and names a value that it refuses."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments.

        Raises:
            UsageError: An option does not take its value.
        """
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            parameter = getattr(error, "param", None)
            if parameter is None or type(error) is not typer.BadParameter:
                raise
            raise refuse_value(parameter, typed, error.message) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each heading with its options; options without a heading come last."""
        _write_options(self.get_params(ctx), ctx, formatter)


class Group(TyperGroup):
    """A group of commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands first, because readers of a group's help look for them."""
        painted = _Painted(formatter)
        shown = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with painted.section("Commands"):
            # typer's own list cuts each sentence at the line's end
            painted.write_dl([(name, command.get_short_help_str(_WHOLE)) for name, command in shown if command is not None])
        _write_options(self.get_params(ctx), ctx, formatter)


class _Painted:
    """A formatter whose headings and names are coloured where the terminal takes colour; widths are counted without it."""

    def __init__(self, formatter: Any) -> None:
        self._formatter = formatter
        self._is_coloured = wants_color(sys.stdout, "auto", os.environ)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._formatter, name)

    def section(self, name: str) -> Any:
        return self._formatter.section(typer.style(name, bold=True, fg="green") if self._is_coloured else name)

    def write_dl(self, rows: Sequence[tuple[str, str]], **_: Any) -> None:
        painted = [(typer.style(name, fg="cyan") if self._is_coloured else name, text) for name, text in rows]
        self._formatter.write_dl(painted, col_max=_WIDEST_NAME)


def _write_options(parameters: Sequence[Any], ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            is_argument = parameter.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            sections.setdefault(heading, []).append(record)
    sections["Options"] = sections.pop("Options", [])  # --help and its like
    painted = _Painted(formatter)
    for heading, rows in sections.items():
        if rows:
            with painted.section(heading):
                painted.write_dl(rows)
