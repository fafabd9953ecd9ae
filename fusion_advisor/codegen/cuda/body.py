"""The statements of a CUDA kernel: what is done per row, and per pack of columns in each pass over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from fusion_advisor.codegen.common.arguments import (
    Access,
    Pass,
    Schedule,
    column_passes,
    kept,
    late_loads,
    needed_in_columns,
    split_index,
)
from fusion_advisor.codegen.common.online_softmax import OnlineSum
from fusion_advisor.codegen.common.printer import ATOM, PRODUCT, SUM, UNARY, Text
from fusion_advisor.codegen.common.welford import Moments
from fusion_advisor.codegen.cuda import wrapping
from fusion_advisor.codegen.cuda.ops import (
    COMPUTE,
    SCALARS,
    CudaWriter,
    moves_with_p,
    shared_by_rows,
    shared_loads,
    split_quotient,
)
from fusion_advisor.codegen.cuda.register_reuse import Carried, Hidden, carried, hidden
from fusion_advisor.codegen.cuda.shared_memory import looped_passes, packs_of, staged_packs

_HELPERS_IN_ORDER = (
    "INF_VALUEF", "INF_VALUE", "NAN_VALUEF", "NAN_VALUE", "checked", "half", "bfloat16", "from_float32", "from_float32_half",
    "from_float32_bfloat16", "round_fp16", "round_bf16",
    "pack", "wide_pack", "load_pack", "store_pack", "columns_inside", "load_part", "store_part",
    "nan_max", "nan_min", "exp2_16bit", "exp_16bit", "sigmoid_16bit", "tanh_cdf_16bit", "normal_cdf_half", "normal_cdf_bfloat16",
    "sigmoid", "remainder_of", "sign_of", "fast_tanh", "fast_sqrt", "mean_of", "philox", "kept_bits", "is_kept", "cluster",
    "row_reduce", "moments", *wrapping.HELPERS,
)  # fmt: skip
_REDUCERS = {"reduce_sum": "Sum", "reduce_max": "Max", "reduce_min": "Min"}
_LOWEST = {"float": "-3.40282347e38f", "double": "-1.7976931348623157e308"}
"""The lowest finite number, where a running maximum starts."""
_STARTS = {
    ("reduce_sum", False): "0", ("reduce_max", False): "-INF_VALUE", ("reduce_min", False): "INF_VALUE",
    ("reduce_sum", True): "0", ("reduce_max", True): "(long long)(1ULL << 63)", ("reduce_min", True): "~(1LL << 63)",
}  # fmt: skip


def body(plan: Schedule, writer: CudaWriter, *, is_looped: bool) -> dict[str, Any]:
    """Everything that the templates of ``templates/cuda`` print, but for the head and the macros."""
    before, passes = looped_passes(plan) if is_looped else column_passes(plan)
    per_p: tuple[int, ...] = ()
    if plan.kind != "rows":  # one pass that stores everything
        per_p = tuple(n for n in before if moves_with_p(plan, n))
        before = tuple(n for n in before if n not in per_p)
        values = tuple(n for n in range(len(plan.program.values)) if plan.has_col(n))
        passes = (Pass(values=values, reductions=(), stores=tuple(range(len(plan.program.stores))), after=()),)
    numbers = itertools.count()
    # The blocks of a cluster have their registers full of packs; only a branch makes up for what a value per column takes.
    has_room = not writer.is_clustered or all(hidden(plan, step) for step in passes)
    kept_values = carried(plan, passes) if has_room and not is_looped else ()
    arrays = {n: _staged_name(writer, n) for n in staged_packs(plan, writer, passes)} if is_looped else {}
    early = {n: writer.fresh(f"{writer.text(n).code}_of") for n in shared_loads(plan, writer)} if writer.is_clustered else {}
    steps, written = [], set[int]()
    for step in passes:
        before_it = frozenset(written)
        given: dict[str, Any] = {"is_looped": is_looped, "arrays": arrays, "written": before_it, "early": early}
        steps.append(_step(plan, writer, step, per_p, numbers, kept_values, **given))
        written |= arrays.keys() & packs_of(plan, writer, step)
    row_stores = [p for p in range(len(plan.program.stores)) if plan.kind == "rows" and not plan.stores_col(p)]
    stores: list[str] = []
    for position in row_stores:
        _add_guarded(stores, _store_element(plan, writer, position), writer, plan.program.stores[position].guard)
    first = [_declare(plan, writer, n) for n in before if writer.is_named(n)]
    is_resident = plan.kind == "rows" and not is_looped
    loads = _loads(plan, writer, list(writer.packs), (), is_looped=False) if is_resident else []
    loads += _early_loads(plan, writer, early)
    everything = [*loads, *first, *stores, *(line for step in steps for lines in step.values() for line in lines)]
    context: dict[str, Any] = {
        "place": _place(plan, writer, everything, is_looped=is_looped),
        "before": [*_staged_arrays(plan, arrays), *first], "loads": loads,
        "stores": stores, "passes": steps, "signature": _signature(plan), "is_staged": bool(arrays),
        "reductions": next(numbers),
    }  # fmt: skip
    context["helpers"] = _helpers(plan, writer, "\n".join(everything))
    return context


def _step(
    plan: Schedule,
    writer: CudaWriter,
    step: Pass,
    per_p: tuple[int, ...],
    numbers: Iterator[int],
    kept_values: tuple[Carried, ...],
    *,
    is_looped: bool,
    arrays: dict[int, str],
    written: frozenset[int],
    early: dict[int, str],
) -> dict[str, list[str]]:
    """One pass over the columns: its loads, its packs with their lane loop and stores, and what is known per row afterwards."""
    values = plan.program.values
    declared = [
        _of_side(plan, writer, n, early[n]) if n in early else _declare(plan, writer, n)
        for n in step.values
        if writer.is_named(n) and n not in writer.per_pack
    ]
    per_pack = [
        f"const {COMPUTE[values[n].dtype]} {writer.text(n).code} = {early[n]}[p];" if n in early else _declare(plan, writer, n)
        for n in step.values
        if writer.is_named(n) and n in writer.per_pack
    ]
    head: list[str] = []
    lane: list[str] = []
    pack_lines: list[str] = []  # as in `lane`, where all columns of a pack are one number
    accumulators, after = [], []
    pairs = [_online(plan, writer, pair, numbers) for pair in step.online]
    for pair in pairs:
        accumulators += pair["accumulators"]
        lane += pair["compare"]
        after += pair["after"]
    together = [_moments(plan, writer, pair, numbers) for pair in step.moments]
    for sums in together:
        accumulators += sums["accumulators"]
        lane += sums["sum"]
        after += sums["after"]
    for n in step.reductions:
        name, kind = writer.text(n).code, COMPUTE[values[n].dtype]
        start = _STARTS[values[n].op, kind == "long long"] + ("F" if kind == "float" and values[n].op != "reduce_sum" else "")
        part = writer.fresh(f"{name}_part")
        arg = writer.text(values[n].args[0])
        total = f"row_reduce<{_REDUCERS[values[n].op]}, {next(numbers)}>({part})"
        is_wrapped = values[n].op == "reduce_sum" and n in writer.may_wrap
        accumulators.append(f"{wrapping.UNSIGNED if is_wrapped else kind} {part} = {start};")
        if is_wrapped:  # a signed sum that overflows is undefined
            arg, total = Text(f"({wrapping.UNSIGNED}){arg.at(ATOM)}", UNARY), f"({kind}){total}"
        combine = {"reduce_sum": f"{part} += {arg.code}", "reduce_max": f"{part} = nan_max({part}, {arg.code})"}
        combine["reduce_min"] = f"{part} = nan_min({part}, {arg.code})"
        lane.append(f"{combine[values[n].op]};")
        pack_lines.append(f"{part} += VEC * {arg.at(PRODUCT)};" if values[n].op == "reduce_sum" else lane[-1])
        after.append(f"const {kind} {name} = {total};")
        writer.helpers |= {"row_reduce", *({start.removeprefix("-")} if "INF" in start else set())}
        writer.helpers |= {"reduce_max": {"nan_max"}, "reduce_min": {"nan_min"}}.get(values[n].op, set())
    means = {pair.mean for pair in step.moments}
    after += [_declare(plan, writer, n) for n in step.after if writer.is_named(n) and n not in means]
    tail: list[str] = []
    accumulated = len(lane)
    for position in step.stores:
        access, both = plan.stores[position], plan.store_pair(position)
        if not writer.is_packed(position):
            _add_guarded(lane, _store_element(plan, writer, position), writer, plan.program.stores[position].guard)
            continue
        if position != min(both):
            continue  # written with the other one of the pair
        pack = writer.fresh(f"{access.operand.name}_pack")
        head.append(f"{_pack(access)} {pack};")
        for place, member in zip(("2 * lane", "2 * lane + 1") if access.is_pair else ("lane",), both, strict=False):
            value = plan.program.stores[member].value
            code = writer.narrowed(writer.text(value).code, values[value].dtype, access.operand.dtype)
            lane.append(f"{pack}[{place}] = {code};")
        address = writer.operand_address(access, col="first")
        stored = f"store_part({address}, {pack}, inside);" if writer.is_shifted else f"store_pack({address}, {pack});"
        _add_guarded(tail, stored, writer, plan.program.stores[position].guard)
    skipped: list[str] = []
    if not is_looped and (unseen := hidden(plan, step)) is not None:
        shown = _loop("lane", "VEC", lane[accumulated:]) if step.stores else []
        skipped = _hidden_pack(plan, writer, unseen, [*pack_lines, *head, *shown, *tail])
    for one in kept_values:
        if one.number not in step.values or not writer.is_named(one.number):
            continue
        own = _declare(plan, writer, one.number)
        name, kind = writer.text(one.number).code, COMPUTE[values[one.number].dtype]
        if step is one.made_in:
            accumulators.append(f"{kind} {name}_columns[PACKS][VEC];")
            lane.append(f"{name}_columns[p][lane] = {name};")
        else:
            declared = [f"const {kind} {name} = {name}_columns[p][lane];" if line == own else line for line in declared]
    lane = kept([f"const index_t {plan.indices[-1]} = first + lane;", *declared], lane) + lane
    if plan.kind == "rows" and not is_looped:
        late = [n for n in writer.packs if n in late_loads(plan) and n in step.values]
        head += [f"if (LATE) {writer.packs[n]}[p] = {_load(plan, writer, n, is_inside=True)};" for n in late]
    # What is only stored is not looked at outside the row; what is added up must not be.
    outside = ["if (!(inside >> lane & 1)) continue;"] if writer.is_shifted and (step.reductions or pairs or together) else []
    head += kept([*(_declare(plan, writer, n) for n in per_p if writer.is_named(n)), *per_pack], [*lane, *tail])
    tail += [line for sums in together for line in sums["count"]]
    columns = [*skipped, *head, *_loop("lane", "VEC", [*outside, *lane]), *tail]
    packs = packs_of(plan, writer, step)
    loads = _loads(plan, writer, packs, per_p, is_looped=is_looped, arrays={n: arrays[n] for n in packs if n in written})
    loads += _staged_stores(plan, writer, {n: arrays[n] for n in packs if n in arrays and n not in written})
    over = _over_packs(plan, writer, columns, is_looped=is_looped, skips=True)
    for pair in pairs:
        over = [*pair["start"], *over, *pair["rescale"]]
        over += _over_packs(plan, writer, _loop("lane", "VEC", [*outside, *pair["sum"]]), is_looped=is_looped, skips=True)
    for sums in together:
        over = [*sums["start"], *over, *sums["mean"]]
        over += _over_packs(plan, writer, _loop("lane", "VEC", [*outside, *sums["squares"]]), is_looped=is_looped, skips=True)
        over += sums["merge"]
    return {
        "loads": loads if plan.kind != "rows" or is_looped else [],
        "accumulators": accumulators,
        "columns": over,
        "after": after,
    }


def _hidden_pack(plan: Schedule, writer: CudaWriter, unseen: Hidden, lines: list[str]) -> list[str]:
    """What is done instead with a pack that a causal mask hides: each value is computed once for all of its columns."""
    values = plan.program.values
    declared = []
    for n in sorted((*unseen.chosen, *unseen.values)):
        if n in unseen.chosen:
            fill = writer.text(unseen.chosen[n]).code
            declared.append(f"const {COMPUTE[values[n].dtype]} {writer.text(n).code} = {fill};")
        elif writer.is_named(n):
            declared.append(_declare(plan, writer, n))
    lines = [*kept(declared, lines), *lines, "continue;"]
    limit = writer.text(unseen.limit).at(SUM)
    return [f"if (first > {limit}) {{  // the mask hides all of the pack", *(f"    {line}" for line in lines), "}"]


def _online(plan: Schedule, writer: CudaWriter, pair: OnlineSum, numbers: Iterator[int]) -> dict[str, list[str]]:
    """A running maximum and the sum of exponentials under it: the sum is rescaled once for all packs that a thread holds."""
    values = plan.program.values
    kind, is_float32 = COMPUTE[values[pair.highest].dtype], values[pair.highest].dtype == "float32"
    highest, total, element = (writer.text(n).code for n in (pair.highest, pair.total, pair.element))
    part, raised, sum_part = (writer.fresh(name) for name in (f"{highest}_part", f"{highest}_raised", f"{total}_part"))
    row_highest, row_total = writer.fresh(f"row_{highest}"), writer.fresh(f"row_{total}")
    exp = writer.call(values[pair.exponential], [Text("@")]).code
    infinity, nan = ("INF_VALUEF", "NAN_VALUEF") if is_float32 else ("INF_VALUE", "NAN_VALUE")
    writer.helpers |= {"row_reduce", "nan_max", infinity, *(() if pair.is_finite else (nan,))}
    declared = [_declare(plan, writer, n) for n in needed_in_columns(plan, [pair.element]) if writer.is_named(n)]
    adding = [f"{sum_part} += {exp.replace('@', f'{element} - {part}')};"]
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
    seen, step, apart = (writer.fresh(f"{noun}_{name}") for name in ("seen", "step", "apart"))
    writer.helpers |= {"row_reduce", "moments"}
    declared = [_declare(plan, writer, n) for n in needed_in_columns(plan, [pair.element]) if writer.is_named(n)]
    adding = [f"const {kind} {apart} = {element} - {step}.mean;", f"{step}.squares += {apart} * {apart};"]
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
            *([_declare(plan, writer, pair.mean)] if writer.is_named(pair.mean) else []),
            f"const {kind} {squares} = row_reduce<Sum, {next(numbers)}>({seen}.squares_about({mean}));",
        ],
    }


def _loads(
    plan: Schedule,
    writer: CudaWriter,
    packs: list[int],
    per_p: tuple[int, ...],
    *,
    is_looped: bool,
    arrays: Mapping[int, str] = MappingProxyType({}),
) -> list[str]:
    """Read packs, all of them before any is used, so that their latencies overlap; what rows share comes last.

    A pack that is gathered needs its row's number here already. There is no branch around that read, for the same reason.
    What dropout keeps is decided next: it needs no operand but the seed, and that work is done while the loads are under way.
    """

    def filled(number: int, code: str) -> list[str]:
        target = f"{writer.packs[number]}[p] ="
        if number not in arrays:
            return [f"{target} {code};"]
        held = _from_staged(plan, writer, number, arrays[number])
        return [f"{target} {_staged_first(writer)} < STAGED ? {held}", f"    : {code};"]

    decided = [n for n in packs if n in plan.numbers]
    packs = sorted((n for n in packs if n not in plan.numbers), key=lambda n: not plan.has_row(n))
    own = [n for n in packs if not shared_by_rows(plan, n)]
    late = late_loads(plan) if plan.kind == "rows" and not is_looped else frozenset()
    lines = [f"{_pack(plan.loads[n])} {writer.packs[n]}[PACKS];" for n in own]
    each = [f"{'if (!LATE) ' if n in late else ''}{line}" for n in own for line in filled(n, _load(plan, writer, n))]
    if each:
        numbers = [_declare(plan, writer, n, condition="is_inside") for n in per_p if writer.is_named(n)]
        lines += _over_packs(plan, writer, [*kept(numbers, each), *each], is_looped=is_looped, skips=False)
    shared = [n for n in packs if n not in own]
    lines += [f"const {_pack(plan.loads[n])} {writer.packs[n]} = {_load(plan, writer, n)};" for n in shared]
    lines += [f"const unsigned {writer.packs[n]} = {writer.kept_bits(n)};" for n in decided if shared_by_rows(plan, n)]
    own = [n for n in decided if not shared_by_rows(plan, n)]
    if own:
        lines += [f"unsigned {writer.packs[n]}[PACKS];  // a bit for each column" for n in own]
        each = [line for n in own for line in filled(n, writer.kept_bits(n))]
        lines += _over_packs(plan, writer, each, is_looped=is_looped, skips=False)
    return lines


def _early_loads(plan: Schedule, writer: CudaWriter, arrays: dict[int, str]) -> list[str]:
    """Read what the columns of a pack share beside the packs: what waits for a cluster must not wait for memory after that."""
    if not arrays:
        return []
    values, sides = plan.program.values, "[2]" if writer.is_split else ""
    lines = [f"{COMPUTE[values[n].dtype]} {name}[PACKS]{sides};" for n, name in arrays.items()]
    side = "[side]" if sides else ""
    each = [f"{name}[p]{side} = is_inside ? {writer.statement(n)[1]} : 0;" for n, name in arrays.items()]
    if not sides:
        others = [n for n in sorted(writer.per_pack - set(arrays)) if writer.is_named(n)]
        needed = [_declare(plan, writer, n, condition="is_inside") for n in others]
        return [*lines, *_over_packs(plan, writer, [*kept(needed, each), *each], is_looped=False, skips=False)]
    channels = {}
    for n in arrays:
        quotient, last = split_quotient(writer, n), f"{plan.sizes[-1]} - 1"
        extent = writer.text(values[quotient].args[1]).at(ATOM)
        name = writer.text(quotient).code
        kind = "index_t" if writer.is_only_addressed(quotient) else "long long"
        channels[name] = f"const {kind} {name} = min(first / {extent} + side, ({last}) / {extent});"
    each = _loop("side", "2", [*channels.values(), *each])
    return [*lines, *_over_packs(plan, writer, each, is_looped=False, skips=False)]


def _of_side(plan: Schedule, writer: CudaWriter, number: int, array: str) -> str:
    """What was read for the channel on a column's side of the border in its pack."""
    values = plan.program.values
    extent = writer.text(values[split_quotient(writer, number)].args[1]).at(ATOM)
    kind, name = COMPUTE[values[number].dtype], writer.text(number).code
    return f"const {kind} {name} = first % {extent} + lane >= {extent} ? {array}[p][1] : {array}[p][0];"


