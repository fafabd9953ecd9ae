"""Are the numbers right? Fused and original side by side, each against the same chain in fp64.

The limit is eager's own error: a kernel may be at most half again as far from the truth as the ops it replaces (or half a unit of
the output's last place, two in fp32, whichever is larger). Matching eager bit for bit is not asked: fp32 intermediates are
usually nearer to the truth than eager's rounded ones. A tolerance of the user's takes that limit's place for floating-point
results; integers, and where NaN and infinities may stand, are judged as ever.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_advisor.records import Numerics, TensorMeta, Tolerance
from fusion_advisor.verify import special_inputs, special_values
from fusion_advisor.verify.accuracy import limit_for, unit_of
from fusion_advisor.verify.comparison import Comparison
from fusion_advisor.verify.domains import has_moments, within_domain
from fusion_advisor.verify.pieces import MOST
from fusion_advisor.verify.row_parts import RowPart
from fusion_advisor.verify.row_tables import random_table
from fusion_advisor.verify.subgraph_oracle import OriginalChain, extent

_NEARBY = 8
"""Oracles that are asked where one makes a result look wrong."""

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
    passed: set[Hashable] | None = None,
    key: Hashable = None,
) -> Numerics:
    """Check a fused call on a site's own tensors and on fresh random ones of several magnitudes.

    Args:
        chain: the original ops.
        fused: takes the root tensors and returns one tensor or a list of them.
        roots: the site's own input tensors.
        seed: of the random inputs.
        fast_math: allow what --fast-math costs; the error is shown either way.
        tolerance: the user's limit instead.
        passed: keys of kernels that have passed rows of special numbers in all classes; gets the key if this one does.
        key: what is equal where these must come out alike (``verify.known``).
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
    is_known = passed is not None and key in passed
    found = _with_special(
        numerics, findings, chain, fused, roots, read=read, seed=seed, tolerance=tolerance, fast_math=fast_math,
        has_rows=not is_known,
    )  # fmt: skip
    is_new = found.is_passed and not is_known and not fast_math and special_inputs.holds_all_classes(roots, read)
    if passed is not None and is_new:
        passed.add(key)
    return found


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
    has_rows: bool,
) -> Numerics:
    """Add what special values show to what a second call did; nothing further is called where the numbers are wrong."""
    sets = (
        []
        if fast_math or not numerics.is_passed
        else special_inputs.special_inputs(
            roots,
            seed,
            is_in_place=bool(chain.in_place) or chain.keeps_indices,
            has_sums=chain.has_sums,
            read=read,
            has_rows=has_rows,
        )
    )
    _compare_all(sets, findings, chain, fused, seed=seed, tolerance=tolerance)
    if sets and has_rows and chain.has_sums and not findings.faults:
        overflowing = special_inputs.overflowing_sums(roots, seed, read=read)
        _compare_all(overflowing, findings, chain, fused, seed=seed, tolerance=tolerance, sums_overflow=True)
    words = special_values.BEHAVIOUR if fast_math else special_values.WORDS if has_rows else special_values.WORDS_BUT_ROWS
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
        for results in _results(chain, fused, given, reach, nearby_seed=seed):
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
    found, dtypes = Comparison(fast_math=fast_math, tolerance=tolerance), set[torch.dtype]()
    for chain, fused, given in calls:
        reach = chain.reach(given) if chain.in_place else [None] * len(chain.outputs)
        for results in _results(chain, fused, given, reach, found):
            found.add(results)
            dtypes.add(results.eager.dtype)
    limit = limit_for(max(dtypes, key=unit_of), fast_math=fast_math)
    return found.numerics(inputs=inputs, limit=str(tolerance or limit))


