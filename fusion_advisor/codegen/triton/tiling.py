"""Block sizes, warps and grid of a Triton kernel, chosen from a Program's sizes and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fusion_advisor.codegen.common.arguments import INT32_SAFE, MAX_RESIDENT_COLS, Schedule, base_is_multiple, next_power
from fusion_advisor.codegen.common.column_passes import parts_of
from fusion_advisor.codegen.common.horizontal_fusion import MULTIPLE
from fusion_advisor.codegen.common.interface import KernelBuildFailed, Tuning
from fusion_advisor.codegen.common.online_softmax import online_sums
from fusion_advisor.codegen.common.welford import moments

FLAT_BLOCK = 1024
"""8 elements a thread at 4 warps: one 16-byte access in half precision, two in float32."""
_SHARED_TILE = 4096
"""Tile where its rows share operands, as heads share rope's tables: those are loaded once for a tile."""
_LOOP_BLOCK = 4096
_LEAST_WHOLE = 512
"""Where channels end more often, a tile reads their weights by column."""
_MIN_PROGRAMS = 512
"""Below this many programs a 132-SM device has idle SMs, so rows are not grouped."""
_MAX_TILE = 2**20
"""Triton's limit on the elements of one tile."""
NARROWEST = 64
"""Columns of the least tile where their number varies: two a lane of a warp."""
_CLOSED: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A launch: ``constants`` are the constexpr arguments in the order of the signature."""

    constants: dict[str, Any]
    num_warps: int
    programs: int

    @property
    def text(self) -> str:
        """What the report shows: ``BLOCK_ROWS=1 BLOCK_COLS=4096 num_warps=8``."""
        blocks = [f"{name}={value}" for name, value in self.constants.items() if name.startswith("BLOCK")]
        return " ".join([*blocks, f"num_warps={self.num_warps}"])


def walks_columns(plan: Schedule, tuning: Tuning) -> bool:
    """Whether rows are read in parts, once for each reduction and once more: too wide for registers, or by the tuning's choice.

    Two reads of a row that stays in the L1 cache can be quicker than one that waits for the whole row: RMSNorm of 16,384 rows of
    8,192 took 126.9 µs in blocks of 4,096 columns and 16 warps, and 131.1 µs from registers (bfloat16, H200). LayerNorm and
    softmax, which compute more on the first walk, lose 10 to 130 % so.
    """
    cols = plan.program.dims[-1]
    return plan.kind == "rows" and (cols > MAX_RESIDENT_COLS or (tuning.block_cols or cols) < cols)


def choose_shape(plan: Schedule, tuning: Tuning, *, is_looped: bool, opened: frozenset[str] = _CLOSED) -> Shape:
    """Pick block sizes for a Program.

    Args:
        plan: the Program's schedule.
        tuning: overrides.
        is_looped: whether rows are walked in parts.
        opened: names of integers that vary: then there are few choices, because each is compiled.

    Raises:
        KernelBuildFailed: the grid or the tile would pass what CUDA or Triton allow.
    """
    import triton.language as tl

    index = tl.int64 if plan.needs_int64 else tl.int32
    cols = plan.program.dims[-1]
    if plan.kind == "flat":
        block = next_power(tuning.block_cols or (FLAT_BLOCK if opened else min(FLAT_BLOCK, max(cols, 32))))
        programs, tile = -(-cols // block), block
        constants: dict[str, Any] = {"INDEX": index, "BLOCK_COLS": block}
    else:
        choose = _tile if plan.kind == "tiled" else _rows
        block_rows, block_cols = choose(plan, tuning, is_looped, opened)
        rows = plan.program.dims[-2] if plan.kind == "tiled" else plan.row_count
        outer = prod(plan.program.dims[:-2]) if plan.kind == "tiled" else 1
        col_tiles = -(-cols // block_cols) if plan.kind == "tiled" else 1
        programs, tile = outer * -(-rows // block_rows) * col_tiles, block_rows * block_cols
        constants = {"INDEX": index, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}
        constants |= _known([plan], block_cols, is_looped=is_looped, opened=[opened])
    tile *= 2 if plan.has_pairs else 1
    if plan.numbers:
        constants["BY_FOUR"] = all(base_is_multiple(plan.program, number, 4) for number in plan.numbers)
    counted = {"rows": [cols] * is_looped, "tiled": plan.program.dims[-2:] if opened else []}.get(plan.kind, [])
    if any(INT32_SAFE <= size < 2**31 for size in counted):
        cause = "the step after the last one along a size this near to 2^31 would pass the 32 bits that it is passed in"
        raise KernelBuildFailed(kernel="triton kernel", target=f"shape {plan.program.dims}", cause=cause)
    if programs >= 2**31 or tile > _MAX_TILE:
        cause = f"{programs} programs of {tile} elements: CUDA allows 2^31 - 1, Triton 2^20"
        raise KernelBuildFailed(kernel="triton kernel", target=f"shape {plan.program.dims}", cause=cause)
    # 16 elements a thread at most: more of them spill once several operands are live.
    most = 16 if plan.kind == "rows" else 4
    num_warps = tuning.num_warps or max(1, min(most, next_power(tile // 512)))
    if plan.kind != "rows" and not tuning.num_warps:
        num_warps = 8 if tile >= _SHARED_TILE else max(1, min(4, next_power(tile // 256)))
    return Shape(constants=constants, num_warps=num_warps, programs=programs)


def choose_shapes(
    plans: Sequence[Schedule], tuning: Tuning, *, is_looped: bool, opened: Sequence[frozenset[str]] = ()
) -> tuple[Shape, list[int]]:
    """Pick block sizes for several loop nests in one launch: those of the largest.

    Args:
        plans: schedules of the nests.
        tuning: overrides. Where the number of columns varies, tiles of whole rows do, and what one of them was tuned to holds for
            no other.
        is_looped: whether rows are walked in parts.
        opened: for each nest, names of its integers that vary.

    Returns:
        the launch, and how many programs each nest has.

    Raises:
        KernelBuildFailed: as :func:`choose_shape`.
    """
    opened = opened or [_CLOSED] * len(plans)
    if not is_looped and plans[0].kind != "flat" and any(p.sizes[-1] in own for p, own in zip(plans, opened, strict=True)):
        tuning = Tuning()
    largest = max(range(len(plans)), key=lambda number: prod(plans[number].program.dims))
    shape = choose_shape(plans[largest], tuning, is_looped=is_looped, opened=opened[largest])
    rows, cols = shape.constants.get("BLOCK_ROWS"), shape.constants["BLOCK_COLS"]
    if len(plans) == 1:
        return shape, [shape.programs]
    fixed = replace(tuning, block_rows=rows, block_cols=cols, num_warps=shape.num_warps)
    shapes = [choose_shape(p, fixed, is_looped=is_looped, opened=own) for p, own in zip(plans, opened, strict=True)]
    constants = {name: size for name, size in shape.constants.items() if name in ("INDEX", "BLOCK_ROWS", "BLOCK_COLS")}
    wide = [s.constants["INDEX"] for plan, s in zip(plans, shapes, strict=True) if plan.needs_int64]
    constants["INDEX"] = wide[0] if wide else constants["INDEX"]
    constants |= _known(plans, cols, is_looped=is_looped, opened=opened)
    if any(plan.numbers for plan in plans):
        constants["BY_FOUR"] = all(s.constants.get("BY_FOUR", True) for s in shapes)
    counts = [s.programs for s in shapes]
    return replace(shape, constants=constants, programs=sum(counts)), counts


def _tile(plan: Schedule, tuning: Tuning, _is_looped: bool, opened: frozenset[str]) -> tuple[int, int]:
    """A tile of about 1024 elements, 4096 where its rows share some; square when an operand runs along the rows."""
    rows, cols = plan.program.dims[-2:]
    accesses = [*plan.loads.values(), *plan.stores]
    is_transposed = any(a.strides[-2] == "1" and a.strides[-1] not in ("0", "1") for a in accesses)
    widest = 32 if is_transposed and rows >= 32 else FLAT_BLOCK
    widest_here = _class_of(cols, widest) if plan.sizes[-1] in opened else min(max(cols, 1), widest)
    block_cols = next_power(tuning.block_cols or widest_here)
    is_shared = len(plan.sizes) > 2 and any(a.strides[-2] == "0" and a.strides[-1] != "0" for a in plan.loads.values())
    is_enough = prod(plan.program.dims) >= _MIN_PROGRAMS * _SHARED_TILE
    elements = _SHARED_TILE if is_shared and is_enough and not is_transposed else FLAT_BLOCK
    elements //= 2 if plan.has_pairs else 1
    most = max(1, elements // block_cols)
    highest = _class_of(rows, most) if plan.sizes[-2] in opened else min(max(rows, 1), most)
    return next_power(tuning.block_rows or highest), block_cols


def _class_of(size: int, most: int) -> int:
    """The next power of four from 4 on: half as many tiles to compile as powers of two, and lanes past the end move nothing."""
    block = 4
    while block < size:
        block *= 4
    return min(block, most)


def _rows(plan: Schedule, tuning: Tuning, is_looped: bool, opened: frozenset[str]) -> tuple[int, int]:
    """One whole row, or as many narrow ones as make 1024 elements while enough programs are left for the device."""
    cols = max(plan.program.dims[-1], 1)
    if is_looped:
        block_cols = max(8, next_power(min(tuning.block_cols or _LOOP_BLOCK, cols)))  # eight neighbours share a running maximum
        if parts_of(plan) and not _has_open_borders(plan, opened):
            # The largest power of two that divides a channel: no tile then lies in two, each of which has a weight of its own.
            shared = math.gcd(*_borders(plan))
            block_cols = min(block_cols, shared & -shared) if shared & -shared >= _LEAST_WHOLE else block_cols
        return tuning.block_rows or 1, block_cols
    is_open = plan.sizes[-1] in opened
    block_cols = max(NARROWEST, next_power(cols)) if is_open else next_power(cols)
    block_rows = next_power(tuning.block_rows or max(1, FLAT_BLOCK // block_cols // (2 if plan.has_pairs else 1)))
    if is_open or tuning.block_rows:
        return block_rows, block_cols
    if not opened.isdisjoint(("rows", *plan.sizes)):
        return block_rows if plan.row_count // block_rows >= _MIN_PROGRAMS else 1, block_cols
    while block_rows > 1 and plan.row_count // block_rows < _MIN_PROGRAMS:
        block_rows //= 2
    return block_rows, block_cols


def _known(plans: Sequence[Schedule], block_cols: int, *, is_looped: bool, opened: Sequence[frozenset[str]]) -> dict[str, bool]:
    """What a launch knows of the columns of all its nests: whether tiles are full, and each lies in one part of its row.

    Of what varies it knows nothing: full tiles of an open number of columns are those of powers of two, and would be compiled
    beside all others.
    """
    found: dict[str, bool] = {}
    own = list(zip(plans, opened, strict=True))
    if plans[0].kind == "rows":
        found["FULL"] = all(
            plan.program.dims[-1] > 0 and plan.program.dims[-1] % block_cols == 0 and plan.sizes[-1] not in names
            for plan, names in own
        )
    if is_looped and any(map(groups_columns, plans)):
        found["VECTORS"] = all(map(_reads_vectors, plans))
    divided = [(plan, names) for plan, names in own if parts_of(plan)] if is_looped else []
    if divided:
        found["WHOLE"] = all(
            not _has_open_borders(plan, names) and all(border % block_cols == 0 for border in _borders(plan))
            for plan, names in divided
        )
    return found


def groups_columns(plan: Schedule) -> bool:
    """Whether walks over columns take eight of them together; see the helper ``in_eights``."""
    return bool(online_sums(plan.program) or moments(plan.program))


def _reads_vectors(plan: Schedule) -> bool:
    """Whether Triton sees that rows start where vectors do: it asks whether what moves an address is a multiple of 16.

    Of rows of 50,257 columns a thread reads single elements, a block's width apart. Eight neighbours are eight threads' then: one
    step of cross-entropy exchanged 90 numbers between threads, and a thread had 742 instructions, now 421 (bfloat16, sm_90).
    """
    values = dict(plan.arguments)
    rows = [access for number, access in plan.loads.items() if access.is_vector and plan.has_row(number)]
    moves = [[*access.strides[:-1], *([access.offset] if access.offset else [])] for access in rows]
    return not rows or any(all(values.get(name, int(name == "1")) % MULTIPLE == 0 for name in names) for names in moves)


def _borders(plan: Schedule) -> list[int]:
    """Columns of each part that a row is divided into."""
    values = plan.program.values
    return [max(1, int(values[value.args[1]].constant or 1)) for value in values if value.op == "quotient"]


def _has_open_borders(plan: Schedule, opened: frozenset[str]) -> bool:
    """Whether the columns of a part vary."""
    return any(plan.extents.get(value.args[1]) in opened for value in plan.program.values if value.op == "quotient")
