"""Make a failing program small: greedily, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.hostile.programs import Input, Program, compiled, evaluate


def shrink(program: Program, fails: Callable[[Program], bool], *, most_tries: int = 150) -> Program:
    """Return the smallest program found that still fails.

    Args:
        program: fails.
        fails: whether a smaller one does; programs that do not run in eager are never asked about.
        most_tries: how often it may be asked.
    """
    tries = 0
    is_smaller = True
    while is_smaller and tries < most_tries:
        is_smaller = False
        for candidate in _smaller(program):
            if not _runs(candidate):
                continue
            tries += 1
            if fails(candidate):
                program, is_smaller = candidate, True
                break
            if tries >= most_tries:
                break
    return program


def live(program: Program) -> Program:
    """Leave out the lines and inputs that no output needs; a line that writes in place stays while what it writes to does."""
    needed, lines = set(program.outputs), []
    changed = True
    while changed:
        changed = False
        for line in program.lines:
            is_needed = line.name in needed or (line.writes and line.reads[0] in needed)
            if is_needed and not {line.name, *line.reads} <= needed:
                needed |= {line.name, *line.reads}
                changed = True
    lines = [line for line in program.lines if line.name in needed]
    shown = {name for one in program.inputs if one.name in needed for name in _names(one)}
    return replace(program, lines=tuple(lines), inputs=tuple(one for one in program.inputs if one.name in needed | shown))


def _names(one: Input) -> set[str]:
    return {part for part in one.shows.replace(".", " ").replace("(", " ").split() if part.startswith("x")}


def _smaller(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield live(replace(program, outputs=(name,)))
        for name in program.outputs:
            rest = tuple(other for other in program.outputs if other != name)
            if rest:
                yield live(replace(program, outputs=rest))
    for line in reversed(program.lines):
        if line.name in program.outputs and len(program.outputs) == 1:
            for name in line.reads:
                if name.startswith("v"):
                    yield live(replace(program, outputs=(name,)))
    values = _values(program)
    for number in range(len(program.lines) - 1, -1, -1):
        line = program.lines[number]
        value = values.get(line.name)
        if isinstance(value, torch.Tensor) and not line.writes and line.name not in program.outputs:
            yield _cut(program, number, value)
        rest = replace(program, lines=(*program.lines[:number], *program.lines[number + 1 :]))
        if line.writes:
            yield live(_renamed(rest, line.name, line.reads[0]))
        for name in line.reads:
            if name in values and isinstance(value, torch.Tensor) and values[name].shape == value.shape:
                yield live(_renamed(rest, line.name, name))
    for number, one in enumerate(program.inputs):
        plain = [replace(one, layout="dense"), replace(one, values="normal"), replace(one, shows="")]
        for made in plain:
            if made != one and not (one.shows and made.shows):
                yield replace(program, inputs=(*program.inputs[:number], made, *program.inputs[number + 1 :]))


def _renamed(program: Program, old: str, new: str) -> Program:
    import re

    pattern = re.compile(rf"\b{old}\b")
    lines = tuple(replace(line, text=pattern.sub(new, line.text)) for line in program.lines)
    return replace(program, lines=lines, outputs=tuple(new if name == old else name for name in program.outputs))


def _cut(program: Program, number: int, value: torch.Tensor) -> Program:
    """Give a line's value as an input instead."""
    line = program.lines[number]
    name = f"x{1 + max((int(one.name[1:]) for one in program.inputs), default=0)}"
    made = Input(name=name, shape=tuple(value.shape), dtype=value.dtype, seed=number)
    rest = (*program.lines[:number], *program.lines[number + 1 :])
    return live(_renamed(replace(program, lines=rest, inputs=(*program.inputs, made)), line.name, name))


def _values(program: Program) -> dict[str, torch.Tensor]:
    values = dict(zip((one.name for one in program.inputs), program.make_inputs("cpu"), strict=True))
    for line in program.lines:
        values[line.name] = evaluate(line.text, values)
    return values


def _runs(program: Program) -> bool:
    if not program.lines or not program.inputs:
        return False
    try:
        with torch.no_grad():
            compiled(program)(*program.make_inputs("cpu"))
    except (RuntimeError, IndexError, ValueError, TypeError, NameError):
        return False
    return True
