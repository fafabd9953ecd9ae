"""Rows that nobody reads: where a model goes on with one token, what comes before computes that token alone.

A classifier takes the first token of its last layer, a prefill the last one; the projections, the MLP and the norms of that layer
compute all tokens for it (of ViT-B/16's 197 one is read, and 10 of the last layer's 12 parts of GEMM work are for the others).
From each ``select`` and ``slice`` we go up through ops that compute each row by itself: pointwise ops, norms, linears, views,
and attention for its queries. Where all that reads a value wants the same rows of it, only those are computed; where
somebody else reads it too (keys and values need all tokens) a slice of it is taken. Every row is made of what it was made of
before.

Sizes may be open (``--shapes``): they are compared as expressions, because dynamo takes for granted what is asked of their
values. The last token of a prompt of any length is then the row that lies 1 before the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import CopyRoom, LayoutRewrite
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion, copy_of, layouts
from fusion_advisor.records.op_facts import PLAIN_VIEWS, PRODUCTS
from fusion_advisor.runtime.torch_internals import fake_mode, symbolic_sizes

_ATEN = torch.ops.aten
_SELECT, _SLICE = _ATEN.select.int, _ATEN.slice.Tensor
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_VIEWS = tuple(getattr(_ATEN, name).default for name in PLAIN_VIEWS)
_LIKE_POINTWISE = (
    _ATEN.to.dtype,
    _ATEN.to.dtype_layout,
    _ATEN.contiguous.default,
    _ATEN.clone.default,
    _ATEN.alias.default,
    _ATEN.detach.default,
    _ATEN.type_as.default,
)
_NORMS = (_ATEN.layer_norm.default, _ATEN.rms_norm.default)
_PRODUCTS: Mapping[object, int] = {getattr(_ATEN, name).default: place for name, place in PRODUCTS.items()}
"""Place of the left matrix."""
_END = 2**63 - 1
"""Where torch ends a slice without an end."""
_ATTENTION_ARGS = ("attn_mask", "dropout_p", "is_causal")
"""Behind query, key and value."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Part of a value: ``begin`` to ``end`` along a dim. Both count from the end of an open size where ``begin`` is negative."""

    dim: int
    begin: int
    end: int

    @property
    def count(self) -> int:
        """How many there are."""
        return self.end - self.begin

    @property
    def stop(self) -> int:
        """Where a slice of them ends: the last one has no negative number behind it."""
        return _END if self.begin < 0 and not self.end else self.end


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be narrowed."""

    wanted: dict[Node, _Rows]
    """Ops of which only some rows are read."""
    needs: dict[Node, list[tuple[Node, _Rows]]]
    """Which rows of its operands each of them then reads; of others all."""
    starts: dict[Node, _Rows]
    """The ops that take these rows of a narrowed value."""


def narrow_rows(region: Region, *, with_queries: bool = True) -> ChangedRegion:
    """Let a copy of a region compute only the rows that are read, where that takes work from GEMMs or attention.

    Args:
        region: left as it is.
        with_queries: also what attention's queries are made of, before attention.

    Returns:
        The copy; ``changed`` is how many ops compute fewer rows.
    """
    result = copy_of(region)
    plan = _plan(list(result.region.graph.graph.nodes), with_queries=with_queries)
    if not any(node.target in _PRODUCTS or node.target is _ATTENTION for node in plan.wanted):
        return result
    try:
        _narrow(result.region, plan)
    except (RuntimeError, ValueError) as error:  # a view of what has other strides now
        refused = copy_of(region)
        refused.refusals.append(str(error).strip().splitlines()[0])
        return refused
    result.changed = len(plan.wanted)
    return result


def _plan(nodes: Sequence[Node], *, with_queries: bool) -> _Plan:
    written = {key for node in nodes for key in written_storages(node)}
    asked: dict[Node, dict[Node, _Rows | None]] = {}
    plan = _Plan({}, {}, {})
    for node in reversed(nodes):
        if node.op != "call_function" or _is_written(node, written):
            continue
        rows, read = _common(node, asked), _read(node)
        is_open = (with_queries or node.target is not _ATTENTION) and not (read is not None and _begins(node, read))
        needs = _needs(node, rows) if rows is not None and is_open else None
        if rows is not None and needs is not None:
            plan.wanted[node], plan.needs[node] = rows, needs
        elif read is not None:
            plan.starts[node], needs = read, [(node.all_input_nodes[0], read)]
        for source, part in needs or ():
            known = asked.setdefault(source, {})
            known[node] = part if known.get(node, part) == part else None
    for node in [node for node in plan.starts if node.args[0] not in plan.wanted]:
        del plan.starts[node]  # it reads what has all its rows
    return plan


def _is_written(node: Node, written: set[int]) -> bool:
    return not written.isdisjoint([*storages(node), *(key for source in node.all_input_nodes for key in storages(source))])


def _common(node: Node, asked: Mapping[Node, Mapping[Node, _Rows | None]]) -> _Rows | None:
    """The rows that all readers of a value want, if those are the same ones."""
    readers = asked.get(node, {})
    parts = set(readers.values())
    return parts.pop() if len(parts) == 1 and set(readers) == set(node.users) else None


def _begins(node: Node, read: _Rows) -> bool:
    """Whether what a ``select`` or a ``slice`` takes can be had alone; else the rows that are read of its result may be."""
    source = node.all_input_nodes[0]
    return len(source.users) == 1 and source.op == "call_function" and _needs(source, read) is not None


def _read(node: Node) -> _Rows | None:
    """The rows that a ``select`` or a ``slice`` takes of what it reads; None for any other op, and where it takes all."""
    if node.target not in (_SELECT, _SLICE) or node.kwargs or not _is_of_tensors(node):
        return None
    source, *where = node.args
    assert isinstance(source, Node)
    shape = source.meta["val"].shape
    dim = _int(where[0]) % len(shape) if where else 0
    if symbolic_sizes.is_size(shape[dim]):
        return _of_open_size(node, dim, *where[1:])
    if node.target is _SELECT:
        begin = _int(where[1]) % shape[dim]
        span = range(begin, begin + 1)
    else:
        begin, end, step = (None if value is None else _int(value) for value in [*where[1:], None, None, None][:3])
        span = range(shape[dim])[begin:end:step]
    if span.step != 1 or not 0 < len(span) < shape[dim]:
        return None
    return _Rows(dim, span.start, span.stop)


def _of_open_size(node: Node, dim: int, begin: Any = None, _end: Any = None, step: Any = None) -> _Rows | None:
    """Return the rows that are taken of an open size; None where their number depends on it."""
    begin, count = _int(begin or 0), 1 if node.target is _SELECT else node.meta["val"].shape[dim]
    if step not in (None, 1) or not isinstance(count, int) or count < 1 or begin < 0 < begin + count:
        return None
    return _Rows(dim, begin, begin + count)


def _is_of_tensors(node: Node) -> bool:
    """Whether an op reads tensors alone, and makes one. The shape that a view gives may have open sizes."""
    sources = node.all_input_nodes[:1] if node.target in _VIEWS else node.all_input_nodes
    return all(isinstance(one.meta.get("val"), torch.Tensor) for one in (*sources, node))


def _is_same(size: Any, other: Any) -> bool:
    return bool(symbolic_sizes.expression_of(size) == symbolic_sizes.expression_of(other))


def _needs(node: Node, rows: _Rows) -> list[tuple[Node, _Rows]] | None:
    """Return which rows of its operands an op needs for those rows of its result; None where it mixes rows."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes or not _is_of_tensors(node):
        return None
    if node.target is _ATTENTION:
        return _of_queries(node, rows)
    if torch.Tag.nondeterministic_seeded in node.target.tags and not _is_idle(node):
        return None
    if torch.Tag.pointwise in node.target.tags or node.target in _LIKE_POINTWISE or _is_idle(node):
        return _broadcast(node, rows)
    if node.target in _PRODUCTS:
        return _of_product(node, rows)
    dim = _dim_before(node, rows.dim)
    return None if dim is None else [(source, replace(rows, dim=dim)) for source in _rows_of(node)]


