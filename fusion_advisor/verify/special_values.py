"""What random numbers never show: NaN, infinities, zeros, huge and tiny numbers, constant rows, other masks, other indices.

Many cases lie in one set of inputs, each in rows of its own, so that large tensors need few further runs. The fused result is
compared with eager's own on the same inputs: NaN where eager has NaN, an infinity of the same sign, the same error limit row by
row. Where eager overflows in its own dtype and fp64 does not, a kernel may have fp64's number: that is a declared exception, as
are subnormal numbers that one of the two flushes to zero, and the sign of a zero behind a sum. All are counted and reported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from fusion_advisor.records import Tolerance
from fusion_advisor.verify.accuracy import limit_for, unit_of
from fusion_advisor.verify.guarded_memory import guard_is_damaged
from fusion_advisor.verify.subgraph_oracle import OriginalChain, extent

CLASSES = (
    "zeros", "negative zeros", "one NaN", "all NaN", "one +Inf", "one -Inf", "all +Inf", "all -Inf", "largest finite numbers",
    "smallest normal numbers", "subnormal numbers", "a constant", "the first column alone", "the last column alone",
    "alternating signs", "numbers near the square root of the largest",
)  # fmt: skip
WORDS = (
    "rows of zeros, ±0, NaN, ±Inf, largest, tiny and subnormal numbers, constants, single columns and signs; other masks and "
    "indices; every call twice, into guarded memory"
)
BEHAVIOUR = "every call twice, into guarded memory; no special values with --fast-math, which assumes that there are none"
ROW_CLASSES = (
    "one NaN", "zeros", "alternating signs", "one -Inf", "all NaN", "a constant", "the last column alone", "one +Inf",
    "smallest normal numbers", "negative zeros", "the first column alone", "large numbers",
)  # fmt: skip
"""For activations that are multiplied by weights: no numbers so large that the order of a sum decides whether it overflows."""
ROWS = "rows of activations with NaN, ±Inf, zeros, constants, single columns, large and tiny numbers"
_MOST_RUNS = 4
_UNITS = 8
"""Times the limit's units, of the largest number in a row: a row of one number and zeros, layer-normed, was 12 units off in fp32
where 40 squares are summed one after the other. How near a kernel is to the truth is judged on ordinary numbers."""
_NEAR_LARGEST = 0.99
"""From this share of the largest number on, rounding decides whether a result is infinite."""

OVERFLOW = "elements are fp64's, where the original overflows"
ON_THE_WAY = "elements are neither fp64's nor the original's, where both overflow in a reduction on the way"
SUBNORMAL = "subnormal elements differ from the original's: one of the two flushes them to zero"
ZERO = "zeros have the other sign than the original's"


@dataclass(slots=True)
class Findings:
    """What comparisons on special values have found.

    Attributes:
        faults: sentences; any refuses the kernel.
        declared: elements by kind of declared exception.
    """

    faults: list[str] = field(default_factory=list)
    declared: Counter[str] = field(default_factory=Counter)

    def sentences(self) -> tuple[str, ...]:
        """Return the declared exceptions in words."""
        return tuple(f"{count:,} {words}" for words, count in self.declared.items())


def special_inputs(
    roots: Sequence[torch.Tensor], seed: int, *, is_in_place: bool, has_sums: bool = False
) -> list[tuple[str, list[torch.Tensor]]]:
    """Return sets of inputs laid out like a site's own: (what they hold, one tensor for each root).

    Args:
        roots: the site's tensors.
        seed: of the ordinary numbers around special ones.
        is_in_place: the chain writes into a root at indices that it is given: those stay, as two writes to one place have no
            order.
        has_sums: the ops add numbers up: the largest numbers are then so small that no order of the terms overflows. Where
            only some orders do, the kernel and the original both are right.
    """
    found = []
    widest = max((root.numel() for root in roots if root.is_floating_point()), default=0)
    rows = max((_rows(root) for root in roots if root.is_floating_point() and root.numel() == widest), default=0)
    if widest:
        runs = min(_MOST_RUNS, math.ceil(len(CLASSES) / max(rows, 1)))
        step = math.ceil(len(CLASSES) / runs)
        for run in range(runs):
            made = [
                _rows_of_classes(root, seed + run, run * step, is_main=root.numel() == widest, has_sums=has_sums)
                for root in roots
            ]
            found.append((f"special rows {run + 1}" if runs > 1 else "special rows", made))
        found.append(("NaN at the end of each operand", [_nan_at_end(root) for root in roots]))
    kinds = {root.dtype for root in roots if not root.is_floating_point() and root.numel() > 1}
    if torch.bool in kinds:
        for title in ("all true", "all false", "another mask", "one row all false"):
            made = [_mask(root, title, seed) if root.dtype == torch.bool else root for root in roots]
            found.append((f"mask {title}", made))
    if kinds - {torch.bool} and not is_in_place:
        for title in ("smallest", "largest", "reversed"):
            found.append((f"{title} indices", [_indices(root, title) for root in roots]))
    return found


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


def compare(
    title: str,
    result: torch.Tensor,
    eager: torch.Tensor,
    oracle: torch.Tensor,
    findings: Findings,
    *,
    nearby: torch.Tensor | None = None,
    tolerance: Tolerance | None = None,
    has_sums: bool = False,
) -> None:
    """Compare one result on special values, row by row; what is found is added to ``findings``.

    Args:
        title: what the inputs hold.
        result: of the kernel.
        eager: of the original ops.
        oracle: of the original ops in fp64.
        findings: gets what is found.
        nearby: the oracle of :func:`perturbed` inputs. A layer norm of a constant row divides rounding errors by the square root
            of eps: two right kernels differ there by as much as two such oracles.
        tolerance: the user's limit instead of eager's own error.
        has_sums: the ops add numbers up. A sum that is zero has the sign that the order of its terms gives it: there another sign
            is a declared exception, elsewhere a fault.
    """
    if not eager.is_floating_point():
        wrong = int((result != eager).sum())
        if wrong:
            findings.faults.append(f"{title}: {wrong:,} of {eager.numel():,} elements differ from the original's")
        return
    info = torch.finfo(eager.dtype)
    ours, theirs, truth = (one.detach().to(torch.float64) for one in (result, eager, oracle))
    rounded = truth.to(eager.dtype).to(torch.float64)
    allowed = _allowed(ours, theirs, truth, nearby, eager.dtype, tolerance)
    near = (ours - truth).abs() <= allowed
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    as_oracle = (ours == rounded) | (ours.isnan() & rounded.isnan()) | (ours.isfinite() & rounded.isfinite() & near)
    at_limit = (truth.abs() >= _NEAR_LARGEST * info.max) & truth.isfinite() & (ours.sign() == truth.sign()) & ~ours.isnan()
    at_limit &= ours.isinf() | (ours.abs() >= 0.9 * info.max)
    tiny = (ours.abs() <= info.smallest_normal) & (theirs.abs() <= info.smallest_normal)
    both = ours.isfinite() & theirs.isfinite()
    passes = same | (both & near) | at_limit | tiny | (~theirs.isfinite() & as_oracle)
    overflows = ~theirs.isfinite() & ~same & as_oracle
    if overflows.any():
        findings.declared[OVERFLOW] += int(overflows.sum())
    # Squares near the largest number: whether a norm of them is 0 or NaN depends on the order of its sums, in eager too.
    lost = ~theirs.isfinite() & rounded.isfinite() & ~passes
    if has_sums and lost.any():
        findings.declared[ON_THE_WAY] += int(lost.sum())
        passes |= lost
    flushed = tiny & ~same & ~near
    if flushed.any():
        findings.declared[SUBNORMAL] += int(flushed.sum())
    signs = (ours == 0) & (theirs == 0) & (ours.signbit() != theirs.signbit())
    if signs.any() and has_sums:
        findings.declared[ZERO] += int(signs.sum())
    elif signs.any():
        findings.faults.append(f"{title}: {int(signs.sum()):,} of {ours.numel():,} elements are zeros of the other sign")
    if not bool(passes.all()):
        place = int((~passes).flatten().nonzero()[0])
        got, want = float(ours.flatten()[place]), float(theirs.flatten()[place])
        wrong = int((~passes).sum())
        findings.faults.append(f"{title}: {wrong:,} of {ours.numel():,} elements are wrong, the first is {got:g} for {want:g}")


def perturbed(roots: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return fp64 copies of the inputs, each number off by up to four roundings of fp32, in which kernels compute."""
    found = []
    for number, root in enumerate(roots):
        if not root.is_floating_point():
            found.append(root)
            continue
        memory = root.as_strided((extent(root),), (1,)).to(torch.float64, copy=True)
        found.append(memory.mul_(_near_one(len(memory), seed + number, root.device)).as_strided(root.shape, root.stride()))
    return found


