"""Are the numbers right? Fused and original side by side, each against the same chain in fp64.

The limit is eager's own error: a kernel may be at most half again as far from the truth as the ops it replaces (or half a unit of
the output's last place, two in fp32, whichever is larger). Matching eager bit for bit is not asked: fp32 intermediates are
usually nearer to the truth than eager's rounded ones. A tolerance of the user's takes that limit's place for floating-point
results; integers, and where NaN and infinities may stand, are judged as ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fusion_advisor.records import ULP_ENDS, Numerics, TensorMeta, Tolerance
from fusion_advisor.verify import special_inputs, special_values
from fusion_advisor.verify.accuracy import Error, count_bit_equal, error_of, is_inside, is_within, limit_for, unit_of
from fusion_advisor.verify.domains import has_moments, within_domain
from fusion_advisor.verify.pieces import pieces
from fusion_advisor.verify.row_tables import random_table
from fusion_advisor.verify.subgraph_oracle import OriginalChain, extent

SCALES = (1.0, 1.0, 32.0, 1e-3)
"""Magnitudes of the random inputs: ordinary twice, large enough to saturate what saturates, and small."""


def check_chain(
    chain: OriginalChain,
    fused: Callable[..., object],
    roots: Sequence[torch.Tensor],
    *,
    seed: int,
    fast_math: bool = False,
    tolerance: Tolerance | None = None,
) -> Numerics:
    """Check a fused call on a site's own tensors and on fresh random ones of several magnitudes.

    Args:
        chain: the original ops.
        fused: takes the root tensors and returns one tensor or a list of them.
        roots: the site's own input tensors.
        seed: of the random inputs.
        fast_math: allow what --fast-math costs; the error is shown either way.
        tolerance: the user's limit instead.
    """
    read = chain.rows_read(roots)
    findings = special_values.Findings()

    def random_inputs(number: int) -> list[torch.Tensor]:
        return within_domain(chain, random_like(roots, seed + number, SCALES[number], read))

    # Ahead of all: inputs that were spoilt stay so, and are those of a trial.
    first = random_inputs(0)
    reach = chain.reach(first) if chain.in_place else [None] * len(chain.outputs)
    special_values.check_behaviour(chain, fused, first, reach, findings)
    trials = itertools.chain((roots, first), (random_inputs(number) for number in range(1, len(SCALES))))
    numerics = check_calls(
        ((chain, fused, inputs) for inputs in trials),
        fast_math=fast_math,
        tolerance=tolerance,
        inputs="the first site's own tensors; random normal ×2, ×32 and ×0.001 in magnitude; the worst is shown",
    )
    return _with_special(numerics, findings, chain, fused, roots, read=read, seed=seed, tolerance=tolerance, fast_math=fast_math)


def _with_special(
    numerics: Numerics,
    findings: special_values.Findings,
    chain: OriginalChain,
    fused: Callable[..., object],
    roots: Sequence[torch.Tensor],
    *,
    read: Mapping[int, torch.Tensor],
    seed: int,
    tolerance: Tolerance | None,
    fast_math: bool,
) -> Numerics:
    """Add what special values show to what a second call did; nothing further is called where the numbers are wrong."""
    sets = (
        []
        if fast_math or not numerics.is_passed
        else special_inputs.special_inputs(roots, seed, is_in_place=bool(chain.in_place), has_sums=chain.has_sums, read=read)
    )
    _compare_all(sets, findings, chain, fused, seed=seed, tolerance=tolerance)
    if sets and chain.has_sums and not findings.faults:
        overflowing = special_inputs.overflowing_sums(roots, seed, read=read)
        _compare_all(overflowing, findings, chain, fused, seed=seed, tolerance=tolerance, sums_overflow=True)
    words = special_values.BEHAVIOUR if fast_math else special_values.WORDS
    return _joined(numerics, findings, words)


def with_special_rows(
    numerics: Numerics,
    chain: OriginalChain,
    fused: Callable[..., object],
    roots: Sequence[torch.Tensor],
    *,
    rows: Collection[int],
    most_runs: int = 4,
    seed: int = 0,
    fast_math: bool = False,
    tolerance: Tolerance | None = None,
) -> Numerics:
    """Add what special rows of activations show to a check that passed; one that did not, or --fast-math, stays as it is.

    Args:
        numerics: from :func:`check_calls`.
        chain: the original ops.
        fused: the call.
        roots: a site's own tensors.
        rows: numbers of the roots that hold activations; the others, weights and biases, stay as they are.
        most_runs: further calls at most.
        seed: of the ordinary numbers.
        fast_math: nothing is tried: it assumes that there are no special values.
        tolerance: the user's limit instead of eager's own error.
    """
    if fast_math or not numerics.is_passed:
        return numerics
    findings = special_values.Findings()
    sets = special_inputs.special_rows(roots, seed, rows=rows, most_runs=most_runs)
    _compare_all(sets, findings, chain, fused, seed=seed, tolerance=tolerance)
    return _joined(numerics, findings, special_values.ROWS) if sets else numerics


def widest(roots: Sequence[torch.Tensor], chain: OriginalChain) -> tuple[int, ...]:
    """Return the numbers of the floating-point roots with the most elements, less those that are written into."""
    read = {number: root.numel() for number, root in enumerate(roots) if root.is_floating_point() and number not in chain.written}
    return tuple(number for number, count in read.items() if count == max(read.values()))


def _joined(numerics: Numerics, findings: special_values.Findings, words: str) -> Numerics:
    return replace(
        numerics,
        is_passed=numerics.is_passed and not findings.faults,
        inputs=f"{numerics.inputs}; {words}",
        faults=(*numerics.faults, *findings.faults),
        declared=(*numerics.declared, *findings.sentences()),
    )


def _compare_all(
    sets: Iterable[tuple[str, Sequence[torch.Tensor]]],
    findings: special_values.Findings,
    chain: OriginalChain,
    fused: Callable[..., object],
    *,
    seed: int,
    tolerance: Tolerance | None,
    sums_overflow: bool = False,
) -> None:
    for title, made in sets:
        given = within_domain(chain, made)
        reach = chain.reach(given) if chain.in_place else [None] * len(chain.outputs)
        oracle, eager = chain.run(chain.copy_written(given), as_float64=True), chain.run(chain.copy_written(given))
        nearby = chain.run(chain.copy_written(given), as_float64=True, widen=special_inputs.perturbing(seed))
        answers = _answers(fused, chain.copy_written(given, reach))
        for answer, expected, exact, other, mask in zip(answers, eager, oracle, nearby, reach, strict=True):
            results = special_values.Results(fused=answer, eager=expected, oracle=exact, nearby=other).at(mask)
            special_values.compare(
                title,
                results,
                findings,
                tolerance=tolerance,
                has_sums=chain.has_sums,
                sums_overflow=sums_overflow,
                has_moments=has_moments(chain),
            )


def _answers(fused: Callable[..., object], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call a kernel and return its results as a list."""
    answer = fused(*given)
    answers = []
    for one in answer if isinstance(answer, list | tuple) else [answer]:
        assert isinstance(one, torch.Tensor)
        answers.append(one)
    return answers