def _rows_of(node: Node) -> list[Node]:
    """The operands that have the result's rows: of a norm not its weight."""
    return node.all_input_nodes if node.target is _ATEN.cat.default else node.all_input_nodes[:1]


def _dim_before(node: Node, dim: int) -> int | None:
    """Where a dim of an op's result lies in what it reads; None where the op computes along it or splits it."""
    target, after = node.target, node.meta["val"].shape
    before, count = node.all_input_nodes[0].meta["val"].shape, len(after)
    at = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if target in _NORMS:
        return dim if dim < count - len(_ints(at)) else None
    if target in _VIEWS:
        outside = math.prod(after[:dim])
        places = (n for n, size in enumerate(before) if _is_same(size, after[dim]))
        return next((n for n in places if _is_same(math.prod(before[:n]), outside)), None)
    if target in (_SLICE, _ATEN.cat.default, _ATEN.softmax.int):
        return dim if _int(at) % count != dim else None
    if target is _ATEN.mean.dim:
        is_kept = len(node.args) > 2 and node.args[2]
        return dim if is_kept and at and dim not in [one % count for one in _ints(at)] else None
    if target is _SELECT:
        return dim + (dim >= _int(at) % len(before))
    if target is _ATEN.unsqueeze.default:
        new = _int(at) % count
        return None if dim == new else dim - (dim > new)
    if target is _ATEN.transpose.int:
        pair = [_int(one) % count for one in node.args[1:3]]
        return sum(pair) - dim if dim in pair else dim
    if target is _ATEN.permute.default:
        return _ints(at)[dim] % count
    return None


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value} is no plain number")
    return value