def _near_one(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Factors up to four roundings of fp32 from 1, made where they are used: an embedding has half a billion numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)
    noise = torch.rand(count, generator=generator, device=device, dtype=torch.float32).sub_(0.5)
    return noise.mul_(8 * torch.finfo(torch.float32).eps).to(torch.float64).add_(1.0)


def bias_of(result: torch.Tensor, oracle: torch.Tensor) -> tuple[float, int]:
    """Return the mean error away from zero in units in the last place, and of how many elements.

    A result that is cut off instead of rounded is 0.5 units too small on average, whatever its sign.
    """
    info = torch.finfo(result.dtype)
    got, want = result.detach().to(torch.float64).flatten(), oracle.detach().to(torch.float64).flatten()
    use = got.isfinite() & (want.abs() > info.smallest_normal) & (want.abs() < _NEAR_LARGEST * info.max)
    got, want = got[use], want[use]
    if not len(want):
        return 0.0, 0
    _, exponent = torch.frexp(want)
    unit = torch.ldexp(torch.full_like(want, info.eps), exponent - 1)
    return float(((got - want) * want.sign() / unit).clamp(-8, 8).mean()), len(want)


BIAS_UNITS = 0.25
"""Half way between rounding (0) and cutting off (0.5). The error of one rounding lies within one unit, so by Hoeffding's
inequality the mean of n independent ones is further off than t with a probability of at most 2 exp(-2 n t²): 2.5e-14 for 256
elements, fewer of which are not judged, and nothing for 10⁵."""
LEAST_ELEMENTS = 256


