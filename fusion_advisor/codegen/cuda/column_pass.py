"""One pass over the columns of a CUDA kernel: its loads, its packs with their lane loop and stores, and what it accumulates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fusion_advisor.codegen.common.arguments import Schedule, kept
from fusion_advisor.codegen.common.column_passes import Pass, late_loads, needed_in_columns
from fusion_advisor.codegen.common.online_softmax import OnlineSum
from fusion_advisor.codegen.common.printer import ATOM, PRODUCT, SUM, UNARY, Text
from fusion_advisor.codegen.common.welford import Moments
from fusion_advisor.codegen.cuda.loads import load_pack, of_side, pack_loads, staged_stores
from fusion_advisor.codegen.cuda.op_rows import COMPUTE, UNSIGNED
from fusion_advisor.codegen.cuda.ops import CudaWriter
from fusion_advisor.codegen.cuda.register_reuse import Carried, Hidden, hidden
from fusion_advisor.codegen.cuda.shared_memory import packs_of
from fusion_advisor.codegen.cuda.statements import add_guarded, declare, loop, over_packs, pack_type, store_element

_REDUCERS = {"reduce_sum": "Sum", "reduce_max": "Max", "reduce_min": "Min"}
_LOWEST = {"float": "-3.40282347e38f", "double": "-1.7976931348623157e308"}
"""The lowest finite number, where a running maximum starts."""
_STARTS = {
    ("reduce_sum", False): "0", ("reduce_max", False): "-INF_VALUE", ("reduce_min", False): "INF_VALUE",
    ("reduce_sum", True): "0", ("reduce_max", True): "(long long)(1ULL << 63)", ("reduce_min", True): "~(1LL << 63)",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What the passes of one kernel have in common.

    Attributes:
        per_p: values of a tiled kernel that differ between the rows of a thread.
        numbers: of the reductions, each of which has shared memory of its own.
        carried: values that stay in registers from the pass that computes them on.
        is_looped: whether rows are walked in parts.
        arrays: names of the shared memory that packs stay in, by load.
        early: names of the arrays that hold what the columns of a pack share, by load.
    """

    per_p: tuple[int, ...]
    numbers: Iterator[int]
    carried: Sequence[Carried]
    is_looped: bool
    arrays: Mapping[int, str]
    early: Mapping[int, str]


@dataclass(slots=True)
class _Lines:
    """The lines of a pass, by where they stand."""

    accumulators: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    """Of each pack, before its lanes."""
    lane: list[str] = field(default_factory=list)
    one_for_all: list[str] = field(default_factory=list)
    """The reductions of ``lane`` for a pack whose columns are all one number."""
    stored: list[str] = field(default_factory=list)
    """The stores of ``lane``."""
    tail: list[str] = field(default_factory=list)
    """Of each pack, after its lanes."""
    after: list[str] = field(default_factory=list)