def check_calls(
    calls: Iterable[tuple[OriginalChain, Callable[..., object], Sequence[torch.Tensor]]],
    *,
    inputs: str,
    fast_math: bool = False,
    tolerance: Tolerance | None = None,
) -> Numerics:
    """Check fused calls against the ops that they replace.

    Args:
        calls: (the original ops, the fused call, the root tensors); at least one.
        inputs: what they are, in words.
        fast_math: allow what --fast-math costs; the error is shown either way.
        tolerance: the user's limit instead.
    """
    found = _Comparison(fast_math=fast_math, tolerance=tolerance)
    for chain, fused, given in calls:
        oracle = chain.run(chain.copy_written(given), as_float64=True)
        eager = chain.run(chain.copy_written(given))
        reach = chain.reach(given) if chain.in_place else [None] * len(eager)
        answers = _answers(fused, chain.copy_written(given, reach))
        for answer, expected, exact, mask in zip(answers, eager, oracle, reach, strict=True):
            if mask is not None:
                # The rows that are not written must stay, and must not make the error of those that are look small.
                found.is_passed = found.is_passed and torch.equal(answer[~mask], expected[~mask])
            found.add(special_values.Results(fused=answer, eager=expected, oracle=exact).at(mask))
    dtype = max((result.dtype for result in eager), key=unit_of)
    return found.numerics(inputs=inputs, limit=str(tolerance or limit_for(dtype, fast_math=fast_math)))