def _staged_name(writer: CudaWriter, number: int) -> str:
    return writer.fresh(f"{writer.packs[number].removesuffix('_packs')}_staged")


def _staged_arrays(plan: Schedule, arrays: dict[int, str]) -> list[str]:
    """Where each pack that is needed again stays: arrays one behind another, indexed as the row is."""
    lines, start = [], "staged"
    for number, name in arrays.items():
        kind = "unsigned char" if number in plan.numbers else SCALARS[plan.loads[number].operand.dtype]
        lines.append(f"{kind}* const {name} = ({kind}*){start};")
        start = f"({name} + {'2 * ' if number in plan.loads and plan.loads[number].is_pair else ''}STAGED)"
    return ["extern __shared__ uint4 staged[];", *lines] if arrays else []


def _staged_first(writer: CudaWriter) -> str:
    return "first + shift" if writer.is_shifted else "first"


def _staged_place(plan: Schedule, writer: CudaWriter, number: int, name: str) -> str:
    return f"{name} + {'2 * ' if plan.loads[number].is_pair else ''}{_staged_first(writer)}"


def _from_staged(plan: Schedule, writer: CudaWriter, number: int, name: str) -> str:
    if number in plan.numbers:
        return f"{name}[first / VEC]"
    return f"load_pack{'<2>' if plan.loads[number].is_pair else ''}({_staged_place(plan, writer, number, name)})"


