"""The statements of a Triton kernel: of whole rows in registers, and of walks over wider ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion_advisor.codegen.common.arguments import Schedule, kept, split_index
from fusion_advisor.codegen.common.column_passes import Pass, column_passes, late_loads
from fusion_advisor.codegen.common.online_softmax import OnlineSum, online_sums
from fusion_advisor.codegen.common.welford import Moments, moments
from fusion_advisor.codegen.triton.ops import LOWEST, TritonWriter, identity
from fusion_advisor.codegen.triton.tiling import groups_columns
from fusion_advisor.ir.program import ITEM_BYTES, REDUCTIONS

_COLUMN_MASKS = [
    "col_mask = col < cols", "mask = row_mask & col_mask",
    "item_col_mask = item < 2 * tl.cast(cols, INDEX)", "item_mask = row_mask & item_col_mask",
]  # fmt: skip
"""``item`` counts the elements of pairs, two to a column: twice as many may pass 32 bits where columns do not."""
_ROW_MASKS = [
    "col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols", _COLUMN_MASKS[1],
    "item_col_mask = tl.full([1, 2 * BLOCK_COLS], True, tl.int1) if FULL else item < 2 * tl.cast(cols, INDEX)",
    _COLUMN_MASKS[3],
]  # fmt: skip
"""Of rows that are reduced. Masks that are known take nothing: causal softmax of 8,192 columns 216.8 µs, with comparisons 246.7
(four batches of 8,192 rows, bfloat16, H200)."""
_THREADS = {"rows": 64, "tiled": 128}
"""Of a tile of 1,024 elements."""
_CACHED_ROW_BYTES = 2**17
"""Rows up to this stay in the L1 cache (up to 256 kB with shared memory, compute capability 8.0 and later) from walk to walk."""


def straight(plan: Schedule, writer: TritonWriter) -> dict[str, list[str]]:
    """Body of a kernel that computes every value once: loads first, so that they are all under way before the first use.

    What can wait for the last reduction (:func:`~fusion_advisor.codegen.common.column_passes.late_loads`) is read then.
    """
    values, late = plan.program.values, late_loads(plan)
    last = max((n for n, v in enumerate(values) if v.op in REDUCTIONS), default=len(values))
    first: set[int] = set()
    for number in reversed(range(len(values))):
        value = values[number]
        if (value.op == "load" and number not in late) or number in first:
            first |= {number, *value.args, *(() if value.guard is None else (value.guard,))}
    order = sorted(range(len(values)), key=lambda n: (n not in first, last + 0.5 if n in late and n < last else n))
    body = writer.definitions(order)
    stores = _stores(plan, writer, range(len(plan.program.stores)))
    return {"place": _place(plan, writer, [*body, *stores]), "body": body, "stores": stores}


@dataclass(slots=True)
class _Walk:
    """The lines of one walk over the columns: before it, for each tile, and after it."""

    accumulators: list[str] = field(default_factory=list)
    loop: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def looped(plan: Schedule, writer: TritonWriter, *, is_cached: bool) -> dict[str, Any]:
    """Body of a kernel that walks the columns once per reduction that waits for another."""
    before, passes = walks(plan)
    steps = []
    for place, step in enumerate(passes):
        writer.policies = _policies(plan, passes, place) if is_cached else {}
        steps.append(_walk(plan, writer, step))
    rows = [p for p in range(len(plan.program.stores)) if not plan.stores_col(p)]
    stores = _stores(plan, writer, rows)
    first = writer.definitions(before)
    everything = [*first, *stores, *(line for walk in steps for line in (*walk.loop, *walk.after))]
    return {
        "place": _place(plan, writer, everything, has_columns=False), "before": first, "passes": steps, "stores": stores,
        # Where rows are read twice, two steps at once let loads of the second go ahead: group norm of 40,960 columns 51.6 µs,
        # one by one 64.5. One walk alone is as fast without. Single elements are many loads in any case: two steps of them, which
        # ptxas orders together, took 152 registers for 50,257 columns, and one takes 58.
        "walk": _walk_over(plan) if len(steps) > 1 else "range(0, cols, BLOCK_COLS)",
    }  # fmt: skip


def _walk_over(plan: Schedule) -> str:
    """The range of a walk over columns that are walked again."""
    steps = "2 if VECTORS else 1" if groups_columns(plan) else "2"
    return f"tl.range(0, cols, BLOCK_COLS, loop_unroll_factor={steps})"


def _walk(plan: Schedule, writer: TritonWriter, step: Pass) -> _Walk:
    walk = _Walk(loop=writer.definitions(step.values))
    for pair in step.online:
        _add_online_sum(plan, writer, pair, walk)
    for sums in step.moments:
        _add_moments(plan, writer, sums, walk)
    for number in step.reductions:
        _add_reduction(plan, writer, number, walk)
    means = {sums.mean for sums in step.moments}
    walk.after += writer.definitions(n for n in step.after if n not in means)
    walk.loop += _stores(plan, writer, step.stores)
    columns = [
        "col = (start + tl.arange(0, BLOCK_COLS)[None, :]).to(INDEX)",
        "item = 2 * tl.cast(start, INDEX) + tl.arange(0, 2 * BLOCK_COLS)[None, :]",
        *_ROW_MASKS,
    ]
    walk.loop = kept(columns, walk.loop) + walk.loop
    return walk


def _add_online_sum(plan: Schedule, writer: TritonWriter, pair: OnlineSum, walk: _Walk) -> None:
    """A running maximum and the sum of exponentials under it, each an eighth of a tile wide."""
    value = plan.program.values[pair.highest]
    highest, total = writer.text(pair.highest).code, writer.text(pair.total).code
    tile = f"tl.full([BLOCK_ROWS, BLOCK_COLS // 8], {{}}, tl.{value.dtype})"
    walk.accumulators += [f"{highest}_tile = {tile.format(LOWEST[value.dtype])}", f"{total}_tile = {tile.format('0.0')}"]
    both = f"{highest}_tile, {total}_tile"
    walk.loop += _call(both, "add_exp", f"{both}, {writer.masked(value)}, VECTORS")
    walk.after.append(f"{highest}, {total} = merge_exp_sums({both})")
    # What the exponentials of the whole row come to where its maximum is infinite.
    edge, sum_there = ("inf", "inf") if pair.is_finite else ("-inf", "nan")
    walk.after.append(f'{total} = tl.where({highest} == float("{edge}"), float("{sum_there}"), {total})')
    writer.helpers |= {"add_exp", "merge_exp_sums", "maximum", "in_eights"}


def _add_moments(plan: Schedule, writer: TritonWriter, sums: Moments, walk: _Walk) -> None:
    """A sum and the squares about its mean, each an eighth of a tile wide."""
    value = plan.program.values[sums.total]
    total, mean, squares = (writer.text(n).code for n in (sums.total, sums.mean, sums.squares))
    both = f"{total}_tile, {squares}_tile"
    tile = f"tl.full([BLOCK_ROWS, BLOCK_COLS // 8], 0.0, tl.{value.dtype})"
    walk.accumulators += [f"{total}_tile = {tile}", f"{squares}_tile = {tile}"]
    element = writer.text(sums.element).code
    if not plan.has_col(sums.element):
        one, element = element, writer.fresh(f"{total}_columns")
        walk.loop.append(f"{element} = tl.full([BLOCK_ROWS, BLOCK_COLS], 0.0, tl.{value.dtype}) + {one}")
    walk.loop += _call(both, "add_moments", f"{both}, {element}, col_mask, start // BLOCK_COLS, FULL, VECTORS")
    walk.after.append(f"{total} = {writer.reduce_tile(value, f'{total}_tile')}")
    walk.after += [" = ".join(writer.statement(sums.mean))] if writer.is_named(sums.mean) else []
    walk.after += [f"{squares}_tile = squares_about({mean}, {both}, cols, BLOCK_COLS, VECTORS)"]
    walk.after.append(f"{squares} = {writer.reduce_tile(value, f'{squares}_tile')}")
    writer.helpers |= {"add_moments", "squares_about", "in_eights"}


def _add_reduction(plan: Schedule, writer: TritonWriter, number: int, walk: _Walk) -> None:
    value, name = plan.program.values[number], writer.text(number).code
    walk.accumulators.append(f"{name}_tile = tl.full([BLOCK_ROWS, BLOCK_COLS], {identity(value)}, tl.{value.dtype})")
    tile = writer.masked(value)
    combine = f"{name}_tile, {tile}, propagate_nan=tl.PropagateNan.ALL"
    combined = f"{name}_tile + {tile}" if value.op == "reduce_sum" else f"tl.{value.op[7:]}imum({combine})"
    walk.loop.append(f"{name}_tile = {combined}")
    walk.after.append(f"{name} = {writer.reduce_tile(value, f'{name}_tile')}")


def _call(results: str, function: str, arguments: str) -> list[str]:
    """A helper's call, on three lines where one would be long."""
    line = f"{results} = {function}({arguments})"
    return [line] if len(line) <= 100 else [f"{results} = {function}(", f"    {arguments}", ")"]


