"""Serves calls of any size in a range: which piece a call belongs to, and which rewrites run there.

Everything about the call but its open dims must be as it was in the example: names, dtypes, devices, other sizes, plain values.
Open tensors must be contiguous. A call is looked at once for each exact shape; the fused model keeps the answer.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.tracer import DynamoCall, Route, writes_to_inputs
from fusion_advisor.capture.sizes.open_capture import Dims, Sizes, call_tensors, sizes_of
from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.cuda_graph.segmented_region import Cutter
from fusion_advisor.fuse.direct.direct_call import Shortcut
from fusion_advisor.fuse.plan.size_ranges import CACHED
from fusion_advisor.fuse.shapes.call_form import CallParts, Row, has_odd_strides, laid_out, odd_tensor, pattern_of, sizes_in
from fusion_advisor.fuse.shapes.padding import PaddedCall, Padding
from fusion_advisor.fuse.shapes.pieces import Box, Piece, Served, contains, hold_ones
from fusion_advisor.fuse.shapes.size_values import compute_ahead
from fusion_advisor.fuse.start.untraced_call import TracedAgain, UntracedCall
from fusion_advisor.records import SizeRange

Wrap = Callable[[GraphModule, tuple[str, ...]], GraphedRegion]


@dataclass(slots=True, weakref_slot=True, eq=False)
class ServedPiece:
    """A piece in service.

    Attributes:
        box: its sizes.
        compiled: the model's call as dynamo compiled it for the piece; None where the original ops run, or nothing was traced.
        route: what that call runs in place of the graph.
        slots: by name which of the graph's inputs tells the size, and in which dim of a tensor; None: the number itself.
        points: what runs near which sizes.
        names: of the graph's inputs.
        refusal: why the original ops run.
        code: of every function that dynamo looked through.
        holds: whether what dynamo took for granted is true of sizes in the box; None where it is of all.
        writes: it writes to what it is given.
        padding: sizes that may be rounded up to share a CUDA graph; None: each shape has its own.
        untraced: makes the call where the piece's graph was read from a file.
        growing: symbols of the sizes that grow from call to call.
        cutter: lets parts of its calls run as CUDA graphs; None where none may.
        masks: places of inputs that are looked at: calls in which they hold ones alone may have graphs of their own.
        symbols: returns the numbers that the symbols of its graph stand for, given the sizes of a call.
    """

    box: Box
    compiled: DynamoCall | None
    route: Route | None
    slots: Mapping[str, tuple[int, int | None]]
    points: tuple[Served, ...]
    names: tuple[str, ...] = ()
    refusal: str = ""
    code: tuple[CodeType, ...] = ()
    holds: Callable[[Sizes], bool] | None = None
    writes: bool = False
    padding: Padding | None = None
    untraced: UntracedCall | None = None
    growing: frozenset[Any] = frozenset()
    cutter: Cutter | None = None
    masks: tuple[int, ...] = ()
    symbols: Callable[[Sizes], Mapping[Any, int]] | None = None
    _wrap: Wrap | None = None
    _shortcut: Shortcut | UntracedCall | None = None
    _traced_anew: int = 0
    _runners: dict[tuple[tuple[int, ...], bool], Callable[..., Any]] = field(default_factory=dict)
    _graphed: dict[tuple[tuple[int, ...], GraphModule], GraphedRegion] = field(default_factory=dict)

    def at(self, sizes: Sizes) -> Served:
        """Return what runs at some sizes."""
        return min(self.points, key=lambda point: point.distance(sizes))

    def start(
        self, model: torch.nn.Module, wrap: Wrap | None, other: Callable[..., Any], on_trace: Callable[[str], object],
        graphs: Graphs | None = None,
    ) -> None:  # fmt: skip
        """Let the compiled call run the rewritten graphs.

        Args:
            model: whose call it is.
            wrap: makes of a graph what is called for one exact shape: it may be recorded as a CUDA graph. None: it is called.
            other: the backend for graphs that dynamo traces where its guards no longer hold.
            on_trace: takes the reason where a piece that started without a trace has to be traced for a call.
            graphs: keep recorded segments of calls that are not recorded as a whole.
        """
        self._wrap = wrap
        is_cut = wrap is None and any(point.in_segments for point in self.points)
        self.cutter = Cutter(graphs, self.growing) if is_cut and graphs is not None else None
        self._runners.clear()
        self._graphed.clear()
        if self.route is not None:
            self.route.forward = _while_alive(self)
        if self.untraced is not None:
            self.untraced.otherwise = TracedAgain(model, self.untraced, other, on_trace)
            self._shortcut = self.untraced
        elif self.compiled is not None and self.route is not None:
            self.compiled.later = functools.partial(self._trace_anew, other)
            self._shortcut = Shortcut(model, self.compiled.call, [self.route], lambda: self._traced_anew)

    def _trace_anew(self, other: Callable[..., Any], *traced: Any) -> Callable[..., Any]:
        """Count the graphs that dynamo traces where its guards no longer hold."""
        self._traced_anew += 1
        forward: Callable[..., Any] = other(*traced)
        return forward

    def forward(self, *args: Any) -> Any:
        """Run the graph of the piece."""
        key = tuple(args[slot] if dim is None else args[slot].shape[dim] for slot, dim in self.slots.values())
        is_unmasked = bool(self.masks) and hold_ones(args, self.masks)
        run = self._runners.get((key, is_unmasked))
        if run is None:
            if len(self._runners) >= _MOST_RUNNERS:
                self._runners.clear()
                self._graphed.clear()
            run = self._runners[key, is_unmasked] = self._runner(key, is_unmasked=is_unmasked)
        return run(*args)

    def _runner(self, key: tuple[int, ...], *, is_unmasked: bool) -> Callable[..., Any]:
        """Return what runs at a shape."""
        sizes = self._sizes(key)
        point = self.at(sizes)
        module = point.unmasked if is_unmasked and point.unmasked is not None else point.graph_at(key)
        if self.cutter is not None and point.in_segments:
            fixed = tuple(size for name, size in sizes.items() if name != CACHED)
            return self.cutter.region(module, self.names, fixed) or module.forward
        if self._wrap is None:
            return module.forward
        exact, padding = self._region(key, module), self.padding
        if padding is None or module is point.unmasked or not padding.serves(module):  # padding is masked
            return exact
        larger = padding.larger(sizes, self.box)
        if larger == sizes or (self.holds is not None and not self.holds(larger)):
            return exact
        place = tuple(larger[name] for name in self.slots)
        if self.at(larger).module is None or self.at(larger).graph_at(place) is not module:
            return exact
        return PaddedCall(
            exact=exact, larger=self._region(place, module), form=padding.form, sizes=sizes, capacity=larger
        )  # fmt: skip

    def _region(self, key: tuple[int, ...], module: GraphModule) -> GraphedRegion:
        """Return what may be recorded for a shape: one for calls of it and for those that are rounded up to it."""
        if (key, module) not in self._graphed:
            assert self._wrap is not None
            assert self.symbols is not None  # a piece that is called has a graph
            compute_ahead(module, self.symbols(self._sizes(key)))
            self._graphed[key, module] = self._wrap(module, self.names)
        return self._graphed[key, module]

    def _sizes(self, key: tuple[int, ...]) -> dict[str, int]:
        return {**{one.name: one.least for one in self.box}, **dict(zip(self.slots, key, strict=True))}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: through dynamo's guards, or past dynamo where nothing in the model was replaced."""
        return self.call_with(args, kwargs)

    def call_with(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[torch.Tensor] = (), objects: Sequence[Any] = ()
    ) -> Any:
        """Call the model as :meth:`call` does, with what is known of its arguments.

        Args:
            args: of the call.
            kwargs: of the call.
            leaves: tensors that it passes as such.
            objects: what is remembered of the others that it passes: one that comes again is compared in bulk.
        """
        assert self._shortcut is not None  # a piece is started before it serves
        return self._shortcut(args, kwargs, leaves, objects)

    def forget(self) -> None:
        """Hold nothing of the model that only a call past dynamo needs."""
        if self._shortcut is not None:
            self._shortcut.forget()


