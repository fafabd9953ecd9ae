"""Join a timeline to ops: which launch, and so which kernel, belongs to which op of the captured graph.

The captured graph is run node by node, each op inside its own range. A kernel's correlation id names the call that launched it,
and that call lies inside exactly one op's range on the same thread: no kernel name is ever interpreted. On a CPU the ATen op
calls inside the range are the launches, and their durations are the device time.
"""

from __future__ import annotations

import bisect
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.capture.graph.op_classes import COMPOSITE, MATH_ATTENTION, base_name, class_of
from fusion_advisor.capture.trace.events import KERNEL_RANGE, STEP_RANGE, Event, Trace, is_kernel
from fusion_advisor.records import Launch, OpClass

FUSED_PREFIX = "fa_"
"""Every kernel of ours starts with this; it is how the after-trace proves that it ran."""
OP_RANGE = "fa:op:"
_IDLE = frozenset(["empty", "empty_strided", "empty_like", "resize_", "result_type", "item", "_local_scalar_dense"])
_COMPILED = frozenset(["TorchDynamo Cache Lookup", "Pregraph bytecode", "AOTDispatcher Runtime Wrapper Prologue"])
"""Events of compiled code around its graphs: they appear among the ops and compute nothing."""
_AUTOGRAD = re.compile(r"autograd::|Backward\d+$")
"""A node of autograd's that called no op: it computed nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a trace: its kernels as launches, and how many launching calls were seen."""

    launches: tuple[Launch, ...]
    calls: int
    origin_ns: int = 0
    """Zero of ``Launch.start_ns`` on the trace's clock."""

    @property
    def device_ns(self) -> int:
        """Sum of the kernels' durations."""
        return sum(launch.duration_ns for launch in self.launches)