def walks(plan: Schedule) -> tuple[tuple[int, ...], tuple[Pass, ...]]:
    """What is known before the first walk over the columns, and the walks."""
    return column_passes(plan, online_sums(plan.program), moments(plan.program))


def _policies(plan: Schedule, passes: Sequence[Pass], place: int) -> dict[int, str]:
    """What a walk's loads say to the L1 cache: keep what another walk reads or all rows share, let go what was read before.

    RMSNorm of 8,192 columns takes 126.9 µs with them and 129.5 µs without (16,384 rows, bfloat16, H200), group norm of 40,960
    58.0 and 65.8 µs (1,024 rows).
    """
    before, after = ({n for step in part for n in step.values} for part in (passes[:place], passes[place + 1 :]))
    loads = [n for n in passes[place].values if plan.program.values[n].op == "load"]
    kept_loads = {n for n in loads if n in after or not plan.has_row(n)}
    return {n: "evict_last" if n in kept_loads else "evict_first" for n in loads if n in kept_loads or n in before}


def rows_stay_cached(plans: Sequence[Schedule]) -> bool:
    """Whether rows that are walked more than once stay in the L1 cache from walk to walk."""
    is_small = all(_row_bytes(plan) <= _CACHED_ROW_BYTES for plan in plans)
    return is_small and any(len(walks(plan)[1]) > 1 for plan in plans)


