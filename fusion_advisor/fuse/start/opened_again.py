"""Makes the capture of a piece of a range from a file, and compares its graph with the model's own ops at two sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fusion_advisor.capture.graph.fx_nodes import draws_numbers
from fusion_advisor.capture.graph.side_effects import Numbers
from fusion_advisor.capture.sizes.open_capture import Dims, OpenCapture, Sizes
from fusion_advisor.fuse.start.call_tensors import given_by
from fusion_advisor.fuse.start.guard_tree import Differs
from fusion_advisor.fuse.start.made_again import call_again, differences_told, results_in
from fusion_advisor.fuse.start.object_changes import ObjectState, in_order
from fusion_advisor.fuse.start.open_call import CallAt
from fusion_advisor.fuse.start.outputs import form_of, furthest
from fusion_advisor.runtime.torch_internals import module_call, symbolic_sizes

_TRIES = 4
"""Small sizes that are tried: some may be ruled out within a piece."""


def open_again(model: torch.nn.Module, at: CallAt, row: Mapping[str, Any], dims: Dims, *, model_id: str) -> OpenCapture:
    """Make the capture of a piece, in a process in which :func:`start_again` has found that nothing differs.

    Args:
        model: as it was traced.
        at: makes a call.
        row: from :func:`fusion_advisor.fuse.start.record.piece_of`.
        dims: names of the call's dims.
        model_id: for errors.

    Raises:
        Differs: the model's code, the call or its sizes are other ones, or the file is none of ours.
    """
    with differences_told():
        sizes = {str(name): int(size) for name, size in row["sizes"].items()}
        args, kwargs = at(sizes)
        live, _, known = call_again(model, args, kwargs, row, model_id, sizes)
        names: dict[Any, str] = {}
        guards: tuple[Any, ...] = ()
        if known is not None:
            names = dict(zip(known.symbols, map(str, row["open"]["names"]), strict=True))
            guards = tuple(map(known.expression, row["open"]["guards"]))
        opened = OpenCapture(
            live=live, sizes=sizes, names=names, guards=guards, environment=None if known is None else known.environment,
            call=(args, kwargs), dims=dims,
        )  # fmt: skip
        small = ({name: min(least + more, most) for name, (least, most) in row["ranges"].items()} for more in range(_TRIES))
        others = [other for other in small if other != sizes and opened.holds(other)]
        others.sort(key=lambda other: sum(other[name] == size for name, size in sizes.items() if name in other))
        for one in (sizes, *others[:1]):  # where it can be, no size is the same in both
            _compare(model, opened, at, one, row)
        return opened


def _compare(model: torch.nn.Module, opened: OpenCapture, at: CallAt, sizes: Sizes, row: Mapping[str, Any]) -> None:
    """Compare the graph at some sizes with the model's own ops, its values' sizes with those that are stored.

    Raises:
        Differs: they are too far apart.
    """
    own = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def shape_of(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = given_by(args, kwargs)
        known = {**own, **{id(tensor): place for place, tensor in enumerate(given.tensors)}}
        objects = {id(value): name for name, value in given.objects.items()}
        return form_of(output, lambda tensor: {"input": known.get(id(tensor), "made")}, objects)

    places = [(path, name) for path, name, _ in row["sets"]]
    route, graph = opened.region.route, opened.region.graph
    numbers = Numbers.now()
    if sizes == opened.sizes and not (opened.live.written.tensors or places or any(map(draws_numbers, graph.graph.nodes))):
        (args, kwargs), expected = opened.call, [opened.live.output]  # these ops have run already
    else:
        args, kwargs = at(sizes)
        state = ObjectState.of(args, kwargs, given_by(args, kwargs))
        output = module_call.original_call(model)(*args, **kwargs)
        expected = [output, *in_order(state.changes(), places)]
    theirs = shape_of(expected, args, kwargs)
    args, kwargs = at(sizes)
    given = given_by(args, kwargs)
    state = ObjectState.of(args, kwargs, given)
    assert route is not None
    numbers.restore()  # the graph is to draw what the model's own ops drew
    route.forward = _Measured(graph, opened.symbols(sizes)).run
    try:
        output = opened.live.untraced(args, kwargs, list(given.leaves.values()))
    finally:
        route.forward = graph.forward
    found = [output, *in_order(state.changes(), places)]
    form = {"list": [row["output"], *(form for *_, form in row["sets"])]}
    problem = furthest(*(list(dict(results_in(form, one)).values()) for one in (found, expected)))
    if problem or shape_of(found, args, kwargs) != theirs:
        raise Differs(f"the stored graph computes something else: {problem or 'another output'}")


class _Measured(Interpreter):
    """Runs a graph and compares the sizes of its values with those that it says they have."""

    def __init__(self, graph: GraphModule, symbols: Mapping[Any, int]) -> None:
        super().__init__(graph)
        self._symbols = symbols

    def run_node(self, n: Node) -> Any:
        """Run one op.

        Raises:
            Differs: its result is of other sizes.
        """
        result, said = super().run_node(n), n.meta.get("val")
        if isinstance(said, torch.SymInt):
            fits = result == self._at(said)
        elif isinstance(said, torch.Tensor):
            fits = (tuple(result.shape), result.dtype) == (tuple(map(self._at, said.shape)), said.dtype)
        else:
            fits = True
        if not fits:
            raise Differs(f"the stored graph's `{n.name}` is of other sizes than it says")
        return result

    def _at(self, size: Any) -> Any:
        return symbolic_sizes.at_sizes(symbolic_sizes.expression_of(size), self._symbols)
