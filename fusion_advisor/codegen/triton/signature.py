"""The integers of a Triton kernel: those that it is compiled for, those that it is given, and those that vary between sizes.

Triton compiles once for each value of a ``tl.constexpr``. It compiles once more for an integer that is 1, for a multiple of 16,
and for any other. A kernel for many sizes avoids both: nothing is assumed of an integer that varies. Vectors need two exceptions.
An integer that is a multiple of 16 at all sizes is left to Triton, which then compiles for it once. For the others a constant,
ALIGNED, says whether all that places columns in memory is a multiple of 16.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence

from fusion_advisor.codegen.common.arguments import Schedule
from fusion_advisor.codegen.common.column_passes import parts_of
from fusion_advisor.codegen.common.horizontal_fusion import MULTIPLE, Call
from fusion_advisor.codegen.common.interface import OpenArguments
from fusion_advisor.codegen.triton.tiling import groups_columns
from fusion_advisor.ir.program import divides_index

WIDTH = 110


def open_names(call: Call, names: Collection[str]) -> frozenset[str]:
    """Return a nest's own names of the integers that vary.

    Args:
        call: the nest.
        names: in the kernel's signature.
    """
    own = zip(call.plan.arguments, call.arguments, strict=True)
    return frozenset(name for (name, _), (given, _) in own if given in names)


def aligned_names(calls: Sequence[Call], arguments: OpenArguments) -> tuple[str, ...]:
    """Return the integers that vary and place columns in memory: strides, offsets, and the number of columns.

    Args:
        calls: all nests.
        arguments: those that vary.
    """
    found: list[str] = []
    for call in calls:
        others = {*call.plan.sizes[:-1], "rows", *call.plan.extents.values()}
        own = zip(call.plan.arguments, call.arguments, strict=True)
        found += [given for (name, _), (given, _) in own if given in arguments.unspecialized and name not in others]
    return tuple(found)


def fixed_arguments(calls: Sequence[Call], names: Collection[str] = ()) -> dict[str, frozenset[int]]:
    """Integers that a kernel is compiled for: in tiles all but the outermost size, which is that of the batch or of its tokens.

    A tile number is split by divisions, and its masks and addresses are most of what it does before its first load. Known sizes
    turn rope of one token from 1.19 into 1.09 µs and of 2,048 tokens from 10.42 into 9.90 µs (32 heads of 128, bfloat16, H200;
    torch.compile, which fixes them too, 1.19 and 9.91 µs). Rows that are reduced and flat runs gain 2 % or nothing, but for what
    their columns are divided by.

    Args:
        calls: all nests; those of one function are given one choice.
        names: of integers that vary.

    Returns:
        positions among a nest's own integers, by function: nests that share one have other names.
    """
    found: dict[str, frozenset[int]] = {}
    for call in calls:
        fixed = found.setdefault(call.function, _fixed(call.plan))
        found[call.function] = fixed - {place for place, (name, _) in enumerate(call.arguments) if name in names}
    return found


def _fixed(plan: Schedule) -> frozenset[int]:
    if plan.kind != "tiled":
        values = plan.program.values
        divisors = {plan.extents.get(value.args[1]) for value in values if divides_index(values, value)}
        return frozenset(place for place, (name, _) in enumerate(plan.arguments) if name in divisors)
    return frozenset(place for place, (name, _) in enumerate(plan.arguments) if name != plan.sizes[0])


def names_at(places: Collection[int], arguments: Sequence[tuple[str, int]]) -> frozenset[str]:
    """Return the names of some of a nest's integers."""
    return frozenset(arguments[place][0] for place in places)


def fixed_of_all(calls: Sequence[Call], fixed: Mapping[str, Collection[int]]) -> frozenset[str]:
    """Return the kernel's own names of what its functions are compiled for.

    Args:
        calls: all nests.
        fixed: of :func:`fixed_arguments`.
    """
    return frozenset[str]().union(*(names_at(fixed[call.function], call.arguments) for call in calls))


def constants_of(calls: Sequence[Call], *, is_looped: bool, arguments: OpenArguments) -> list[str]:
    """Return the names of the constants of :func:`~fusion_advisor.codegen.triton.launch.launch_of`, in their order."""
    plans = [call.plan for call in calls]
    blocks = ["BLOCK_COLS"] if plans[0].kind == "flat" else ["BLOCK_ROWS", "BLOCK_COLS"]
    blocks += ["FULL"] if plans[0].kind == "rows" else []
    blocks += ["VECTORS"] if is_looped and any(map(groups_columns, plans)) else []
    blocks += ["WHOLE"] if is_looped and any(parts_of(plan) for plan in plans) else []
    blocks += ["BY_FOUR"] if any(plan.numbers for plan in plans) else []
    return ["INDEX", *blocks, *(["ALIGNED"] if aligned_names(calls, arguments) else [])]


_MEANINGS = {
    "INDEX": "INDEX: dtype of indices, tl.int64 where one may pass 32 bits",
    "FULL": "FULL: BLOCK_COLS divides cols",
    "VECTORS": "VECTORS: rows start at multiples of 16 elements",
    "WHOLE": "WHOLE: no tile lies in two parts of its row",
    "BY_FOUR": "BY_FOUR: rows start at multiples of four random numbers",
}


def constants_note(constants: Sequence[str]) -> tuple[str, ...]:
    """Return the head comment's line about the constants whose names do not say what they are."""
    return ("; ".join(_MEANINGS[name] for name in constants if name in _MEANINGS) + ".",)


def signature(
    pointers: Sequence[str], integers: Iterable[tuple[str, int]], constants: Sequence[str], fixed: Collection[str]
) -> list[str]:
    """Return the lines of a function's parameters, without their last commas."""
    lines = textwrap.wrap(", ".join(pointers), WIDTH)
    named = ", ".join(name + ":~tl.constexpr" * (name in fixed) for name, _ in integers)
    lines += [line.replace("~", " ") for line in textwrap.wrap(named, WIDTH)]
    known = textwrap.wrap(", ".join(f"{name}:~tl.constexpr" for name in constants if name != "ALIGNED"), WIDTH + 15)
    lines += [line.replace("~", " ") for line in known]
    lines += ["ALIGNED: tl.constexpr"] * ("ALIGNED" in constants)
    return [line.removesuffix(",") for line in lines]


def decorator(arguments: OpenArguments) -> list[str]:
    """Return the lines above the kernel's ``def``."""
    if not arguments.unspecialized:
        return ["@triton.jit"]
    names = ", ".join(f'"{name}"' for name in arguments.unspecialized)
    reason = ["# One machine code for all values of these."]
    if arguments.multiples:
        others = f"The other sizes and strides that vary are multiples of {MULTIPLE} at all sizes, which Triton may assume."
        reason = [f"# {line}" for line in textwrap.wrap(f"One machine code for all values of these. {others}", WIDTH)]
    if len(names) < WIDTH - 40:
        return [*reason, f"@triton.jit(do_not_specialize=[{names}])"]
    lines = [f"        {line.removesuffix(',')}," for line in textwrap.wrap(names, WIDTH)]
    return [*reason, "@triton.jit(", "    do_not_specialize=[", *lines, "    ]", ")"]