_NO_ULPS = (0,) * (len(ULP_ENDS) + 1)


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """What the results compared so far have shown.

    Attributes:
        fast_math: allow what --fast-math costs.
        tolerance: the user's limit instead of eager's own error.
        worst: errors of the kernel and of eager where the kernel is farthest beyond its limit.
        badness: how far.
        nonfinite: elements that are not finite and are finite in eager.
    """

    fast_math: bool
    tolerance: Tolerance | None
    worst: tuple[Error, Error] | None = None
    badness: float = 0.0
    is_passed: bool = True
    nonfinite: int = 0
    elements: int = 0
    bit_equal: int = 0
    faults: list[str] = field(default_factory=list)
    fused_ulps: tuple[int, ...] = _NO_ULPS
    eager_ulps: tuple[int, ...] = _NO_ULPS

    def add(self, results: special_values.Results) -> None:
        """Compare one result with eager's and with the oracle's."""
        one, original, truth = results.fused, results.eager, results.oracle
        ours, theirs = error_of(one, truth), error_of(original, truth)
        self._judge(results, ours, theirs)
        self.nonfinite += max(0, ours.nonfinite - theirs.nonfinite)
        self.elements += ours.elements
        self.bit_equal += count_bit_equal(one, original) if one.dtype == original.dtype else 0
        self.fused_ulps = _added(self.fused_ulps, count_ulps(one, truth))
        self.eager_ulps = _added(self.eager_ulps, count_ulps(original, truth))
        badness = _badness(ours, theirs, original.dtype, fast_math=self.fast_math)
        if self.worst is None or badness > self.badness:
            self.worst, self.badness = (ours, theirs), badness

    def _judge(self, results: special_values.Results, ours: Error, theirs: Error) -> None:
        """Refuse a result whose error is over the limit, or which was cut off instead of rounded."""
        one, original, truth = results.fused, results.eager, results.oracle
        if self.tolerance is None or not original.is_floating_point():
            is_right = is_within(ours, theirs, original.dtype, fast_math=self.fast_math)
        else:
            is_right = is_inside(one, truth, self.tolerance) and ours.nonfinite <= theirs.nonfinite
        if self.tolerance is None and not self.fast_math:
            bias = special_values.is_biased(one, original, truth)
            if bias is not None:
                is_right = False
                self.faults.append(f"results lean to one side by {bias:+.2f} units in the last place: cut off, not rounded")
        self.is_passed = self.is_passed and is_right

    def numerics(self, *, inputs: str, limit: str) -> Numerics:
        """Return the record of the comparison.

        Args:
            inputs: what was compared, in words.
            limit: of the error, in words.
        """
        assert self.worst is not None
        ours, theirs = self.worst
        return Numerics(
            oracle="float64",
            fused_max_abs=ours.max_abs,
            eager_max_abs=theirs.max_abs,
            fused_rel_l2=ours.rel_l2,
            eager_rel_l2=theirs.rel_l2,
            elements=self.elements,
            limit=limit,
            is_passed=self.is_passed,
            nonfinite_mismatches=self.nonfinite,
            inputs=inputs,
            fused_ulps=self.fused_ulps if any(self.fused_ulps) else (),
            eager_ulps=self.eager_ulps if any(self.eager_ulps) else (),
            faults=tuple(dict.fromkeys(self.faults)),
            bit_equal_elements=self.bit_equal,
        )


