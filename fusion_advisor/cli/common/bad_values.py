"""Turns an option's refused value into our own error: the value as typed, the reason, and the nearest value that works."""

from __future__ import annotations

import difflib
import re
from typing import Any

from fusion_advisor.codegen.registry import BACKENDS
from fusion_advisor.errors import UsageError

_MEANT = {
    "float16": "fp16", "half": "fp16", "f16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "f32": "fp32",
    "training": "train", "inference": "forward", "generation": "generate",
    "none": "eager", "inductor": "compile", "torch.compile": "compile",
    **{name: backend.name for backend in BACKENDS for name in backend.other_names},
}  # fmt: skip
"""Other tools' names of our options' values."""

_REASONS = (
    (r"greater than or equal to ([\d.]+)", "must be at least {0}"),
    (r"less than or equal to ([\d.]+)", "must be at most {0}"),
    (r"valid integer", "must be a whole number"),
    (r"valid number", "must be a number"),
    (r"valid boolean", "must be true or false"),
)
"""A pattern of typer's reason, and ours."""


def refuse_value(parameter: Any, arguments: list[str], message: str) -> UsageError:
    """Phrase a value that its option does not take.

    Args:
        parameter: typer's option or argument.
        arguments: the command's arguments as typed.
        message: typer's reason.
    """
    name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.make_metavar(None)
    typed = typed_value(parameter.opts, arguments)
    reason, advice = reason_and_advice(message, typed)
    return UsageError(detail=f"{name} {reason}", help=advice or f"`--help` says what {name} takes")


def reason_and_advice(message: str, typed: str) -> tuple[str, str]:
    """Return why a value is refused, as the rest of a sentence that begins with the option's name, and what to write.

    Args:
        message: typer's reason.
        typed: the value; empty where it is not known.
    """
    got = f", not `{typed}`" if typed else ""
    if "is not one of" in message:
        choices = re.findall(r"'([^']*)'", message.partition("is not one of")[2])
        meant = _MEANT.get(typed.lower(), typed.lower())
        near = [meant] if meant in choices else difflib.get_close_matches(meant, choices, n=1)
        every = f"use {', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else f"use {choices[0]}"
        reason = f"cannot be `{typed}`" if typed else "has a value that it does not take"
        return reason, f"did you mean `{near[0]}`? {every}" if near else every
    for pattern, advice in _REASONS:
        found = re.search(pattern, message)
        if found:
            return advice.format(*found.groups()) + got, ""
    return f"cannot be `{typed}`: " + message.removeprefix("Value error, ").strip().rstrip("."), ""


def typed_value(names: list[str], arguments: list[str]) -> str:
    """Find the last value that the command line gives an option (``--batch 0`` and ``--batch=0``); empty where none is there."""
    found = ""
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else arguments[number + 1] if number + 1 < len(arguments) else ""
    return found