def median_step(trace: Trace, *, on_cuda: bool) -> Step:
    """Return the step whose device time is the median of all recorded steps.

    On a CPU another program may take the core in the middle of an op. There a launch takes no longer than its median over all
    steps, where all of them launch the same.
    """
    steps = sorted(_steps(trace, on_cuda=on_cuda), key=lambda step: step.device_ns)
    middle = steps[len(steps) // 2]
    return middle if on_cuda else _undisturbed(middle, steps)


def _undisturbed(middle: Step, steps: Sequence[Step]) -> Step:
    if any(list(map(_what, step.launches)) != list(map(_what, middle.launches)) for step in steps):
        return middle
    each = zip(*([launch.duration_ns for launch in step.launches] for step in steps), strict=True)
    launches = [
        replace(launch, duration_ns=min(launch.duration_ns, statistics.median_low(durations_ns)))
        for launch, durations_ns in zip(middle.launches, each, strict=True)
    ]
    return replace(middle, launches=tuple(launches))


def _what(launch: Launch) -> tuple[str, int | None]:
    return launch.kernel_name, launch.op_index


def _steps(trace: Trace, *, on_cuda: bool) -> Iterator[Step]:
    op_ranges = [event for event in trace.ranges if event.name.startswith(OP_RANGE)]
    by_thread = _Ranges(op_ranges)
    for step in (event for event in trace.ranges if event.name.startswith(STEP_RANGE)):
        yield (_cuda_step if on_cuda else _cpu_step)(trace, step, by_thread)


class _Ranges:
    """Finds the range that covers a moment on a thread, among ranges of one kind that never overlap."""

    def __init__(self, ranges: Sequence[Event]) -> None:
        self._by_thread: dict[str, tuple[list[int], list[Event]]] = {}
        for event in ranges:
            starts, events = self._by_thread.setdefault(event.thread, ([], []))
            starts.append(event.start_ns)
            events.append(event)

    def at(self, thread: str, moment_ns: int) -> Event | None:
        starts, events = self._by_thread.get(thread, ([], []))
        position = bisect.bisect_right(starts, moment_ns) - 1
        return None if position < 0 or moment_ns > events[position].end_ns else events[position]

    def op_at(self, thread: str, moment_ns: int) -> int | None:
        found = self.at(thread, moment_ns)
        return None if found is None else int(found.name.removeprefix(OP_RANGE))


def _cuda_step(trace: Trace, step: Event, ranges: _Ranges) -> Step:
    calls = {event.correlation: event for event in trace.launches if step.start_ns <= event.start_ns <= step.end_ns}
    op_names = {event.external: event.name for event in trace.cpu_ops}
    math = _Ranges([event for event in trace.cpu_ops if event.name.startswith(MATH_ATTENTION)])
    kernels = [event for event in trace.kernels if event.correlation in calls]
    first_ns = min((event.start_ns for event in kernels), default=0)
    launches = []
    for kernel in kernels:
        call = calls[kernel.correlation]
        is_math = math.at(call.thread, call.start_ns) is not None
        category = OpClass.ATTENTION.value if is_math else category_of(kernel.name, op_names.get(kernel.external, ""))
        launches.append(
            Launch(
                kernel_name=kernel.name,
                op_index=ranges.op_at(call.thread, call.start_ns),
                duration_ns=kernel.duration_ns,
                start_ns=kernel.start_ns - first_ns,
                stream=kernel.stream,
                grid=kernel.grid,
                block=kernel.block,
                category=category,
                call_start_ns=call.start_ns - first_ns,
                call_ns=call.duration_ns,
            )
        )
    return Step(launches=tuple(launches), calls=len(calls), origin_ns=first_ns)


def category_of(kernel_name: str, op_name: str) -> str:
    """Return a launch's category: ``fused`` for a kernel of ours, else the class of the op that it was launched from."""
    if kernel_name.startswith(f"{FUSED_PREFIX}all_reduce_"):  # it runs until the last rank has come to it
        return OpClass.COLLECTIVE.value
    if kernel_name.startswith(FUSED_PREFIX):
        return "fused"
    if kernel_name.startswith(("Memcpy", "Memset")):
        return OpClass.MEMORY.value
    if kernel_name.startswith("nccl"):  # launched by a thread or an op that the trace does not link
        return OpClass.COLLECTIVE.value
    found = class_of(base_name(op_name)) if op_name else OpClass.OTHER
    # A view op launches nothing itself: what ran under its name was the copy that it needed.
    return (OpClass.MEMORY if found is OpClass.VIEW else found).value


def _cpu_step(trace: Trace, step: Event, ranges: _Ranges) -> Step:
    ops = [event for event in trace.cpu_ops if event.thread == step.thread and step.start_ns <= event.start_ns <= step.end_ns]
    launches = [
        Launch(
            kernel_name=name,
            op_index=ranges.op_at(event.thread, event.start_ns),
            duration_ns=duration_ns,
            start_ns=event.start_ns - step.start_ns,
            category=category,
        )
        for event, name, category, duration_ns in computing_ops(ops)
    ]
    launches += [
        Launch(kernel_name=event.name.removeprefix(KERNEL_RANGE), op_index=None, duration_ns=event.duration_ns,
               start_ns=event.start_ns - step.start_ns, category="fused")
        for event in trace.ranges
        if is_kernel(event) and step.start_ns <= event.start_ns <= step.end_ns
    ]  # fmt: skip
    return Step(launches=tuple(launches), calls=len(launches), origin_ns=step.start_ns)


def computing_ops(ops: Sequence[Event]) -> Iterator[tuple[Event, str, str, int]]:
    """Yield the outermost op calls that computed something: (event, name, category, duration).

    A composite op (``linear`` around ``addmm`` is not one: both are GEMM) passes its time on to the ops inside it.
    """
    position = 0
    while position < len(ops):
        event = ops[position]
        inside = position + 1
        while inside < len(ops) and ops[inside].start_ns < event.end_ns:
            inside += 1
        name = base_name(event.name)
        found = class_of(name)
        if found is OpClass.VIEW or name in COMPOSITE or (found is OpClass.OTHER and inside > position + 1):
            yield from computing_ops(ops[position + 1 : inside])
        elif not (name in _IDLE or name in _COMPILED or _AUTOGRAD.search(name)):
            yield event, event.name, found.value, event.duration_ns
        position = inside
