"""Checks that types cannot express: a record's indices are in range, sizes are not negative, names stay inside their folder.

A file that passes may still be wrong, but no reader fails on it: every index exists, and no divisor is 0.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from fusion_advisor.files.safe_name import why_unsafe
from fusion_advisor.records import (
    ULP_ENDS,
    Arg,
    Capture,
    Chain,
    Match,
    OpNode,
    Ref,
    Report,
    ShapeRanges,
    SizeRange,
    Status,
    StepProfile,
    Timing,
)

_LARGEST = 2**63
_SIGNED = frozenset({
    "step_delta_ns", "step_delta_ci_ns", "predicted_saving_ns", "predicted_low_ns", "predicted_high_ns", "saving_bound_ns",
    "start_ns", "call_start_ns", "idle_ns", "gain_ns", "share", "joined_share", "limit_share", "prefill_after_ns",
    "decode_after_ns",
})  # fmt: skip
"""Figures that may be negative or beyond 1 in a sound file: differences, and times before the first kernel."""
_SIGNED_THERE = frozenset({("Recomputed", "saved_bytes")})
"""The same, of one record: the forward pass may keep an op's results in place of others."""
_COUNTS = frozenset({
    "batch", "seq_len", "context", "new_tokens", "parameter_count", "cores", "launches", "kernels", "runs", "sites", "elements",
    "sites_found", "sites_matched", "sites_replaced", "launches_before", "launches_after", "source_line", "modules",
})  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")


class Unsound(ValueError):
    """A record that does not hold together; the text says where and why."""


def check_report(report: Report) -> None:
    """Look through a report.

    Raises:
        Unsound: with the place.
    """
    _figures(report, "")
    for held in report.training.memory if report.training else ():
        columns = (held.at_share, held.activation_bytes, held.gradient_bytes, held.working_bytes)
        if len(set(map(len, columns))) != 1:
            raise Unsound(f"memory of the {held.label} step: its lists differ in length")
    for label, step in (("before", report.before), ("captured", report.captured), ("after", report.after)):
        _step(step, label)
    for number, baseline in enumerate(report.baselines):
        _step(baseline.step, f"baselines[{number}].step")
    ids = [chain.id for chain in report.chains]
    if len(set(ids)) < len(ids):
        raise Unsound("chains: two have one id")
    for at, chain in enumerate(report.chains):
        _chain(chain, f"chains[{at}]")
    for at, fusion in enumerate(report.fusions):
        if fusion.numerics is not None:
            for key in ("fused_ulps", "eager_ulps"):
                bins = len(getattr(fusion.numerics, key))
                if bins not in (0, len(ULP_ENDS) + 1):
                    raise Unsound(f"fusions[{at}].numerics.{key}: {bins} bins are not the {len(ULP_ENDS) + 1} that are known")
    if report.shapes is not None:
        _shapes(report.shapes)


def check_capture(capture: Capture) -> None:
    """Look through a capture.

    Raises:
        Unsound: with the place.
    """
    _figures(capture, "")
    runs = len(capture.region_runs) or max((op.region for op in capture.ops), default=0) + 1
    for number, op in enumerate(capture.ops):
        place = f"ops[{number}]"
        if op.index != number:
            raise Unsound(f"{place}.index: {op.index} is not its position")
        if not 0 <= op.region < runs:
            raise Unsound(f"{place}.region: {op.region} is none of {runs}")
        _op(op, place)
        _within(op.mutates, number, f"{place}.mutates")
        _within(() if op.alias_of is None else (op.alias_of,), number, f"{place}.alias_of")
    for key, launches in (("launches", capture.launches), ("eager_launches", capture.eager_launches)):
        for number, launch in enumerate(launches):
            if launch.op_index is not None:
                _within((launch.op_index,), len(capture.ops), f"{key}[{number}].op_index")


def check_plan(capture: Capture, report: Report) -> None:
    """Look at what a plan takes from its report against its capture.

    Raises:
        Unsound: with the place.
    """
    chains = {chain.id for chain in report.chains}
    matched = {answer.chain_id for answer in report.answers if isinstance(answer, Match)}
    for number, chain in enumerate(report.chains):
        for at, site in enumerate(chain.sites):
            place = f"chains[{number}].sites[{at}].op_indices"
            _within(site.op_indices, len(capture.ops), place)
            if not site.op_indices or sorted(set(site.op_indices)) != list(site.op_indices):
                raise Unsound(f"{place}: they are not in the order of the graph")
    for number, fusion in enumerate(report.fusions):
        place = f"fusions[{number}]"
        if fusion.chain_id and fusion.chain_id not in chains:
            raise Unsound(f"{place}.chain_id: there is no chain `{fusion.chain_id[:40]}`")
        if fusion.status is not Status.KEPT:
            continue
        if fusion.chain_id and fusion.chain_id not in matched:
            raise Unsound(f"{place}.chain_id: `{fusion.chain_id[:40]}` has no kernel, and yet it was kept")
        if not fusion.rendered:
            raise Unsound(f"{place}.rendered: it was kept, and has no kernel")
        for at, kernel in enumerate(fusion.rendered):
            if refusal := why_unsafe(kernel.path):
                raise Unsound(f"{place}.rendered[{at}].path: {refusal}")
        if why_unsafe(fusion.id):
            raise Unsound(f"{place}.id: it is part of a file's name")
    for number, answer in enumerate(report.answers):
        if isinstance(answer, Match):
            # These are printed into source code.
            _names((answer.kernel, *answer.operands, *(name for _, name in answer.named_values)), f"answers[{number}]")