def serving(piece: Piece, points: Sequence[Served], padding: Padding | None = None) -> ServedPiece:
    """Return a piece that is ready to serve.

    Args:
        piece: with its graph; without one the original ops run, with its reason or the points'.
        points: what runs near which sizes.
        padding: sizes that may be rounded up.
    """
    opened = piece.opened
    if opened is None:
        return ServedPiece(box=piece.box, compiled=None, route=None, slots={}, points=tuple(points), refusal=piece.refusal)
    region = opened.region
    return ServedPiece(
        box=piece.box, compiled=opened.live.compiled, untraced=opened.live.untraced, route=region.route, slots=opened.slots(),
        points=tuple(points), names=region.names, code=region.code, holds=opened.holds if opened.guards else None,
        writes=writes_to_inputs(region), padding=padding, growing=opened.symbols_of(CACHED),
        masks=tuple(sorted({place for point in points for place in point.masks})),
        symbols=opened.symbols,
    )  # fmt: skip


_MOST_RUNNERS = 1024
MOST_CALLS = 4096
"""Signatures that are remembered."""
_MOST_CACHES = 256
"""Signatures of calls with a growing cache: each is of some hundred tensors."""
_MOST_FORMS = 64


@dataclass(slots=True, eq=False)
class VerifiedCall:
    """A call that was verified: one for each signature.

    Attributes:
        sharing: which of its tensors share memory, where its graphs write to what they are given (a KV cache): such a call cannot
            be started over, and what it reads before a write must not lie in what is written.
        is_in_place: dynamo has handed over its graphs.
        piece: of a range of sizes that serves it; None where it was verified by itself.
        may_record: it may run as a CUDA graph.
        lays_out: its tensors are given the strides of new ones first, for dynamo guards the strides of dims of size 1 too.
        shortcut: runs what dynamo compiled for it, without dynamo where it can; None until dynamo has handed over its graphs.
    """

    sharing: tuple[int, ...] | None = None
    is_in_place: bool = False
    piece: ServedPiece | None = None
    may_record: bool = True
    lays_out: bool = False
    shortcut: Shortcut | UntracedCall | None = None


