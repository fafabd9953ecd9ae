"""Fold equal chains of different layers into one row, price each row, and rank by what it costs.

The floor is what one kernel per site could not beat: the bytes it must move over the *measured* copy bandwidth, plus one smallest
launch. The saving shown is an upper bound and is never added up: rows share inputs with each other and with GEMMs.

An op by itself is a row too where its own kernel is clearly slower than that: a reduction always, a pointwise op or a copy of
whole runs as :data:`_SLOW_SHARE` says (``docs/measurements/zoo.md``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusion_advisor.chains.group import Group
from fusion_advisor.chains.op_inputs import copies_runs, inputs_of, writes_by_number
from fusion_advisor.records import Arg, Bandwidth, Capture, Chain, Launch, NoMatch, OpClass, OpNode, Ref, Site, TensorMeta
from fusion_advisor.records.op_facts import item_bytes, overload_free, reads_by_number

_SLOW_SHARE = 0.15
"""Of its floor: a lone pointwise op that takes so much longer has something to gain. On an H200 ATen's exact GELU in bf16 takes
0.24 to 0.40 longer and our kernels 0.05; ATen's add of two tensors of one layout is at its floor. It must take longer by a
smallest launch as well, for a kernel of a microsecond or two gains nothing. ATen copies permuted heads (bf16, 16 x 256 x 12 x 64,
H100) in 8.7 µs, of which memory needs 4.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A chain row with its groups, and the refusal if no kernel can compute it."""

    chain: Chain
    groups: tuple[Group, ...]
    refusal: NoMatch | None


def rank_chains(capture: Capture, groups: Iterable[Group], *, min_share: float = 0.0) -> list[Ranked]:
    """Fold, price and rank.

    Args:
        capture: whose ops and launches the groups refer to.
        groups: from ``find_groups``.
        min_share: rows below this share of the captured step's device time are left out.
    """
    launches: dict[int, list[Launch]] = defaultdict(list)
    for launch in capture.launches:
        if launch.op_index is not None:
            launches[launch.op_index].append(launch)
    total_ns = max(sum(launch.duration_ns for launch in capture.launches), 1)
    rows: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        rows[group.verdict.key or signature(capture.ops, group)].append(group)
    priced = [_price(capture, same, launches, total_ns) for same in rows.values()]
    worth = [row for row in priced if row.chain.share >= min_share and _is_worth_a_row(capture, row)]
    worth.sort(key=lambda row: -row.chain.device_ns)
    return [_renamed(row, f"C{number}") for number, row in enumerate(worth, start=1)]


def _is_worth_a_row(capture: Capture, row: Ranked) -> bool:
    chain = row.chain
    if chain.launches > chain.runs:
        return True
    if chain.is_reduction:
        return chain.launches > 0
    # A lone pointwise op moves the fewest bytes it can, so that only a slow kernel leaves something to gain: one that computes
    # too much per element, or loads no vectors. So does a copy that ATen makes element by element. A lookup or a cat is no such.
    members = [capture.ops[index] for index in row.groups[0].members]
    is_slow_kind = any(op.op_class is OpClass.POINTWISE or copies_runs(op, capture.ops) for op in members)
    if row.refusal is not None or not is_slow_kind:
        return False
    return chain.saving_bound_ns > max(_SLOW_SHARE * chain.floor_ns, chain.runs * capture.bandwidth.launch_ns)


def _renamed(row: Ranked, name: str) -> Ranked:
    from dataclasses import replace

    refusal = None if row.refusal is None else replace(row.refusal, chain_id=name)
    return Ranked(chain=replace(row.chain, id=name), groups=row.groups, refusal=refusal)


def signature(ops: Sequence[OpNode], group: Group) -> str:
    """Text that two groups share exactly when they compute the same thing on equally laid out tensors."""
    local = {index: number for number, index in enumerate(group.members)}
    outer: dict[int, int] = {}

    def show(argument: Arg) -> str:
        if isinstance(argument, Ref):
            if argument.index in local:
                return f"v{local[argument.index]}"
            number = outer.setdefault(argument.index, len(outer))
            return f"i{number}:{[_layout(meta) for meta in ops[argument.index].outputs]}"
        if isinstance(argument, tuple):
            return "(" + ",".join(show(item) for item in argument) + ")"
        return repr(argument)

    parts = []
    for index in group.members:
        op = ops[index]
        arguments = ",".join([*map(show, op.args), *(f"{name}={show(value)}" for name, value in op.kwargs)])
        parts.append(f"{op.target}({arguments})->{[_layout(meta) for meta in op.outputs]}")
    return ";".join(parts) + f"|{[local[index] for index in group.outputs]}"


def computing_names(ops: Sequence[OpNode], members: Iterable[int]) -> tuple[str, ...]:
    """Return the base names of what a group computes, views left out.

    Args:
        ops: all ops of the capture.
        members: of the group.
    """
    return tuple(overload_free(ops[index].target).strip("_") for index in members if ops[index].op_class is not OpClass.VIEW)


def _layout(meta: TensorMeta) -> str:
    # Offsets of sliced inputs are kept: they distinguish two slices of one tensor.
    return f"{meta.dtype}{list(meta.shape)}{list(meta.stride)}+{meta.offset}"


def _price(capture: Capture, same: Sequence[Group], launches: Mapping[int, Sequence[Launch]], total_ns: int) -> Ranked:
    ops = capture.ops
    sites = tuple(_site(capture, group, launches) for group in same)
    first = same[0]
    computing = [ops[index] for index in first.members if ops[index].op_class is not OpClass.VIEW]
    device_ns = sum(site.device_ns for site in sites)
    runs = sum(site.runs for site in sites)
    moved = runs * sum(_moved_bytes(ops, op) for op in computing)
    floor_bytes = runs * (first.verdict.floor_bytes or _outer_bytes(ops, first))
    floor_ns = floor_time_ns(floor_bytes, runs, capture.bandwidth)
    # A chain whose value is never read (FA601) has no outputs.
    widest = max((ops[index].outputs[0] for index in first.outputs or first.members), key=lambda meta: math.prod(meta.shape))
    refusal = None
    if not first.verdict.is_fusible:
        refusal = NoMatch(chain_id="", code=first.verdict.code, reason=first.verdict.reason)
    chain = Chain(
        id="",
        ops=computing_names(ops, first.members),
        sites=sites,
        launches=sum(len(launches.get(index, ())) for group in same for index in group.members),
        device_ns=device_ns,
        share=device_ns / total_ns,
        moved_bytes=moved,
        floor_bytes=floor_bytes,
        floor_ns=floor_ns,
        saving_bound_ns=max(0, device_ns - floor_ns),
        is_reduction=any(op.op_class is OpClass.REDUCTION for op in computing),
        dtype=widest.dtype,
        shape=widest.shape,
    )
    return Ranked(chain=chain, groups=tuple(same), refusal=refusal)


def floor_time_ns(moved_bytes: int, launches: int, bandwidth: Bandwidth) -> int:
    """Return bytes over the measured copy bandwidth plus one smallest launch each."""
    return round(moved_bytes / bandwidth.copy_bytes_per_s * 1e9) + launches * bandwidth.launch_ns


def _site(capture: Capture, group: Group, launches: Mapping[int, Sequence[Launch]]) -> Site:
    ops = capture.ops

    def time_ns(index: int) -> int:
        return sum(launch.duration_ns for launch in launches.get(index, ()))

    computing = [index for index in group.members if ops[index].op_class is not OpClass.VIEW]
    slowest = ops[max(computing, key=time_ns)]
    return Site(
        op_indices=group.members,
        module_path=common_path([ops[index].module_path for index in computing]),
        source_file=slowest.source_file,
        source_line=slowest.source_line,
        source_text=slowest.source_text,
        device_ns=sum(time_ns(index) for index in group.members),
        runs=capture.runs_of(slowest),
    )


def common_path(paths: Sequence[str]) -> str:
    """Return the innermost module that all paths lie in; the last path where they only share the top."""
    parts = [path.split(".") for path in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) != 1:
            break
        shared.append(names[0])
    return ".".join(shared) or paths[-1]


def _bytes_of(meta: TensorMeta) -> int:
    distinct = math.prod(size for size, stride in zip(meta.shape, meta.stride, strict=True) if stride != 0)
    return distinct * item_bytes(meta.dtype)


def _moved_bytes(ops: Sequence[OpNode], op: OpNode) -> int:
    sources = inputs_of(op)
    if writes_by_number(op):  # the rows, read and written, and where they go
        return sum(_bytes_of(meta) for source in (sources[1], sources[2], sources[2]) for meta in ops[source].outputs)
    read = sum(_bytes_of(meta) for source in sources for meta in ops[source].outputs)
    if reads_by_number(op.target):
        tables = sum(_bytes_of(meta) for meta in ops[sources[0]].outputs)
        read -= max(0, tables - sum(_bytes_of(meta) for meta in op.outputs))
    return read + sum(_bytes_of(meta) for meta in op.outputs)


def _outer_bytes(ops: Sequence[OpNode], group: Group) -> int:
    members = set(group.members)
    outer = {source for index in group.members for source in inputs_of(ops[index]) if source not in members}
    return sum(_bytes_of(meta) for index in (*outer, *group.outputs) for meta in ops[index].outputs)