def _row_bytes(plan: Schedule) -> int:
    """Bytes of a row in all that is read by row and column."""
    read = {access.operand.name: access.col_bytes for n, access in plan.loads.items() if plan.has_row(n) and access.is_vector}
    return sum(read.values()) * plan.program.dims[-1]


def _stores(plan: Schedule, writer: TritonWriter, positions: Iterable[int]) -> list[str]:
    lines: list[str] = []
    named: dict[str, str] = {}
    for position in positions:
        access, pair = plan.stores[position], plan.store_pair(position)
        if position != min(pair):
            continue  # written with the other one of the pair
        even, odd = (plan.program.stores[member].value for member in pair)
        varies = plan.varies[even] | plan.varies[odd] | {d for d, stride in enumerate(access.strides) if stride != "0"}
        varies = varies.union(*(plan.varies[number] for number, _ in access.gathered))
        text = writer.interleaved((even, odd)) if access.is_pair else writer.text(even).code
        mask = writer.mask(varies)
        if (guard := plan.program.stores[position].guard) is not None:
            wanted = " & ".join(filter(None, writer.with_guard(mask, guard)))
            mask = next((name for name, code in named.items() if code == wanted), "") or writer.fresh("store_mask")
            lines += [f"{mask} = {wanted}"] if mask not in named else []
            named[mask] = wanted
        masked = f", mask={'item_' * access.is_pair}{mask}" if mask else ""
        arguments = f"{writer.address(access, varies)}, {text}{masked}"
        lines += [f"tl.store({arguments})"] if len(arguments) <= 115 else ["tl.store(", f"    {arguments}", ")"]
    return lines


def _shared_by_rows(plan: Schedule) -> list[str]:
    """Columns of what all rows of a tile share.

    Triton spreads one row of it over all threads. Where each gets an element or more, but less than 16 bytes, threads have other
    columns of it than of the rows, and results are moved between threads through shared memory. Spread over all rows it lies in
    threads as they do; a thread reads it once, or once more for each of its rows.
    """
    threads = _THREADS[plan.kind]
    narrowest = min((ITEM_BYTES[access.operand.dtype] for access in plan.loads.values() if access.is_vector), default=2)
    # triton 3.6 takes no a <= b < c
    is_narrow = f"BLOCK_COLS >= {threads} and BLOCK_COLS < {threads * 16 // narrowest}"
    return [f"shared_col = col + 0 * row if {is_narrow} else col  # laid out as rows are"]


def _place(plan: Schedule, writer: TritonWriter, body: list[str], *, has_columns: bool = True) -> list[str]:
    """Where a program is: its rows and columns, its masks, and the indices of the outer dims, as far as the body uses them."""
    if plan.kind == "flat":
        run = "index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)"
        items = "item = tl.program_id(0).to(INDEX) * (2 * BLOCK_COLS) + tl.arange(0, 2 * BLOCK_COLS)"
        return kept([run, items, "mask = index < size", "item_mask = item < 2 * tl.cast(size, INDEX)"], body)
    columns = ["col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)", "item = tl.arange(0, 2 * BLOCK_COLS)[None, :].to(INDEX)"]
    columns = columns if has_columns else []
    bases = [f"{name} = {code}" for name, code, _ in writer.bases]
    by_column = [*(_ROW_MASKS if plan.kind == "rows" else _COLUMN_MASKS), *_shared_by_rows(plan)]
    masks = ["row_mask = row < rows", *(by_column if has_columns else [])]
    if plan.kind == "rows":
        lines = ["row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]"]
        outer = split_index("row", plan.indices[:-1], plan.sizes[:-1]) if len(plan.indices) > 2 else []
        return kept([*lines, *outer, *columns, *masks, *bases], body)
    lines = [
        "tile = tl.program_id(0)",
        "col_tiles = tl.cdiv(cols, BLOCK_COLS)",
        "row_tiles = tl.cdiv(rows, BLOCK_ROWS)",
        "col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]",
        "item = (tile % col_tiles).to(INDEX) * (2 * BLOCK_COLS) + tl.arange(0, 2 * BLOCK_COLS)[None, :]",
    ]
    if len(plan.indices) == 2:
        lines.append("row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]")
        return kept([*lines, *masks, *bases], body)
    lines.append("row = (tile // col_tiles % row_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]")
    outer = ["outer = (tile // col_tiles // row_tiles).to(INDEX)", *split_index("outer", plan.indices[:-2], plan.sizes[:-2])]
    if len(plan.indices) == 3:
        outer = [outer[0].replace("outer", plan.indices[0], 1)]
    return kept([*lines, *outer, *masks, *bases], body)
