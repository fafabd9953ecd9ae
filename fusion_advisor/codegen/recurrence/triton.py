"""Recurrences in Triton: each program walks some rows through all steps, with their part of the state in registers.

A step waits for the one before it, so a program's time is that of its loads. The loads of several steps are therefore issued
ahead of the first of these steps: none of them reads the state.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fusion_advisor.codegen.common.arguments import Access, Schedule, kept, next_power, schedule, split_index
from fusion_advisor.codegen.common.header_comment import comment
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Rendered, entry_name, environment
from fusion_advisor.codegen.common.printer import Unsupported
from fusion_advisor.codegen.recurrence.notes import notes_of
from fusion_advisor.codegen.triton.backend import compile_source, has_cuda, load_source
from fusion_advisor.codegen.triton.direct_launch import TritonLauncher, compile_options
from fusion_advisor.codegen.triton.interpreted import for_interpreter, is_interpreted
from fusion_advisor.codegen.triton.ops import TritonWriter
from fusion_advisor.codegen.triton.signature import signature
from fusion_advisor.ir.program import ADDRESSED, Program, Value
from fusion_advisor.ir.recurrence import Recurrence

AHEAD = 4
"""Steps whose loads are issued together."""
_MOST_COLS = 256
"""Of a state that a program holds: one number a thread and register at 8 warps."""
_TILE = 128
"""Elements of a program's state: 4 a lane of its only warp, so that a device has as many programs as can be."""
_MASKS = [
    "row_mask = row < rows",
    "col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols",
    "mask = row_mask & col_mask",
]
_NAMES = frozenset({"first", "steps", "held", "held_next", "is_inside"})