class ShapeTable:
    """All pieces of one way to call a model.

    Attributes:
        example: (args, kwargs) of one call.
        pieces: in the order of the report.
        may_record: whether its calls may run as CUDA graphs: not where each is given new tensors of a cache.
        most_result_bytes: of results that such a graph may hold; None: any.
        sharing: which tensors of a call share memory, where its graphs write to what they are given; None: they do not write.
    """

    def __init__(
        self, ranges: Sequence[SizeRange], dims: Dims, pieces: Sequence[ServedPiece], example: Any, *, may_record: bool = True,
        most_result_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Remember what must be equal in each call.

        Args:
            ranges: of all sizes.
            dims: names of the call's dims.
            pieces: that make up the ranges.
            example: (args, kwargs) of one call.
            may_record: whether its calls may run as CUDA graphs.
            most_result_bytes: of results that such a graph may hold.
        """
        self.example = example
        self.ranges = tuple(ranges)
        self.pieces = tuple(pieces)
        self.may_record = may_record
        self.most_result_bytes = most_result_bytes
        self._dims = dims
        args, kwargs = example
        self._like = pattern_of(args, kwargs, dims)
        self._like_form = pattern_of(args, kwargs, None)
        self._forms: dict[Any, tuple[Row, ...] | None] = {}
        self.sharing: tuple[int, ...] | None = None
        self._known: dict[Any, VerifiedCall | str] = {}
        """By signature: a call that is served, or why it is not."""

    @property
    def writes(self) -> bool:
        """Whether a call writes to what it is given."""
        return any(piece.writes for piece in self.pieces)

    @property
    def modules(self) -> list[GraphModule]:
        """All rewritten graphs, each once."""
        found = [module for piece in self.pieces for point in piece.points for module in point.modules]
        return list({id(module): module for module in found}.values())

    def regions_in(self, graphs: Graphs | None) -> Wrap | None:
        """Return what makes of a graph what may be recorded for one exact shape; None where calls are not recorded as a whole."""
        if graphs is None or not self.may_record:
            return None
        return functools.partial(GraphedRegion, graphs=graphs, most_result_bytes=self.most_result_bytes, is_bounded=True)

    def look_up(
        self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: Callable[[], CallParts] | None = None
    ) -> VerifiedCall | str:
        """Return a call that the ranges serve, or why they do not; the call is looked at once for its signature.

        Args:
            key: its signature.
            args: of the call.
            kwargs: of the call.
            parts: returns those of its signature; without them the whole call is looked through.
        """
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= (MOST_CALLS if self.may_record else _MOST_CACHES):
                self._known.clear()
            piece = self.find(args, kwargs) if parts is None else self._find_by_form(parts(), args, kwargs)
            found = self._known[key] = piece if isinstance(piece, str) else self._verified(piece, args, kwargs, parts)
        return found

    def _verified(
        self, piece: ServedPiece, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: Callable[[], CallParts] | None
    ) -> VerifiedCall | str:
        """Return a call of a piece; or why dynamo would trace it, though it fits: a cache of one KV head that was cut."""
        layouts = () if parts is None else {id(one): one for one in parts().layouts}.values()  # layers are alike
        lays_out = parts is None or any(has_odd_strides(shape, stride) for shape, _, _, stride, *_ in layouts)
        odd = lays_out and odd_tensor(laid_out(args), laid_out(kwargs), self._dims)
        if odd:
            return f"the strides of `{odd}` are not those of a new tensor"
        lays_out = lays_out and (laid_out(args) is not args or laid_out(kwargs) is not kwargs)
        return VerifiedCall(self.sharing, True, piece, self.may_record, lays_out)

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ServedPiece | str:
        """Return the piece that serves a call, or why the original ops run."""
        tensors = call_tensors(args, kwargs)
        if any(one.is_nested or one.layout is not torch.strided for one in tensors.values()):
            return ""
        sizes = sizes_of(tensors, self._dims)
        if sizes is None or pattern_of(args, kwargs, self._dims) != self._like:
            return ""
        return self._at(sizes)

    def _find_by_form(self, parts: CallParts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ServedPiece | str:
        """Return what :meth:`find` does, and look through one call of each form alone."""
        if parts.form in self._forms:
            rows = self._forms[parts.form]
        else:
            given = parts.tensors()
            if len({*map(id, given)}) < len(parts.layouts):  # one tensor twice, or one that was not noted
                return self.find(args, kwargs)
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            rows = self._forms[parts.form] = self._rows(given, args, kwargs)
        sizes = None if rows is None else sizes_in(rows, parts.layouts)
        return "" if sizes is None else self._at(sizes)

    def _rows(self, given: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Row, ...] | None:
        """Say what the layouts of a call's tensors must be; None where a call of this form is never served."""
        tensors = call_tensors(args, kwargs)
        if pattern_of(args, kwargs, None) != self._like_form:
            return None
        example = call_tensors(*self.example)
        paths = {id(tensor): path for path, tensor in tensors.items()}
        own: dict[Row, Row] = {}
        rows = []
        for tensor in given:
            path = paths.get(id(tensor))
            like = None if path is None else example[path]
            names = None if path is None else self._dims.get(path)
            row = Row(names, None if like is None else (like.shape, like.dtype, like.device, like.stride()))
            rows.append(own.setdefault(row, row))
        return tuple(rows)

    def _at(self, sizes: Sizes) -> ServedPiece | str:
        """Return the piece that serves sizes, or why the original ops run."""
        outside = [one for one in self.ranges if not one.holds(sizes[one.name])]
        if outside:
            return f"{outside[0].name} is outside of {outside[0].text}"
        piece = next((one for one in self.pieces if contains(one.box, sizes)), None)
        if piece is None or piece.refusal:
            return piece.refusal if piece is not None else "its sizes are in no piece of the ranges"
        if piece.holds is not None and not piece.holds(sizes):
            return "the model does something else at exactly these sizes"
        served = piece.at(sizes)
        return piece if served.module is not None else served.reason


def _while_alive(piece: ServedPiece) -> Callable[..., Any]:
    """Return a piece's forward that does not keep the piece alive.

    Dynamo's code has a global for the route, until that code is gone. A piece holds the code.
    """
    kept = weakref.ref(piece)

    def forward(*args: Any) -> Any:
        found = kept()
        assert found is not None  # it makes the call
        return found.forward(*args)

    return forward
