"""The statements of a CUDA kernel: what is done per row, and per pack of columns in each pass over them."""

from __future__ import annotations

import itertools
from typing import Any

from fusion_advisor.codegen.common.arguments import Schedule, kept
from fusion_advisor.codegen.common.column_passes import Pass, column_passes
from fusion_advisor.codegen.cuda.column_pass import Common, column_pass
from fusion_advisor.codegen.cuda.loads import early_loads, pack_loads, staged_arrays, staged_name
from fusion_advisor.codegen.cuda.op_rows import WRAPPING_HELPERS
from fusion_advisor.codegen.cuda.ops import SCALARS, CudaWriter, moves_with_p, shared_loads
from fusion_advisor.codegen.cuda.register_reuse import carried, hidden
from fusion_advisor.codegen.cuda.shared_memory import looped_passes, packs_of, staged_packs
from fusion_advisor.codegen.cuda.statements import add_guarded, bases, declare, outer_indices, store_element

_HELPERS_IN_ORDER = (
    "INF_VALUEF", "INF_VALUE", "NAN_VALUEF", "NAN_VALUE", "checked", "half", "bfloat16", "from_float32", "from_float32_half",
    "from_float32_bfloat16", "round_fp16", "round_bf16",
    "pack", "wide_pack", "load_pack", "store_pack", "columns_inside", "load_part", "store_part",
    "nan_max", "nan_min", "exp2_16bit", "exp_16bit", "sigmoid_16bit", "tanh_16bit", "expm1_16bit", "log1p_16bit",
    "quotient_16bit", "tanh_cdf_16bit", "normal_cdf_half", "normal_cdf_bfloat16",
    "sigmoid", "remainder_of", "sign_of", "fast_tanh", "fast_sqrt", "mean_of", "philox", "kept_bits", "is_kept", "cluster",
    "row_reduce", "moments", *WRAPPING_HELPERS,
)  # fmt: skip

_POWERS = frozenset(
    {"exp_16bit", "sigmoid_16bit", "tanh_16bit", "expm1_16bit", "tanh_cdf_16bit", "normal_cdf_half", "normal_cdf_bfloat16"}
)
"""What calls ``exp2_16bit``."""


def body(plan: Schedule, writer: CudaWriter, *, is_looped: bool) -> dict[str, Any]:
    """Everything that the templates of ``templates/cuda`` print, but for the head and the macros."""
    before, passes = looped_passes(plan) if is_looped else column_passes(plan)
    per_p: tuple[int, ...] = ()
    if plan.kind != "rows":
        per_p = tuple(n for n in before if moves_with_p(plan, n))
        before = tuple(n for n in before if n not in per_p)
        passes = (_only_pass(plan),)
    # The blocks of a cluster have their registers full of packs; only a branch makes up for what a value per column takes.
    has_room = not writer.is_clustered or all(hidden(plan, step) for step in passes)
    common = Common(
        per_p=per_p,
        numbers=itertools.count(),
        carried=carried(plan, passes) if has_room and not is_looped else (),
        is_looped=is_looped,
        arrays={n: staged_name(writer, n) for n in staged_packs(plan, writer, passes)} if is_looped else {},
        early={n: writer.fresh(f"{writer.text(n).code}_of") for n in shared_loads(plan, writer)} if writer.is_clustered else {},
    )
    steps, written = [], set[int]()
    for step in passes:
        steps.append(column_pass(plan, writer, step, common, frozenset(written)))
        written |= common.arrays.keys() & packs_of(plan, writer, step)
    stores = _row_stores(plan, writer)
    first = [declare(plan, writer, n) for n in before if writer.is_named(n)]
    is_resident = plan.kind == "rows" and not is_looped
    loads = pack_loads(plan, writer, list(writer.packs), (), is_looped=False) if is_resident else []
    loads += early_loads(plan, writer, common.early)
    everything = [*loads, *first, *stores, *(line for step in steps for lines in step.values() for line in lines)]
    context: dict[str, Any] = {
        "place": _place(plan, writer, everything, is_looped=is_looped),
        "before": [*staged_arrays(plan, common.arrays), *first], "loads": loads,
        "stores": stores, "passes": steps, "signature": _signature(plan), "is_staged": bool(common.arrays),
        "reductions": next(common.numbers),
    }  # fmt: skip
    context["helpers"] = _helpers(plan, writer, "\n".join(everything))
    return context


def _only_pass(plan: Schedule) -> Pass:
    """The pass of a pointwise kernel, which stores everything."""
    values = tuple(n for n in range(len(plan.program.values)) if plan.has_col(n))
    return Pass(values=values, reductions=(), stores=tuple(range(len(plan.program.stores))))


def _row_stores(plan: Schedule, writer: CudaWriter) -> list[str]:
    """The stores of one element for each row."""
    stores: list[str] = []
    for position in range(len(plan.program.stores)):
        if plan.kind == "rows" and not plan.stores_col(position):
            add_guarded(stores, store_element(plan, writer, position), writer, plan.program.stores[position].guard)
    return stores


def _place(plan: Schedule, writer: CudaWriter, lines: list[str], *, is_looped: bool) -> list[str]:
    """The row of a thread, and the indices of its outer dims as far as the body uses them."""
    if plan.kind == "flat":
        return []
    is_tiled = plan.kind == "tiled"
    name = "top" if is_tiled else "row"
    outer = outer_indices(plan, name)[is_tiled:]
    pointers = [line for line, access in bases(writer) if not is_tiled or access.strides[-2] == "0"]
    declared = kept([*(f"const index_t {line};" for line in outer), *pointers], lines)
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
    # all loads after it: 0.05 to 0.1 µs of 1.5 in one row of 4096 columns, known columns included (H200).
    cols, ends = plan.sizes[-1], [] if writer.is_clustered else ["if (ROWS > 1 && row >= rows) return;"]
    if not is_looped and any(f"){cols}" in line for line in lines):
        whole = f"{'CLUSTER * ' if writer.is_clustered else ''}PACKS * THREADS * VEC"
        ends.append(f"if (FULL) __builtin_assume({cols} == {whole});  // a mean then takes no division")
    return [place, *ends, *declared]


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
    if writer.helpers & _POWERS:
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
