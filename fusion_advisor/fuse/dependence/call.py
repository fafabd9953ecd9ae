"""One op of a graph: its arguments by name, what is known of them, and results that are checked against their sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.fuse.dependence.kept import Axes, Expression, Kept, Long, Sign, Span, Stops
from fusion_advisor.runtime.torch_internals import symbolic_sizes

State = Kept | Stops | list[Kept]
"""Of a node that gives tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """The size that is padded.

    Attributes:
        name: of the dim.
        symbols: that are its size.
        others: symbols of sizes that stay. What is none of both is read off values, or made by an op of a size.
        replaced: expressions that are others.
    """

    name: str
    symbols: frozenset[Any]
    others: frozenset[Any]
    replaced: Mapping[Any, Any]

    def written(self, size: Any) -> Expression:
        """Return a size so that equal ones are written alike."""
        return symbolic_sizes.written_out(symbolic_sizes.expression_of(size), self.replaced)

    def grows(self, size: Expression) -> bool:
        """Whether a size may depend on the padded one."""
        return not symbolic_sizes.symbols_in(size) <= self.others

    def factors(self, size: Any) -> tuple[Any, ...]:
        """Return the factors of a dim that is one axis."""
        found = self.written(size)
        if self.grows(found):
            if not symbolic_sizes.symbols_in(found) <= self.symbols | self.others:
                raise Stops("makes a dim whose size only its values tell")
            if not symbolic_sizes.rises(found, self.symbols):  # then what is kept would not lie ahead of junk
                raise Stops(f"makes a dim of size {found}, which may shrink where `{self.name}` grows")
            return (Long(found),)
        return () if found == 1 else (found,)

    def difference(self, one: Expression, other: Expression) -> Expression | None:
        """Return by how much an axis is longer than another; None where that depends on the padded size."""
        found = self.written(one - other)
        return None if self.grows(found) else found


@dataclass(frozen=True, slots=True)
class Call:
    """An op with what is known of its arguments."""

    node: Node
    name: str
    padded: Padded
    states: Mapping[Node, State]
    given: Mapping[str, Any]

    @property
    def values(self) -> list[Any]:
        """The tensors that it gives, without their numbers."""
        value = self.node.meta.get("val")
        return list(value) if isinstance(value, tuple | list) else [value]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument as the graph has it."""
        return self.given.get(name, default)

    def number(self, name: str, default: Any = None) -> Any:
        """Return a number, or an expression, that is given as an argument."""
        return self.size(self.given.get(name, default))

    def size(self, value: Any) -> Any:
        """Return an argument's leaf as a number or an expression; a tensor's node is no number."""
        if isinstance(value, Node):
            value = value.meta.get("val")
        return self.padded.written(value) if isinstance(value, torch.SymInt) else value

    def rank(self, name: str) -> int:
        """Return how many dims a tensor argument has."""
        return int(self.given[name].meta["val"].dim())

    def tensor(self, name: str) -> Kept:
        """Return what is known of a tensor argument."""
        return self.state(self.given.get(name))

    def optional(self, name: str) -> Kept | None:
        """Return what is known of a tensor argument that may be left out."""
        return None if self.given.get(name) is None else self.tensor(name)

    def state(self, node: Any) -> Kept:
        """Return what is known of a tensor."""
        found = self.states.get(node) if isinstance(node, Node) else None
        if not isinstance(found, Kept):
            raise found if isinstance(found, Stops) else Stops("takes a value that no rule is for")
        return found

    def dim(self, name: str, rank: int, default: Any = None) -> int:
        """Return a dim, counted from the first."""
        found = self.given.get(name, default)
        return int(found) % rank if rank else 0

    def dims(self, name: str, rank: int) -> list[int]:
        """Return several dims, counted from the first; all where none are named."""
        found = self.given.get(name)
        if found is None or found == []:
            return list(range(rank))
        return sorted({int(one) % rank for one in (found if isinstance(found, list | tuple) else [found])})

    def plain(self, value: Any) -> Axes:
        """Return axes of a result each of whose dims is one axis."""
        return tuple(self.padded.factors(size) for size in value.shape)

    def made(self, kept: Kept, at: int = 0) -> Kept:
        """Return a result whose axes account for its sizes.

        Raises:
            Stops: they do not, so no rule covers the case.
        """
        shape = self.values[at].shape
        if len(shape) != len(kept.axes):
            raise Stops("has another number of dims than its rule knows")
        for size, factors in zip(shape, kept.axes, strict=True):
            product = 1
            for factor in factors:
                product = product * (factor.size if isinstance(factor, Long) else factor)
            whole = self.padded.written(size)
            grows = any(isinstance(factor, Long) for factor in factors)
            if grows != self.padded.grows(whole) or (grows and self.padded.written(product) != whole):
                raise Stops(f"makes a dim of size {whole} in a way that no rule covers")
        return kept


Rule = Callable[[Call], Kept | list[Kept]]


@dataclass(frozen=True, slots=True)
class Ruled:
    """A rule and which arguments it takes sizes in; a padded size anywhere else is used as a number."""

    rule: Rule
    sizes: Collection[str] = ()
    reads_shapes_alone: bool = False


def table(rows: Mapping[str, Ruled | Rule]) -> dict[str, Ruled]:
    """Return rules by name of the op: one line may name several."""
    found = {}
    for names, rule in rows.items():
        found.update(dict.fromkeys(names.split(), rule if isinstance(rule, Ruled) else Ruled(rule)))
    return found


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of an argument."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def joined(operands: Sequence[Kept]) -> tuple[Axes, list[dict[int, int]]]:
    """Return the axes of operands that are broadcast, and for each operand where its long axes are among them.

    Raises:
        Stops: a dim is laid out in two ways.
    """
    rank = max((len(one.axes) for one in operands), default=0)
    axes: list[tuple[Any, ...]] = []
    for dim in range(rank):
        own = [(one, one.axes[dim - rank + len(one.axes)]) for one in operands if dim - rank + len(one.axes) >= 0]
        found = {factors for one, factors in own if factors and one.fill is None}
        filled = {factors for one, factors in own if factors and one.fill is not None}
        grows = [factors for factors in (*found, *filled) if any(isinstance(factor, Long) for factor in factors)]
        if not grows:
            axes.append(next(iter((*found, *filled)), ()))
            continue
        if len(found) > 1:
            raise Stops("joins values whose dims are flattened in different ways")
        axes.append(next(iter(found or filled)))
    there = {place: ordinal for ordinal, place in enumerate(Kept(axes=tuple(axes)).places)}
    targets = []
    for one in operands:
        shift = rank - len(one.axes)
        targets.append({
            ordinal: there[dim + shift, at] for ordinal, (dim, at) in enumerate(one.places) if (dim + shift, at) in there
        })  # fmt: skip
    return tuple(axes), targets


def fixed(call: Call, operands: Sequence[Kept], value: Any) -> Kept:
    """Return what is known of a result of operands without a long axis: it is the same at both sizes."""
    rank = value.dim() if isinstance(value, torch.Tensor) else 0
    is_whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return Kept(
        axes=((),) * rank if value is None else call.plain(value), span=Span.FINITE if is_whole else Span.ANY, sign=Sign.ANY,
        is_copied=True, is_free=all(one.is_free for one in operands),
    )  # fmt: skip