def _staged_stores(plan: Schedule, writer: CudaWriter, arrays: dict[int, str]) -> list[str]:
    lines = []
    for number, name in arrays.items():
        pack = f"{writer.packs[number]}[p]"
        if number in plan.numbers:
            lines.append(f"{name}[first / VEC] = {pack};")
        else:
            lines.append(f"store_pack({_staged_place(plan, writer, number, name)}, {pack});")
    skip = f"if ({_staged_first(writer)} >= STAGED) continue;"
    return _over_packs(plan, writer, [skip, *lines], is_looped=True, skips=False) if lines else []


def _load(plan: Schedule, writer: CudaWriter, number: int, *, is_inside: bool = False) -> str:
    guard = plan.program.values[number].guard
    conditions = [] if is_inside or shared_by_rows(plan, number) else ["is_inside"]
    conditions += [writer.pack_guard(guard)] if guard is not None else []
    address = writer.operand_address(plan.loads[number], col="first")
    if writer.is_shifted:
        return f"load_part({address}, inside)"
    function = "load_pack<2>" if plan.loads[number].is_pair else "load_pack"
    return f"{function}({address}, {' && '.join(conditions)})" if conditions else f"{function}({address})"


def _over_packs(plan: Schedule, writer: CudaWriter, lines: list[str], *, is_looped: bool, skips: bool) -> list[str]:
    """A loop over the packs of a thread.

    Pointwise packs are compared with the end even where the launch leaves none past it: the branch keeps the compiler from
    moving the loads down between the computations. A reduction does that by itself, so rows go without it (FULL).
    """
    if plan.kind == "tiled":
        inner = _outer_indices(plan, "top")[:1]
        place = [f"const index_t {line} + p;" for line in inner] or ["const index_t row = top + p;"]
        place.append(f"const bool is_inside = {'top + p' if inner else 'row'} < rows;")
        place += [line for line, access in _bases(writer) if access.strides[-2] != "0"]
    elif plan.kind == "flat":
        place = ["const index_t first = (((index_t)blockIdx.x * PACKS + p) * THREADS + threadIdx.x) * VEC;"]
        place.append(f"const bool is_inside = first < {plan.sizes[-1]};")
    else:
        start = "start + " if is_looped else "begin + " if writer.is_clustered else ""
        shift = " - shift" if writer.is_shifted else ""
        place = [f"const index_t first = {start}((index_t)p * THREADS + threadIdx.x) * VEC{shift};"]
        place.append(f"const bool is_inside = FULL || first < {plan.sizes[-1]};")
        place.append(f"const unsigned inside = columns_inside(first, {plan.sizes[-1]});")
    if skips:
        lines = ["if (!inside) continue;" if writer.is_shifted else "if (!is_inside) continue;", *lines]
    return _loop("p", "PACKS", [*kept(place, lines), *lines])


