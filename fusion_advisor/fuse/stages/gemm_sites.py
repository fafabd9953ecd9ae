"""Linears that one call computes with what stands around them: what GEMV kernels and epilogues of cuBLAS have in common.

Such a call takes the place of fused chains as well (the norm of an ``add_rmsnorm``, a ``gelu_tanh``), whose rows say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, BuiltLinear
from fusion_advisor.records import Fusion, OpClass, Ref, Status, Timing
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.verify.subgraph_oracle import OriginalChain, original_chain
from fusion_advisor.workload.device import is_out_of_memory

if TYPE_CHECKING:
    from fusion_advisor.fuse.decide.instruments import (
        Instruments,  # brings in all that times a step, of which a saved plan needs nothing
    )

_FLOAT64_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One site by op indices."""

    region: int
    members: tuple[int, ...]
    """In order; the last is the result."""
    inputs: tuple[int, ...]


def own_classes(region: Region, operands: Iterable[Node]) -> set[str]:
    """Return the classes of tensors that are no plain ones: an op means something of its own there, or there is no such memory.

    Args:
        region: with the tensors of a call.
        operands: of one place; of what is computed from the region's inputs (merged weights), those are asked.
    """
    inputs = [node for node in region.graph.graph.nodes if node.op == "placeholder"]
    given = dict(zip(inputs, region.example_args, strict=True))
    asked = {source for node in operands for source in (node, *_joined_in(node)) if source in given}
    return {type(given[node]).__name__ for node in asked if type(given[node]) not in (torch.Tensor, torch.nn.Parameter)}


def _joined_in(node: Node) -> list[Node]:
    """What a call of ours makes one tensor of; an op of torch makes something else of what it reads."""
    is_ours = node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
    return node.all_input_nodes if is_ours else []


def observe(bench: Bench, places: Iterable[Place]) -> None:
    """Run the model once and keep what the places read."""
    inputs = {index for place in places for index in place.inputs}
    bench.observe_values(inputs, inputs)


def original_of(bench: Bench, place: Place) -> tuple[OriginalChain, list[torch.Tensor]]:
    """Return a place's original ops and its own tensors; the bench has observed them."""
    chain = original_chain(bench.ops, bench.index_of[place.region], place.members, place.inputs, place.members[-1:])
    return chain, [bench.values[index] for index in place.inputs]


def why_no_room(bench: Bench, places: Sequence[Place], instruments: Instruments) -> str | None:
    """Why the sites' inputs plus one float64 copy do not fit in memory; None if they do."""
    free_bytes, _ = instruments.memory_bytes(bench.device)
    kept = {index for place in places for index in place.inputs if not _is_in_memory(bench, index)}
    kept_bytes = sum(_elements(bench, index) * getattr(torch, bench.ops[index].outputs[0].dtype).itemsize for index in kept)
    needed_bytes = kept_bytes + max(_FLOAT64_BYTES * _float64_elements(bench, place) for place in places)
    if free_bytes and needed_bytes > free_bytes:
        what = "what they read, and the largest of them in float64 to check against"
        return f"{what}, take {needed_bytes:,} bytes; {free_bytes:,} are free"
    return None


def _is_in_memory(bench: Bench, index: int) -> bool:
    """Whether it is there anyway: an input of the graph, or parameters that are read as one (merged weights)."""
    op = bench.ops[index]
    sources = [bench.ops[argument.index] for argument in op.args if isinstance(argument, Ref)]
    is_view = op.op_class in (OpClass.OTHER, OpClass.VIEW)
    return op.op_class is OpClass.INPUT or (is_view and bool(sources) and all(one.role == "parameter" for one in sources))


def _float64_elements(bench: Bench, place: Place) -> int:
    """Of what is there at once: inputs, members, and the result some five times over, for its errors."""
    indices = [*place.inputs, *place.members, *[place.members[-1]] * 5]
    return sum(_elements(bench, index) for index in indices)


def _elements(bench: Bench, index: int) -> int:
    return math.prod(bench.ops[index].outputs[0].shape)


def observe_together(bench: Bench, places: Sequence[Place], instruments: Instruments) -> str:
    """Run the step once and keep what places read, on all ranks together.

    Args:
        bench: of the step.
        places: where calls may stand.
        instruments: say what counts of a rank's problem.

    Returns:
        Why a rank has no memory for it; empty where all have.

    Raises:
        RuntimeError: memory ran out in a step that meets other ranks. They wait in it, so that no rank can go on without it.
    """
    problem = ""
    try:
        observe(bench, places)
    except (RuntimeError, MemoryError) as error:
        if instruments.exchange is not None and not bench.is_alone:
            raise
        problem = ran_out(error)
    return instruments.worst(problem)


def ran_out(error: Exception) -> str:
    """Say that memory ran out: what was kept before needs none of it. Any other error is raised again.

    Args:
        error: while a kernel was built or checked.
    """
    if not is_out_of_memory(error):
        raise error
    return f"memory ran out while it was checked: {str(error).strip().splitlines()[0]}"


def compare_alone(
    before: Sequence[Callable[..., object]],
    after: Sequence[Callable[..., object]],
    given: Sequence[Sequence[torch.Tensor]],
    bench: Bench,
    instruments: Instruments,
) -> tuple[Timing, Timing]:
    """Time all places one after the other, as a step runs them (one's weight alone would stay in the cache); per place.

    Args:
        before: one call per place.
        after: what would stand there.
        given: what each place reads.
        bench: of the step.
        instruments: time the calls.
    """

    def all_of(calls: Sequence[Callable[..., object]]) -> Callable[[], None]:
        def run() -> None:
            for call, tensors in zip(calls, given, strict=True):
                call(*tensors)

        return run

    one, other = instruments.compare_alone(all_of(before), all_of(after), on_cuda=bench.on_cuda, timer=bench.timer)
    return _each(one, len(given)), _each(other, len(given))


def _each(timing: Timing, places: int) -> Timing:
    return as_timing([ns // places for ns in timing.times_ns], timing.method)


def without_taken(
    fusion: Fusion, built: Sequence[BuiltFusion], linears: Sequence[BuiltLinear], titles: Mapping[str, str]
) -> Fusion:
    """Say of a kept fusion which of its sites such calls took in.

    Args:
        fusion: its row so far.
        built: the fusions of the step.
        linears: the calls that are in it now.
        titles: what to call them, by id.
    """
    sites = [site for item in built if item.planned.id == fusion.id for site in item.sites]
    taking = {index: linear.id for linear in linears for site in linear.sites for index in site.members}
    by = [{taking[index] for index in site.members if index in taking} for site in sites]
    if fusion.status is not Status.KEPT or not any(by):
        return fusion
    takers = ", ".join(titles[name] for name in sorted(set().union(*by)))
    taken = sum(map(bool, by))
    status = Status.ABSORBED if taken == len(sites) else fusion.status
    return replace(fusion, status=status, reason=f"{fusion.reason}; then {takers} took in {taken} of its {len(sites)} sites")