class _StepWriter(TritonWriter):
    """Prints a step: the state is a name, not a load."""

    helper_names = TritonWriter.helper_names | _NAMES

    def __init__(self, plan: Schedule, state: int) -> None:
        self._state = plan.program.operands[state]
        super().__init__(plan, fast_math=False, is_looped=False)

    def load(self, number: int, value: Value, access: Access) -> str:
        """The carried state, or a masked load."""
        return "held" if access.operand is self._state else super().load(number, value, access)

    def mask(self, varies: frozenset[int]) -> str:
        """The mask of a tile: a program is at one step at a time."""
        return super().mask(varies - {0})

    def _read(self, access: Access, varies: frozenset[int], masks: list[str], *, policy: str = "") -> str:
        # The last steps of a row of them may lie past the end.
        ahead = ["is_inside"] if access.strides[0] != "0" else []
        return super()._read(access, varies, [*ahead, *masks], policy=policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a kernel is launched with.

    Attributes:
        scalars: integer arguments after the tensors.
        constants: constexpr arguments.
        programs: size of the grid.
        num_warps: of each program.
    """

    scalars: tuple[int, ...]
    constants: Mapping[str, Any]
    programs: int
    num_warps: int = 1


class TritonRecurrence:
    """An imported kernel.

    Attributes:
        build_ns: what importing and compiling took so far.
        tuning: block sizes of the recurrence that was bound last.
    """

    def __init__(self, rendered: Rendered, path: Path) -> None:
        started = time.perf_counter_ns()
        self._rendered = for_interpreter(rendered) if is_interpreted() else rendered
        self._kernel: Any = getattr(load_source(self._rendered, path), rendered.entry)
        self.build_ns = time.perf_counter_ns() - started
        self.tuning = ""

    def bind(self, recurrence: Recurrence) -> Launcher:
        """Fix sizes, strides and grid; the launcher takes the operands' tensors in order, the state among them.

        Raises:
            KernelBuildFailed: Triton refuses the kernel, or the recurrence has another layout than the one that was rendered.
        """
        program = _by_rows(recurrence.program)
        if not self._rendered.entry.endswith(_entry(program, "recurrence").rpartition("_")[2]):
            raise KernelBuildFailed(kernel=self._rendered.entry, target="triton", cause="it was rendered for another layout")
        if 0 in program.dims[1:-1]:
            return lambda *_tensors: None
        launch = _launch(program)
        self.tuning = " ".join(f"{name}={value}" for name, value in launch.constants.items() if name.startswith("BLOCK"))
        if not hasattr(self._kernel, "warmup") or not has_cuda():
            return _interpreted(self._kernel, launch)
        started = time.perf_counter_ns()
        launcher = TritonLauncher(
            self._kernel, [operand.dtype for operand in program.operands], (*launch.scalars, *launch.constants.values()),
            launch.programs, compile_options(launch.num_warps, asserts=False, is_exact=False), self._rendered.entry,
        )  # fmt: skip
        self.build_ns += time.perf_counter_ns() - started
        return launcher


def _interpreted(kernel: Any, launch: Launch) -> Launcher:
    def call(*tensors: Any) -> None:
        kernel[(launch.programs,)](*tensors, *launch.scalars, **launch.constants, num_warps=launch.num_warps)

    return call


class TritonRecurrences:
    """Renders and builds recurrences in Triton."""

    name: ClassVar[str] = "triton"

    def render(self, recurrence: Recurrence, header: Header) -> Rendered:
        """Print a recurrence as readable Triton.

        Raises:
            KernelBuildFailed: the state has too many columns for registers, or a step holds what Triton cannot express.
        """
        program = _by_rows(recurrence.program)
        entry = _entry(program, header.title)
        if program.dims[-1] > _MOST_COLS:
            cause = f"a row of the state has {program.dims[-1]} columns; {_MOST_COLS} fit in a program's registers"
            raise KernelBuildFailed(kernel=entry, target="triton", cause=cause)
        plan = schedule(program, flatten_rows=False)
        try:
            writer = _StepWriter(plan, recurrence.state)
            body = _body(plan, writer, recurrence)
        except Unsupported as error:
            raise KernelBuildFailed(kernel=entry, target="triton", cause=str(error)) from error
        exp = "exp" if "exp" in writer.helpers else "tl.exp"
        if writer.helpers & {"sigmoid", "expm1"} and not (writer.is_half or writer.is_float64):
            writer.helpers.add("exp")
            exp = "exp"
        source = environment().get_template("triton/recurrence.py.jinja").render(
            heading=comment(notes_of(recurrence, header)), entry=entry, fast_math=False, exp=exp,
            bits=64 if writer.is_float64 else 32, helpers=sorted(writer.helpers, key=lambda name: (name != "exp", name)),
            signature=signature(plan.pointers, _integers(plan), ["INDEX", "BLOCK_ROWS", "BLOCK_COLS", "FULL"], ()),
            ahead=AHEAD, **body,
        )  # fmt: skip
        return Rendered(backend=self.name, entry=entry, source=source, suffix=".py")

    def build(self, rendered: Rendered, path: Path) -> TritonRecurrence:
        """Write the source to ``path`` and import it; machine code is made when a recurrence is bound.

        Raises:
            KernelBuildFailed: the file cannot be imported.
        """
        return TritonRecurrence(rendered, path)


def compile_for(recurrence: Recurrence, rendered: Rendered, target: int) -> bytes:
    """Compile a kernel for a GPU that need not be here; returns the cubin.

    Args:
        recurrence: decides sizes and block sizes.
        rendered: the kernel.
        target: compute capability, 80, 90 or 100.

    Raises:
        KernelBuildFailed: the cause is Triton's last line.
    """
    launch = launch_of(recurrence)
    dtypes = [operand.dtype for operand in recurrence.program.operands]
    options = compile_options(launch.num_warps, asserts=False, is_exact=False)
    return bytes(compile_source(rendered, target, dtypes, launch.scalars, launch.constants, options)["cubin"])


def launch_of(recurrence: Recurrence) -> Launch:
    """Return what the kernel of a recurrence is launched with at its sizes.

    Args:
        recurrence: decides sizes and block sizes.
    """
    return _launch(_by_rows(recurrence.program))


def _by_rows(program: Program) -> Program:
    """Return a Program that Triton's tiles of rows take: where nothing is summed, its columns are rows of one column."""
    if program.is_reduced:
        return program
    values = tuple(replace(value, strides=(*value.strides, 0)) if value.op in ADDRESSED else value for value in program.values)
    stores = tuple(replace(store, strides=(*store.strides, 0)) for store in program.stores)
    return replace(program, dims=(*program.dims, 1), values=values, stores=stores, is_reduced=True)


def _entry(program: Program, title: str) -> str:
    return entry_name(program, title, "triton", f"ahead={AHEAD}")


def _integers(plan: Schedule) -> list[tuple[str, int]]:
    """Return the integer arguments: ``rows`` are those of one step."""
    program = plan.program
    rows = 1
    for size in program.dims[1:-1]:
        rows *= size
    return [("steps", program.dims[0]), *((name, rows if name == "rows" else value) for name, value in plan.arguments)]


def _launch(program: Program) -> Launch:
    import triton.language as tl

    plan = schedule(program, flatten_rows=False)
    integers = _integers(plan)
    rows = dict(integers)["rows"]
    block_cols = next_power(program.dims[-1])
    block_rows = max(1, _TILE // block_cols)
    constants = {
        "INDEX": tl.int64 if plan.needs_int64 else tl.int32, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols,
        "FULL": 0 < program.dims[-1] == block_cols,
    }  # fmt: skip
    return Launch(
        scalars=tuple(value for _, value in integers), constants=constants, programs=-(-rows // block_rows),
        num_warps=max(1, min(8, block_rows * block_cols // _TILE)),
    )  # fmt: skip


def _body(plan: Schedule, writer: _StepWriter, recurrence: Recurrence) -> dict[str, Any]:
    """Return the lines of a kernel: its place, what it does before the steps, in each step, and after them."""
    values, step = plan.program.values, plan.indices[0]
    every, loads, rest = _parts(plan, recurrence)
    state_at = next(number for number, store in enumerate(plan.program.stores) if store.operand == recurrence.state)
    hidden, row = plan.program.stores[state_at], plan.program.stores[1 - state_at]
    whole = frozenset(range(1, len(plan.program.dims)))
    state_address = writer.address(plan.stores[state_at], whole)
    dtype = values[hidden.value].dtype
    before = [
        *writer.definitions(every),
        f"held = tl.load({state_address}, mask=mask, other=0.0).to(tl.{dtype})",
    ]
    is_by_row = row.strides[-1] == 0 and not plan.has_col(row.value)
    row_varies = whole - {plan.col_dim} if is_by_row else whole
    row_mask = writer.mask(row_varies)
    stored = writer.text(row.value).code
    lines = [
        *writer.definitions(rest),
        f"held_next = {writer.text(hidden.value).code}",
        f"tl.store({writer.address(plan.stores[1 - state_at], row_varies)}, {stored}, mask={row_mask} & is_inside)",
        "held = tl.where(is_inside, held_next, held)",
    ]
    groups = _unrolled(writer, step, writer.definitions(loads), lines, {*loads, *rest})
    after = [f"tl.store({state_address}, held, mask=mask)"]
    resting = [f"{name} = {code}" for name, code, access in writer.bases if access.strides[0] == "0"]
    before = [*kept(resting, [*before, *(line for group in groups for line in group), *after]), *before]
    everything = [*before, *(line for group in groups for line in group), *after]
    outer = split_index("row", plan.indices[1:-1], plan.sizes[1:-1]) if len(plan.indices) > 3 else []
    names = plan.indices[1:-1]
    place = [
        "row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]", *outer,
        *([f"{names[0]} = row"] if not outer and names[0] != "row" else []),
        "col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)", *_MASKS,
    ]  # fmt: skip
    return {"place": kept(place, everything), "before": before, "groups": groups, "after": after}


def _parts(plan: Schedule, recurrence: Recurrence) -> tuple[list[int], list[int], list[int]]:
    """Split a step's values: what is one for all steps, what is read in each, and what is computed in each."""
    values = plan.program.values
    moving: set[int] = set()
    for number, value in enumerate(values):
        needs = (*value.args, *(() if value.guard is None else (value.guard,)))
        is_read_on = value.op in ADDRESSED and (value.strides[0] != 0 or number in recurrence.state_loads)
        if is_read_on or (value.op == "index" and value.dim == 0) or not moving.isdisjoint(needs):
            moving.add(number)
    every = [number for number in range(len(values)) if number not in moving]
    loads = [
        number for number in sorted(moving)
        if values[number].op == "load" and number not in recurrence.state_loads
        and not values[number].args and values[number].guard is None
    ]  # fmt: skip
    return every, loads, [number for number in sorted(moving) if number not in loads]


def _unrolled(
    writer: _StepWriter, step: str, reads: Sequence[str], lines: Sequence[str], numbers: Iterable[int]
) -> list[list[str]]:
    """Return the lines of some steps in a row: all loads, then each step's own lines, its names numbered."""
    own = {step, "is_inside", *(writer.text(number).code for number in numbers if writer.is_named(number))}
    own |= {name for name, _, access in writer.bases if access.strides[0] != "0"}
    pattern = re.compile(rf"\b({'|'.join(sorted(map(re.escape, own)))})\b")
    bases = [f"{name} = {code}" for name, code, access in writer.bases if access.strides[0] != "0"]
    body: list[list[str]] = []
    ahead: list[str] = []
    for number in range(AHEAD):

        def numbered(line: str, number: int = number) -> str:
            return pattern.sub(lambda found: f"{found.group(1)}_at{number}", line)

        # A block, not a number: the interpreter makes no mask of a block and a number.
        place = [f"{step} = tl.full([1, 1], {number}, INDEX) + first", f"is_inside = {step} < steps"]
        used = kept(bases, [*reads, *lines])
        ahead += [numbered(line) for line in (*place, *used, *reads)]
        body.append([numbered(line) for line in lines])
    return [ahead, *body]