def _loop(name: str, end: str, lines: list[str]) -> list[str]:
    return ["#pragma unroll", f"for (int {name} = 0; {name} < {end}; ++{name}) {{", *(f"    {line}" for line in lines), "}"]


def _store_element(plan: Schedule, writer: CudaWriter, position: int) -> str:
    access, store = plan.stores[position], plan.program.stores[position]
    code = writer.narrowed(writer.text(store.value).code, plan.program.values[store.value].dtype, access.operand.dtype)
    return f"{writer.base(access)}[{writer.element(access)}] = {code};"


def _add_guarded(lines: list[str], stored: str, writer: CudaWriter, guard: int | None) -> None:
    """Append a store; those under one guard share its branch."""
    if guard is None:
        lines.append(stored)
        return
    branch = f"if ({writer.text(guard).code}) {{"
    if branch in lines and lines[-1] == "}":
        lines.insert(-1, f"    {stored}")
    else:
        lines += [branch, f"    {stored}", "}"]


def _declare(plan: Schedule, writer: CudaWriter, number: int, *, condition: str = "") -> str:
    name, code = writer.statement(number)
    if condition and plan.program.values[number].op == "load":
        code = f"{condition} ? {code} : 0"
    elif condition and plan.program.values[number].op == "inside":
        code = f"{condition} && {code}"
    is_index = writer.is_only_compared(number) or writer.is_only_addressed(number)
    kind = "index_t" if is_index else COMPUTE[plan.program.values[number].dtype]
    return f"const {kind} {name} = {code};"


