"""Reads the options that somebody gave to :func:`fusion_advisor.apply` or :func:`fusion_advisor.profile` in Python."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.options import ProfileOptions
from fusion_advisor.fuse.plan.size_ranges import asked_shapes

OptionsT = TypeVar("OptionsT", bound=ProfileOptions)

_LISTS = ("only", "skip", "kernel_dirs")
"""Of which a single one may be given by itself: a string is a sequence of characters, each of which would be a pattern."""
_OTHERWISE_ON_THE_COMMAND_LINE = {
    "quick": 'effort="quick"', "thorough": 'effort="thorough"', "fresh": "remembers=False", "no_compile": "compile=False",
    "no_graph": "graph=False", "kernels": "kernel_dirs=...", "min_time": "min_time_s=...", "points": "shape_points=...",
    "output": "run_dir=...",
}  # fmt: skip
"""Options of the command line that have another name in Python."""
_OF_THE_CALL = {
    "dtype": "model.to(torch.bfloat16)", "device": "model.to(...)", "batch": "inputs", "seq_len": "inputs", "input": "inputs",
    "context": "inputs", "layers": "the model", "weights": "the model",
}  # fmt: skip
"""Options of the command line that say which model and call it makes; in Python both are there already."""


def read_options(kind: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
    """Return the options as a record.

    Args:
        kind: of the record.
        given: values by the record's field names. ``shapes`` may have each of its forms; one pattern or path may stand for a list
            of one.

    Raises:
        TypeError: there is no option of that name.
        UsageError: a value is of another type, or out of its range.
    """
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            raise TypeError(f"there is no option {name!r}{_instead(name, known)}")
    values: dict[str, Any] = {
        name: (value,) if name in _LISTS and isinstance(value, str | Path) else value for name, value in given.items()
    }
    if "shapes" in values:
        values["shapes"] = asked_shapes(values["shapes"])
    try:
        return msgspec.convert(values, kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).replace("`array`", "a list").partition(" - at `$.")
        option = where.rstrip("`")
        if choices := _choices(kind, option):
            reason = f"{values[option]!r} is none of {', '.join(map(repr, choices))}"
        raise UsageError(
            detail=f"{option or 'the options'}: {reason[:1].lower()}{reason[1:]}",
            help=f"see help(fusion_advisor.fuse.plan.options.{kind.__name__})",
        ) from None


def _choices(kind: type, option: str) -> tuple[str, ...]:
    """Return the words that an option takes; none where it takes others than words."""
    found = get_args(get_type_hints(kind).get(option))
    return found if found and all(isinstance(one, str) for one in found) else ()


def _instead(name: str, known: list[str]) -> str:
    if name in _OTHERWISE_ON_THE_COMMAND_LINE:
        return f": in Python it is {_OTHERWISE_ON_THE_COMMAND_LINE[name]}"
    if name in _OF_THE_CALL:
        return f": the model and the inputs that you pass decide it ({_OF_THE_CALL[name]})"
    near = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(known)}"


def _path(kind: type, value: Any) -> Any:
    """Take what msgspec has no rule for; it adds the option's name to the error."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise ValueError(f"expected `{kind.__name__}`, got `{type(value).__name__}`")
