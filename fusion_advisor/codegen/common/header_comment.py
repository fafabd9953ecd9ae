"""The comment at the top of a rendered kernel: what it fuses, what it moves, where it comes from.

Text from a manifest ends up in a source file here, so it is reduced to printable ASCII on one line: a comment cannot be left.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from fusion_advisor.codegen.common.arguments import Schedule
from fusion_advisor.codegen.common.interface import Header, OpenArguments
from fusion_advisor.codegen.common.printer import ROUNDERS
from fusion_advisor.ir.program import ITEM_BYTES, Program, Store, Value, dropout_constants, nests
from fusion_advisor.records import Tuning


def heading(plans: Sequence[Schedule], header: Header, *, fast_math: bool, notes: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of the head comment, without comment marks.

    Args:
        plans: the schedule of every loop nest, for the bytes.
        header: title, summary, origin and source.
        fast_math: whether approximations are allowed.
        notes: what the backend has to add, one sentence each.
    """
    maths = "float64" if any(v.dtype == "float64" for plan in plans for v in plan.program.values) else "float32"
    accuracy = "with approximate division, square root and tanh (fast math)" if fast_math else "rounded once, at the store"
    if not fast_math and any(v.op in ROUNDERS for plan in plans for v in plan.program.values):
        accuracy = "rounded at the store, and before it where the model rounds"
    lines = [f"{header.title}: {header.summary}", "", f"Moves each operand once: {moved_sentence(plans)}."]
    lines += [f"Maths in {maths}, {accuracy}.", *notes, f"Origin: {header.origin}."]
    if header.source:
        lines.append(f"Source: {header.source}")
    return comment(lines)


def comment(lines: list[str]) -> list[str]:
    """Lines of a comment: printable ASCII, wrapped. "decoding: the" in a first line would name an encoding (PEP 263)."""
    wrapped: list[str] = []
    for line in lines:
        clean = " ".join(re.sub(r"[^ -~]|\\", " ", line).split())
        clean = re.sub(r"coding(?=[:=])", "coding ", clean)
        wrapped += wrap(clean)
    return wrapped


def wrap(line: str) -> list[str]:
    """Wrap a comment; a number stays with its unit."""
    bound = re.sub(r"(?<=\d) (?=B\b|bytes\b)", "\0", line)
    return [part.replace("\0", " ") for part in textwrap.wrap(bound, 110, break_long_words=False, break_on_hyphens=False)] or [""]


def moved_sentence(plans: Sequence[Schedule]) -> str:
    """Say what moving each operand once costs: ``x 2 B/element, weight 2 B/column``."""
    units = {(True, True): "/element", (True, False): "/column", (False, True): "/row", (False, False): " in all"}
    parts: dict[str, str] = {}
    for plan in plans:
        for position, (reach, is_of_parts) in enumerate(_reaches(plan)):
            operand = plan.program.operands[position]
            has_col, has_row = plan.col_dim in reach, bool(reach - {plan.col_dim})
            unit = units[has_col, has_row or plan.kind == "flat"] if has_col else units[has_col, has_row]
            unit = "/part of a row" if is_of_parts else unit
            still = [plan.indices[d] for d in range(plan.col_dim) if d not in reach]
            shared = f", the same for every {' and '.join(still)}" if has_row and still else ""
            parts.setdefault(operand.name, f"{operand.name} {ITEM_BYTES[operand.dtype]} B{unit}{shared}")
    return ("; " if any("," in part for part in parts.values()) else ", ").join(parts.values())


def _reaches(plan: Schedule) -> list[tuple[set[int], bool]]:
    """For each operand the dims that other elements of it are taken along, and whether a part of a row takes one."""
    program = plan.program
    found: list[tuple[set[int], bool]] = [(set(), False) for _ in program.operands]
    places: list[Value | Store] = [*(value for value in program.values if value.op == "load"), *program.stores]
    for place in places:
        reach, is_of_parts = found[place.operand]
        reach |= {d for d, stride in enumerate(place.strides) if stride}
        for arg in place.args:
            is_part = program.values[arg].op == "quotient"
            reach |= set(plan.varies[arg]) - ({plan.col_dim} if is_part else set())
            is_of_parts |= is_part
        found[place.operand] = reach, is_of_parts
    return found


def tuning_note(tuning: Tuning) -> tuple[str, ...]:
    """The head comment's line about launch parameters that were asked for."""
    names = ("block_cols", "block_rows", "num_warps", "packs", "cluster")
    given = [f"{name}={getattr(tuning, name)}" for name in names if getattr(tuning, name)]
    return (f"Tuning: {' '.join(given)}",) if given else ()


def sizes_note(arguments: OpenArguments) -> tuple[str, ...]:
    """The head comment's line about the sizes that vary."""
    names = arguments.names
    return (f"Serves any sizes: {', '.join(names)} {'is an argument' if len(names) == 1 else 'are arguments'}.",) if names else ()


def dropout_notes(program: Program) -> tuple[str, ...]:
    """The head comment's line about what is dropped."""
    chances = dict.fromkeys(v.constant for part in nests(program) for v in part.program.values if v.op == "dropout")
    return tuple(
        f"Drops the elements whose random word (Philox4x32-10 of the seed and the row-major element number) is below "
        f"{dropout_constants(float(p or 0))[0]}, p = {p} of 2**32; the others are scaled by 1 / (1 - p)."
        for p in chances
    )