def column_pass(plan: Schedule, writer: CudaWriter, step: Pass, common: Common, written: frozenset[int]) -> dict[str, list[str]]:
    """Print one pass.

    Args:
        plan: the schedule.
        writer: of the kernel.
        step: the pass.
        common: what its passes share.
        written: packs that earlier passes left in shared memory.

    Returns:
        the lines by their name in ``templates/cuda``: loads, accumulators, columns, after.
    """
    lines = _Lines()
    pairs = [_online(plan, writer, pair, common.numbers) for pair in step.online]
    sums = [_moments(plan, writer, pair, common.numbers) for pair in step.moments]
    for both, summed in [*((pair, "compare") for pair in pairs), *((one, "sum") for one in sums)]:
        lines.accumulators += both["accumulators"]
        lines.lane += both[summed]
        lines.after += both["after"]
    for number in step.reductions:
        _add_reduction(plan, writer, number, common.numbers, lines)
    means = {pair.mean for pair in step.moments}
    lines.after += [declare(plan, writer, n) for n in step.after if writer.is_named(n) and n not in means]
    for position in step.stores:
        _add_store(plan, writer, position, lines)
    skipped = [] if common.is_looped else _skipped(plan, writer, step, lines)
    lines.lane += lines.stored
    lines.lane = _declared(plan, writer, step, common, lines)
    # What is only stored is not looked at outside the row; what is added up must not be.
    is_summed = bool(step.reductions or pairs or sums)
    outside = ["if (!(inside >> lane & 1)) continue;"] if writer.is_shifted and is_summed else []
    _add_per_pack(plan, writer, step, common, lines)
    lines.tail += [line for one in sums for line in one["count"]]
    # Asked for also where the kernel prints them once for all passes: row pointers are declared in the order of their first use.
    loads = _loads(plan, writer, step, common, written)
    columns = [*skipped, *lines.head, *loop("lane", "VEC", [*outside, *lines.lane]), *lines.tail]

    def over(packs: list[str]) -> list[str]:
        return over_packs(plan, writer, packs, is_looped=common.is_looped, skips=True)

    walked = over(columns)
    for pair in pairs:
        walked = [*pair["start"], *walked, *pair["rescale"], *over(loop("lane", "VEC", [*outside, *pair["sum"]]))]
    for one in sums:
        squares = over(loop("lane", "VEC", [*outside, *one["squares"]]))
        walked = [*one["start"], *walked, *one["mean"], *squares, *one["merge"]]
    has_loads = plan.kind != "rows" or common.is_looped
    return {
        "loads": loads if has_loads else [],
        "accumulators": lines.accumulators, "columns": walked, "after": lines.after,
    }  # fmt: skip


def _add_reduction(plan: Schedule, writer: CudaWriter, number: int, numbers: Iterator[int], lines: _Lines) -> None:
    value = plan.program.values[number]
    name, kind, arg = writer.text(number).code, COMPUTE[value.dtype], writer.text(value.args[0])
    start = _STARTS[value.op, kind == "long long"] + ("F" if kind == "float" and value.op != "reduce_sum" else "")
    part = writer.fresh(f"{name}_part")
    total = f"row_reduce<{_REDUCERS[value.op]}, {next(numbers)}>({part})"
    is_wrapped = value.op == "reduce_sum" and number in writer.may_wrap
    lines.accumulators.append(f"{UNSIGNED if is_wrapped else kind} {part} = {start};")
    if is_wrapped:  # a signed sum that overflows is undefined
        arg, total = Text(f"({UNSIGNED}){arg.at(ATOM)}", UNARY), f"({kind}){total}"
    if value.op == "reduce_sum":
        lines.lane.append(f"{part} += {arg.code};")
        lines.one_for_all.append(f"{part} += VEC * {arg.at(PRODUCT)};")
    else:
        helper = "nan_max" if value.op == "reduce_max" else "nan_min"
        lines.lane.append(f"{part} = {helper}({part}, {arg.code});")
        lines.one_for_all.append(lines.lane[-1])
        writer.helpers.add(helper)
    lines.after.append(f"const {kind} {name} = {total};")
    writer.helpers |= {"row_reduce", *({start.removeprefix("-")} if "INF" in start else set())}


def _add_store(plan: Schedule, writer: CudaWriter, position: int, lines: _Lines) -> None:
    """A store of each lane, or of a pack that the lanes fill."""
    access, both, store = plan.stores[position], plan.store_pair(position), plan.program.stores[position]
    if not writer.is_packed(position):
        add_guarded(lines.stored, store_element(plan, writer, position), writer, store.guard)
        return
    if position != min(both):
        return  # written with the other one of the pair
    pack = writer.fresh(f"{access.operand.name}_pack")
    lines.head.append(f"{pack_type(access)} {pack};")
    for place, member in zip(("2 * lane", "2 * lane + 1") if access.is_pair else ("lane",), both, strict=False):
        value = plan.program.stores[member].value
        code = writer.narrowed(writer.text(value).code, plan.program.values[value].dtype, access.operand.dtype)
        lines.stored.append(f"{pack}[{place}] = {code};")
    address = writer.operand_address(access, col="first")
    stored = f"store_part({address}, {pack}, inside);" if writer.is_shifted else f"store_pack({address}, {pack});"
    add_guarded(lines.tail, stored, writer, store.guard)


