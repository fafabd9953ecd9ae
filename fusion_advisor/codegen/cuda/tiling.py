"""How a CUDA kernel is laid out over threads and blocks, chosen from a Program's sizes and strides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fusion_advisor.codegen.common.arguments import INT32_SAFE, MAX_RESIDENT_COLS, Access, Schedule, base_is_multiple, next_power
from fusion_advisor.codegen.common.column_passes import late_loads
from fusion_advisor.codegen.common.interface import Form
from fusion_advisor.codegen.cuda.ops import shared_by_rows, vector_width
from fusion_advisor.codegen.cuda.shared_memory import SharedMemory, pack_bytes, staged_cols
from fusion_advisor.ir.program import ITEM_BYTES, Store, Value, divides_index
from fusion_advisor.records import Tuning

BLOCK = 256
_HALVES_BLOCK = 128
"""Where a thread takes a pack of each half of a row, as in rope: of twelve shapes of a block the fastest from 512 tokens to
8,192, by 1 to 4 % of the time of 256 threads with up to four packs each (bfloat16, 32 heads, H200)."""
_LOOP_BLOCK = 512
_PACK_REGISTERS = {"flat": 40, "tiled": 40, "rows": 80}
"""Registers for the packs that a thread loads at once. Pointwise threads are short: many of them serve better than much on
each. Those of a row wait for one another, and hide that with loads of their own."""
_LOOP_REGISTERS = 32
"""The same where 1024 threads share a multiprocessor, in one block or in two, and have 64 registers each."""
_CLUSTER_REGISTERS = 64
"""The same in the blocks of a cluster, up to 512 threads each, which have 128 registers."""
_WARP = 32
_NARROW_BLOCK = 128
"""Threads of a block where several rows share a warp: QK-norm with rope, 8 packs to a row, takes 12.2 µs so and 26.9 with a warp
for each row (2,048 tokens, 32 heads, bfloat16, H200)."""
_MIN_BLOCKS = 512
"""Below this many blocks a 132-SM device has idle SMs, so rows are not grouped."""
_MOST_ACROSS = 65535
"""CUDA's limit on the second side of a grid."""
_NO_SHARED_MEMORY = SharedMemory()
_NO_TUNING = Tuning()
_PLAIN = Form()


def form_for(plans: Sequence[Schedule], tuning: Tuning = _NO_TUNING) -> Form:
    """The form that is best for some loop nests; rows are shared by blocks where the tuning says so.

    Packs inside the channels of 7 by 7 elements, or inside rows of 50,257, are single columns, which costs two or three times the
    instructions. The other forms cost more than packs of half or a quarter of the width that they gain.
    """

    def widens(plan: Schedule, form: Form) -> bool:
        return pack_width(plan)[0] <= min(vector_width(plan), pack_width(plan, form)[0]) // 4

    split, shifted = Form(is_split=True), Form(is_shifted=True)
    is_wide = plans[0].kind == "rows" and max(plan.program.dims[-1] for plan in plans) > MAX_RESIDENT_COLS
    is_clustered = plans[0].kind == "rows" and tuning.cluster is not None
    return Form(
        is_looped=is_wide and not is_clustered,
        is_clustered=is_clustered,
        is_split=any(widens(plan, split) for plan in plans),
        # In narrow rows the packs at the edges, which are moved element by element, are too many.
        is_shifted=is_wide and all(_may_shift(plan) and widens(plan, shifted) for plan in plans),
    )


def _may_shift(plan: Schedule) -> bool:
    """Whether all that varies by column is plain packs: then nothing but loads, stores and sums asks where the row starts."""
    values = plan.program.values
    loads = [n for n, value in enumerate(values) if value.op == "load" and plan.has_col(n)]
    is_plain = all(plan.loads[n].is_vector and values[n].guard is None and not values[n].args for n in loads)
    stored = [n for n in range(len(plan.stores)) if plan.stores_col(n)]
    is_plain = is_plain and all(plan.stores[n].is_vector and plan.program.stores[n].guard is None for n in stored)
    return (
        plan.kind == "rows"
        and bool(loads)
        and is_plain
        and not (plan.has_pairs or plan.numbers or any(value.op in ("quotient", "index") for value in values))
    )