def _pack(access: Access) -> str:
    return f"Pack<{SCALARS[access.operand.dtype]}{', 2' if access.is_pair else ''}>"


def _place(plan: Schedule, writer: CudaWriter, lines: list[str], *, is_looped: bool) -> list[str]:
    """The row of a thread, and the indices of its outer dims as far as the body uses them."""
    if plan.kind == "flat":
        return []
    is_tiled = plan.kind == "tiled"
    name = "top" if is_tiled else "row"
    outer = _outer_indices(plan, name)[is_tiled:]
    bases = [line for line, access in _bases(writer) if not is_tiled or access.strides[-2] == "0"]
    declared = kept([*(f"const index_t {line};" for line in outer), *bases], lines)
    if writer.is_shifted:
        access = next(plan.loads[n] for n in writer.packs)
        scalar, address = SCALARS[access.operand.dtype], writer.operand_address(access, col="0").removesuffix(" + 0")
        declared.append("// Packs start where all rows' addresses allow: the row's first column is not the first of its pack.")
        declared.append(f"const index_t shift = (unsigned long long)({address}) / sizeof({scalar}) % VEC;")
    if writer.is_clustered:
        declared[:0] = ["const index_t begin = (index_t)blockIdx.x % CLUSTER * (PACKS * THREADS * VEC);", "cluster_start();"]
    row = "(index_t)blockIdx.x / CLUSTER" if writer.is_clustered else "(index_t)blockIdx.x * ROWS + threadIdx.y"
    place = f"const index_t {name} = " + (f"({row}) * PACKS;  // the thread's first row" if is_tiled else f"{row};")
    if is_tiled:
        return [place, f"if ({name} >= rows) return;", *declared]
    # Grids of a row for each block, or each cluster, end with the last one. The test waits for the kernel's arguments, and so did
    # all loads behind it: 0.05 to 0.1 µs of 1.5 in one row of 4096 columns, known columns included (H200).
    cols, ends = plan.sizes[-1], [] if writer.is_clustered else ["if (ROWS > 1 && row >= rows) return;"]
    if not is_looped and any(f"){cols}" in line for line in lines):
        whole = f"{'CLUSTER * ' if writer.is_clustered else ''}PACKS * THREADS * VEC"
        ends.append(f"if (FULL) __builtin_assume({cols} == {whole});  // a mean then takes no division")
    return [place, *ends, *declared]


