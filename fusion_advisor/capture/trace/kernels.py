"""From a trace's events to device work: every kernel with the op call that launched it, its step and its share of busy time.

A trace that was made elsewhere has no ranges of ours, so the op is found by the id that both carry, else as the innermost op
around the call that launched the kernel. Where there is neither (CUDA graphs, other frontends) the kernel's name has to do.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fusion_advisor.capture.graph.op_classes import COMPOSITE, MATH_ATTENTION, base_name, class_of
from fusion_advisor.capture.trace.attribute import FUSED_PREFIX, category_of, computing_ops
from fusion_advisor.capture.trace.events import KERNEL_RANGE, STEP_RANGE, Event, Trace, is_kernel, is_step
from fusion_advisor.records import OpClass, TensorMeta
from fusion_advisor.records.op_facts import ROWS_OPERAND

CAST = "to"
_MOVING = frozenset({CAST, "cat"}) | frozenset(ROWS_OPERAND)
"""Ops of class ``memory`` that may stand in a chain: the same as in a captured graph."""
_FUSIBLE = (OpClass.POINTWISE.value, OpClass.REDUCTION.value)


class Work(NamedTuple):
    """One kernel, copy or fill; on a CPU one op call that computes. A tuple for the reason that :class:`Event` is one."""

    kernel_name: str
    label: str
    """Short name of the op that the user's code called: ``layer_norm``, ``to``."""
    category: str
    call: int
    """Number of that op call; kernels of one call are one op. -1: not linked."""
    is_fusible: bool
    """Whether a chain may hold it."""
    start_ns: int
    duration_ns: int
    busy_ns: int
    """The part of duration_ns in which nothing that began earlier ran on the device."""
    queue: tuple[int, int]
    """Device and stream; what is in one queue runs in order."""
    step: int
    """-1: outside the marked steps, or none are marked."""
    inputs: tuple[TensorMeta | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Launches without a kernel."""

    launches: int
    missing: int


def missing_kernels(trace: Trace) -> Missing:
    """Count the calls that launch one kernel, and those of them whose kernel the trace lacks (by correlation id)."""
    seen = {kernel.correlation for kernel in trace.kernels}
    single = [call for call in trace.launches if "Launch" in call.name and "Graph" not in call.name]
    calls = [call.correlation for call in single if call.correlation >= 0]
    return Missing(launches=len(calls), missing=sum(call not in seen for call in calls))


def device_work(trace: Trace) -> list[Work]:
    """Return the device's work in order of time; on a trace without any, the CPU's computing op calls.

    Where steps are ours, what was launched between them is left out: it puts back what a step moved on.
    """
    steps = _Steps([event for event in trace.ranges if is_step(event)])
    return list(_on_device(trace, steps) if trace.kernels else _on_cpu(trace, steps))


class _Steps:
    """Tells the step of a moment."""

    def __init__(self, ranges: Sequence[Event]) -> None:
        ours = [event for event in ranges if event.name.startswith(STEP_RANGE)]
        self._are_ours = bool(ours)
        self._ranges = ours or ranges
        self._starts = [event.start_ns for event in self._ranges]

    def at(self, moment_ns: int) -> int | None:
        """The number of the step around a moment; -1 outside of any; None outside of ours, where nothing counts."""
        number = bisect.bisect_right(self._starts, moment_ns) - 1
        if number >= 0 and moment_ns <= self._ranges[number].end_ns:
            return number
        return None if self._are_ours else -1


class _Busy:
    """Gives each moment of a device to the work that began first: what overlaps on two streams does not count twice."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def add(self, device: int, event: Event) -> int:
        """Return how much of an event is new; events come in order of time."""
        covered = max(self._ends.get(device, event.start_ns), event.start_ns)
        self._ends[device] = max(covered, event.end_ns)
        return max(0, event.end_ns - covered)


def _on_device(trace: Trace, steps: _Steps) -> Iterator[Work]:
    ops, busy = _Calls(trace.cpu_ops), _Busy()
    calls = {call.correlation: call for call in trace.launches}
    for kernel in trace.kernels:
        launched = calls.get(kernel.correlation)
        step = steps.at(kernel.start_ns if launched is None else launched.start_ns)
        if step is None:
            continue
        op = ops.of(kernel, launched)
        outer = ops.outer[op] if op >= 0 else -1
        op_name = ops.events[op].name if op >= 0 else ""
        call_name = ops.events[outer].name if outer >= 0 else op_name
        is_math = op >= 0 and ops.is_math_attention[op]
        category, label, is_fusible = _describe(kernel.name, op_name, call_name, is_math=is_math)
        yield Work(  # by position for the reason that events are
            kernel.name,
            label,
            category,
            outer if outer >= 0 else op,
            is_fusible,
            kernel.start_ns,
            kernel.duration_ns,
            busy.add(kernel.device, kernel),
            (kernel.device, kernel.stream),
            step,
            ops.events[outer].inputs if outer >= 0 else None,
        )


def _on_cpu(trace: Trace, steps: _Steps) -> Iterator[Work]:
    threads: dict[str, list[Event]] = {}
    for event in trace.cpu_ops:
        threads.setdefault(event.thread, []).append(event)
    numbers = {thread: number for number, thread in enumerate(threads)}
    found = [(event, name, category) for ops in threads.values() for event, name, category, _ in computing_ops(ops)]
    found += [(event, event.name.removeprefix(KERNEL_RANGE), "fused") for event in trace.ranges if is_kernel(event)]
    busy = _Busy()
    for number, (event, name, category) in enumerate(sorted(found, key=lambda row: row[0].start_ns)):
        step = steps.at(event.start_ns)
        if step is None:
            continue
        label = _short(base_name(name))
        yield Work(
            kernel_name=name,
            label=label,
            category=category,
            call=number,
            is_fusible=category in _FUSIBLE or (category == OpClass.MEMORY and label in _MOVING),
            start_ns=event.start_ns,
            duration_ns=event.duration_ns,
            busy_ns=busy.add(0, event),
            queue=(0, numbers.get(event.thread, -1)),
            step=step,
            inputs=event.inputs,
        )


class _Calls:
    """The CPU ops of a trace: how they are nested, and which of them is the call that the user's code made."""

    def __init__(self, ops: Sequence[Event]) -> None:
        self.events = ops
        self._by_id = {event.external: number for number, event in enumerate(ops) if event.external >= 0}
        self._parents: list[int] = []
        self._by_thread: dict[str, tuple[list[int], list[int]]] = {}
        self.outer: list[int] = []
        """The outermost ATen op around each op that computes something itself; -1: none does."""
        self.is_math_attention: list[bool] = []
        stacks: dict[str, list[int]] = {}
        outer, is_math = self.outer, self.is_math_attention
        ends: list[int] = []
        is_aten: list[bool] = []
        for number, event in enumerate(ops):
            name, start, duration, thread = event[:4]
            if thread not in stacks:
                stacks[thread], self._by_thread[thread] = [], ([], [])
            stack, (starts, numbers) = stacks[thread], self._by_thread[thread]
            while stack and ends[stack[-1]] <= start:
                stack.pop()
            parent = stack[-1] if stack else -1
            stack.append(number)
            ends.append(start + duration)
            self._parents.append(parent)
            starts.append(start)
            numbers.append(number)
            computes, is_own_math, is_own_aten = _facts(name)
            around = outer[parent] if parent >= 0 and is_aten[parent] else -1
            is_aten.append(is_own_aten)
            outer.append(around if around >= 0 else number if computes else -1)
            is_math.append(is_own_math or (parent >= 0 and is_math[parent]))

    def of(self, kernel: Event, launched: Event | None) -> int:
        """The innermost op that launched a kernel; -1 where the trace does not tell."""
        found = self._by_id.get(kernel.external, -1) if kernel.external >= 0 else -1
        if found >= 0 or launched is None or launched.thread not in self._by_thread:
            return found
        starts, numbers = self._by_thread[launched.thread]
        place = bisect.bisect_right(starts, launched.start_ns) - 1
        found = numbers[place] if place >= 0 else -1
        while found >= 0 and self.events[found].end_ns < launched.start_ns:
            found = self._parents[found]
        return found


@functools.cache
def _facts(op_name: str) -> tuple[bool, bool, bool]:
    """Whether an op computes something itself, is attention out of single ops, and is an ATen op."""
    name, is_aten = base_name(op_name), op_name.startswith("aten::")
    computes = is_aten and name not in COMPOSITE and class_of(name) not in (OpClass.VIEW, OpClass.OTHER)
    return computes, op_name.startswith(MATH_ATTENTION), is_aten


@functools.cache
def _describe(kernel_name: str, op_name: str, call_name: str, *, is_math: bool) -> tuple[str, str, bool]:
    """Return a kernel's category, the label of its call, and whether a chain may hold it."""
    if is_math:
        return OpClass.ATTENTION.value, "attention", False
    category = category_of(kernel_name, op_name)
    if category == "fused" or kernel_name.startswith(("Memcpy", "Memset")):
        return category, kernel_label(kernel_name), False
    is_told = category != OpClass.OTHER
    if not is_told:
        category = kernel_class(kernel_name).value
    is_named = op_name.startswith("aten::")
    label = _short(base_name(call_name if is_told else op_name)) if is_named else kernel_label(kernel_name)
    moves = category == OpClass.MEMORY and label in _MOVING
    # An ATen op of no known class may do anything; a kernel without an op is at least named after what it does.
    return category, label, (category in _FUSIBLE or moves) and (is_told or not is_named or op_name.endswith("_backward"))


def _short(name: str) -> str:
    short = name if name.startswith("__") else name.lstrip("_").removeprefix("native_").removeprefix("fused_")
    return CAST if short == "to_copy" else short


_BY_NAME = (
    (OpClass.COLLECTIVE, "nccl rccl allreduce all_reduce all_gather reduce_scatter"),
    (OpClass.OTHER, "sort topk"),
    (OpClass.ATTENTION, "flash fmha attention attn mha_"),
    (OpClass.CONVOLUTION, "conv wgrad dgrad fprop winograd im2col"),
    (OpClass.GEMM, "gemm gemv nvjet cutlass cublas splitk cijk_ triton_tem wgmma triton_mm matmul addmm"),
    (OpClass.REDUCTION, "reduce softmax norm welford argmax argmin"),
    (OpClass.MEMORY, "catarray indexselect index_ gather scatter embedding copy fill transpose memcpy memset arange"),
    (OpClass.POINTWISE, "elementwise pointwise functor gelu silu rotary rope"),
)  # fmt: skip
_OF_INDUCTOR = {
    "triton_poi_": OpClass.POINTWISE,
    "triton_for_": OpClass.POINTWISE,
    "triton_red_": OpClass.REDUCTION,
    "triton_per_": OpClass.REDUCTION,
    "triton_spl_": OpClass.REDUCTION,
}
"""Meaning of Inductor's prefix. The words after it are of all ops that it read in the graph, computed there or not: its copies of
keys and values are called after the attention that reads them, and a bias after the GEMM."""
_CASTS = re.compile(r"LoadWithCast|StoreWithCast|b?float16_copy_kernel|half_copy_kernel")
_GENERIC = re.compile(r"elementwise|reduce|apply|launch|legacy|unrolled|vectorized_gather")
_FUNCTION = re.compile(r"(\w+?)(?:_scalar|_tensor)*(?:_kernel)(?:_cuda|_impl|_without_opmath)*\b")
_FUNCTOR = re.compile(r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)<|([A-Z]\w*?)(?:Functor|Ops|CUDAKernelImpl)\b")


@functools.cache
def kernel_class(name: str) -> OpClass:
    """Return the class that a kernel's name speaks for; only where a trace links no op.

    Args:
        name: demangled, as traces have it.
    """
    if _CASTS.search(name):
        return OpClass.MEMORY if "_copy" in name else OpClass.POINTWISE
    lowered = name.lower()
    if lowered[:11] in _OF_INDUCTOR:
        return _OF_INDUCTOR[lowered[:11]]
    for op_class, words in _BY_NAME:
        if any(word in lowered for word in words.split()):
            return op_class
    return OpClass.OTHER


@functools.cache
def kernel_label(name: str) -> str:
    """Return the short name of what a kernel computes: ``tanh`` for ``…<4, at::native::tanh_kernel_cuda(…)…>``."""
    if name.startswith(("Memcpy", "Memset", FUSED_PREFIX)):
        return name.split("(", maxsplit=1)[0].strip()
    if "_copy_kernel" in name:
        return CAST if _CASTS.search(name) else "copy"
    if "CatArray" in name:
        return "cat"
    for found in _FUNCTOR.finditer(name):
        return (found[1] or found[2]).lower().removeprefix("binary")
    for found in _FUNCTION.finditer(name):
        if not _GENERIC.search(found[1]):
            return found[1].removeprefix("vectorized_").removesuffix("_tensor_scalar").lower()
    own = re.split(r"[<(]", name.removeprefix("void "))[0].split("::")[-1].strip()
    return re.sub(r"^triton_[a-z]{3}_|_\d+$", "", own) or name[:40]
