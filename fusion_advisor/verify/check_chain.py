"""Are the numbers right? Fused and original side by side, each against the same chain in fp64.

The limit is eager's own error: a kernel may be at most half again as far from the truth as the ops it replaces (or half a unit of
the output's last place, two in fp32, whichever is larger). Matching eager bit for bit is not asked: fp32 intermediates are
usually nearer to the truth than eager's rounded ones. A tolerance of the user's takes that limit's place for floating-point
results; integers, and where NaN and infinities may stand, are judged as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch

from fusion_advisor.records import ULP_ENDS, ModelCheck, Numerics, TensorMeta, Tolerance
from fusion_advisor.verify import special_inputs, special_values
from fusion_advisor.verify.accuracy import Error, count_bit_equal, error_of, is_inside, is_within, limit_for, unit_of
from fusion_advisor.verify.likeliest import agreement
from fusion_advisor.verify.subgraph_oracle import OriginalChain, extent

_MODEL_FACTOR = 1.5
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
    trials = [list(roots), *(random_like(roots, seed + number, scale) for number, scale in enumerate(SCALES))]
    findings = special_values.Findings()
    reach = chain.reach(trials[1]) if chain.in_place else [None] * len(chain.outputs)
    special_values.check_behaviour(chain, fused, trials[1], reach, findings)  # ahead of all: inputs that were spoilt stay so
    numerics = check_calls(
        ((chain, fused, inputs) for inputs in trials),
        fast_math=fast_math,
        tolerance=tolerance,
        inputs="the first site's own tensors; random normal ×2, ×32 and ×0.001 in magnitude; the worst is shown",
    )
    return _with_special(numerics, findings, chain, fused, roots, seed=seed, tolerance=tolerance, fast_math=fast_math)


def _with_special(
    numerics: Numerics,
    findings: special_values.Findings,
    chain: OriginalChain,
    fused: Callable[..., object],
    roots: Sequence[torch.Tensor],
    *,
    seed: int,
    tolerance: Tolerance | None,
    fast_math: bool,
) -> Numerics:
    """Add what special values show to what a second call did; nothing further is called where the numbers are wrong."""
    sets = (
        []
        if fast_math or not numerics.is_passed
        else special_inputs.special_inputs(roots, seed, is_in_place=bool(chain.in_place), has_sums=chain.has_sums)
    )
    _compare_all(sets, findings, chain, fused, seed=seed, tolerance=tolerance)
    if sets and chain.has_sums and not findings.faults:
        overflowing = special_inputs.overflowing_sums(roots, seed)
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
    for title, given in sets:
        reach = chain.reach(given) if chain.in_place else [None] * len(chain.outputs)
        oracle, eager = chain.run(chain.apart(given), as_float64=True), chain.run(chain.apart(given))
        nearby = chain.run(special_inputs.perturbed(chain.apart(given), seed), as_float64=True)
        answer = fused(*chain.apart(given, reach))
        results = list(answer) if isinstance(answer, list | tuple) else [answer]
        for result, expected, exact, other, mask in zip(results, eager, oracle, nearby, reach, strict=True):
            assert isinstance(result, torch.Tensor)
            four = (result, expected, exact, other)
            one, own, truth, moved = four if mask is None else (side[mask] for side in four)
            special_values.compare(
                title,
                one,
                own,
                truth,
                findings,
                nearby=moved,
                tolerance=tolerance,
                has_sums=chain.has_sums,
                sums_overflow=sums_overflow,
            )


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
    worst: tuple[Error, Error] | None = None
    passed, nonfinite, elements, bit_equal = True, 0, 0, 0
    faults: list[str] = []
    no_counts = (0,) * (len(ULP_ENDS) + 1)
    fused_ulps, eager_ulps = no_counts, no_counts
    for chain, fused, given in calls:
        oracle = chain.run(chain.apart(given), as_float64=True)
        eager = chain.run(chain.apart(given))
        reach = chain.reach(given) if chain.in_place else [None] * len(eager)
        answer = fused(*chain.apart(given, reach))
        results = list(answer) if isinstance(answer, list | tuple) else [answer]
        for result, expected, exact, mask in zip(results, eager, oracle, reach, strict=True):
            assert isinstance(result, torch.Tensor)
            one, original, truth = result, expected, exact
            if mask is not None:
                # The rows that are not written must stay, and must not make the error of those that are look small.
                passed = passed and torch.equal(result[~mask], expected[~mask])
                one, original, truth = result[mask], expected[mask], exact[mask]
            ours, theirs = error_of(one, truth), error_of(original, truth)
            unit = unit_of(original.dtype)
            if tolerance is None or not original.is_floating_point():
                passed = passed and is_within(ours, theirs, original.dtype, fast_math=fast_math)
            else:
                passed = passed and is_inside(one, truth, tolerance) and ours.nonfinite <= theirs.nonfinite
            nonfinite += max(0, ours.nonfinite - theirs.nonfinite)
            elements += ours.elements
            leaning = None if tolerance is not None or fast_math else special_values.is_biased(one, original, truth)
            if leaning is not None:
                passed = False
                faults.append(f"results lean to one side by {leaning:+.2f} units in the last place: cut off, not rounded")
            bit_equal += count_bit_equal(one, original) if one.dtype == original.dtype else 0
            fused_ulps = _added(fused_ulps, count_ulps(one, truth))
            eager_ulps = _added(eager_ulps, count_ulps(original, truth))
            if worst is None or _badness(ours, theirs, unit) > _badness(*worst, unit):
                worst = (ours, theirs)
    assert worst is not None
    ours, theirs = worst
    limit = str(tolerance or limit_for(max((result.dtype for result in eager), key=unit_of), fast_math=fast_math))
    return Numerics(
        oracle="float64",
        fused_max_abs=ours.max_abs,
        eager_max_abs=theirs.max_abs,
        fused_rel_l2=ours.rel_l2,
        eager_rel_l2=theirs.rel_l2,
        elements=elements,
        limit=limit,
        is_passed=passed,
        nonfinite_mismatches=nonfinite,
        inputs=inputs,
        fused_ulps=fused_ulps if any(fused_ulps) else (),
        eager_ulps=eager_ulps if any(eager_ulps) else (),
        faults=tuple(dict.fromkeys(faults)),
        bit_equal_elements=bit_equal,
    )


def why_wrong(numerics: Numerics, tolerance: Tolerance | None = None) -> str:
    """Say in one line what a check that did not pass has found."""
    if numerics.faults:
        return "; ".join(numerics.faults[:3])
    errors = f"relative error {numerics.fused_rel_l2:.2e} against float64, the original ops have {numerics.eager_rel_l2:.2e}"
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
    ends = torch.tensor(ULP_ENDS, device=result.device)
    if result.dtype not in _ORDERED:
        return (0,) * (len(ULP_ENDS) + 1)
    rounded = oracle.detach().to(result.dtype)
    both = torch.isfinite(result) & torch.isfinite(rounded)
    apart = (_ordinal(result.detach()[both]) - _ordinal(rounded[both])).abs()
    return tuple(torch.bincount(torch.bucketize(apart, ends), minlength=len(ULP_ENDS) + 1).tolist())


def _ordinal(values: torch.Tensor) -> torch.Tensor:
    """Number floats in order: zero is 0 whatever its sign, its neighbours are ±1."""
    bits = values.contiguous().view(_ORDERED[values.dtype]).to(torch.int64)
    lowest = torch.iinfo(_ORDERED[values.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)


def _added(counts: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(counts, more, strict=True))


def _badness(ours: Error, theirs: Error, unit: float) -> float:
    # Integers have no unit: whatever differs is far off.
    return ours.rel_l2 / max(theirs.rel_l2, unit / 4, 1e-30) + 1e9 * max(0, ours.nonfinite - theirs.nonfinite)


def random_like(roots: Sequence[torch.Tensor], seed: int, scale: float) -> list[torch.Tensor]:
    """Fresh inputs with the same layouts: floats are normal, ids, masks and positions stay as the model had them."""
    fresh = []
    for number, root in enumerate(roots):
        if not root.is_floating_point():
            fresh.append(root)
            continue
        generator = torch.Generator(device=root.device).manual_seed(seed * 1009 + number)
        values = torch.randn(extent(root), generator=generator, device=root.device, dtype=torch.float32) * scale
        fresh.append(values.to(root.dtype).as_strided(root.shape, root.stride()))
    return fresh


def check_model(
    fused: Sequence[tuple[str, torch.Tensor]],
    eager: Sequence[tuple[str, torch.Tensor]],
    oracle: Sequence[tuple[str, torch.Tensor]],
    oracle_name: str,
    *,
    tolerance: Tolerance | None = None,
    exact: Collection[str] = (),
) -> ModelCheck:
    """Compare whole-model outputs; the worst floating output decides.

    Args:
        fused: (name, tensor) of every output of the fused model.
        eager: of the original model.
        oracle: of a higher-precision copy, or of the original again where no copy fits.
        oracle_name: ``float64 copy``, ``float32 copy`` or ``eager``.
        tolerance: the user's limit instead of eager's own error; every floating output must keep to it.
        exact: names of outputs that hold integers as floats, for which there is no tolerance.
    """
    other = [name for (name, ours), (_, theirs) in zip(fused, eager, strict=True) if ours.shape != theirs.shape]
    if other:
        return _of_other_shapes(other, oracle_name)
    rows = []
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    is_kept = True
    for (name, ours), (_, theirs), (_, truth) in zip(fused, eager, oracle, strict=True):
        if ours.is_floating_point():
            if tolerance is not None and name not in exact:
                is_kept = is_kept and is_inside(ours, truth, tolerance)
            rows.append((name, error_of(ours, truth), error_of(theirs, truth), error_of(ours, theirs), ours, theirs))
            if logits is None and ours.dim() >= 2 and ours.shape[-1] > 1000:
                logits = (ours, theirs, truth)
    if not rows:
        raise ValueError("the model returns no floating tensor")

    def overrun(row: tuple[str, Error, Error, Error, torch.Tensor, torch.Tensor]) -> float:
        unit = unit_of(row[4].dtype)
        if oracle_name == "eager":
            return row[3].rel_l2 / (8 * unit)
        return row[1].rel_l2 / max(_MODEL_FACTOR * row[2].rel_l2, unit)

    _, ours_error, theirs_error, between, ours, theirs = max(rows, key=overrun)
    unit = unit_of(ours.dtype)
    if tolerance is not None:
        limit = str(tolerance)
        is_kept = is_kept and all(overrun(row) <= 1 for row in rows if row[0] in exact)
    elif oracle_name == "eager":
        limit = (
            f"‖fused − eager‖ / ‖eager‖ ≤ {8 * unit:.2g} (8 units in the last place of {str(ours.dtype).removeprefix('torch.')})"
        )
    else:
        limit = f"relative error against the oracle ≤ {_MODEL_FACTOR} × eager's own (or one unit in the last place)"
    mismatches = sum(row[3].nonfinite for row in rows)
    flat_ours, flat_theirs = ours.flatten().to(torch.float64), theirs.flatten().to(torch.float64)
    token, five = (None, None) if logits is None else agreement(logits[0], logits[1])
    own_token, own_five = (None, None) if logits is None or oracle_name == "eager" else agreement(logits[1], logits[2])
    return ModelCheck(
        oracle=oracle_name,
        outputs=tuple(row[0] for row in rows),
        fused_rel_l2=ours_error.rel_l2,
        eager_rel_l2=theirs_error.rel_l2,
        fused_max_abs=ours_error.max_abs,
        eager_max_abs=theirs_error.max_abs,
        fused_vs_eager_max_abs=between.max_abs,
        cosine=float(torch.nn.functional.cosine_similarity(flat_ours, flat_theirs, dim=0)),
        argmax_agreement=token,
        top5_agreement=five,
        eager_argmax_agreement=own_token,
        eager_top5_agreement=own_five,
        nonfinite_mismatches=mismatches,
        limit=limit,
        is_passed=(max(map(overrun, rows)) <= 1 if tolerance is None else is_kept) and mismatches == 0,
    )


def _of_other_shapes(names: Sequence[str], oracle_name: str) -> ModelCheck:
    """A check that failed because outputs have other shapes than eager's: no error says how far they are off."""
    return ModelCheck(
        oracle=oracle_name,
        outputs=tuple(names),
        fused_rel_l2=math.inf,
        eager_rel_l2=0.0,
        fused_max_abs=math.inf,
        eager_max_abs=0.0,
        fused_vs_eager_max_abs=math.inf,
        cosine=0.0,
        argmax_agreement=None,
        nonfinite_mismatches=0,
        limit="the shapes of eager's outputs, which a model that draws random numbers may not keep to itself",
        is_passed=False,
    )


def layout_of(tensor: torch.Tensor) -> TensorMeta:
    """Return a real tensor's layout as a record."""
    return TensorMeta(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        offset=int(tensor.storage_offset()),
        device=tensor.device.type,
    )