def _figures(record: Any, place: str) -> None:
    """Look at every number of a record and of those in it, by what its name says of it."""
    for name, is_counted in _numbers_of(record.__class__):
        value = getattr(record, name)
        where = f"{place}.{name}" if place else name
        if isinstance(value, tuple):
            for at, item in enumerate(value):
                if type(item) is int:
                    _figure(item, is_counted, f"{where}[{at}]")
                elif isinstance(item, tuple):
                    for number in item:
                        if type(number) is int:
                            _figure(number, is_counted, f"{where}[{at}]")
                elif hasattr(item, "__dataclass_fields__"):
                    _figures(item, f"{where}[{at}]")
        elif type(value) is int:
            _figure(value, is_counted, where)
        elif hasattr(value, "__dataclass_fields__"):
            _figures(value, where)


@functools.cache
def _numbers_of(kind: type) -> tuple[tuple[str, bool], ...]:
    """The fields that may hold numbers or records, and whether a negative number makes no sense in them."""
    if not is_dataclass(kind):
        return ()
    found = []
    for item in fields(kind):
        is_counted = item.name in _COUNTS or item.name.endswith(("_ns", "_bytes", "_bytes_per_s", "shape"))
        if str(item.type) not in ("str", "bool", "OpClass", "Status"):
            is_signed = item.name in _SIGNED or (kind.__name__, item.name) in _SIGNED_THERE
            found.append((item.name, is_counted and not is_signed))
    return tuple(found)


def _figure(value: int, is_counted: bool, place: str) -> None:
    if is_counted and value < 0:
        raise Unsound(f"{place}: {value} is negative")
    if abs(value) >= _LARGEST:
        raise Unsound(f"{place}: it does not fit 64 bits")


def _step(step: StepProfile | None, place: str) -> None:
    if step is None:
        return
    for label, timing in (("wall", step.wall), ("rested", step.rested), ("device", step.device)):
        _timing(timing, f"{place}.{label}")
    line = step.timeline
    if line is None:
        return
    count = len(line.kernel)
    calls = len(line.call_start_ns)
    if {len(line.start_ns), len(line.duration_ns)} != {count} or calls not in (0, count) or len(line.call_ns) != calls:
        raise Unsound(f"{place}.timeline: its lists differ in length")
    if step.kernels or not place.startswith("baselines"):  # a baseline keeps no table of them
        _within(line.kernel, len(step.kernels), f"{place}.timeline.kernel")


def _timing(timing: Timing | None, place: str) -> None:
    if timing is not None and not timing.ci_low_ns <= timing.median_ns <= timing.ci_high_ns:
        raise Unsound(f"{place}: its median lies outside its interval")


def _shapes(shapes: ShapeRanges) -> None:
    _ranges(shapes.asked, "shapes.asked")
    names = [one.name for one in shapes.asked]
    if not names or not math.isfinite(shapes.seconds):
        raise Unsound("shapes: no dim varies, or the time that it took is no number")
    _timing(shapes.exact, "shapes.exact")
    _timing(shapes.general, "shapes.general")
    for number, piece in enumerate(shapes.pieces):
        place = f"shapes.pieces[{number}]"
        _ranges(piece.ranges, f"{place}.ranges")
        own = [one.name for one in piece.ranges]
        if not own or (not piece.call and own != names):  # a step of generate has dims of its own
            raise Unsound(f"{place}.ranges: its dims are not those asked for")
        for at, point in enumerate(piece.points):
            if [name for name, _ in point.sizes] != own or min(size for _, size in point.sizes) < 1:
                raise Unsound(f"{place}.points[{at}].sizes: they are not one size for each dim")
            _timing(point.eager, f"{place}.points[{at}].eager")
            _timing(point.ours, f"{place}.points[{at}].ours")


def _ranges(ranges: tuple[SizeRange, ...], place: str) -> None:
    for one in ranges:
        if not 1 <= one.least <= one.most:
            raise Unsound(f"{place}: {one.name[:40]} goes from {one.least} to {one.most}")


def _chain(chain: Chain, place: str) -> None:
    if not chain.sites:
        raise Unsound(f"{place}.sites: it occurs nowhere")
    if not math.isfinite(chain.share):
        raise Unsound(f"{place}.share: {chain.share} is no share")
    for number, site in enumerate(chain.sites):
        if min(site.op_indices, default=0) < 0:
            raise Unsound(f"{place}.sites[{number}].op_indices: {min(site.op_indices)} is negative")


def _op(op: OpNode, place: str) -> None:
    for key, arguments in (("args", op.args), ("kwargs", op.kwargs)):
        _within(_refs(arguments), op.index, f"{place}.{key}")
    for number, meta in enumerate(op.outputs):
        if len(meta.shape) != len(meta.stride):
            raise Unsound(f"{place}.outputs[{number}]: it has {len(meta.shape)} sizes and {len(meta.stride)} strides")
        if math.prod(size or 1 for size in meta.shape) >= _LARGEST or meta.offset < 0:
            raise Unsound(f"{place}.outputs[{number}]: no memory has that many elements")


def _refs(value: Arg) -> Iterable[int]:
    if isinstance(value, Ref):
        yield value.index
    elif isinstance(value, tuple):
        for item in value:
            yield from _refs(item)


def _within(indices: Iterable[int], count: int, place: str) -> None:
    for index in indices:
        if not 0 <= index < count:
            raise Unsound(f"{place}: {index} is none of {count}")


def _names(names: Iterable[str], place: str) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise Unsound(f"{place}: `{name[:40]}` cannot be a name in source code")