def _skipped(plan: Schedule, writer: CudaWriter, step: Pass, lines: _Lines) -> list[str]:
    """What stands in for a pack that a causal mask hides; nothing where the pass has no such packs."""
    unseen = hidden(plan, step)
    if unseen is None:
        return []
    shown = loop("lane", "VEC", lines.stored) if step.stores else []
    return _hidden_pack(plan, writer, unseen, [*lines.one_for_all, *lines.head, *shown, *lines.tail])


def _declared(plan: Schedule, writer: CudaWriter, step: Pass, common: Common, lines: _Lines) -> list[str]:
    """The lane's lines after the declarations that they need; carried values are written to registers or read from them."""
    early, values = common.early, plan.program.values
    declared = [
        of_side(plan, writer, n, early[n]) if n in early else declare(plan, writer, n)
        for n in step.values
        if writer.is_named(n) and n not in writer.per_pack
    ]
    for one in common.carried:
        if one.number not in step.values or not writer.is_named(one.number):
            continue
        own = declare(plan, writer, one.number)
        name, kind = writer.text(one.number).code, COMPUTE[values[one.number].dtype]
        if step is one.made_in:
            lines.accumulators.append(f"{kind} {name}_columns[PACKS][VEC];")
            lines.lane.append(f"{name}_columns[p][lane] = {name};")
        else:
            declared = [f"const {kind} {name} = {name}_columns[p][lane];" if line == own else line for line in declared]
    return kept([f"const index_t {plan.indices[-1]} = first + lane;", *declared], lines.lane) + lines.lane


def _add_per_pack(plan: Schedule, writer: CudaWriter, step: Pass, common: Common, lines: _Lines) -> None:
    """What is read or computed once for all columns of a pack."""
    early, values = common.early, plan.program.values
    if plan.kind == "rows" and not common.is_looped:
        late = [n for n in writer.packs if n in late_loads(plan) and n in step.values]
        lines.head += [f"if (LATE) {writer.packs[n]}[p] = {load_pack(plan, writer, n, is_inside=True)};" for n in late]
    per_pack = [
        f"const {COMPUTE[values[n].dtype]} {writer.text(n).code} = {early[n]}[p];" if n in early else declare(plan, writer, n)
        for n in step.values
        if writer.is_named(n) and n in writer.per_pack
    ]
    per_p = [declare(plan, writer, n) for n in common.per_p if writer.is_named(n)]
    lines.head += kept([*per_p, *per_pack], [*lines.lane, *lines.tail])


def _loads(plan: Schedule, writer: CudaWriter, step: Pass, common: Common, written: frozenset[int]) -> list[str]:
    packs, arrays = packs_of(plan, writer, step), common.arrays
    pack_arrays = {n: arrays[n] for n in packs if n in written}
    loads = pack_loads(plan, writer, packs, common.per_p, is_looped=common.is_looped, arrays=pack_arrays)
    return loads + staged_stores(plan, writer, {n: arrays[n] for n in packs if n in arrays and n not in written})


def _hidden_pack(plan: Schedule, writer: CudaWriter, unseen: Hidden, lines: list[str]) -> list[str]:
    """What is done instead with a pack that a causal mask hides: each value is computed once for all of its columns."""
    values = plan.program.values
    declared = []
    for n in sorted((*unseen.chosen, *unseen.values)):
        if n in unseen.chosen:
            fill = writer.text(unseen.chosen[n]).code
            declared.append(f"const {COMPUTE[values[n].dtype]} {writer.text(n).code} = {fill};")
        elif writer.is_named(n):
            declared.append(declare(plan, writer, n))
    lines = [*kept(declared, lines), *lines, "continue;"]
    limit = writer.text(unseen.limit).at(SUM)
    return [f"if (first > {limit}) {{  // the mask hides all of the pack", *(f"    {line}" for line in lines), "}"]


