"""Unrolled loops of a graph that one kernel could walk, with the ops that only prepare what the steps read.

Mamba writes ``exp(delta * A)`` and ``delta * B * u`` for all steps ahead of its loop: two tensors of batch x channels x steps x
state. They come into the kernel, which then reads ``delta``, ``B`` and ``u``, and neither tensor is written. An op comes in if
only the loop reads it, if it works element by element, and if its result has a dim as long as the loop. What is made once for
all steps (``A`` of its logarithm) stays outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.loops.one_op import UnrolledLoop
from fusion_advisor.capture.loops.one_step import NoStep, OneStep, add_op, one_step
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.program import Program
from fusion_advisor.ir.recurrence import NoRecurrence, Recurrence, over_time, with_row_stride
from fusion_advisor.lowering.lower import lower
from fusion_advisor.records import OpClass
from fusion_advisor.runtime.torch_internals import fx_trace

_aten = torch.ops.aten
_VIEWS = frozenset({
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.select.int, _aten.slice.Tensor, _aten.alias.default, _aten.t.default,
})  # fmt: skip
"""Views through which an element's place is a linear function of its place: one that is even in time stays so."""
_CASTS = frozenset({_aten.to.dtype, _aten._to_copy.default})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSite:
    """A loop that one kernel could walk.

    Attributes:
        loop: the loop's op.
        members: the ops that the kernel takes the place of, in order; the loop and its results among them.
        inputs: what it reads, in the order of the kernel's operands.
        before: makes what the state is before the first step out of ``inputs_before``; None where that is zero.
        inputs_before: see ``before``.
        outputs: the ops whose results it makes: the rows, and the last state where somebody reads it.
        recurrence: what it computes.
        state: layout of the state, as a value of the graph.
    """

    loop: Node
    members: tuple[Node, ...]
    inputs: tuple[Node, ...]
    before: Callable[..., torch.Tensor] | None
    inputs_before: tuple[Node, ...]
    outputs: tuple[Node, ...]
    recurrence: Recurrence
    state: torch.Tensor

    @property
    def given(self) -> tuple[Node, ...]:
        """What its call is given: what the kernel reads, then what its first state is made of."""
        return tuple(dict.fromkeys((*self.inputs, *self.inputs_before)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOp:
    """A loop that stays op by op, and why."""

    loop: Node
    reason: str


def find_scans(region: Region, taken: Collection[Node] = ()) -> list[ScanSite | LeftOp]:
    """Return every unrolled loop of a region: what a kernel could walk, or why none could.

    Args:
        region: its graph stays as it is.
        taken: ops that another kernel has taken in already.
    """
    graph = region.graph.graph
    found: list[ScanSite | LeftOp] = []
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, UnrolledLoop):
            try:
                found.append(_site(graph, node, taken))
            except (NoStep, NoRecurrence) as refusal:
                found.append(LeftOp(loop=node, reason=str(refusal)))
            except CannotLower as refusal:
                found.append(LeftOp(loop=node, reason=f"a step is no single kernel: {refusal.reason}"))
    return found


def _site(graph: Graph, call: Node, taken: Collection[Node]) -> ScanSite:
    assert isinstance(call.target, UnrolledLoop)
    step = one_step(call.target)
    results = [call] if isinstance(call.meta["val"], torch.Tensor) else sorted(call.users)
    if len(call.meta["results"]) > 1 and (len(results) != len(call.meta["results"])):
        raise NoStep("a result of it is never read")
    _refuse_other_results(call.target)
    folded = _folded(graph, call, step.count, taken)
    try:
        return _lowered(call, step, folded, results)
    except (CannotLower, NoRecurrence):
        if not folded:
            raise
        return _lowered(call, step, (), results)


def _refuse_other_results(loop: UnrolledLoop) -> None:
    """Raise NoStep where a loop hands out anything else than its rows and its last state, which may be rounded once."""
    results = loop.graph.output_node().args[0]
    more = results[1:] if isinstance(results, tuple) else ()
    for node in more:
        assert isinstance(node, Node)
        source = node.args[0] if node.target in _CASTS else node
        if source is not loop.states[-1]:
            raise NoStep("it hands out another value than its rows and its last state")


def _folded(graph: Graph, call: Node, steps: int, taken: Collection[Node]) -> tuple[Node, ...]:
    """Return the ops ahead of a loop that come into its kernel, in order."""
    inside = {call}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node in taken or not node.users or not inside.issuperset(node.users):
            continue
        value = node.meta.get("val")
        is_of_steps = isinstance(value, torch.Tensor) and steps in value.shape
        if is_of_steps and (node.target in _VIEWS | _CASTS or _is_by_element(node)):
            inside.add(node)
    return tuple(node for node in graph.nodes if node in inside and node is not call)


def _is_by_element(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    is_drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return torch.Tag.pointwise in node.target.tags and class_of(base_name(str(node.target))) is OpClass.POINTWISE and not is_drawn


def _lowered(call: Node, step: OneStep, folded: tuple[Node, ...], results: Sequence[Node]) -> ScanSite:
    inside = {call, *folded}
    written = {number: _written(call, step, folded, number) for number in sorted({0, 1, 2, step.count - 1})}
    one = written[1]
    if any(other.given != one.given for other in written.values()):
        raise NoRecurrence("its steps read other tensors")
    recurrence = over_time({number: other.program for number, other in written.items()}, step.count, one.before)
    rows = call.meta["results"][0]
    recurrence = with_row_stride(recurrence, rows.stride(step.along))
    before, inputs_before = _before(call, step)
    if not inside.isdisjoint(inputs_before):
        raise NoRecurrence("its first state is made of what only its steps read")
    ordered = [node for node in call.graph.nodes if node in inside or (node in results and node is not call)]
    return ScanSite(
        loop=call, members=tuple(ordered), inputs=one.given, before=before, inputs_before=inputs_before,
        outputs=_outputs(call, results), recurrence=recurrence, state=one.state,
    )  # fmt: skip


def _outputs(call: Node, results: Sequence[Node]) -> tuple[Node, ...]:
    return (call,) if call in results else tuple(sorted(results, key=lambda node: int(str(node.args[1]))))


def _before(call: Node, step: OneStep) -> tuple[Callable[..., torch.Tensor] | None, tuple[Node, ...]]:
    """Return what makes the state before the first step, and what of; nothing where it is zero."""
    sources = dict(zip(step.loop.graph.find_nodes(op="placeholder"), call.args, strict=True))
    given = sources.get(step.before)
    if isinstance(given, Node) and given.target is _aten.zeros.default:
        return None, ()
    graph = Graph()
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []

    def copy(node: Node) -> Node:
        if node not in copies and node in sources:
            source = sources[node]
            assert isinstance(source, Node)
            inputs.append(source)
            copies[node] = graph.placeholder(f"given_{len(inputs)}")
        elif node not in copies:
            for before in node.all_input_nodes:
                copy(before)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    graph.output(copy(step.before))
    return fx_trace.lazy_graph_module(torch.nn.Module(), graph, class_name="Before"), tuple(inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A step's Program.

    Attributes:
        given: ops of the outer graph that its operands are, in order, the state left out.
        before: number of the operand that is the state before.
        state: layout of the state.
    """

    program: Program
    given: tuple[Node, ...]
    before: int
    state: torch.Tensor


def _written(call: Node, step: OneStep, folded: Sequence[Node], number: int) -> _Written:
    """Write down one step with the ops that prepare it, and lower it."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    inside = set(folded)

    def given(source: Node) -> Node:
        if source not in copies:
            copies[source] = graph.placeholder(f"given_{len(copies)}")
            copies[source].meta["val"] = source.meta["val"]
        return copies[source]

    state_value = step.loop.states[0].meta["val"]
    state_value = state_value.new_empty(state_value.shape)
    state = graph.placeholder("state")
    state.meta["val"] = state_value
    outer = {given(source): source for node in (call, *folded) for source in node.all_input_nodes if source not in inside}
    for node in folded:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    inner = step.loop.graph.find_nodes(op="placeholder")
    arguments = {own: copies[source] for own, source in zip(inner, call.args, strict=True) if isinstance(source, Node)}
    after, row = step.write(graph, arguments, state, number)
    rows = call.meta["results"][0]
    strides = [stride for dim, stride in enumerate(rows.stride()) if dim != step.along or rows.dim() == row.meta["val"].dim()]
    after, row = (add_op(graph, _aten.clone.default, (one,)) for one in (after, row))
    after.meta["val"] = state_value
    row.meta["val"] = rows.new_empty_strided(row.meta["val"].shape, strides)
    graph.output((after, row))
    module = fx_trace.lazy_graph_module(torch.nn.Module(), graph, class_name="OneStep")
    ops, index_of = describe(Region(index=0, graph=module, original=module))
    members = [index_of[node] for node in graph.nodes if node.op == "call_function"]
    lowered = lower(ops, members, (index_of[after], index_of[row]))
    node_at = {index: node for node, index in index_of.items()}
    operands = [node_at[index] for index in lowered.inputs]
    if state not in operands:
        raise NoRecurrence("a step reads no state")
    return _Written(
        program=lowered.program, given=tuple(outer[node] for node in operands if node is not state),
        before=operands.index(state), state=state_value,
    )  # fmt: skip
