"""Inputs that random numbers never are: rows of NaN, infinities, zeros, huge and tiny numbers, other masks, other indices.

Many classes lie in one set of inputs, each in rows of its own, so that large tensors need few further runs. All numbers are made
on the device that reads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from fusion_advisor.verify.pieces import MOST
from fusion_advisor.verify.row_tables import is_worth_while
from fusion_advisor.verify.subgraph_oracle import extent

CLASSES = (
    "zeros", "negative zeros", "one NaN", "all NaN", "one +Inf", "one -Inf", "all +Inf", "all -Inf", "largest finite numbers",
    "smallest normal numbers", "subnormal numbers", "a constant", "the first column alone", "the last column alone",
    "alternating signs", "numbers near the square root of the largest",
)  # fmt: skip
ROW_CLASSES = (
    "one NaN", "zeros", "alternating signs", "one -Inf", "all NaN", "a constant", "the last column alone", "one +Inf",
    "smallest normal numbers", "negative zeros", "the first column alone", "large numbers",
)  # fmt: skip
"""For activations that are multiplied by weights: no numbers so large that the order of a sum decides whether it overflows."""
_OVERFLOWING = ("largest numbers of any sign", "two of the largest numbers")
_MOST_RUNS = 4


def special_inputs(
    roots: Sequence[torch.Tensor],
    seed: int,
    *,
    is_in_place: bool,
    has_sums: bool = False,
    read: Mapping[int, torch.Tensor] | None = None,
    most: int = MOST,
    has_rows: bool = True,
) -> list[tuple[str, list[torch.Tensor]]]:
    """Return sets of inputs laid out like a site's own: (what they hold, one tensor for each root).

    Args:
        roots: the site's tensors.
        seed: of the ordinary numbers around special ones.
        is_in_place: indices stay as they are. Where the chain writes at them, two writes to one place have no order; where it
            computes with them, others may lie outside of a table.
        has_sums: the ops add numbers up: the largest numbers are then so small that no order of the terms overflows. For those
            that are not: :func:`overflowing_sums`.
        read: the rows that are read of roots that are tables, by the root's number: these alone hold special numbers.
        most: elements that are made at once in fp32.
        has_rows: whether rows of special numbers are among them; all else depends on the sizes or takes little.
    """
    found = []
    read = read or {}
    widest, rows = _widest(roots), _special_rows(roots, read)
    if widest and has_rows:
        runs = min(_MOST_RUNS, math.ceil(len(CLASSES) / max(rows, 1)))
        step = math.ceil(len(CLASSES) / runs)
        for run in range(runs):
            made = [
                _rows_of_classes(
                    root,
                    seed + run,
                    run * step,
                    is_main=root.numel() == widest,
                    has_sums=has_sums,
                    read=read.get(number),
                    most=most,
                )
                for number, root in enumerate(roots)
            ]
            found.append((f"special rows {run + 1}" if runs > 1 else "special rows", made))
    if widest:
        ends = [_nan_at_end(root, read.get(number)) for number, root in enumerate(roots)]
        found.append(("NaN at the end of each operand", ends))
    kinds = {root.dtype for root in roots if not root.is_floating_point() and root.numel() > 1}
    found += _masks(roots, seed)
    if kinds - {torch.bool} and not is_in_place:
        for title in ("smallest", "largest", "reversed"):
            found.append((f"{title} indices", [_indices(root, title) for root in roots]))
    return found


def holds_all_classes(roots: Sequence[torch.Tensor], read: Mapping[int, torch.Tensor] | None = None) -> bool:
    """Whether the special rows of :func:`special_inputs` are of all classes: a few rows hold only some of them.

    Args:
        roots: the site's tensors.
        read: as there.
    """
    return _special_rows(roots, read or {}) * _MOST_RUNS >= len(CLASSES)


def _widest(roots: Sequence[torch.Tensor]) -> int:
    return max((root.numel() for root in roots if root.is_floating_point()), default=0)


def _special_rows(roots: Sequence[torch.Tensor], read: Mapping[int, torch.Tensor]) -> int:
    """Return how many rows of one set may be special."""
    widest = _widest(roots)
    return max(
        (
            _rows(root) if read.get(number) is None else len(read[number])
            for number, root in enumerate(roots)
            if root.is_floating_point() and root.numel() == widest
        ),
        default=0,
    )


def _masks(roots: Sequence[torch.Tensor], seed: int) -> list[tuple[str, list[torch.Tensor]]]:
    """Sets with other masks; a mask of one element is true or false."""
    most = max((root.numel() for root in roots if root.dtype == torch.bool), default=0)
    titles = ("all true", "all false", "another mask", "one row all false")[: {0: 0, 1: 2}.get(most, 4)]
    return [
        (f"mask {title}", [_mask(root, title, seed) if root.dtype == torch.bool else root for root in roots]) for title in titles
    ]


def overflowing_sums(
    roots: Sequence[torch.Tensor], seed: int, *, read: Mapping[int, torch.Tensor] | None = None
) -> list[tuple[str, list[torch.Tensor]]]:
    """Return a set of inputs whose row sums overflow in some orders of their terms, or none where no root is floating point.

    Args:
        roots: the site's tensors.
        seed: of the signs.
        read: as for :func:`special_inputs`.
    """
    widest = max((root.numel() for root in roots if root.is_floating_point()), default=0)
    made = [
        _rows_of_classes(root, seed, 0, is_main=root.numel() == widest, classes=_OVERFLOWING, read=(read or {}).get(number))
        for number, root in enumerate(roots)
    ]
    return [("rows whose sums overflow", made)] if widest else []


def special_rows(
    roots: Sequence[torch.Tensor], seed: int, *, rows: Collection[int], most_runs: int = _MOST_RUNS
) -> list[tuple[str, list[torch.Tensor]]]:
    """Return sets of inputs of which some hold special rows, and the others what the site has: weights are as they are.

    Args:
        roots: the site's tensors.
        seed: of the ordinary numbers.
        rows: numbers of the roots that get special rows. With ``most_runs`` × rows fewer than :data:`ROW_CLASSES`, the classes
            are spread over what there is.
        most_runs: sets at most.
    """
    count = max((_rows(roots[number]) for number in rows if roots[number].is_floating_point()), default=0)
    if not count:
        return []
    runs = min(most_runs, math.ceil(len(ROW_CLASSES) / count))
    step = math.ceil(len(ROW_CLASSES) / runs)
    found = []
    for run in range(runs):
        made = [
            _rows_of_classes(root, seed + run, run * step, is_main=number in rows, classes=ROW_CLASSES)
            for number, root in enumerate(roots)
        ]
        found.append((f"special rows {run + 1}" if runs > 1 else "special rows", made))
    return found


def perturbing(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes fp64 copies of tensors, each number off by up to four roundings of fp32, in which kernels compute.

    Args:
        seed: of the first tensor; each further one has a seed of its own.
    """
    seeds = itertools.count(seed)

    def perturbed(tensor: torch.Tensor) -> torch.Tensor:
        number = next(seeds)
        if not tensor.is_floating_point():
            return tensor
        memory = tensor.as_strided((extent(tensor),), (1,)).to(torch.float64, copy=True)
        return memory.mul_(_near_one(len(memory), number, tensor.device)).as_strided(tensor.shape, tensor.stride())

    return perturbed