def pack_width(plan: Schedule, form: Form = _PLAIN) -> tuple[int, int]:
    """The widest pack that sizes, strides and offsets allow, and the alignment that it asks of base addresses, in bytes.

    Alignment is 1 where every tensor has it: an element is aligned to itself.

    Args:
        plan: the schedule.
        form: of the kernel.
    """
    width = vector_width(plan)
    along = [access for access in _addresses(plan) if access.access.is_vector]
    while width > 1:
        if _is_whole(plan, width, form) and _is_aligned(plan, along, width, form):
            return width, max(min(16, one.access.col_bytes * width) for one in along)
        width //= 2
    return 1, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """An access with how far it moves, in elements: by row dims, and by its offset and steps."""

    access: Access
    row_strides: tuple[int, ...]
    others: tuple[int, ...]


def _addresses(plan: Schedule) -> list[_Address]:
    """The addresses of loads and stores, those of pairs once; strides of dims with one row are left out."""
    program = plan.program
    found: list[tuple[Access, Value | Store]] = [
        (access, program.values[n]) for n, access in plan.loads.items() if n == plan.load_pair(n)[0]
    ]
    found += [(access, program.stores[n]) for n, access in enumerate(plan.stores) if n == plan.store_pair(n)[0]]
    return [
        _Address(
            access=access,
            row_strides=tuple(s for s, size in zip(place.strides[:-1], program.dims[:-1], strict=True) if size > 1),
            others=(place.offset, *place.steps),
        )
        for access, place in found
    ]


def _is_whole(plan: Schedule, width: int, form: Form) -> bool:
    """Whether packs take whole calls of the random numbers, which make four, and lie across no border between channels."""
    values = plan.program.values
    borders = [int(values[v.args[1]].constant or 0) for v in values if v.op == "quotient"]
    along = (n for n in plan.numbers if plan.numbers[n].strides[-1] == "1")
    return all(base_is_multiple(plan.program, n, min(width, 4)) for n in along) and all(
        border % width == 0 or (form.is_split and border >= width) for border in borders
    )


def _is_aligned(plan: Schedule, along: Sequence[_Address], width: int, form: Form) -> bool:
    """Whether all packs lie where one access may read them."""
    if form.is_shifted:  # every address may miss a pack's border by as much as all others do
        return len({(*(stride % width for stride in one.row_strides), one.others[0] % width) for one in along}) == 1
    return plan.program.dims[-1] % width == 0 and all(
        move * ITEM_BYTES[one.access.operand.dtype] % min(16, one.access.col_bytes * width) == 0
        for one in along
        for move in (*one.others, *one.row_strides)
    )


