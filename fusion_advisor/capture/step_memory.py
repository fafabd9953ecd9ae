"""Memory that a training step holds over its time, and what holds it at the peak: the allocator's own record of one step.

Each tensor is one of three kinds. The forward pass made an activation, or another value that lives on. The backward pass made a
parameter's gradient if it outlives the step, and working memory if it does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from fusion_advisor.capture.graph.op_classes import base_name
from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.events import Trace, is_step
from fusion_advisor.capture.trace.profiler import Allocation
from fusion_advisor.capture.training import Nested, Origins, layers_folded
from fusion_advisor.records import HeldMemory, StepMemory

MOMENTS = 240
"""Of a picture: the step is cut into so many equal times, and each shows its largest total."""
HOLDERS = 12
"""Rows at the peak; what is left is one more row for each kind."""
_ALLOCATING = ("empty", "new_empty", "resize")
_KINDS = ("activation", "gradient", "working")
_REST = "the rest"


@dataclass(slots=True)
class _Block:
    """Memory from when it was given out to when it was taken back.

    Attributes:
        made: number of the allocation.
        gone: number of the allocation that took it back; None where the step left it.
        moment_ns: when it was made.
        size_bytes: of it.
    """

    made: int
    gone: int | None
    moment_ns: int
    size_bytes: int


def record_step_memory(
    step: Callable[[], object], *, label: str, on_cuda: bool, ranges: Callable[[], AbstractContextManager[None]] = nullcontext
) -> StepMemory | None:
    """Run a training step under the profiler and return what it held; None where it allocated nothing.

    Args:
        step: drops all gradients, then runs forward, loss and backward; the new gradients are there when it returns.
        label: of the record.
        on_cuda: whether it runs on a GPU.
        ranges: opened around the step: puts a range around each module.
    """
    with ranges():
        trace, allocations = profiler.record_memory(step, on_cuda=on_cuda)
    return step_memory(trace, allocations, label=label)


def step_memory(trace: Trace, allocations: Sequence[Allocation], *, label: str) -> StepMemory | None:
    """Return what one traced step held at each moment; None where it allocated nothing.

    Memory that was given out before the step and is taken back in it is not counted.

    Args:
        trace: of the step, in its range.
        allocations: in order of time.
        label: of the record.
    """
    step = next(event for event in trace.ranges if is_step(event))
    inside = [one for one in allocations if step.start_ns <= one.moment_ns <= step.end_ns]
    blocks = _blocks(inside)
    if not blocks:
        return None
    origins = Origins(trace)
    in_backward = [moment for block in blocks if origins.at(moment := block.moment_ns)[1]]
    backward_ns = min(in_backward, default=step.end_ns)
    kinds = [_kind(block, backward_ns) for block in blocks]
    totals = _totals(len(inside), blocks, kinds)
    peak = max(range(len(inside)), key=lambda at: sum(totals[at]))
    length_ns = max(step.duration_ns, 1)
    shares = [(one.moment_ns - step.start_ns) / length_ns for one in inside]
    shown = _shown(shares, [sum(total) for total in totals])
    at_peak = [(block, kind) for block, kind in zip(blocks, kinds, strict=True) if _is_alive(block, peak)]
    return StepMemory(
        label=label,
        at_share=tuple(shares[at] for at in shown),
        activation_bytes=tuple(totals[at][0] for at in shown),
        gradient_bytes=tuple(totals[at][1] for at in shown),
        working_bytes=tuple(totals[at][2] for at in shown),
        backward_share=(backward_ns - step.start_ns) / length_ns,
        peak_share=shares[peak],
        peak_bytes=sum(totals[peak]),
        holders=_holders(trace, origins, at_peak),
    )


def _blocks(allocations: Sequence[Allocation]) -> list[_Block]:
    alive: dict[int, _Block] = {}
    blocks = []
    for number, one in enumerate(allocations):
        if one.change_bytes > 0:
            alive[one.address] = _Block(number, None, one.moment_ns, one.change_bytes)
            blocks.append(alive[one.address])
        elif (block := alive.pop(one.address, None)) is not None:
            block.gone = number
    return blocks


def _kind(block: _Block, backward_ns: int) -> str:
    if block.moment_ns < backward_ns:
        return "activation"
    return "gradient" if block.gone is None else "working"


def _is_alive(block: _Block, at: int) -> bool:
    return block.made <= at and (block.gone is None or block.gone > at)


def _totals(count: int, blocks: Sequence[_Block], kinds: Sequence[str]) -> list[tuple[int, int, int]]:
    """Bytes of each kind after each allocation."""
    changes = [[0, 0, 0] for _ in range(count)]
    for block, kind in zip(blocks, kinds, strict=True):
        column = _KINDS.index(kind)
        changes[block.made][column] += block.size_bytes
        if block.gone is not None:
            changes[block.gone][column] -= block.size_bytes
    columns = [list(itertools.accumulate(change[column] for change in changes)) for column in range(3)]
    return list(zip(*columns, strict=True))


def _shown(shares: Sequence[float], totals: Sequence[int]) -> list[int]:
    """Return the number of the largest total in each part of the step that has one, and the last of all."""
    best: dict[int, int] = {}
    for at, share in enumerate(shares):
        part = min(int(share * MOMENTS), MOMENTS - 1)
        if part not in best or totals[at] > totals[best[part]]:
            best[part] = at
    return sorted({*best.values(), len(totals) - 1})


def _holders(trace: Trace, origins: Origins, at_peak: Sequence[tuple[_Block, str]]) -> tuple[HeldMemory, ...]:
    ops = Nested([op for op in trace.cpu_ops if _computes(op.name)])
    found: dict[tuple[str, str, str], list[int]] = {}
    for block, kind in at_peak:
        op, module = ops.at(block.moment_ns), layers_folded(origins.at(block.moment_ns)[0])
        found.setdefault((kind, base_name(op.name) if op else "", module), []).append(block.size_bytes)
    rows = sorted(found.items(), key=lambda row: -sum(row[1]))
    rest = {kind: [size for (other, *_), sizes in rows[HOLDERS:] if other == kind for size in sizes] for kind in _KINDS}
    rows = [*rows[:HOLDERS], *(((kind, _REST, ""), sizes) for kind, sizes in rest.items() if sizes)]
    return tuple(
        HeldMemory(kind=kind, op=op, module=module, tensors=len(sizes), held_bytes=sum(sizes))
        for (kind, op, module), sizes in rows
    )


def _computes(name: str) -> bool:
    """Whether an event is an op that computes: not what allocates for it, nor autograd's or dynamo's own."""
    return "::" in name and not name.startswith("autograd::") and not base_name(name).startswith(_ALLOCATING)