def _online(plan: Schedule, writer: CudaWriter, pair: OnlineSum, numbers: Iterator[int]) -> dict[str, list[str]]:
    """A running maximum and the sum of exponentials under it: the sum is rescaled once for all packs that a thread holds."""
    values = plan.program.values
    kind, is_float32 = COMPUTE[values[pair.highest].dtype], values[pair.highest].dtype == "float32"
    highest, total, element = (writer.text(n).code for n in (pair.highest, pair.total, pair.element))
    minuend = writer.text(pair.element).at(SUM)
    part, raised, sum_part = (writer.fresh(name) for name in (f"{highest}_part", f"{highest}_raised", f"{total}_part"))
    row_highest, row_total = writer.fresh(f"row_{highest}"), writer.fresh(f"row_{total}")
    exp = writer.printed(pair.exponential, values[pair.exponential], [Text("@", SUM)]).code
    infinity, nan = ("INF_VALUEF", "NAN_VALUEF") if is_float32 else ("INF_VALUE", "NAN_VALUE")
    writer.helpers |= {"row_reduce", "nan_max", infinity, *(() if pair.is_finite else (nan,))}
    declared = [declare(plan, writer, n) for n in needed_in_columns(plan, [pair.element]) if writer.is_named(n)]
    adding = [f"{sum_part} += {exp.replace('@', f'{minuend} - {part}')};"]
    edge, sum_there = (f"{row_highest} == {infinity}", infinity) if pair.is_finite else (f"{row_total} == 0", nan)
    return {
        "accumulators": [f"{kind} {part} = {_LOWEST[kind]};", f"{kind} {sum_part} = 0;"],
        "start": [f"{kind} {raised} = {part};"],
        "compare": [f"{raised} = nan_max({raised}, {element});"],
        "rescale": [f"{sum_part} *= {exp.replace('@', f'{part} - {raised}')};", f"{part} = {raised};"],
        "sum": kept([f"const index_t {plan.indices[-1]} = first + lane;", *declared], adding) + adding,
        "after": [
            f"const {kind} {row_highest} = row_reduce<Max, {next(numbers)}>({part});",
            f"{sum_part} *= {exp.replace('@', f'{part} - {row_highest}')};",
            f"const {kind} {row_total} = row_reduce<Sum, {next(numbers)}>({sum_part});",
            "// Only a row of -inf alone leaves the sum at 0.",
            f"const {kind} {highest} = {row_total} == 0 ? -{infinity} : {row_highest};",
            f"const {kind} {total} = {edge} ? {sum_there} : {row_total};",
        ],
    }


def _moments(plan: Schedule, writer: CudaWriter, pair: Moments, numbers: Iterator[int]) -> dict[str, list[str]]:
    """A sum and the squares about its mean: first of the packs that a thread holds at once, then of all that it has seen."""
    kind = COMPUTE[plan.program.values[pair.total].dtype]
    total, mean, squares, element = (writer.text(n).code for n in (pair.total, pair.mean, pair.squares, pair.element))
    noun = total.removesuffix("_sum")
    seen, step, deviation = (writer.fresh(f"{noun}_{name}") for name in ("seen", "step", "deviation"))
    writer.helpers |= {"row_reduce", "moments"}
    declared = [declare(plan, writer, n) for n in needed_in_columns(plan, [pair.element]) if writer.is_named(n)]
    minuend = writer.text(pair.element).at(SUM)
    adding = [f"const {kind} {deviation} = {minuend} - {step}.mean;", f"{step}.squares += {deviation} * {deviation};"]
    return {
        "accumulators": [f"Moments<{kind}> {seen} = {{}};"],
        "start": [f"Moments<{kind}> {step} = {{}};"],
        "sum": [f"{step}.sum += {element};"],
        "count": [f"{step}.count += {'__popc(inside)' if writer.is_shifted else 'VEC'};"],
        "mean": [f"{step}.set_mean();"],
        "squares": kept([f"const index_t {plan.indices[-1]} = first + lane;", *declared], adding) + adding,
        "merge": [f"{seen} = merged({seen}, {step});"],
        "after": [
            f"const {kind} {total} = row_reduce<Sum, {next(numbers)}>({seen}.sum);",
            *([declare(plan, writer, pair.mean)] if writer.is_named(pair.mean) else []),
            f"const {kind} {squares} = row_reduce<Sum, {next(numbers)}>({seen}.squares_about({mean}));",
        ],
    }
