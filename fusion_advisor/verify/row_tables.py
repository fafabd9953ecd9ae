"""Tables of which a chain reads few rows: an embedding of 50,257 rows, looked up at 128 ids.

A check need not widen, perturb or draw the rows that nobody reads. With GPT-2's table that was two thirds of the time in which
its kernels are checked on a CPU (``docs/measurements/first_minutes.md``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from fusion_advisor.records import TensorMeta

_FEW = 0.5
"""Of a table's rows: from there on the whole table is as cheap."""


def look_up(node: Node) -> tuple[Node, Node] | None:
    """Return the table and the row numbers of an op that copies whole rows of a table; None for every other op."""
    target, args = node.target, node.args
    if target is torch.ops.aten.embedding.default:
        table, ids = args[0], args[1]
    elif target is torch.ops.aten.index_select.default and args[1] == 0:
        table, ids = args[0], args[2]
    elif target is torch.ops.aten.index.Tensor and isinstance(args[1], Sequence) and len(args[1]) == 1:
        table, ids = args[0], args[1][0]
    else:
        return None
    return (table, ids) if isinstance(table, Node) and isinstance(ids, Node) and not _is_mask(ids) else None


def row_tables(
    nodes: Collection[Node], outer: Iterable[tuple[Node, int, TensorMeta, TensorMeta]], written: Collection[int]
) -> dict[int, tuple[Node, ...]]:
    """Return the ops that look up each table, by the table's root operand number.

    A table is a contiguous matrix of floats that no op of the chain reads or writes in another way.

    Args:
        nodes: the chain's ops.
        outer: values read from outside, each as (node, root operand number, layout, the root's layout).
        written: root operand numbers of the tensors that the chain writes into.
    """
    found: dict[int, tuple[Node, ...]] = {}
    others = set(written)
    for source, number, meta, root_meta in outer:
        readers = tuple(node for node in nodes if source in node.all_input_nodes)
        if _is_matrix(root_meta) and meta == root_meta and all(_is_looked_up(source, node) for node in readers):
            found[number] = (*found.get(number, ()), *readers)
        else:
            others.add(number)
    return {number: readers for number, readers in found.items() if number not in others}


def random_table(root: torch.Tensor, rows: torch.Tensor, generator: torch.Generator, scale: float) -> torch.Tensor | None:
    """Return a table with random rows where it is read and NaN elsewhere, so that a kernel that reads another row is found out.

    Args:
        root: the table, contiguous.
        rows: numbers of the rows that are read, each once.
        generator: of the rows.
        scale: their standard deviation.

    Returns:
        None where most rows are read.
    """
    if not is_worth_while(rows, root):
        return None
    made = torch.full_like(root, float("nan"))
    values = torch.randn((len(rows), root.shape[1]), generator=generator, device=root.device, dtype=torch.float32)
    made[rows] = (values * scale).to(root.dtype)
    return made


def is_worth_while(rows: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether so few rows of a table are read that it is quicker to draw these alone."""
    return len(rows) <= _FEW * len(table)


def distinct_rows(ids: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Return the distinct row numbers among several tensors of ids; those below zero count from the end.

    Args:
        ids: of any shape.
        count: the table's rows.
    """
    rows: torch.Tensor = torch.unique(torch.cat([one.flatten().to(torch.int64) % count for one in ids]))
    return rows


def ids_of(tables: Mapping[int, Sequence[Node]]) -> dict[int, tuple[Node, ...]]:
    """Return the nodes that hold each table's row numbers.

    Args:
        tables: from :func:`row_tables`.
    """
    return {number: tuple(pair[1] for node in readers if (pair := look_up(node))) for number, readers in tables.items()}


def _is_looked_up(table: Node, node: Node) -> bool:
    pair = look_up(node)
    return pair is not None and pair[0] is table and pair[1] is not table


def _is_mask(ids: Node) -> bool:
    """Whether an index chooses elements by true and false, not rows by their numbers."""
    value = ids.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _is_matrix(meta: TensorMeta) -> bool:
    return len(meta.shape) == 2 and meta.stride == (meta.shape[1], 1) and getattr(torch, meta.dtype).is_floating_point