def _results(
    chain: OriginalChain, fused: Callable[..., object], given: Sequence[torch.Tensor], reach: Sequence[torch.Tensor | None],
    found: Comparison | None = None, nearby_seed: int | None = None,
) -> Iterator[special_values.Results]:  # fmt: skip
    """Yield what a kernel's results are compared with: all rows of one at once, those of a very large one part by part.

    Args:
        chain: the original ops.
        fused: the call.
        given: the roots.
        reach: masks of what is written, one for each result.
        found: is told where elements changed that are not to be written.
        nearby_seed: of the oracle's perturbed inputs; None: without one.
    """
    answers: list[torch.Tensor] = []
    for part in chain.parts() or (None,):
        oracle = chain.run(chain.copy_written(given), as_float64=True, part=part)
        eager = chain.run(chain.copy_written(given), part=part)
        near = None if nearby_seed is None else _Nearby(chain, given, part, oracle, nearby_seed)
        nearby: Sequence[torch.Tensor | None] = [None] * len(eager) if near is None else near.oracle(0)
        answers = answers or _answers(fused, chain.copy_written(given, reach))
        each = zip(chain.outputs, answers, eager, oracle, nearby, reach, strict=True)
        for at, (node, answer, expected, exact, other, mask) in enumerate(each):
            if mask is not None and found is not None:
                # The rows that are not written must stay, and must not make the error of those that are look small.
                found.is_passed = found.is_passed and torch.equal(answer[~mask], expected[~mask])
            own = answer if part is None else part.cut(node, answer)
            # What looks wrong on one rank may not on another, and a second look runs the ops again.
            looks_again = not chain.meets_ranks and expected.is_floating_point()
            is_whole = part is None and found is not None
            elsewhere = functools.partial(_moved, chain, fused, given, reach, at) if looks_again and is_whole else None
            farther = functools.partial(near.farthest, at) if looks_again and near is not None else None
            yield special_values.Results(
                fused=own, eager=expected, oracle=exact, nearby=other, farther=farther, elsewhere=elsewhere
            ).at(mask)


@dataclass(frozen=True, slots=True)
class _Nearby:
    """Oracles of inputs that are off by a few roundings of fp32, of all rows or a part of them."""

    chain: OriginalChain
    given: Sequence[torch.Tensor]
    part: RowPart | None
    exact: Sequence[torch.Tensor]
    seed: int

    def oracle(self, number: int) -> list[torch.Tensor]:
        """Return one, a tensor for each output."""
        seed = self.seed + 7919 * number
        widen = special_inputs.perturbing(seed if self.part is None else seed + 1009 * self.part.first)
        return self.chain.run(self.chain.copy_written(self.given), as_float64=True, widen=widen, part=self.part)

    def farthest(self, output: int) -> torch.Tensor:
        """Return one output's elements that lie farthest from the oracle of the inputs themselves."""
        exact, found = self.exact[output], self.oracle(0)[output]
        for number in range(1, _NEARBY):
            other = self.oracle(number)[output]
            is_farther = ~found.isfinite() | ((other - exact).abs() > (found - exact).abs())
            found = torch.where(is_farther & other.isfinite(), other, found)
        return found


def _moved(
    chain: OriginalChain, fused: Callable[..., object], given: Sequence[torch.Tensor], reach: Sequence[torch.Tensor | None],
    output: int, seed: int,
) -> special_values.Results:  # fmt: skip
    """Return what one output is compared with on inputs that differ from some by roundings."""
    inputs = within_domain(chain, special_inputs.moved(given, seed))
    return special_values.Results(
        fused=_answers(fused, chain.copy_written(inputs, reach))[output],
        eager=chain.run(chain.copy_written(inputs))[output],
        oracle=chain.run(chain.copy_written(inputs), as_float64=True)[output],
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
        memory = torch.empty(extent(root), device=root.device, dtype=root.dtype)
        for part in torch.split(memory, MOST):  # numbers of a large root would take four times its bytes before they are rounded
            part.copy_(torch.randn(len(part), generator=generator, device=root.device, dtype=torch.float32) * scale)
        fresh.append(memory.as_strided(root.shape, root.stride()))
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
