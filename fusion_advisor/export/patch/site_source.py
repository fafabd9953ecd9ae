"""A way in which statements are called, as Python source of the package's ``sites.py``."""

from __future__ import annotations

from fusion_advisor.export.patch.express import Expressed, Operand
from fusion_advisor.records import TensorMeta


def variant_lines(one: Expressed) -> list[str]:
    """Return the lines of a ``Variant``.

    Args:
        one: the way.
    """
    lines = ["Variant(", f"    op=ops.{one.op.name},", "    values=("]
    lines += [f"        {_seen(value)}," for value in one.seen]
    lines += ["    ),", "    operands=("]
    lines += [f"        {_operand(operand)}," for operand in one.operands]
    lines.append("    ),")
    if one.facts.attributes:
        lines += ["    attributes={", *(f"        {path!r}: {text}," for path, text in one.facts.attributes.items()), "    },"]
    if one.facts.modules:
        lines += ["    modules={", *(f"        {path!r}: {text}," for path, text in one.facts.modules.items()), "    },"]
    return [*lines, ")"]


def _seen(value: TensorMeta | str) -> str:
    if isinstance(value, str):
        return f"Equal({value})"
    return f"Seen({tuple(value.shape)}, {tuple(value.stride)}, torch.{value.dtype})"


def _operand(operand: Operand) -> str:
    given = operand.given
    if isinstance(operand.source, str):
        return f"Owned({operand.source!r}, Seen({tuple(given.shape)}, {tuple(given.stride)}, torch.{given.dtype}))"
    return f"Viewed({operand.source}, {tuple(given.shape)}, {tuple(given.stride)})" if operand.is_viewed else str(operand.source)