def _outer_indices(plan: Schedule, flat: str) -> list[str]:
    """The indices of the row dims, innermost first, where there is more than one."""
    if len(plan.indices) == 2:
        return []
    return [line.replace("//", "/") for line in split_index(flat, plan.indices[:-1], plan.sizes[:-1])]


def _bases(writer: CudaWriter) -> list[tuple[str, Access]]:
    lines = []
    for name, code, access in writer.bases:
        if writer.plan.kind == "tiled":
            lines.append((f"const index_t {name} = {code};", access))
            continue
        constness = "" if access.operand.is_output else "const "
        lines.append((f"{constness}{SCALARS[access.operand.dtype]}* const {name} = {code};", access))
    return lines


def _signature(plan: Schedule) -> list[str]:
    lines = []
    for operand, pointer in zip(plan.program.operands, plan.pointers, strict=True):
        constness = "" if operand.is_output else "const "
        lines.append(f"{constness}{SCALARS[operand.dtype]}* __restrict__ {pointer}")
    return [*lines, *(f"index_t {name}" for name, _ in plan.arguments)]


def ordered(helpers: set[str]) -> list[str]:
    """Helpers in an order in which each is defined before it is used."""
    return [name for name in _HELPERS_IN_ORDER if name in helpers]


def _helpers(plan: Schedule, writer: CudaWriter, text: str) -> list[str]:
    """The helpers that a kernel's text calls."""
    if writer.helpers & {"exp_16bit", "sigmoid_16bit", "tanh_cdf_16bit", "normal_cdf_half", "normal_cdf_bfloat16"}:
        writer.helpers.add("exp2_16bit")
    dtypes = {o.dtype for o in plan.program.operands}
    outputs = {o.dtype for o in plan.program.operands if o.is_output}
    wanted = set(writer.helpers)
    wanted |= {"pack"} if "Pack<" in text else set()
    wanted |= {"cluster"} if writer.is_clustered else set()
    names = ("load_pack", "store_pack", "columns_inside", "load_part", "store_part")
    wanted |= {name for name in names if f"{name}(" in text or f"{name}<" in text}
    wanted |= {part.replace("part", "pack") for part in ("load_part", "store_part") if part in wanted}
    wanted |= ({"half"} if "float16" in dtypes else set()) | ({"bfloat16"} if "bfloat16" in dtypes else set())
    narrow = {"float16": "from_float32_half", "bfloat16": "from_float32_bfloat16"}
    wanted |= {narrow[d] for d in outputs if d in narrow} | ({"from_float32"} if outputs & set(narrow) else set())
    return ordered(wanted)
