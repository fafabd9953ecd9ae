"""The statements of a CUDA kernel: what is done per row, and per pack of columns in each pass over them."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from fusion_advisor.library.cuda_ops import COMPUTE, SCALARS, CudaWriter
from fusion_advisor.library.expressions import ATOM
from fusion_advisor.library.program import ITEM_BYTES
from fusion_advisor.library.schedule import Pass, Schedule, column_passes, kept, split_index

_UNROLL = "#pragma unroll"
_REDUCERS = {"reduce_sum": "Sum", "reduce_max": "Max", "reduce_min": "Min"}
_STARTS = {
    ("reduce_sum", False): "0", ("reduce_max", False): "-INF_VALUE", ("reduce_min", False): "INF_VALUE",
    ("reduce_sum", True): "0", ("reduce_max", True): "(long long)(1ULL << 63)", ("reduce_min", True): "~(1LL << 63)",
}  # fmt: skip


def vector_width(plan: Schedule) -> int:
    """Columns of a pack: 16 bytes of the narrowest operand that runs along the columns, 8 columns at most."""
    accesses = [*plan.loads.values(), *plan.stores]
    widths = [ITEM_BYTES[a.operand.dtype] for a in accesses if a.strides[-1] == "1"]
    return min(8, 16 // min(widths)) if widths else 1


def body(plan: Schedule, writer: CudaWriter, *, is_looped: bool) -> dict[str, Any]:
    """Everything that the templates of ``templates/cuda`` print, but for the head and the macros."""
    before, passes = column_passes(plan)
    if plan.kind != "rows":  # one pass that stores everything
        values = tuple(n for n in range(len(plan.program.values)) if plan.has_col(n))
        passes = (Pass(values=values, reductions=(), stores=tuple(range(len(plan.program.stores))), after=()),)
    resident = _resident(writer, passes) if plan.kind == "rows" and not is_looped else {}
    arrays = [f"Pack<{_type(plan, n)}> {name}[PACKS];" for n, name in resident.items()]
    loaded: set[int] = set()
    steps = [_step(plan, writer, step, resident, loaded) for step in passes]
    row_stores = [p for p in range(len(plan.program.stores)) if plan.kind == "rows" and not plan.stores_col(p)]
    stores = [_store_element(plan, writer, p) for p in row_stores]
    first = [_declare(plan, writer, n) for n in before if writer.is_named(n)]
    everything = [*first, *stores, *(line for step in steps for lines in step.values() for line in lines)]
    text = "\n".join(everything)
    context: dict[str, Any] = {
        "place": _place(plan, writer, everything), "before": first, "arrays": arrays, "stores": stores, "passes": steps,
        "columns": steps[0]["columns"] if steps else [], "signature": _signature(plan),
    }  # fmt: skip
    context["helpers"] = _helpers(plan, writer, text)
    return context


def _resident(writer: CudaWriter, passes: tuple[Pass, ...]) -> dict[int, str]:
    """Packs that more than one pass reads: they stay in registers, in an array."""
    uses = {n: sum(n in step.values for step in passes) for n in writer.packs}
    return {n: writer.fresh(f"{name}s") for n, name in writer.packs.items() if uses[n] > 1}


def _step(plan: Schedule, writer: CudaWriter, step: Pass, resident: dict[int, str], loaded: set[int]) -> dict[str, list[str]]:
    """One pass over the columns: its packs, its lane loop, its stores, and what is known per row afterwards."""
    values = plan.program.values
    packs = [n for n in step.values if n in writer.packs]
    head: list[str] = []
    for n in packs:
        head += _load_pack(plan, writer, n, resident.get(n, ""), is_first=n not in loaded)
        loaded.add(n)
    declared = [_declare(plan, writer, n) for n in step.values if writer.is_named(n)]
    lane: list[str] = []
    accumulators, after = [], []
    for n in step.reductions:
        name, kind = writer.text(n).code, COMPUTE[values[n].dtype]
        start = _STARTS[values[n].op, kind == "long long"] + ("F" if kind == "float" and values[n].op != "reduce_sum" else "")
        part = writer.fresh(f"{name}_part")
        accumulators.append(f"{kind} {part} = {start};")
        arg = writer.text(values[n].args[0])
        combine = {"reduce_sum": f"{part} += {arg.code}", "reduce_max": f"{part} = nan_max({part}, {arg.code})"}
        combine["reduce_min"] = f"{part} = nan_min({part}, {arg.code})"
        lane.append(f"if (lanes >> lane & 1) {combine[values[n].op]};")
        after.append(f"const {kind} {name} = row_reduce<{_REDUCERS[values[n].op]}>({part});")
        writer.helpers |= {"row_reduce", *({start.removeprefix("-")} if "INF" in start else set())}
        writer.helpers |= {"reduce_max": {"nan_max"}, "reduce_min": {"nan_min"}}.get(values[n].op, set())
    after += [_declare(plan, writer, n) for n in step.after if writer.is_named(n)]
    tail = []
    for position in step.stores:
        access, store = plan.stores[position], plan.program.stores[position]
        if access.strides[-1] != "1":
            lane.append(f"if (lanes >> lane & 1) {_store_element(plan, writer, position)}")
            continue
        pack = writer.fresh(f"{access.operand.name}_pack")
        head.append(f"Pack<{SCALARS[access.operand.dtype]}> {pack};")
        code = writer.narrowed(writer.text(store.value).code, values[store.value].dtype, access.operand.dtype)
        lane.append(f"{pack}[lane] = {code};")
        tail.append(f"store_pack({writer.operand_address(access, col='first')}, {pack}, lanes);")
    # A guard of a pack is already in the pack's lanes: its values are declared again only where something else uses them.
    lane = kept([f"const index_t {plan.indices[-1]} = first + lane;", *declared], lane) + lane
    lines = [
        *head,
        _UNROLL,
        "for (int lane = 0; lane < VEC; ++lane) {",
        *textwrap.indent("\n".join(lane), "    ").split("\n"),
        "}",
        *tail,
    ]
    if any(re.search(r"\blanes\b", line) for line in lines):
        lines.insert(0, f"const unsigned lanes = lanes_before({plan.sizes[-1]}, first);")
    return {"accumulators": accumulators, "columns": lines, "after": after}


def _load_pack(plan: Schedule, writer: CudaWriter, number: int, array: str, *, is_first: bool) -> list[str]:
    name, kind = writer.packs[number], _type(plan, number)
    lines, lanes = [], "lanes"
    value = plan.program.values[number]
    if array and not is_first:
        return [f"const Pack<{kind}>& {name} = {array}[p];"]
    if value.guard is not None:
        lanes = writer.fresh(f"{name}_lanes")
        lines += _guard_lanes(plan, writer, value.guard, lanes)
    code = f"load_pack({writer.operand_address(plan.loads[number], col='first')}, {lanes})"
    if array:
        return [*lines, f"const Pack<{kind}>& {name} = {array}[p] = {code};"]
    return [*lines, f"const Pack<{kind}> {name} = {code};"]


def _guard_lanes(plan: Schedule, writer: CudaWriter, guard: int, lanes: str) -> list[str]:
    """The lanes of a pack that a guard lets through."""
    values = plan.program.values
    needed, waiting = set(), [guard]
    while waiting:
        number = waiting.pop()
        needed.add(number)
        waiting += values[number].args
    loop = [_declare(plan, writer, n) for n in sorted(needed) if writer.is_named(n) and plan.has_col(n)]
    loop.append(f"{lanes} |= (unsigned){writer.text(guard).at(ATOM)} << lane;")
    if any(re.search(rf"\b{plan.indices[-1]}\b", line) for line in loop):
        loop.insert(0, f"const index_t {plan.indices[-1]} = first + lane;")
    return [f"unsigned {lanes} = 0;", _UNROLL, "for (int lane = 0; lane < VEC; ++lane) {", *(f"    {line}" for line in loop), "}",
            f"{lanes} &= lanes;"]  # fmt: skip


def _store_element(plan: Schedule, writer: CudaWriter, position: int) -> str:
    access, store = plan.stores[position], plan.program.stores[position]
    code = writer.narrowed(writer.text(store.value).code, plan.program.values[store.value].dtype, access.operand.dtype)
    return f"{writer.base(access)}[{writer.element(access)}] = {code};"


def _declare(plan: Schedule, writer: CudaWriter, number: int) -> str:
    name, code = writer.statement(number)
    return f"const {COMPUTE[plan.program.values[number].dtype]} {name} = {code};"


def _type(plan: Schedule, number: int) -> str:
    return SCALARS[plan.loads[number].operand.dtype]


def _place(plan: Schedule, writer: CudaWriter, lines: list[str]) -> list[str]:
    """The row of a thread, and the indices of its outer dims as far as the body uses them."""
    if plan.kind == "flat":
        return []
    rows = "rows"
    outer = split_index("row", plan.indices[:-1], plan.sizes[:-1]) if len(plan.indices) > 2 else []
    bases = []
    for name, code, access in writer.bases:
        constness = "" if access.operand.is_output else "const "
        bases.append(f"{constness}{SCALARS[access.operand.dtype]}* const {name} = {code};")
    declared = kept([*(f"const index_t {line.replace('//', '/')};" for line in outer), *bases], lines)
    return ["const index_t row = (index_t)blockIdx.x * ROWS + threadIdx.y;", f"if (row >= {rows}) return;", *declared]


def _signature(plan: Schedule) -> list[str]:
    lines = []
    for operand, pointer in zip(plan.program.operands, plan.pointers, strict=True):
        constness = "" if operand.is_output else "const "
        lines.append(f"{constness}{SCALARS[operand.dtype]}* __restrict__ {pointer}")
    return [*lines, *(f"index_t {name}" for name, _ in plan.arguments)]


def _helpers(plan: Schedule, writer: CudaWriter, text: str) -> list[str]:
    """Helpers in an order in which each is defined before it is used."""
    dtypes = {o.dtype for o in plan.program.operands}
    outputs = {o.dtype for o in plan.program.operands if o.is_output}
    wanted = set(writer.helpers)
    wanted |= {"pack"} if "lanes" in text else set()
    wanted |= {name for name in ("load_pack", "store_pack") if name in text}
    wanted |= ({"half"} if "float16" in dtypes else set()) | ({"bfloat16"} if "bfloat16" in dtypes else set())
    narrow = {"float16": "narrow_half", "bfloat16": "narrow_bfloat16"}
    wanted |= {narrow[d] for d in outputs if d in narrow} | ({"narrow"} if outputs & set(narrow) else set())
    order = """INF_VALUEF INF_VALUE NAN_VALUEF NAN_VALUE half bfloat16 narrow narrow_half narrow_bfloat16 pack load_pack
        store_pack nan_max nan_min sigmoid remainder_of sign_of fast_tanh fast_sqrt row_reduce""".split()  # noqa: SIM905
    return [name for name in order if name in wanted]