def _ints(value: Any) -> list[int]:
    return [_int(one) for one in value]


def _is_idle(node: Node) -> bool:
    """Whether an op is a dropout that drops nothing."""
    return node.target is _ATEN.dropout.default and 0 in (node.args[1], node.args[2])


def _of_product(node: Node, rows: _Rows) -> list[tuple[Node, _Rows]] | None:
    place = _PRODUCTS[node.target]
    left = node.args[place]
    if rows.dim == node.meta["val"].ndim - 1 or not isinstance(left, Node) or list(node.args).count(left) > 1:
        return None
    added = node.args[0]
    is_matrix = place == 1 and isinstance(added, Node) and added.meta["val"].ndim == 2
    has_rows = is_matrix and isinstance(added, Node) and not _is_same(added.meta["val"].shape[0], 1)
    return [(left, rows), *([(added, rows)] if has_rows and isinstance(added, Node) else [])]


def _broadcast(node: Node, rows: _Rows) -> list[tuple[Node, _Rows]] | None:
    """Return the operands that have the result's rows; None where one may have them under another expression of their number."""
    shape, found = node.meta["val"].shape, []
    combines = torch.Tag.pointwise in cast("torch._ops.OpOverload", node.target).tags
    for place, source in enumerate(node.all_input_nodes):
        value = source.meta["val"]
        at = rows.dim - (len(shape) - value.ndim)
        if at < 0 or _is_same(value.shape[at], 1):
            continue
        if _is_same(value.shape[at], shape[rows.dim]):
            found.append((source, replace(rows, dim=at)))
        elif combines or place == 0:  # s and 2 * (s // 2) are one number where s is even; of what `type_as` is like, any will do
            return None
    return found