def moved(roots: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return inputs of which each number is off by up to two units of its own dtype; integers and masks stay.

    Args:
        roots: one tensor for each root.
        seed: of the first tensor; each further one has a seed of its own.
    """
    found = []
    for number, root in enumerate(roots):
        if not root.is_floating_point():
            found.append(root)
            continue
        generator = torch.Generator(device=root.device).manual_seed(seed * 1009 + number)
        memory = root.as_strided((extent(root),), (1,))
        units = torch.randint(-2, 3, memory.shape, generator=generator, device=root.device).to(root.dtype)
        others = memory + memory * units * torch.finfo(root.dtype).eps
        # The largest numbers stand for infinity in masks, and infinity times zero is no number.
        is_usual = memory.abs() < torch.finfo(root.dtype).max / 2
        found.append(torch.where(is_usual, others, memory).as_strided(root.shape, root.stride()))
    return found


def _near_one(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Factors up to four roundings of fp32 from 1, made where they are used: an embedding has half a billion numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)
    noise = torch.rand(count, generator=generator, device=device, dtype=torch.float32).sub_(0.5)
    return noise.mul_(8 * torch.finfo(torch.float32).eps).to(torch.float64).add_(1.0)


def _rows(root: torch.Tensor) -> int:
    return root.numel() // max(root.shape[-1], 1) if root.dim() else 1


def _copy(root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy with the same strides, and a view of its memory in which no two elements share a place."""
    memory = root.as_strided((extent(root),), (1,)).clone()
    made = memory.as_strided(root.shape, root.stride())
    distinct = made
    for dim, step in enumerate(root.stride()):
        if step == 0 and root.shape[dim] > 1:
            distinct = distinct.narrow(dim, 0, 1)
    return made, distinct


def _rows_of_classes(
    root: torch.Tensor,
    seed: int,
    first: int,
    *,
    is_main: bool,
    classes: Sequence[str] = CLASSES,
    has_sums: bool = False,
    read: torch.Tensor | None = None,
    most: int = MOST,
) -> torch.Tensor:
    """Fill row after row with one class after the other; operands of other sizes (weights, biases) stay as they are."""
    if not root.is_floating_point() or not is_main or not root.numel():
        return root
    if read is not None and is_worth_while(read, root):
        table = root.clone()
        table[read] = _rows_of_classes(root[read], seed, first, is_main=True, classes=classes, has_sums=has_sums)
        return table
    made, distinct = _copy(root)
    generator = torch.Generator(device=root.device).manual_seed(seed)
    columns = distinct.shape[-1] if distinct.dim() else 1
    dtype = torch.float64 if root.dtype == torch.float64 else torch.float32
    shape = (distinct.numel() // max(columns, 1), columns)
    terms = 4 * root.numel() if has_sums else 1
    # In parts that begin with the first class: ordinary numbers of a large root would take four times its bytes.
    step = max(1, most // max(columns, 1) // len(classes)) * len(classes) if distinct.is_contiguous() else shape[0]
    for start in range(0, shape[0], step):
        rows = torch.randn((min(step, shape[0] - start), columns), generator=generator, device=root.device, dtype=dtype)
        for number in range(min(len(classes), len(rows))):
            kind, at = classes[(number + first) % len(classes)], slice(number, None, len(classes))
            rows[at] = _of_class(kind, rows[at], torch.finfo(root.dtype), seed, terms=terms)
        if step >= shape[0]:
            distinct.copy_(rows.reshape(distinct.shape))
        else:
            distinct.view(shape)[start : start + step] = rows
    return made


def _of_class(kind: str, rows: torch.Tensor, info: torch.finfo, seed: int, *, terms: int) -> torch.Tensor:
    places = torch.arange(rows.shape[-1], device=rows.device)
    one, first, last = (places == place for place in (seed % max(len(places), 1), 0, len(places) - 1))
    signs = (1 - 2 * (places % 2)).to(rows.dtype)
    filled: dict[str, Callable[[], torch.Tensor]] = {
        "zeros": lambda: torch.zeros_like(rows),
        "negative zeros": lambda: -torch.zeros_like(rows),
        "one NaN": lambda: rows.masked_fill(one, math.nan),
        "all NaN": lambda: torch.full_like(rows, math.nan),
        "one +Inf": lambda: rows.masked_fill(one, math.inf),
        "one -Inf": lambda: rows.masked_fill(one, -math.inf),
        "all +Inf": lambda: torch.full_like(rows, math.inf),
        "all -Inf": lambda: torch.full_like(rows, -math.inf),
        "largest finite numbers": lambda: rows.sign() * (info.max / terms),
        "smallest normal numbers": lambda: rows.sign() * info.smallest_normal,
        "subnormal numbers": lambda: rows * info.smallest_normal / 8,
        "a constant": lambda: torch.full_like(rows, 0.7265625),
        "the first column alone": lambda: rows.masked_fill(~first, 0.0),
        "the last column alone": lambda: rows.masked_fill(~last, 0.0),
        "alternating signs": lambda: rows.abs() * signs,
        "largest numbers of any sign": lambda: rows.sign() * (info.max * 0.9),
        "two of the largest numbers": lambda: rows.masked_fill(first | last, info.max * 0.9),
        "large numbers": lambda: rows * 1024.0,
        "numbers near the square root of the largest": lambda: rows * math.sqrt(info.max),
    }
    return filled[kind]()


def _nan_at_end(root: torch.Tensor, read: torch.Tensor | None) -> torch.Tensor:
    if not root.is_floating_point() or not root.numel():
        return root
    made, distinct = _copy(root)
    end = (-1,) * distinct.dim() if read is None or not len(read) else (int(read[-1]), -1)
    distinct[end] = math.nan
    return made


def _mask(root: torch.Tensor, title: str, seed: int) -> torch.Tensor:
    made, distinct = _copy(root)
    if title in ("all true", "all false"):
        distinct.fill_(title == "all true")
    elif title == "another mask":
        generator = torch.Generator().manual_seed(seed)
        distinct.copy_(torch.randint(0, 2, distinct.shape, generator=generator).bool().to(root.device))
    else:
        distinct.fill_(True)
        distinct[(slice(0, 1),) * max(distinct.dim() - 1, min(distinct.dim(), 1))].fill_(False)
    return made


def _indices(root: torch.Tensor, title: str) -> torch.Tensor:
    """Other indices, all of them among those that the site has: what is looked up by each alone is not out of range."""
    if root.is_floating_point() or root.dtype == torch.bool or not root.numel():
        return root
    made, distinct = _copy(root)
    if title == "reversed":
        distinct.copy_(distinct.flatten().flip(0).reshape(distinct.shape).clone())
    else:
        distinct.fill_(distinct.min() if title == "smallest" else distinct.max())
    return made