def launch_shape(
    plan: Schedule, tuning: Tuning, *, form: Form = _PLAIN, width: int = 0, shared: SharedMemory = _NO_SHARED_MEMORY
) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Macros and grid for a Program.

    Args:
        plan: the Program's schedule.
        tuning: overrides; ``packs`` holds for every width of rows, ``num_warps`` for one. ``block_cols`` narrows packs: on a
            row of a few thousand elements, more threads that have less to do end sooner.
        form: of the kernel.
        width: columns of a pack; what the Program allows by default.
        shared: what a kernel that walks rows in parts keeps them in.
    """
    width = width or pack_width(plan, form)[0]
    width = min(width, 1 << (tuning.block_cols.bit_length() - 1)) if tuning.block_cols else width
    if plan.kind == "flat":
        macros = _flat_shape(plan, tuning, width)
    elif plan.kind == "tiled":
        macros = _tiled_shape(plan, tuning, width)
    elif form.is_looped:
        macros = _looped_shape(plan, tuning, width, shared, is_shifted=form.is_shifted)
    else:
        macros = _resident_shape(plan, tuning, width, form)
    if plan.needs_int64:
        macros["WIDE_INDEX"] = 1
    if plan.kind == "rows" and not form.is_looped and late_loads(plan):
        # A third of the registers, and all that a block waits for again: too much where few rows are under way.
        macros["LATE"] = int(max(plan.row_count, 1) >= _MIN_BLOCKS)
    return macros, _grid(plan, macros)


def _asked_threads(tuning: Tuning) -> int:
    """Threads that a tuning asks for; 0 where it leaves the choice."""
    return 32 * tuning.num_warps if tuning.num_warps else 0


def _are_halves(plan: Schedule) -> bool:
    """Whether a thread writes a pack of each half of a row, as in rope."""
    return plan.kind == "tiled" and len(plan.stores) > 1 and not plan.has_pairs


def _wanted_packs(plan: Schedule, tuning: Tuning, width: int) -> int:
    """Packs of a thread that are asked for, or best while there are enough blocks."""
    return tuning.packs or (1 if _are_halves(plan) else _packs(plan, width, _PACK_REGISTERS[plan.kind]))


def _packs_for(wanted: int, tuning: Tuning, blocks: Callable[[int], int]) -> int:
    """Packs of a thread that leave blocks for every SM; what a tuning asks for stays."""
    count = wanted
    while not tuning.packs and count > 1 and blocks(count) < _MIN_BLOCKS:
        count //= 2
    return count


def _flat_shape(plan: Schedule, tuning: Tuning, width: int) -> dict[str, int]:
    packs, threads = -(-max(plan.program.dims[-1], 1) // width), _asked_threads(tuning) or BLOCK
    each = _packs_for(_wanted_packs(plan, tuning, width), tuning, lambda count: packs // (threads * count))
    return {"THREADS": threads, "PACKS": each, "VEC": width}


def _tiled_shape(plan: Schedule, tuning: Tuning, width: int) -> dict[str, int]:
    packs, rows = -(-max(plan.program.dims[-1], 1) // width), max(plan.row_count, 1)
    block = _asked_threads(tuning) or (_HALVES_BLOCK if _are_halves(plan) else BLOCK)
    threads = min(block, next_power(packs))
    height = max(1, min(tuning.block_rows or block // threads, 1024 // threads, rows))
    across = min(-(-packs // threads), _MOST_ACROSS)
    each = _packs_for(_wanted_packs(plan, tuning, width), tuning, lambda count: rows // (height * count) * across)
    each = min(each, rows)
    while len(plan.sizes) > 2 and plan.program.dims[-2] % each:
        each -= 1
    return {"THREADS": threads, "ROWS": min(height, -(-rows // each)), "PACKS": each, "VEC": width}


def _resident_shape(plan: Schedule, tuning: Tuning, width: int, form: Form) -> dict[str, int]:
    """Launch shape of rows that stay in the registers of a block, or of the blocks of a cluster."""
    cols, rows = max(plan.program.dims[-1], 1) + (width - 1 if form.is_shifted else 0), max(plan.row_count, 1)
    blocks, asked = (tuning.cluster or 1) if form.is_clustered else 1, _asked_threads(tuning)
    packs_of_row = -(-cols // width)
    packs = -(-packs_of_row // blocks)
    if packs <= _WARP // 2 and not (asked or form.is_clustered):
        # Several rows share a warp: its lanes would have nothing to do otherwise.
        threads = next_power(-(-packs // (tuning.packs or 1)))
        height = min(tuning.block_rows or _NARROW_BLOCK // threads, 1024 // threads)
        while not tuning.block_rows and height * threads > _WARP and rows // height < _MIN_BLOCKS:
            height //= 2
    else:
        threads = asked or min(1024, -(-packs // (_WARP * _wanted_packs(plan, tuning, width))) * _WARP)
        height = (tuning.block_rows or 4) if threads == _WARP and (tuning.block_rows or rows // 4 >= _MIN_BLOCKS) else 1
        height = min(height, 32)
    each = -(-packs // threads)
    if form.is_clustered:
        is_full = cols == blocks * threads * each * width and not form.is_shifted
        return {"THREADS": threads, "CLUSTER": blocks, "PACKS": each, "VEC": width, "FULL": int(is_full)}
    is_full = cols % (threads * each * width) == 0 and not form.is_shifted
    return {"THREADS": threads, "ROWS": height, "PACKS": each, "VEC": width, "FULL": int(is_full)}


def fits_cluster(plan: Schedule, tuning: Tuning) -> bool:
    """Whether the registers of a cluster hold a row; what does not fit would be spilled."""
    form = form_for([plan], tuning)
    macros, _ = launch_shape(plan, tuning, form=form)
    return macros["PACKS"] * _registers(plan, macros["VEC"]) <= (
        _LOOP_REGISTERS if macros["THREADS"] > 512 else _CLUSTER_REGISTERS
    )


def _looped_shape(plan: Schedule, tuning: Tuning, width: int, shared: SharedMemory, *, is_shifted: bool) -> dict[str, int]:
    """Launch shape of rows that are walked in parts: as many at once as shared memory holds, with enough loads under way."""
    before = width - 1 if is_shifted else 0
    cols = plan.program.dims[-1] + before
    row_bytes = -(-cols // width) * pack_bytes(plan, width)
    fitting = shared.sm_bytes // (row_bytes + shared.reserved_bytes)
    is_alone = fitting < 2 or plan.row_count < _MIN_BLOCKS
    threads = 32 * tuning.num_warps if tuning.num_warps else 1024 if is_alone else _LOOP_BLOCK
    packs = -(-cols // (width * threads))
    each = tuning.packs or _packs(plan, width, _LOOP_REGISTERS)
    if not tuning.packs:
        most = max(1, min(8, _LOOP_REGISTERS // max(1, _registers(plan, width))))
        # A row that has a multiprocessor for itself is read at one go; others in steps that are full.
        steps = -(-packs // most) if plan.row_count < _MIN_BLOCKS else max(-(-packs // most), round(packs / each))
        each = -(-packs // steps)
    macros = {"THREADS": threads, "ROWS": 1, "PACKS": each, "VEC": width, "FULL": 0}
    macros["FULL"] = int(cols % (threads * each * width) == 0 and not is_shifted)
    if not pack_bytes(plan, width):
        return macros
    blocks = max(1, min(tuning.block_rows or fitting, 2048 // threads))
    return {**macros, "STAGED": staged_cols(plan, shared, width=width, threads=threads, blocks=blocks, before=before)}


def launch_shapes(
    plans: Sequence[Schedule], tuning: Tuning, *, form: Form, width: int, shared: SharedMemory = _NO_SHARED_MEMORY,
    opened: Collection[str] = (),
) -> tuple[dict[str, int], list[tuple[int, int, int]]]:  # fmt: skip
    """Macros of a launch of several loop nests, which is shaped for the largest, and the grid of each; see :func:`launch_shape`.

    Args:
        plans: the nests; one alone gets what it gets by itself.
        tuning: overrides.
        form: of the kernel.
        width: columns of a pack, that every nest allows.
        shared: what a kernel that walks rows in parts keeps them in.
        opened: names of integers that the kernel was rendered to be given.
    """
    widest = max(plans, key=lambda plan: plan.row_count)
    macros, _ = launch_shape(widest, tuning, form=form, width=width, shared=shared)
    if form.is_looped:
        staged_cols = [launch_shape(plan, tuning, form=form, width=width, shared=shared)[0].get("STAGED") for plan in plans]
        macros |= {"STAGED": min(cols for cols in staged_cols if cols is not None)} if "STAGED" in macros else {}
    if widest.kind == "tiled":
        while any(len(plan.sizes) > 2 and plan.program.dims[-2] % macros["PACKS"] for plan in plans):
            macros["PACKS"] -= 1
    if any(plan.needs_int64 for plan in plans):
        macros["WIDE_INDEX"] = 1
    if any(_blocks_across(plan, macros) > _MOST_ACROSS for plan in plans if plan.kind == "tiled"):
        macros["ONCE"] = 0
        step = _MOST_ACROSS * macros["THREADS"] * macros["VEC"]  # up to 2^27 columns
        if any(plan.program.dims[-1] + step >= INT32_SAFE for plan in plans):
            macros["WIDE_INDEX"] = 1
    if len(plans) == 1:  # functions of several nests are shared by some of other sizes
        macros |= {name.upper(): size for name, size in divisors(widest, opened).items()}
    return macros, [_grid(plan, macros) for plan in plans]


def shared_bytes_of(plan: Schedule, macros: dict[str, int]) -> int:
    """Dynamic shared memory of a block, for one of the nests that a launch serves."""
    return macros["STAGED"] // macros["VEC"] * pack_bytes(plan, macros["VEC"]) if "STAGED" in macros else 0


def _grid(plan: Schedule, macros: dict[str, int]) -> tuple[int, int, int]:
    packs, rows = -(-max(plan.program.dims[-1], 1) // macros["VEC"]), plan.row_count
    if plan.kind == "flat":
        return -(-packs // (macros["THREADS"] * macros["PACKS"])), 1, 1
    if plan.kind == "tiled":
        # More columns than the grid's second side can hold are reached by the loop over blocks.
        return -(-rows // (macros["ROWS"] * macros["PACKS"])), min(_blocks_across(plan, macros), _MOST_ACROSS), 1
    return -(-rows // macros.get("ROWS", 1)) * macros.get("CLUSTER", 1), 1, 1


def _blocks_across(plan: Schedule, macros: dict[str, int]) -> int:
    """Blocks that hold all columns of a tiled kernel."""
    return -(-max(plan.program.dims[-1], 1) // (macros["VEC"] * macros["THREADS"]))


def divisors(plan: Schedule, opened: Collection[str] = ()) -> dict[str, int]:
    """Sizes but those that vary by which a tiled kernel divides its row index, which is most of its work before its first load.

    With 32 heads for a constant, and without a loop over columns, the first load of rope is its 49th instruction, not the 86th,
    and a thread of 16 elements has 159 instead of 204. Rows whose columns are divided too, as into the channels of a group
    norm, have few sizes in a model, and a division for each pack; for each column where channels come last.
    """
    values = plan.program.values
    divided = [value for value in values if divides_index(values, value) and plan.kind == "rows"]
    extents = {value.args[1] for value in divided} & plan.extents.keys()
    inner = plan.sizes[1:-1] if plan.kind == "tiled" or extents else ()
    found = {name: plan.program.dims[number] for number, name in enumerate(inner, start=1)}
    found |= {plan.extents[number]: int(values[number].constant or 0) for number in sorted(extents)}
    return {name: size for name, size in found.items() if name not in opened}


def _registers(plan: Schedule, width: int) -> int:
    """Registers for a pack of every operand that a thread reads."""
    arrays = [
        access
        for n, access in plan.loads.items()
        if access.is_vector and n == plan.load_pair(n)[0] and not shared_by_rows(plan, n)
    ]
    return sum(-(-access.col_bytes * width // 4) for access in arrays)


def _packs(plan: Schedule, width: int, registers: int) -> int:
    """Packs of a thread: as many loads under way as so many registers allow."""
    # Short of rows, more threads on each of them are faster than more packs on a thread.
    count = 8 if width == 1 else 2 if plan.kind == "rows" and plan.row_count < _MIN_BLOCKS else 4
    while count > 1 and _registers(plan, width) * count > registers:
        count //= 2
    return count
