"""One graph for all sizes of a range: dynamo keeps the dims that vary open and says what it took for granted of them.

The graph is traced once, on a call of some size. What was assumed of the sizes (a branch on the length, a table that ends) stands
in its guards. ``one_size`` makes of it the graph of one size, node for node: chains are found and lowered there, and a chain's
ops have the same numbers at every size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.graph.tracer import LiveCapture, Region, Run, capture_regions
from fusion_advisor.capture.layout_trial import drop_layouts
from fusion_advisor.capture.sizes.size_nodes import let_nodes_stand_for_sizes, put_input_numbers_in
from fusion_advisor.capture.sizes.whole_slices import drop_whole_slices
from fusion_advisor.errors import CannotCapture
from fusion_advisor.runtime.call_tensors import copied, tensors_in
from fusion_advisor.runtime.torch_internals import dynamo, symbolic_sizes

Dims = Mapping[str, tuple[str, ...]]
"""By path of a tensor of the call (``input_ids``, ``args.0``) the name of each of its dims; an empty name is a fixed dim.

``cached+1`` is a dim that is one longer than the dim ``cached``: a mask over a KV cache and the token that comes to it.
"""
Sizes = Mapping[str, int]
"""By name of a dim its size."""


class OneSizeOnly(Exception):
    """A capture that serves one size alone; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCapture:
    """A call's graph with open sizes.

    Attributes:
        live: the capture, of one region.
        sizes: of the call that was traced.
        names: the name of the dim that each of dynamo's symbols is the size of.
        guards: expressions that must be true of the sizes.
        environment: dynamo's, where every symbol lives; None where all sizes are fixed.
        numbers: by place of a graph input the number that was written into the graph for it.
        call: (args, kwargs) that were traced, with tensors of their own.
        dims: names of its tensors' dims.
    """

    live: LiveCapture
    sizes: Sizes
    names: Mapping[Any, str]
    guards: tuple[Any, ...]
    environment: Any
    numbers: Mapping[int, float] = field(default_factory=dict)
    call: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
    dims: Dims = field(default_factory=dict)

    @property
    def region(self) -> Region:
        """The one region."""
        return self.live.regions[0]

    def as_captured(self) -> OpenCapture:
        """Return the same with the graph as it is now, whatever takes its place here."""
        return replace(self, live=replace(self.live, regions=[*self.live.regions]))

    def symbols(self, sizes: Sizes) -> dict[Any, int]:
        """Return the size of each of dynamo's symbols."""
        return {symbol: dim_size(name, sizes) for symbol, name in self.names.items()}

    def dims_of_symbols(self) -> dict[Any, Any]:
        """Return each of dynamo's symbols as an expression of dims: tensors may each have a symbol for one dim."""
        return {symbol: dim_expression(name) for symbol, name in self.names.items()}

    def symbols_of(self, name: str) -> frozenset[Any]:
        """Return the symbols of the sizes that a dim is, or that are counted from it."""
        return frozenset(symbol for symbol, dim in self.names.items() if base_of(dim) == name)

    def symbols_now(self) -> dict[Any, int]:
        """Return the size of each of dynamo's symbols in the call that was traced."""
        return self.symbols(self.sizes)

    def holds(self, sizes: Sizes) -> bool:
        """Whether all that dynamo took for granted is true of other sizes."""
        return _hold(self.guards, self.symbols(sizes))

    def holds_alone(self, name: str, size: int) -> bool:
        """Whether what was taken for granted of one dim alone is true of a size."""
        own = {symbol: dim_size(dim, {name: size}) for symbol, dim in self.names.items() if base_of(dim) == name}
        return _hold([one for one in self.guards if symbolic_sizes.symbols_in(one) <= set(own)], own)

    def holds_but_for_holes(self, sizes: Sizes) -> bool:
        """Whether all is true of other sizes but that certain combinations of them were ruled out (height x width != 16)."""
        ranges = [one for one in self.guards if len(symbolic_sizes.symbols_in(one)) < 2 or not symbolic_sizes.is_inequation(one)]
        return _hold(ranges, self.symbols(sizes))

    def written_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Written:
        """Return what a call of other sizes writes to: the same tensors by name, as they are now."""
        tensors, then = call_tensors(args, kwargs), self.live.written
        live = {name: tensors[name] for name in then.tensors}
        return Written(tensors=live, before={name: tensor.clone() for name, tensor in live.items()}, moving=then.moving)

    def places(self) -> dict[str, Node]:
        """Return the node that each open dim's size is the value of: a graph input, or what reads it off a tensor."""
        found: dict[str, Node] = {}
        for node in self.region.graph.graph.nodes:
            symbol = symbolic_sizes.symbol_of(node.meta.get("val"))
            if symbol in self.names and base_of(self.names[symbol]) == self.names[symbol]:
                found.setdefault(self.names[symbol], node)
        return found

    def slots(self) -> dict[str, tuple[int, int | None]]:
        """Return, for each open dim, which of the graph's inputs tells its size, and which dim of a tensor; None: a number."""
        inputs = [node for node in self.region.graph.graph.nodes if node.op == "placeholder"]
        found: dict[str, tuple[int, int | None]] = {}
        for name, node in self.places().items():
            is_input = node.op == "placeholder"
            source, dim = (node, None) if is_input else (node.args[0], node.args[1])
            assert isinstance(source, Node)
            assert dim is None or isinstance(dim, int)
            found[name] = inputs.index(source), dim
        return found


