"""Open sizes of a call: which they are, off which tensor each is read, and the same sizes in another process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes, dim_size
from fusion_advisor.fuse.start.call_tensors import Given
from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.fuse.start.guard_tree import Differs
from fusion_advisor.records import SizeRange
from fusion_advisor.runtime.torch_internals import stored_sizes, symbolic_sizes
from fusion_advisor.runtime.torch_internals.stored_sizes import OpenSizes

Source = int | str | list[int]
"""What an input of a graph is: the place of a tensor of the call, the name of one of the model's, or [place, dim] of a size."""
Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""(args, kwargs)."""
CallAt = Callable[[Sizes], tuple[tuple[Any, ...], dict[str, Any]]]
"""Makes a new call of some sizes."""


@dataclass(frozen=True, slots=True)
class DescribedSizes:
    """The open sizes of a call that was traced.

    Attributes:
        symbols: dynamo's.
        places: of each the place of a tensor of the call, and the dim whose size it is.
        open_at: by ``id`` of a tensor, the dims whose sizes and the dims whose strides are open.
        data: the same as plain data, for another process; None where no size is open.
    """

    symbols: list[Any] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    open_at: Mapping[int, list[list[int]]] = field(default_factory=dict)
    data: Any = None

    def place_of(self, size: torch.SymInt) -> list[int]:
        """Return where a size is read.

        Raises:
            CannotDescribe: it is computed from others.
        """
        symbol = symbolic_sizes.symbol_of(size)
        if symbol not in self.symbols:
            raise CannotDescribe(f"an input of its graph is the size {size}")
        return self.places[self.symbols.index(symbol)]


def described_sizes(opened: OpenCapture | None, given: Given) -> DescribedSizes:
    """Describe the open sizes of a call.

    Args:
        opened: the capture; None, or one whose sizes are all fixed, has none.
        given: what the call passes.

    Raises:
        CannotDescribe: a size is not read off a tensor of the call.
    """
    if opened is None or opened.environment is None:
        return DescribedSizes()
    inputs = [node.meta.get("val") for node in opened.region.graph.graph.nodes if node.op == "placeholder"]
    known = {id(value): meta for value, meta in zip(opened.region.example_args, inputs, strict=True)}
    symbols = list(opened.names)
    places: dict[Any, list[int]] = {}
    open_at: dict[int, list[list[int]]] = {}
    for place, tensor in enumerate(given.tensors):
        meta = known.get(id(tensor))
        if not isinstance(meta, torch.Tensor):
            continue
        numbers = (meta.shape, meta.stride())
        open_at[id(tensor)] = [[dim for dim, one in enumerate(row) if symbolic_sizes.is_size(one)] for row in numbers]
        for dim, size in enumerate(meta.shape):
            places.setdefault(symbolic_sizes.symbol_of(size), [place, dim])
    missing = [opened.names[symbol] for symbol in symbols if symbol not in places]
    if missing:
        raise CannotDescribe(f"the size {missing[0]} is read off no tensor of the call")
    read_at = [places[symbol] for symbol in symbols]
    data = {
        "names": [opened.names[symbol] for symbol in symbols],
        "places": read_at,
        "bounds": [list(symbolic_sizes.range_of(opened.environment, symbol)) for symbol in symbols],
        "guards": [_plain(guard, symbols) for guard in opened.guards],
    }
    return DescribedSizes(symbols, read_at, open_at, data)


def _plain(expression: Any, symbols: Sequence[Any]) -> Any:
    try:
        return stored_sizes.plain(expression, symbols)
    except ValueError as error:
        raise CannotDescribe(str(error)) from error


def sizes_from(data: Mapping[str, Any] | None, sizes: Sizes, tensors: Sequence[torch.Tensor]) -> OpenSizes | None:
    """Return the open sizes of a call in this process.

    Args:
        data: of :class:`DescribedSizes`, or from whoever wrote the file.
        sizes: of a call's dims, by name.
        tensors: of that call.

    Raises:
        Differs: the call has other sizes.
        LookupError, TypeError, ValueError: the data are none of ours.
    """
    if data is None:
        return None
    now = [dim_size(name, sizes) for name in data["names"]]
    found = [tensors[place].shape[dim] for place, dim in data["places"]]
    if now != found:
        raise Differs(f"the call's sizes are {found}, and were {now}")
    return stored_sizes.open_sizes(now, data["bounds"], data["guards"])


def other_sizes(opened: OpenCapture, box: Sequence[SizeRange]) -> Sizes | None:
    """Return sizes of a piece of which each is another one than in the captured call, where it may vary; None: none were found.

    Args:
        opened: the piece's capture.
        box: its sizes.
    """
    choices = []
    for one in box:
        near = (one.least, one.least + 1, one.most, one.most - 1)
        usual = [size for size in dict.fromkeys(near) if one.least <= size <= one.most and size != opened.sizes[one.name]]
        choices.append(usual if one.least < one.most else [one.least])
    every = (dict(zip((one.name for one in box), sizes, strict=True)) for sizes in itertools.product(*choices))
    return next(filter(opened.holds, every), None)