def is_biased(result: torch.Tensor, eager: torch.Tensor, oracle: torch.Tensor) -> float | None:
    """Return the bias in units in the last place where it is more than eager's own and rounding explain; None otherwise.

    Only results of 16 bits are judged: they are rounded once from fp32, whose own errors are 1/256 of a unit at most.

    In fp32 no bound tells a result that was cut off (it leans by 0.45 to 0.5 units) from a right one of another order. A constant
    is rounded once and pulls all products to the same side: ``x * (1 / 3)`` for ``x / 3`` leans by 0.33 units, ``x * 1.1`` by
    0.27, and two such factors by more than 0.5. So fp32 results are judged by the size of their errors alone: one bit that is
    cut off passes, three are refused.
    """
    if result.dtype not in (torch.float16, torch.bfloat16):
        return None
    ours, count = bias_of(result, oracle)
    if count < LEAST_ELEMENTS or abs(ours) <= BIAS_UNITS:
        return None
    theirs, _ = bias_of(eager, oracle)
    return ours if abs(ours) > BIAS_UNITS + abs(theirs) else None


def check_behaviour(
    chain: OriginalChain,
    fused: Callable[..., object],
    roots: Sequence[torch.Tensor],
    reach: Sequence[torch.Tensor | None],
    findings: Findings,
) -> None:
    """Call a kernel twice on the same inputs: the same bits must come out, the inputs stay, and nothing else is written."""
    given = chain.apart(roots, reach)
    before = [tensor.clone() for tensor in given]
    first = _listed(fused(*given))
    read = [number for number in range(len(given)) if number not in chain.written]
    if not all(_is_same(given[number], before[number]) for number in read):
        findings.faults.append("an input was written to")
    for number, output in enumerate(first):
        if number not in chain.in_place and guard_is_damaged(output):
            findings.faults.append("memory outside of an output was written to")
    first = [output.clone() for output in first]
    second = _listed(fused(*chain.apart(roots, reach)))
    if not all(map(_is_same, first, second)):
        findings.faults.append("two calls on the same inputs differ: a race, or memory that was read before it was written")


def _listed(answer: object) -> list[torch.Tensor]:
    found = list(answer) if isinstance(answer, list | tuple) else [answer]
    return [one for one in found if isinstance(one, torch.Tensor)]


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = _BITS.get(one.element_size())
    if bits is not None and torch.equal(one.view(bits), other.view(bits)):  # a tenth of the time of what follows
        return True
    both_nan = one.isnan() & other.isnan()
    return bool((((one == other) & (one.signbit() == other.signbit())) | both_nan).all())