def base_of(name: str) -> str:
    """Return the dim that a name is counted from: ``cached`` for ``cached+1``."""
    return name.partition("+")[0]


def dim_size(name: str, sizes: Sizes) -> int:
    """Return the size of a dim, ``cached+1`` among them."""
    base, _, more = name.partition("+")
    return sizes[base] + int(more or 0)


def dim_expression(name: str) -> Any:
    """Return the size of a dim as an expression, in which all that are counted from one dim have its one symbol."""
    _, _, more = name.partition("+")
    return sympy.Symbol(base_of(name), positive=True, integer=True) + int(more or 0)


def _hold(guards: Sequence[Any], symbols: Mapping[Any, int]) -> bool:
    return all(symbolic_sizes.at_sizes(guard, symbols) for guard in guards)


def call_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a call by path: ``input_ids``, ``args.0``."""
    found = dict(tensors_in("args", list(args)))
    for name, value in kwargs.items():
        found.update(tensors_in(name, value))
    return found


def sizes_of(tensors: Mapping[str, torch.Tensor], dims: Dims) -> dict[str, int] | None:
    """Return the size of each named dim of a call; None where tensors disagree or one has another rank."""
    found: dict[str, int] = {}
    for path, names in dims.items():
        tensor = tensors.get(path)
        if tensor is None or tensor.dim() != len(names):
            return None
        for name, size in zip(names, tensor.shape, strict=True):
            base = base_of(name)
            own = size - dim_size(name, {base: 0})
            if name and found.setdefault(base, own) != own:
                return None
    return found


def capture_open(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dims: Dims,
    *,
    model_id: str = "model",
    with_lines: bool = False,
) -> OpenCapture:
    """Capture a call with the named dims of its tensors open, those of size 1 excepted.

    Args:
        model: called as ``model(*args, **kwargs)``.
        args: of a call; a dim that is of size 1 in it is fixed.
        kwargs: of the same call.
        dims: names of the dims.
        model_id: for errors.
        with_lines: note the source line of each op, for reasons that name one.

    Raises:
        OneSizeOnly: the model fixes a size, the call is several graphs, or it writes to a buffer.
        CannotCapture: dynamo captured nothing.
    """
    try:
        return _capture_open(model, args, kwargs, dims, model_id=model_id, with_lines=with_lines)
    except _OpenSlice:
        return _capture_open(model, args, kwargs, dims, model_id=model_id, with_lines=with_lines, takes_ones=False)


class _OpenSlice(OneSizeOnly):
    """A slice whose length torch does not compute where sizes may be 1: before torch 2.12 that of the last tokens, say."""


def _capture_open(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Dims, *, model_id: str, with_lines: bool,
    takes_ones: bool = True,
) -> OpenCapture:  # fmt: skip
    """Capture a call; without ``takes_ones`` no open size may be 1, and torch asks what decides a slice's length."""
    args, kwargs = copied((args, dict(kwargs)), lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    tensors = call_tensors(args, kwargs)
    sizes = sizes_of(tensors, dims)
    if sizes is None:
        raise OneSizeOnly("tensors of the call disagree on the size of a dim")
    for path, names in dims.items():
        symbolic_sizes.leave_open(tensors[path], [n for n, name in enumerate(names) if name and sizes[base_of(name)] > 1])
    try:
        sizes_of_one = symbolic_sizes.ones_among_the_sizes() if takes_ones else contextlib.nullcontext()
        with dynamo.without_logged_guard_errors(), sizes_of_one:
            live = capture_regions(model, args, kwargs, model_id=model_id, with_lines=with_lines)
    except CannotCapture as error:
        why = _why_one_size(error)
        if why is None:
            raise
        raise OneSizeOnly(why) from error
    except Exception as error:
        why = symbolic_sizes.why_fixed(error)
        if why is None:
            raise
        raise OneSizeOnly(why) from error
    drop_layouts(live)  # nobody times what they change, and a piece of one size has the ops that a piece of open sizes has
    for region in live.regions:
        drop_whole_slices(region.graph)
    if not live.is_whole():
        raise OneSizeOnly(f"the call is {len(live.in_order())} graphs, and its Python between them may look at sizes")
    made = _made_ahead(model, live.regions[0], tensors.values())
    if made:
        raise OneSizeOnly(f"the model's Python makes `{made}` ahead of the graph, and may look at sizes")
    others = [name for name in live.written.tensors if name not in tensors]
    if others:
        raise OneSizeOnly(f"the call writes to `{others[0]}`, which the model keeps")
    opened = _named(live, sizes, dims, {id(tensor): path for path, tensor in tensors.items()})
    if not takes_ones:
        opened = replace(opened, guards=(*opened.guards, *(symbol >= 2 for symbol in opened.names)))
    return replace(opened, call=(args, kwargs), dims=dims)


def _made_ahead(model: torch.nn.Module, region: Region, given: Iterable[torch.Tensor]) -> str:
    """Name a tensor that Python of the model's own makes, where dynamo began after it; empty where there is none."""
    if dynamo.begins_with(model, region.code[0]):
        return ""
    known = {*map(id, given)}
    inputs = zip(region.names, region.roles, region.example_args, strict=True)
    others = (name for name, role, one in inputs if role == "input" and isinstance(one, torch.Tensor) and id(one) not in known)
    return next(others, "")


def opened_by_dynamo(region: Region) -> OpenCapture:
    """Return a graph that dynamo handed over with open sizes; each symbol is a dim of its own name, and dynamo keeps the guards.

    Args:
        region: with the tensors of a call.

    Raises:
        OneSizeOnly: a size is not read off its inputs alone.
    """
    live = LiveCapture(regions=[region], runs=[Run(0, tuple(region.example_args))])
    drop_layouts(live)
    drop_whole_slices(region.graph)
    values = [node.meta.get("val") for node in region.graph.graph.nodes if node.op == "placeholder"]
    sizes: dict[str, int] = {}
    names: dict[Any, str] = {}
    for value, given in zip(values, region.example_args, strict=True):
        pairs = zip(value.shape, given.shape, strict=True) if isinstance(value, torch.Tensor) else [(value, given)]
        for size, number in pairs:
            symbol = symbolic_sizes.symbol_of(size)
            if symbol is not None:
                names[symbol] = str(symbol)
                sizes[str(symbol)] = int(number)
    numbers = put_input_numbers_in(region.graph, region.example_args)
    let_nodes_stand_for_sizes(region.graph)
    environment = symbolic_sizes.environment_of([value for value in values if value is not None])
    return OpenCapture(live=live, sizes=sizes, names=names, guards=(), environment=environment, numbers=numbers)


def _why_one_size(error: CannotCapture) -> str | None:
    cause = error.__cause__
    return symbolic_sizes.why_fixed(cause) if isinstance(cause, Exception) else None


def _named(live: LiveCapture, sizes: Sizes, dims: Dims, paths: Mapping[int, str]) -> OpenCapture:
    """Say which dim each symbol is the size of.

    Raises:
        OneSizeOnly: a dim has become a number, or a symbol is no dim's size.
    """
    region = live.regions[0]
    names: dict[Any, str] = {}
    inputs = [node for node in region.graph.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in inputs]
    for value, given in zip(values, region.example_args, strict=True):
        path = paths.get(id(given))
        if path is None or not isinstance(value, torch.Tensor):
            continue
        for name, size in zip(dims.get(path, ()), value.shape, strict=False):
            symbol = symbolic_sizes.symbol_of(size)
            if symbol is not None and names.setdefault(symbol, name) != name:
                raise OneSizeOnly(f"the model takes {names[symbol]} and {name} for one size")
            if isinstance(size, int) and name and sizes[base_of(name)] > 1:
                raise OneSizeOnly(f"the model fixes {name} to {dim_size(name, sizes)}")
    for value in values:
        symbol = symbolic_sizes.symbol_of(value)
        if symbol is not None and symbol not in names:
            raise OneSizeOnly(f"a size of the graph ({symbol}) is the size of no dim that may vary")
    counted = _not_of_sizes(region, names)
    if counted is not None:
        kind = _OpenSlice if counted.target is torch.ops.aten.slice.Tensor else OneSizeOnly
        raise kind(f"the sizes of `{counted.name}` do not follow from the sizes of the call")
    environment = symbolic_sizes.environment_of([value for value in values if value is not None])
    let_nodes_stand_for_sizes(region.graph)
    assumed = () if environment is None else (*symbolic_sizes.guards_of(environment), *_kept_by_squeezes(region))
    guards = _on_named(assumed, environment, names)
    return OpenCapture(live=live, sizes=dict(sizes), names=names, guards=guards, environment=environment)


def _not_of_sizes(region: Region, names: Mapping[Any, str]) -> Node | None:
    """Return an op with a size that is counted from values, or that the trace leaves open; None where there is none."""
    for node in region.graph.graph.nodes:
        for value in tensors_of(node.meta.get("val")):
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            open_sizes = [symbolic_sizes.expression_of(size) for size in sizes if not isinstance(size, int)]
            if any(not symbolic_sizes.symbols_in(one) <= names.keys() for one in open_sizes):
                return node
    return None


_SQUEEZES = {torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


def _kept_by_squeezes(region: Region) -> Iterator[Any]:
    """Yield what ``squeeze`` takes for granted of sizes: an open one is not 1. Torch does not guard it where 1 is a size."""
    for node in region.graph.graph.nodes:
        if node.target in _SQUEEZES:
            shape = node.args[0].meta["val"].shape
            dims = node.args[1] if len(node.args) > 1 else range(len(shape))
            sizes = [shape[dim] for dim in ([dims] if isinstance(dims, int) else dims)] if shape else []
            yield from (symbolic_sizes.is_not_one(size) for size in sizes if symbolic_sizes.is_size(size))


def _on_named(guards: Sequence[Any], environment: Any, names: Mapping[Any, str]) -> tuple[Any, ...]:
    """Return the guards in symbols that have a name: dynamo notes those of equal sizes on symbols that it then replaces.

    Raises:
        OneSizeOnly: a guard is on something else.
    """
    found = []
    for assumed in guards:
        guard = assumed.xreplace(environment.replacements)
        if guard in (True, False) or (guard.is_Boolean and not guard.free_symbols):
            continue
        if not guard.free_symbols <= set(names):
            raise OneSizeOnly(f"what it takes for granted ({guard}) is on more than the sizes that may vary")
        found.append(guard)
    return tuple(dict.fromkeys(found))
