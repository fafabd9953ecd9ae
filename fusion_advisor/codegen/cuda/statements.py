"""Statements and loops that the text of a CUDA kernel is put together from."""

from __future__ import annotations

from fusion_advisor.codegen.common.arguments import Access, Schedule, kept, split_index
from fusion_advisor.codegen.cuda.op_rows import COMPUTE
from fusion_advisor.codegen.cuda.ops import SCALARS, CudaWriter


def over_packs(plan: Schedule, writer: CudaWriter, lines: list[str], *, is_looped: bool, skips: bool) -> list[str]:
    """A loop over the packs of a thread.

    Pointwise packs are compared with the end even where the launch leaves none past it: the branch keeps the compiler from
    moving the loads down between the computations. A reduction does that by itself, so rows go without it (FULL).
    """
    if plan.kind == "tiled":
        inner = outer_indices(plan, "top")[:1]
        place = [f"const index_t {line} + p;" for line in inner] or ["const index_t row = top + p;"]
        place.append(f"const bool is_inside = {'top + p' if inner else 'row'} < rows;")
        place += [line for line, access in bases(writer) if access.strides[-2] != "0"]
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
    return loop("p", "PACKS", [*kept(place, lines), *lines])


def loop(name: str, end: str, lines: list[str]) -> list[str]:
    """Return an unrolled loop around some lines."""
    return ["#pragma unroll", f"for (int {name} = 0; {name} < {end}; ++{name}) {{", *(f"    {line}" for line in lines), "}"]


def store_element(plan: Schedule, writer: CudaWriter, position: int) -> str:
    """Return the statement that stores one element."""
    access, store = plan.stores[position], plan.program.stores[position]
    code = writer.narrowed(writer.text(store.value).code, plan.program.values[store.value].dtype, access.operand.dtype)
    return f"{writer.base(access)}[{writer.element(access)}] = {code};"


def add_guarded(lines: list[str], stored: str, writer: CudaWriter, guard: int | None) -> None:
    """Append a store; those under one guard share its branch."""
    if guard is None:
        lines.append(stored)
        return
    branch = f"if ({writer.text(guard).code}) {{"
    if branch in lines and lines[-1] == "}":
        lines.insert(-1, f"    {stored}")
    else:
        lines += [branch, f"    {stored}", "}"]


def declare(plan: Schedule, writer: CudaWriter, number: int, *, condition: str = "") -> str:
    """Return the statement that declares a named value.

    Args:
        plan: the schedule.
        writer: of the kernel.
        number: of the value.
        condition: what must hold where it is read or checked.
    """
    name, code = writer.statement(number)
    if condition and plan.program.values[number].op == "load":
        code = f"{condition} ? {code} : 0"
    elif condition and plan.program.values[number].op == "inside":
        code = f"{condition} && {code}"
    is_index = writer.is_only_compared(number) or writer.is_only_addressed(number)
    kind = "index_t" if is_index else COMPUTE[plan.program.values[number].dtype]
    return f"const {kind} {name} = {code};"


def pack_type(access: Access) -> str:
    """Return the type of a pack."""
    return f"Pack<{SCALARS[access.operand.dtype]}{', 2' if access.is_pair else ''}>"


def outer_indices(plan: Schedule, flat: str) -> list[str]:
    """The indices of the row dims, innermost first, where there is more than one."""
    if len(plan.indices) == 2:
        return []
    return [line.replace("//", "/") for line in split_index(flat, plan.indices[:-1], plan.sizes[:-1])]


def bases(writer: CudaWriter) -> list[tuple[str, Access]]:
    """Return the declarations of row pointers, or of row offsets in a tiled kernel, with an access that uses each."""
    lines = []
    for name, code, access in writer.bases:
        if writer.plan.kind == "tiled":
            lines.append((f"const index_t {name} = {code};", access))
            continue
        constness = "" if access.operand.is_output else "const "
        lines.append((f"{constness}{SCALARS[access.operand.dtype]}* const {name} = {code};", access))
    return lines
