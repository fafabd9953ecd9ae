"""Checks that random numbers cannot make: results on special inputs, a second call, and guarded memory.

The fused result is compared with eager's own on the same inputs: NaN where eager has NaN, an infinity of the same sign, the same
error limit row by row. Where eager overflows in its own dtype and fp64 does not, a kernel may have fp64's number: that is a
declared exception. So are subnormal numbers that one of the two flushes to zero, the sign of a zero that is a sum, and elements
that differ where sums of the largest numbers overflow in one order of their terms and not in another. All are counted and
reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from fusion_advisor.records import Tolerance
from fusion_advisor.verify.accuracy import limit_for, unit_of
from fusion_advisor.verify.guarded_memory import guard_is_damaged
from fusion_advisor.verify.pieces import pieces
from fusion_advisor.verify.subgraph_oracle import OriginalChain

WORDS = (
    "rows of zeros, ±0, NaN, ±Inf, largest, tiny and subnormal numbers, constants, single columns and signs; other masks and "
    "indices; every call twice, into guarded memory"
)
WORDS_BUT_ROWS = (
    "NaN at the end of each operand; other masks and indices; every call twice, into guarded memory; no rows of special numbers, "
    "which the same kernel has passed at other sizes"
)
BEHAVIOUR = "every call twice, into guarded memory; no special values with --fast-math, which assumes that there are none"
ROWS = "rows of activations with NaN, ±Inf, zeros, constants, single columns, large and tiny numbers"
_UNITS = 8
"""Times the limit's units, of the largest number in a row: a row of one number and zeros, layer-normed, was 12 units off in fp32
where 40 squares are summed one after the other. How near a kernel is to the truth is judged on ordinary numbers."""
_NEAR_LARGEST = 0.99
"""From this share of the largest number on, rounding decides whether a result is infinite."""

OVERFLOW = "elements are fp64's, where the original overflows"
ON_THE_WAY = "elements are neither fp64's nor the original's, where both overflow in a reduction on the way"
SUBNORMAL = "subnormal elements differ from the original's: one of the two flushes them to zero"
ORDER = "elements differ from the original's, where sums of the largest numbers overflow in one order and not in another"
NO_NUMBER = "elements are NaN for an infinity or the other way, where a row's mean is no number"
ZERO = "zeros have the other sign than the original's"


@dataclass(slots=True)
class Findings:
    """Findings of comparisons on special values.

    Attributes:
        faults: sentences; any refuses the kernel.
        declared: elements by kind of declared exception.
    """

    faults: list[str] = field(default_factory=list)
    declared: Counter[str] = field(default_factory=Counter)

    def declare(self, kind: str, elements: torch.Tensor) -> None:
        """Count the elements of a mask as declared exceptions of one kind."""
        if elements.any():
            self.declared[kind] += int(elements.sum())

    def sentences(self) -> tuple[str, ...]:
        """Return the declared exceptions in words."""
        return tuple(f"{count:,} {words}" for words, count in self.declared.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A kernel's result and the results that it is compared with.

    Attributes:
        fused: of the kernel.
        eager: of the original ops.
        oracle: of the original ops in fp64.
        nearby: the oracle of :func:`perturbing` inputs. A layer norm of a constant row divides rounding errors by the square root
            of eps: two right kernels differ there by as much as two such oracles.
        farther: returns for each element the farthest of several such oracles; None: not to be had. One alone may lie near by
            luck, and where a row has one element (the mean of a norm's row) nothing else says how far right results differ.
        elsewhere: given a seed, the three on inputs that differ by roundings; None: not to be had.
    """

    fused: torch.Tensor
    eager: torch.Tensor
    oracle: torch.Tensor
    nearby: torch.Tensor | None = None
    farther: Callable[[], torch.Tensor] | None = None
    elsewhere: Callable[[int], Results] | None = None

    def at(self, mask: torch.Tensor | None) -> Results:
        """Return the elements that a mask leaves; all of them without a mask."""
        if mask is None:
            return self
        farther, elsewhere = self.farther, self.elsewhere
        return Results(
            fused=self.fused[mask], eager=self.eager[mask], oracle=self.oracle[mask],
            nearby=None if self.nearby is None else self.nearby[mask],
            farther=None if farther is None else lambda: farther()[mask],
            elsewhere=None if elsewhere is None else lambda seed: elsewhere(seed).at(mask),
        )  # fmt: skip

    def pieces(self) -> Iterator[Results]:
        """Cut them between rows into pieces that can be compared in fp64; small ones are one piece."""
        nearby = () if self.nearby is None else (self.nearby,)
        for fused, eager, oracle, *other in pieces((self.fused, self.eager, self.oracle, *nearby), keeps_rows=True):
            yield Results(fused=fused, eager=eager, oracle=oracle, nearby=other[0] if other else None)


