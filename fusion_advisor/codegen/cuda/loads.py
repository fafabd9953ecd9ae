"""Reads of packs in CUDA kernels: from memory, early for what a cluster waits for, and from shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fusion_advisor.codegen.common.arguments import Schedule, kept
from fusion_advisor.codegen.common.column_passes import late_loads
from fusion_advisor.codegen.common.printer import ATOM
from fusion_advisor.codegen.cuda.op_rows import COMPUTE
from fusion_advisor.codegen.cuda.ops import SCALARS, CudaWriter, shared_by_rows, split_quotient
from fusion_advisor.codegen.cuda.statements import declare, loop, over_packs, pack_type


def pack_loads(
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
    decided = [n for n in packs if n in plan.numbers]
    read = sorted((n for n in packs if n not in plan.numbers), key=lambda n: not plan.has_row(n))
    own = [n for n in read if not shared_by_rows(plan, n)]
    late = late_loads(plan) if plan.kind == "rows" and not is_looped else frozenset()
    lines = [f"{pack_type(plan.loads[n])} {writer.packs[n]}[PACKS];" for n in own]
    each: list[str] = []
    for n in own:
        filled = _filled(plan, writer, n, load_pack(plan, writer, n), arrays)
        each += [f"{'if (!LATE) ' if n in late else ''}{line}" for line in filled]
    if each:
        numbers = [declare(plan, writer, n, condition="is_inside") for n in per_p if writer.is_named(n)]
        lines += over_packs(plan, writer, [*kept(numbers, each), *each], is_looped=is_looped, skips=False)
    shared = [n for n in read if n not in own]
    lines += [f"const {pack_type(plan.loads[n])} {writer.packs[n]} = {load_pack(plan, writer, n)};" for n in shared]
    return lines + _decisions(plan, writer, decided, is_looped=is_looped, arrays=arrays)


def _decisions(
    plan: Schedule, writer: CudaWriter, decided: list[int], *, is_looped: bool, arrays: Mapping[int, str]
) -> list[str]:
    """What dropout keeps of each pack."""
    lines = [f"const unsigned {writer.packs[n]} = {writer.kept_bits(n)};" for n in decided if shared_by_rows(plan, n)]
    own = [n for n in decided if not shared_by_rows(plan, n)]
    if not own:
        return lines
    lines += [f"unsigned {writer.packs[n]}[PACKS];  // a bit for each column" for n in own]
    each = [line for n in own for line in _filled(plan, writer, n, writer.kept_bits(n), arrays)]
    return lines + over_packs(plan, writer, each, is_looped=is_looped, skips=False)


def _filled(plan: Schedule, writer: CudaWriter, number: int, code: str, arrays: Mapping[int, str]) -> list[str]:
    """A pack from shared memory where it lies there, else from ``code``."""
    target = f"{writer.packs[number]}[p] ="
    if number not in arrays:
        return [f"{target} {code};"]
    staged = _from_staged(plan, writer, number, arrays[number])
    return [f"{target} {_staged_first(writer)} < STAGED ? {staged}", f"    : {code};"]


def early_loads(plan: Schedule, writer: CudaWriter, arrays: Mapping[int, str]) -> list[str]:
    """Read values that the columns of a pack share together with the packs, so that no load follows a wait for the cluster."""
    if not arrays:
        return []
    values, sides = plan.program.values, "[2]" if writer.is_split else ""
    lines = [f"{COMPUTE[values[n].dtype]} {name}[PACKS]{sides};" for n, name in arrays.items()]
    side = "[side]" if sides else ""
    each = [f"{name}[p]{side} = is_inside ? {writer.statement(n)[1]} : 0;" for n, name in arrays.items()]
    if not sides:
        others = [n for n in sorted(writer.per_pack - set(arrays)) if writer.is_named(n)]
        needed = [declare(plan, writer, n, condition="is_inside") for n in others]
        return [*lines, *over_packs(plan, writer, [*kept(needed, each), *each], is_looped=False, skips=False)]
    channels = {}
    for n in arrays:
        quotient, last = split_quotient(writer, n), f"{plan.sizes[-1]} - 1"
        extent = writer.text(values[quotient].args[1]).at(ATOM)
        name = writer.text(quotient).code
        kind = "index_t" if writer.is_only_addressed(quotient) else "long long"
        channels[name] = f"const {kind} {name} = min(first / {extent} + side, ({last}) / {extent});"
    each = loop("side", "2", [*channels.values(), *each])
    return [*lines, *over_packs(plan, writer, each, is_looped=False, skips=False)]


def of_side(plan: Schedule, writer: CudaWriter, number: int, array: str) -> str:
    """What was read for the channel on a column's side of the border in its pack."""
    values = plan.program.values
    extent = writer.text(values[split_quotient(writer, number)].args[1]).at(ATOM)
    kind, name = COMPUTE[values[number].dtype], writer.text(number).code
    return f"const {kind} {name} = first % {extent} + lane >= {extent} ? {array}[p][1] : {array}[p][0];"


def staged_name(writer: CudaWriter, number: int) -> str:
    """Return a name for the shared memory that a pack stays in."""
    return writer.fresh(f"{writer.packs[number].removesuffix('_packs')}_staged")


def staged_arrays(plan: Schedule, arrays: Mapping[int, str]) -> list[str]:
    """Declare the arrays in shared memory that keep packs for later passes: one after another, indexed like the row."""
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


def staged_stores(plan: Schedule, writer: CudaWriter, arrays: dict[int, str]) -> list[str]:
    """Write packs to shared memory, as far as it holds them."""
    lines = []
    for number, name in arrays.items():
        pack = f"{writer.packs[number]}[p]"
        if number in plan.numbers:
            lines.append(f"{name}[first / VEC] = {pack};")
        else:
            lines.append(f"store_pack({_staged_place(plan, writer, number, name)}, {pack});")
    skip = f"if ({_staged_first(writer)} >= STAGED) continue;"
    return over_packs(plan, writer, [skip, *lines], is_looped=True, skips=False) if lines else []


def load_pack(plan: Schedule, writer: CudaWriter, number: int, *, is_inside: bool = False) -> str:
    """Return the expression that reads a pack."""
    guard = plan.program.values[number].guard
    conditions = [] if is_inside or shared_by_rows(plan, number) else ["is_inside"]
    conditions += [writer.pack_guard(guard)] if guard is not None else []
    address = writer.operand_address(plan.loads[number], col="first")
    if writer.is_shifted:
        return f"load_part({address}, inside)"
    function = "load_pack<2>" if plan.loads[number].is_pair else "load_pack"
    return f"{function}({address}, {' && '.join(conditions)})" if conditions else f"{function}({address})"