def _of_queries(node: Node, rows: _Rows) -> list[tuple[Node, _Rows]] | None:
    """Each query is an op of its own; among causal ones only the last sees what it would see alone: all keys."""
    query, key, *others = list(node.args)
    assert isinstance(query, Node) and isinstance(key, Node)
    given = {**dict(zip(_ATTENTION_ARGS, others[1:], strict=False)), **node.kwargs}
    count, keys, mask = query.meta["val"].shape[-2], key.meta["val"].shape[-2], given.get("attn_mask")
    is_read_twice = query in (key, others[0], mask)
    if rows.dim != query.meta["val"].ndim - 2 or given.get("dropout_p") or is_read_twice:
        return None
    is_last = rows.count == 1 and (rows.end == 0 if symbolic_sizes.is_size(count) else rows.end == count)
    if given.get("is_causal") and not (is_last and _is_same(count, keys)):
        return None
    over: Sequence[int] = mask.meta["val"].shape if isinstance(mask, Node) else ()
    has_rows = len(over) >= 2 and not _is_same(over[-2], 1)
    return [(query, rows), *([(mask, replace(rows, dim=len(over) - 2))] if has_rows and isinstance(mask, Node) else [])]


def _narrow(region: Region, plan: _Plan) -> None:
    """Give the ops what they need of their operands, and all that follows the layouts that it has then."""
    graph = region.graph.graph
    dirty: set[Node] = set()
    for node in list(graph.nodes):
        if (rows := plan.wanted.get(node)) is not None:
            for source, part in plan.needs[node]:
                if source not in plan.wanted:
                    node.replace_input_with(source, _part(node, source, part))
            _resize(node, rows)
        elif (rows := plan.starts.get(node)) is not None:
            where = (0,) if node.target is _SELECT else (0, rows.count)
            node.args = (node.args[0], rows.dim, *where)
        elif node.op != "call_function" or dirty.isdisjoint(node.all_input_nodes):
            continue
        before = node.meta.get("val")
        node.meta["val"] = fake_mode.fake_result(region.graph, node)
        if layouts(before) == layouts(node.meta["val"]) and not _is_view(node):
            node.meta["val"] = before
        else:
            dirty.add(node)
    graph.lint()
    region.graph.recompile()


def _is_view(node: Node) -> bool:
    return not {key for source in node.all_input_nodes for key in storages(source)}.isdisjoint(storages(node))


def _part(node: Node, source: Node, rows: _Rows) -> Node:
    """Take rows of what others read in full; for a GEMM side by side, or it would make the copy, and add its bias, by itself."""
    graph, value = node.graph, source.meta["val"]
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    with graph.inserting_before(node):
        part = graph.call_function(_SLICE, (source, rows.dim, rows.begin, rows.stop))
        part.meta = {**origin, "val": _SLICE(value, rows.dim, rows.begin, rows.stop)}
        if node.target in _PRODUCTS and not _is_packed(part.meta["val"]):
            copy = graph.call_function(_ATEN.clone.default, (part,), {"memory_format": torch.contiguous_format})
            copy.meta = {**origin, "val": part.meta["val"].clone(memory_format=torch.contiguous_format)}
            return copy
    return part


def _is_packed(value: torch.Tensor) -> bool:
    """Whether a value is contiguous; not where one of its open sizes would have to be 1 for that."""
    expected: Any = 1
    for size, step in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not _is_same(size, 1):
            if not _is_same(step, expected):
                return False
            expected = expected * size
    return True


def _resize(node: Node, rows: _Rows) -> None:
    if node.target in _VIEWS:
        shape = list(cast("Sequence[Any]", node.args[1]))
        shape[rows.dim] = rows.count
        node.args = (node.args[0], shape)
    elif node.target is _ATTENTION:
        node.args = tuple(False if place == 5 else value for place, value in enumerate(node.args))
        node.kwargs = {name: False if name == "is_causal" else value for name, value in node.kwargs.items()}


def narrow_all(regions: Sequence[Region], _room: CopyRoom) -> Iterator[list[ChangedRegion]]:
    """Yield narrowed copies of all regions: with queries, then without; none where all rows are read.

    A kernel may rotate queries in one launch with keys, which all tokens need: then queries are computed in full, and only the
    ops after attention are narrowed.
    """
    for with_queries in (True, False):
        changed = [narrow_rows(region, with_queries=with_queries) for region in regions]
        if any(one.changed or one.refusals for one in changed):
            yield changed


NARROW_ROWS = LayoutRewrite(id="narrow-rows", title="narrowed rows", change=narrow_all, suffix="rows")