def compare(
    title: str,
    results: Results,
    findings: Findings,
    *,
    tolerance: Tolerance | None = None,
    has_sums: bool = False,
    sums_overflow: bool = False,
    has_moments: bool = False,
) -> None:
    """Compare one result on special values, row by row; what is found is added to ``findings``.

    What looks wrong is compared once more with the farthest of several oracles, where there are any.

    Args:
        title: what the inputs hold.
        results: of the kernel, of the original ops, and of the original ops in fp64.
        findings: gets what is found.
        tolerance: the user's limit instead of eager's own error.
        has_sums: the ops add numbers up. A sum that is zero has the sign that the order of its terms gives it: there another sign
            is a declared exception, elsewhere a fault.
        sums_overflow: the inputs are such that only some orders of a sum's terms overflow: what differs is a declared exception.
        has_moments: the ops write or read a row's mean. Whether that is an infinity or NaN for a row that holds an infinity
            depends on the order in which eager updates it, and so does what is made of it: both are a declared exception there.
    """

    def compared(given: Results) -> Findings:
        found = Findings()
        for piece in given.pieces():
            _compare_piece(
                title, piece, found, tolerance=tolerance, has_sums=has_sums, sums_overflow=sums_overflow, has_moments=has_moments
            )
        return found

    found = compared(results)
    if found.faults and tolerance is None and results.farther is not None:
        found = compared(replace(results, nearby=results.farther()))
    findings.faults += found.faults
    findings.declared.update(found.declared)