def _allowed(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    truth: torch.Tensor,
    nearby: torch.Tensor | None,
    dtype: torch.dtype,
    tolerance: Tolerance | None,
) -> torch.Tensor:
    """The largest error allowed, for each element that of its row."""
    if tolerance is not None:
        return tolerance.atol + tolerance.rtol * truth.abs()
    limit = limit_for(dtype)
    finite = theirs.isfinite() & truth.isfinite()
    own = torch.where(finite, (theirs - truth).abs(), 0.0)
    if nearby is not None:
        moved = torch.where(truth.isfinite() & nearby.isfinite(), (nearby.to(torch.float64) - truth).abs(), 0.0)
        own = torch.maximum(own, moved)
    size = torch.where(truth.isfinite(), truth.abs(), 0.0)
    if truth.dim() and truth.shape[-1]:
        own, size = own.amax(-1, keepdim=True), size.amax(-1, keepdim=True)
    least = torch.finfo(dtype).smallest_normal
    return torch.maximum(2 * limit.factor * own, _UNITS * limit.units * unit_of(dtype) * size).clamp_min(least).expand_as(ours)


def _rows(root: torch.Tensor) -> int:
    return root.numel() // max(root.shape[-1], 1) if root.dim() else 1


def _copy(root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy with the same strides, and a view of its memory in which no two elements share a place."""
    memory = root.as_strided((extent(root),), (1,)).clone()
    made = memory.as_strided(root.shape, root.stride())
    apart = made
    for dim, step in enumerate(root.stride()):
        if step == 0 and root.shape[dim] > 1:
            apart = apart.narrow(dim, 0, 1)
    return made, apart


def _rows_of_classes(
    root: torch.Tensor, seed: int, first: int, *, is_main: bool, classes: Sequence[str] = CLASSES, has_sums: bool = False
) -> torch.Tensor:
    """Fill row after row with one class after the other; operands of other sizes (weights, biases) stay as they are."""
    if not root.is_floating_point() or not is_main or not root.numel():
        return root
    made, apart = _copy(root)
    generator = torch.Generator(device=root.device).manual_seed(seed)
    columns = apart.shape[-1] if apart.dim() else 1
    dtype = torch.float64 if root.dtype == torch.float64 else torch.float32
    shape = (apart.numel() // max(columns, 1), columns)
    rows = torch.randn(shape, generator=generator, device=root.device, dtype=dtype)
    terms = 4 * root.numel() if has_sums else 1
    for number in range(min(len(classes), len(rows))):
        kind = classes[(number + first) % len(classes)]
        rows[number :: len(classes)] = _of_class(kind, rows[number :: len(classes)], torch.finfo(root.dtype), seed, terms=terms)
    apart.copy_(rows.reshape(apart.shape))
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
        "large numbers": lambda: rows * 1024.0,
        "numbers near the square root of the largest": lambda: rows * math.sqrt(info.max),
    }
    return filled[kind]()


def _nan_at_end(root: torch.Tensor) -> torch.Tensor:
    if not root.is_floating_point() or not root.numel():
        return root
    made, apart = _copy(root)
    apart[(-1,) * apart.dim()] = math.nan
    return made


def _mask(root: torch.Tensor, title: str, seed: int) -> torch.Tensor:
    made, apart = _copy(root)
    if title in ("all true", "all false"):
        apart.fill_(title == "all true")
    elif title == "another mask":
        generator = torch.Generator().manual_seed(seed)
        apart.copy_(torch.randint(0, 2, apart.shape, generator=generator).bool().to(root.device))
    else:
        apart.fill_(True)
        apart[(slice(0, 1),) * max(apart.dim() - 1, min(apart.dim(), 1))].fill_(False)
    return made


def _indices(root: torch.Tensor, title: str) -> torch.Tensor:
    """Other indices, all of them among those that the site has: nothing is read out of range."""
    if root.is_floating_point() or root.dtype == torch.bool or not root.numel():
        return root
    made, apart = _copy(root)
    if title == "reversed":
        apart.copy_(apart.flatten().flip(0).reshape(apart.shape).clone())
    else:
        apart.fill_(apart.min() if title == "smallest" else apart.max())
    return made
