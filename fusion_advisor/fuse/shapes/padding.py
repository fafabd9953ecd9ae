"""Rounds sizes of a call up: the inputs with padding at their ends, and the part of the results that the call asked for.

A CUDA graph is of one exact shape. A call of another shape may run in the graph of the next capacity where padding was proved to
change no result (:mod:`fusion_advisor.fuse.shapes.proved_sizes`). The padding repeats the call's last row, token or frame: a
number that the call does not hold may be no place in a table, and a mask of zeros alone gives rows of NaN. Where that is not
proved, as each token of an encoder reads the later ones too, but is with zeros in the masks, masks are padded with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes, base_of, dim_size
from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion
from fusion_advisor.fuse.shapes.pieces import Box
from fusion_advisor.records import SizeRange
from fusion_advisor.runtime.torch_internals import symbolic_sizes

Fill = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Makes padding for a tensor: given the tensor, the dim that grows and by how much."""
_LEAST_STEP = {"batch": 1}
_USUAL_STEP = 8
"""Below this many tokens a step is as long as its launches, whatever its size."""


class CannotPad(Exception):
    """Sizes that a graph's inputs or results do not let grow; the text says why."""


def capacity(name: str, size: int) -> int:
    """Return the size that is rounded up to: four steps in each doubling, so that at most a fifth of it is padding.

    Args:
        name: of the dim: a batch grows by 1 at least, all else by 8.
        size: of the call.
    """
    least = _LEAST_STEP.get(name, _USUAL_STEP)
    step = max(least, 1 << max((size - 1).bit_length() - 3, 0))
    return -(-size // step) * step


def capacities(one: SizeRange) -> tuple[int, ...]:
    """Return all sizes that calls in a range are rounded up to, in rising order."""
    found: list[int] = []
    while not found or found[-1] < one.most:
        found.append(min(capacity(one.name, found[-1] + 1 if found else one.least), one.most))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadForm:
    """Where the sizes of a graph stand in its inputs and results.

    Attributes:
        numbers: places of the inputs that are a size, with its name.
        inputs: places of the tensors with open dims, with the name of each dim; empty for fixed ones.
        results: names of each result's dims and its layout by size; None for what is no tensor of open size.
        is_list: the graph gives a list.
        masks: places of the inputs that say which others count.
        masked: names of sizes along which these are padded with zeros.
    """

    numbers: Mapping[int, str]
    inputs: Mapping[int, tuple[str, ...]]
    results: tuple[tuple[tuple[str, ...], Callable[[Sizes], tuple[int, ...]]] | None, ...]
    is_list: bool
    masks: frozenset[int] = frozenset()
    masked: frozenset[str] = frozenset()

    def has_masks(self, name: str) -> bool:
        """Whether a mask grows with a size."""
        return any(name in self.inputs.get(slot, ()) for slot in self.masks)

    def pad(self, args: Sequence[Any], sizes: Sizes, fill: Fill | None = None) -> list[Any] | None:
        """Return the inputs at larger sizes; None where one is not contiguous.

        Args:
            args: of the graph.
            sizes: to be had.
            fill: of the padding; None: what is at the end of each dim, as calls are padded.
        """
        given = list(args)
        made: dict[tuple[int, tuple[str, ...], bool], torch.Tensor] = {}
        for slot, name in self.numbers.items():
            given[slot] = sizes[name]
        for slot, names in self.inputs.items():
            value = args[slot]
            if not value.is_contiguous():
                return None
            key = (id(value), names, slot in self.masks)
            if key not in made:
                zeros = {dim for dim, name in enumerate(names) if name in self.masked} if slot in self.masks else set[int]()
                made[key] = _padded(value, _shape(value.shape, names, sizes), fill, zeros)
            given[slot] = made[key]
        return given

    def cut(self, results: Any, sizes: Sizes) -> Any:
        """Return the results at the sizes of the call, with the strides that the call would have given them.

        Where only the first dim was padded that is a view of what the graph gave; else a copy.
        """
        values = [
            value if form is None else _cut(value, _shape(value.shape, form[0], sizes), form[1](sizes))
            for value, form in zip(results if self.is_list else [results], self.results, strict=True)
        ]
        return type(results)(values) if self.is_list else values[0]


def pad_form(opened: OpenCapture) -> PadForm:
    """Say where the sizes of a piece's graph stand.

    Raises:
        CannotPad: a dim is computed from sizes, or results share memory.
    """
    nodes = list(opened.region.graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    numbers: dict[int, str] = {}
    inputs: dict[int, tuple[str, ...]] = {}
    for slot, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            names = _names(opened, value, f"input `{node.name}`")
            if any(names):
                inputs[slot] = names
        elif symbolic_sizes.is_size(value):
            numbers[slot] = _name(opened, value, f"input `{node.name}`")
    (output,) = (node for node in nodes if node.op == "output")
    is_list = isinstance(output.args[0], tuple | list)
    results: list[tuple[tuple[str, ...], Callable[[Sizes], tuple[int, ...]]] | None] = []
    held = {key for node in placeholders for key in storages(node)}
    for result in output.args[0] if is_list else [output.args[0]]:
        value = result.meta.get("val") if isinstance(result, Node) else result
        if symbolic_sizes.is_size(value):
            raise CannotPad("a result is a size")
        if not isinstance(value, torch.Tensor):
            results.append(None)
            continue
        if held.intersection(storages(result)):
            raise CannotPad("a result shares memory with an input or with another result")
        held.update(storages(result))
        names = _names(opened, value, "a result")
        results.append((names, _strides(opened, value)) if any(names) else None)
    masks = {slot for slot in inputs if _is_mask(opened.region.names[slot], placeholders[slot].meta["val"])}
    return PadForm(numbers=numbers, inputs=inputs, results=tuple(results), is_list=is_list, masks=frozenset(masks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Sizes of a piece that may be rounded up.

    Attributes:
        names: of the sizes.
        form: where they stand.
        modules: the graphs of which it was proved, and that passed their runs.
    """

    names: tuple[str, ...]
    form: PadForm
    modules: tuple[GraphModule, ...]

    def larger(self, sizes: Sizes, box: Box) -> dict[str, int]:
        """Return the sizes that a call is rounded up to, inside a piece."""
        return rounded_up(sizes, self.names, box)

    def serves(self, module: GraphModule) -> bool:
        """Whether a graph may run padded calls."""
        return any(one is module for one in self.modules)


def rounded_up(sizes: Sizes, names: Sequence[str], box: Box) -> dict[str, int]:
    """Return sizes with the named ones at their capacity, or at the largest size of the piece."""
    most = {one.name: one.most for one in box}
    return {name: min(capacity(name, size), most[name]) if name in names else size for name, size in sizes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedCall:
    """What runs for one exact shape: its own graph once it has one, till then that of the next capacity.

    Attributes:
        exact: the region at the sizes of the call.
        larger: the same region at its capacity; all shapes that are rounded up to it share its graph.
        form: where the sizes stand.
        sizes: of the call.
        capacity: its sizes rounded up.
    """

    exact: GraphedRegion
    larger: GraphedRegion
    form: PadForm
    sizes: Sizes
    capacity: Sizes

    def __call__(self, *args: Any) -> Any:
        """Run the region on dynamo's inputs."""
        graphs, larger = self.exact.graphs, self.larger
        leaves = graphs.leaves_now()
        # The second call of a shape records its own graph, which has no padding to compute.
        is_launched = larger.refusal is not None or larger.is_too_large
        if leaves is None or graphs.is_recorded(self.exact) or not self.exact.waits or is_launched:
            return self.exact(*args)
        if not graphs.is_recorded(larger) and larger.waits:
            larger.waits -= 1
            return self.exact(*args)
        padded = self.form.pad(args, self.capacity)
        if padded is None:
            return self.exact(*args)
        self.exact.waits -= 1
        stand_ins = {id(args[slot]): padded[slot] for slot in self.form.inputs}
        given = [stand_ins.get(id(leaf), leaf) for leaf in leaves]
        return self.form.cut(graphs.region(larger, padded, given), self.sizes)


def listed(results: Any) -> list[Any]:
    """Return what a graph gives as a list: it may give one tensor."""
    return list(results) if isinstance(results, tuple | list) else [results]


def _is_mask(name: str, value: torch.Tensor) -> bool:
    """Whether an input is taken for a mask: what zeros in it do is shown by running it."""
    return "mask" in name and not value.is_floating_point()


def _padded(value: torch.Tensor, shape: tuple[int, ...], fill: Fill | None, zeros: Collection[int]) -> torch.Tensor:
    with torch.inference_mode(False):  # the graph's own tensors are used in both modes
        larger = value.new_empty(shape)
    filled = larger[tuple(slice(0, size) for size in value.shape)]
    filled.copy_(value)
    for dim, (size, most) in enumerate(zip(value.shape, shape, strict=True)):
        if size < most:
            before, filled = filled, larger[tuple(slice(0, one) for one in (*shape[: dim + 1], *value.shape[dim + 1 :]))]
            padding = filled.narrow(dim, size, most - size)
            if dim in zeros:
                padding.zero_()
            else:
                padding.copy_(before.narrow(dim, size - 1, 1) if fill is None else fill(before, dim, most - size))
    return larger


def _cut(value: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    part = value[tuple(slice(0, size) for size in shape)]
    if all(size == 1 or own == asked for size, own, asked in zip(shape, part.stride(), strides, strict=True)):
        return part.as_strided(shape, strides)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(part)


def _shape(shape: Sequence[int], names: Sequence[str], sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[name] if name else size for size, name in zip(shape, names, strict=True))


def _names(opened: OpenCapture, value: torch.Tensor, what: str) -> tuple[str, ...]:
    return tuple("" if isinstance(size, int) else _name(opened, size, what) for size in value.shape)


def _name(opened: OpenCapture, size: Any, what: str) -> str:
    symbol = symbolic_sizes.symbol_of(size)
    name = opened.names.get(symbol, "")
    if not name or base_of(name) != name:
        raise CannotPad(f"a dim of {what} is computed from sizes ({symbolic_sizes.expression_of(size)})")
    return name


def _strides(opened: OpenCapture, value: torch.Tensor) -> Callable[[Sizes], tuple[int, ...]]:
    steps = tuple(symbolic_sizes.expression_of(step) for step in value.stride())
    names = dict(opened.names)

    @functools.lru_cache(maxsize=4096)
    def of(sizes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        known = dict(sizes)
        symbols = {symbol: dim_size(name, known) for symbol, name in names.items()}
        return tuple(symbolic_sizes.at_sizes(step, symbols) for step in steps)

    return lambda sizes: of(tuple(sizes.items()))