def _compare_piece(
    title: str, results: Results, findings: Findings, *, tolerance: Tolerance | None, has_sums: bool, sums_overflow: bool,
    has_moments: bool,
) -> None:  # fmt: skip
    eager = results.eager

    def refuse(elements: int, words: str) -> None:
        if sums_overflow:
            findings.declared[ORDER] += elements
        else:
            findings.faults.append(f"{title}: {elements:,} of {eager.numel():,} elements {words}")

    if not eager.is_floating_point():
        wrong = int((results.fused != eager).sum())
        if wrong:
            refuse(wrong, "differ from the original's")
        return
    sides = _Sides.of(results, tolerance)
    passes = sides.passing()
    findings.declare(OVERFLOW, ~sides.theirs.isfinite() & ~sides.same & sides.as_oracle)
    # Squares near the largest number: whether a norm of them is 0 or NaN depends on the order of its sums, in eager too.
    lost = ~sides.theirs.isfinite() & sides.rounded.isfinite() & ~passes
    if has_sums:
        findings.declare(ON_THE_WAY, lost)
        passes |= lost
    if has_moments:
        no_number = ~sides.theirs.isfinite() & ~sides.ours.isfinite() & ~passes
        findings.declare(NO_NUMBER, no_number)
        passes |= no_number
    findings.declare(SUBNORMAL, sides.tiny & ~sides.same & ~sides.near)
    signs = sides.zeros_of_other_sign()
    # Where an op of eager rounds a tiny value to 0 on the way, its sign may be lost; the exact result's sign decides.
    is_right = signs & (has_sums | (sides.ours.signbit() == sides.truth.signbit()))
    findings.declare(ZERO, is_right)
    if (signs & ~is_right).any():
        refuse(int((signs & ~is_right).sum()), "are zeros of the other sign")
    if not bool(passes.all()):
        place = int((~passes).flatten().nonzero()[0])
        got, want = float(sides.ours.flatten()[place]), float(sides.theirs.flatten()[place])
        refuse(int((~passes).sum()), f"are wrong, the first is {got:g} for {want:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """Floating-point results in fp64, element by element.

    Attributes:
        ours: of the kernel.
        theirs: of the original ops.
        truth: of the oracle.
        rounded: of the oracle, rounded to the dtype of the original ops.
        near: where the kernel's error is allowed.
        same: where the kernel has the number of the original ops, or both have NaN.
        tiny: where both are zero or subnormal.
        as_oracle: where the kernel has the oracle's number.
        largest: finite number of the dtype.
    """

    ours: torch.Tensor
    theirs: torch.Tensor
    truth: torch.Tensor
    rounded: torch.Tensor
    near: torch.Tensor
    same: torch.Tensor
    tiny: torch.Tensor
    as_oracle: torch.Tensor
    largest: float

    @classmethod
    def of(cls, results: Results, tolerance: Tolerance | None) -> _Sides:
        """Compare results, under the user's limit where there is one."""
        dtype = results.eager.dtype
        info = torch.finfo(dtype)
        sides = (results.fused, results.eager, results.oracle)
        ours, theirs, truth = (one.detach().to(torch.float64) for one in sides)
        rounded = truth.to(dtype).to(torch.float64)
        near = (ours - truth).abs() <= _allowed(ours, theirs, truth, results.nearby, dtype, tolerance)
        return cls(
            ours=ours,
            theirs=theirs,
            truth=truth,
            rounded=rounded,
            near=near,
            same=(ours == theirs) | (ours.isnan() & theirs.isnan()),
            tiny=(ours.abs() <= info.smallest_normal) & (theirs.abs() <= info.smallest_normal),
            as_oracle=(ours == rounded) | (ours.isnan() & rounded.isnan()) | (ours.isfinite() & rounded.isfinite() & near),
            largest=info.max,
        )

    def passing(self) -> torch.Tensor:
        """Return which elements are right; sums that overflow on the way are left to the caller."""
        both = self.ours.isfinite() & self.theirs.isfinite()
        return self.same | (both & self.near) | self._at_limit() | self.tiny | (~self.theirs.isfinite() & self.as_oracle)

    def _at_limit(self) -> torch.Tensor:
        """Return where rounding decides whether a result is infinite, and the kernel's is infinite or nearly so."""
        is_limit = (self.truth.abs() >= _NEAR_LARGEST * self.largest) & self.truth.isfinite()
        is_limit &= (self.ours.sign() == self.truth.sign()) & ~self.ours.isnan()
        return is_limit & (self.ours.isinf() | (self.ours.abs() >= 0.9 * self.largest))

    def zeros_of_other_sign(self) -> torch.Tensor:
        """Return where both are zero and their signs differ."""
        return (self.ours == 0) & (self.theirs == 0) & (self.ours.signbit() != self.theirs.signbit())


def bias_of(result: torch.Tensor, oracle: torch.Tensor) -> tuple[float, int]:
    """Return the mean error away from zero in units in the last place, and of how many elements.

    A result that is cut off instead of rounded is 0.5 units too small on average, whatever its sign.
    """
    parts = [_bias_of(one, truth) for one, truth in pieces((result, oracle))]
    count = sum(number for _, number in parts)
    return (sum(total for total, _ in parts) / count if count else 0.0), count


def _bias_of(result: torch.Tensor, oracle: torch.Tensor) -> tuple[float, int]:
    """Return the sum of the errors away from zero in units in the last place, and of how many elements."""
    info = torch.finfo(result.dtype)
    got, want = result.detach().to(torch.float64).flatten(), oracle.detach().to(torch.float64).flatten()
    use = got.isfinite() & (want.abs() > info.smallest_normal) & (want.abs() < _NEAR_LARGEST * info.max)
    got, want = got[use], want[use]
    if not len(want):
        return 0.0, 0
    _, exponent = torch.frexp(want)
    unit = torch.ldexp(torch.full_like(want, info.eps), exponent - 1)
    return float(((got - want) * want.sign() / unit).clamp(-8, 8).sum()), len(want)


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
    given = chain.copy_written(roots, reach)
    before = [tensor.clone() for tensor in given]
    first = _listed(fused(*given))
    read = [number for number in range(len(given)) if number not in chain.written]
    if not all(_is_same(given[number], before[number]) for number in read):
        findings.faults.append("an input was written to")
    for number, output in enumerate(first):
        if number not in chain.in_place and guard_is_damaged(output):
            findings.faults.append("memory outside of an output was written to")
    first = [output.clone() for output in first]
    second = _listed(fused(*chain.copy_written(roots, reach)))
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