def why_wrong(numerics: Numerics, tolerance: Tolerance | None = None) -> str:
    """Say in one line what a check that did not pass has found."""
    if numerics.faults:
        return "; ".join(numerics.faults[:3])
    errors = (
        f"relative error {numerics.fused_rel_l2:.2e} against float64, the original ops have {numerics.eager_rel_l2:.2e}; "
        f"largest error {numerics.fused_max_abs:.2e}, the original ops have {numerics.eager_max_abs:.2e}"
    )
    return errors if tolerance is None else f"{errors}; outside {tolerance}"


_ORDERED = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
"""Integers as wide as each float: read as one, a float's bits grow with its magnitude (IEEE 754)."""


def count_ulps(result: torch.Tensor, oracle: torch.Tensor) -> tuple[int, ...]:
    """Count elements by how many numbers of the result's dtype lie between them and the oracle rounded to it.

    Args:
        result: of 16 or 32 bits; an integer counts nothing, nor does fp64, than which the oracle is no wider.
        oracle: fp64, same shape.

    Returns:
        One count for each bin of :data:`fusion_advisor.records.ULP_ENDS`, and one for what lies beyond.
    """
    if result.dtype not in _ORDERED:
        return _NO_ULPS
    counts = _NO_ULPS
    for one, truth in pieces((result, oracle)):
        counts = _added(counts, _count_ulps(one, truth))
    return counts


def _count_ulps(result: torch.Tensor, oracle: torch.Tensor) -> tuple[int, ...]:
    ends = torch.tensor(ULP_ENDS, device=result.device)
    rounded = oracle.detach().to(result.dtype)
    both = torch.isfinite(result) & torch.isfinite(rounded)
    differ = both & (result != rounded)  # most are equal: the others alone are numbered, a third of the time
    distance = (_ordinal(result.detach()[differ]) - _ordinal(rounded[differ])).abs()
    counts = torch.bincount(torch.bucketize(distance, ends), minlength=len(ULP_ENDS) + 1).tolist()
    return (counts[0] + int(both.sum()) - distance.numel(), *counts[1:])


def _ordinal(values: torch.Tensor) -> torch.Tensor:
    """Number floats in order: zero is 0 whatever its sign, its neighbours are ±1."""
    bits = values.contiguous().view(_ORDERED[values.dtype]).to(torch.int64)
    lowest = torch.iinfo(_ORDERED[values.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)


def _added(counts: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(counts, more, strict=True))


def _badness(ours: Error, theirs: Error, dtype: torch.dtype, *, fast_math: bool) -> float:
    """How far beyond its limit a result is; the one that is shown is the one that was refused, where one was."""
    own = limit_for(dtype, fast_math=fast_math).excess(ours, theirs, unit_of(dtype))
    return own + 1e9 * max(0, ours.nonfinite - theirs.nonfinite)


def random_like(
    roots: Sequence[torch.Tensor], seed: int, scale: float, read: Mapping[int, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Fresh inputs with the same layouts: floats are normal, ids, masks and positions stay as the model had them.

    Args:
        roots: a site's own tensors.
        seed: of the numbers.
        scale: their standard deviation.
        read: the rows that are read of roots that are tables; the others are NaN.
    """
    fresh = []
    for number, root in enumerate(roots):
        if not root.is_floating_point():
            fresh.append(root)
            continue
        generator = torch.Generator(device=root.device).manual_seed(seed * 1009 + number)
        rows = (read or {}).get(number)
        table = None if rows is None else random_table(root, rows, generator, scale)
        if table is not None:
            fresh.append(table)
            continue
        values = torch.randn(extent(root), generator=generator, device=root.device, dtype=torch.float32) * scale
        fresh.append(values.to(root.dtype).as_strided(root.shape, root.stride()))
    return fresh


def layout_of(tensor: torch.Tensor) -> TensorMeta:
    """Return a real tensor's layout as a record."""
    return TensorMeta(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        offset=int(tensor.storage_offset()),
        device=tensor.device.type,
    )
