"""One row of ``kernels bench``: set it up, hold every contender's numbers against fp64, time those that are right."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.codegen.registry import backends_for
from fusion_advisor.evaluate.bench import peers
from fusion_advisor.evaluate.bench.inputs import TensorSet, as_list, bytes_of, make_inputs, outputs_like
from fusion_advisor.evaluate.bench.records import BenchRow, Entrant, judged, limit_ns
from fusion_advisor.evaluate.check_inputs import in_float64
from fusion_advisor.evaluate.kinds import Place, kind_of
from fusion_advisor.library.discover import load_references
from fusion_advisor.library.patterns import example
from fusion_advisor.library.spec import Case, KernelSpec
from fusion_advisor.lowering.rules.tables import CannotLower
from fusion_advisor.records import Bandwidth
from fusion_advisor.timing.kernel_timer import Clock, Rotation, free_bytes, interleaved, plan_rotation
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.verify.accuracy import error_of

ERROR_FACTOR = 2.0
"""A contender's error against fp64 may be so many times the reference's own: all round differently, none may be wrong."""

_STANDARD_ERRORS = 6.0
DRAWS_NOTE = "draws its own random numbers: compared with fp64 in mean and mean square only"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        backends: ours that take part; those of the manifest that the device can run when empty.
        with_compile: whether ``torch.compile`` takes part.
        with_liger: whether liger-kernel takes part.
        variants: names of references; the first of each kernel when empty.
        rounds: the most repetitions of each contender.
        budget_s: seconds of timing for a row.
        seed: of the inputs.
        store: tuned launch parameters; the user's file by default.
    """

    device: torch.device
    backends: tuple[str, ...] = ()
    with_compile: bool = True
    with_liger: bool = True
    variants: tuple[str, ...] = ()
    rounds: int = 30
    budget_s: float = 1.0
    seed: int = 0
    store: TuningStore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device can do, measured once for a run."""

    bandwidth: Bandwidth
    cache_bytes: int
    clock: Clock


def bench_row(spec: KernelSpec, variant: str, case: Case, dtype: str, options: BenchOptions, ceilings: Ceilings) -> BenchRow:
    """Measure one row. The numbers of each contender are checked before it is timed."""
    with tempfile.TemporaryDirectory() as folder:
        bed = set_up(spec, variant, case, dtype, options, ceilings, Path(folder))
        ready: list[tuple[Entrant, Callable[[], object]]] = []
        out: list[Entrant] = []
        for name, make in makers(spec, options):
            entrant, repetition = _made_ready(name, make, bed, ceilings.clock)
            if repetition is None:
                out.append(entrant)
            else:
                ready.append((entrant, repetition))
        times = interleaved(
            ceilings.clock,
            [repetition for _, repetition in ready],
            bed.rotation.calls,
            rounds=options.rounds,
            budget_s=options.budget_s,
        )
        timed = [replace(e, timing=as_timing(t, ceilings.clock.method)) for (e, _), t in zip(ready, times, strict=True)]
        by_name = {entrant.name: entrant for entrant in (*out, *timed)}
        entrants = tuple(by_name[name] for name, _ in makers(spec, options))
        verdict: dict[str, Any] = judged(entrants, bed.limit_ns)
        row = BenchRow(
            kernel=spec.name, variant=variant, dtype=dtype, sizes=case.sizes, moved_bytes=bed.moved_bytes,
            limit_ns=bed.limit_ns, input_sets=bed.rotation.sets, is_past_cache=bed.rotation.is_past_cache,
            entrants=entrants, **verdict,
        )  # fmt: skip
    del bed, ready
    release(options.device)
    return row


@dataclass(slots=True, kw_only=True)
class Bed:
    """A row's tensors, and the fp64 results with which its own are compared."""

    work: peers.Work
    rotation: Rotation
    moved_bytes: int
    limit_ns: int
    oracle: list[torch.Tensor]
    eager_error: float
    eager_nonfinite: int


def set_up(
    spec: KernelSpec, variant: str, case: Case, dtype: str, options: BenchOptions, ceilings: Ceilings, folder: Path
) -> Bed:
    """Make a row's tensors, lower its reference and run it once in fp64."""
    sizes, kind = dict(case.sizes), getattr(torch, dtype)
    kernel, constants = load_references(spec), dict(spec.constants)
    function, baseline = dict(kernel.references)[variant], dict(kernel.baselines).get(variant)

    def reference(*tensors: torch.Tensor) -> Any:
        return function(*tensors, **constants)

    subject, refusal = None, ""
    try:
        subject = next(kind_of(spec).subjects(spec, variant, function, case, dtype))
    except CannotLower as error:
        refusal = f"{error.code}: {error.reason}"
    first = make_inputs(spec, sizes, kind, options.device, seed=options.seed)
    with torch.no_grad():
        results = as_list(reference(*first))
    graph = trace(reference, [example(tensor, sizes, kind) for tensor in spec.inputs])
    oracle = in_float64(graph, first)
    errors = [error_of(result, truth) for result, truth in zip(results, oracle, strict=True)]
    in_bytes, out_bytes = bytes_of(first), bytes_of(results)
    moved = subject.moved_bytes if subject is not None else in_bytes + out_bytes
    limit = limit_ns(moved, ceilings.bandwidth)
    rotation = plan_rotation(in_bytes, out_bytes, ceilings.cache_bytes, limit, free_bytes(options.device))
    sets = [TensorSet(inputs=first, outputs=outputs_like(results, first, first))]
    for number in range(1, rotation.sets):
        inputs = make_inputs(spec, sizes, kind, options.device, seed=options.seed + number)
        sets.append(TensorSet(inputs=inputs, outputs=outputs_like(results, first, inputs)))
    work = peers.Work(
        spec=spec, variant=variant, function=function, reference=reference, baseline=baseline, subject=subject, refusal=refusal,
        sets=sets, place=Place(device=options.device, folder=folder, store=options.store),
    )  # fmt: skip
    return Bed(
        work=work, rotation=rotation, moved_bytes=moved, limit_ns=limit, oracle=oracle,
        eager_error=max(error.rel_l2 for error in errors), eager_nonfinite=sum(error.nonfinite for error in errors),
    )  # fmt: skip


def makers(spec: KernelSpec, options: BenchOptions) -> list[tuple[str, Callable[[peers.Work], peers.Contender]]]:
    """Who takes part, in the order of the table."""
    on_cuda, kind = options.device.type == "cuda", kind_of(spec)
    found: list[tuple[str, Callable[[peers.Work], peers.Contender]]] = [("eager", peers.eager)]
    if options.with_compile:
        found.append(("compile", peers.compiled))
    if on_cuda:
        found += [(name, peers.peer(name, make)) for name, make in kind.peers_before.items()]
    if options.with_liger and on_cuda and not kind.peers_before:
        found.append(("liger", peers.liger))
    wanted = options.backends or spec.backends
    for backend in (one.name for one in backends_for(options.device.type)):
        if backend in wanted and backend in spec.backends:
            found.append((backend, lambda work, backend=backend: peers.ours(work, backend)))  # type: ignore[misc]
    if on_cuda:
        found += [(name, peers.peer(name, make)) for name, make in kind.peers_after.items()]
    return found


def _made_ready(
    name: str, make: Callable[[peers.Work], peers.Contender], bed: Bed, clock: Clock
) -> tuple[Entrant, Callable[[], object] | None]:
    """Build a contender, check its numbers, and record its repetition; any failure becomes the note of a row without a time."""
    try:
        contender = make(bed.work)
        entrant = Entrant(name=name, note=contender.note, tuning=contender.tuning, build_ns=contender.build_ns)
        if contender.call is None:
            return entrant, None
        with torch.no_grad():
            results = contender.outputs(contender.call(0))
        if contender.draws:
            complaint = _distribution(results, bed)
            entrant = replace(entrant, note=entrant.note or DRAWS_NOTE)
        else:
            error, complaint = _numbers(results, bed)
            entrant = replace(entrant, rel_l2=error)
        if complaint and name != "eager":
            return replace(entrant, note=complaint), None
        return entrant, clock.prepare(contender.call, bed.rotation)
    except Exception as error:  # noqa: BLE001 - a contender of ours or of others may fail in any way; the others still run
        words = str(error).strip().splitlines()
        return Entrant(name=name, note=f"{type(error).__name__}: {words[0][:200] if words else ''}"), None


def _numbers(results: Iterable[torch.Tensor], bed: Bed) -> tuple[float, str]:
    """Return the worst relative error against fp64, and a complaint when it is too large to time what made it."""
    worst, nonfinite, unit = 0.0, 0, 0.0
    results = list(results)
    if complaint := _shapes(results, bed):
        return float("inf"), complaint
    for result, truth in zip(results, bed.oracle, strict=True):
        error = error_of(result, truth)
        worst, nonfinite = max(worst, error.rel_l2), nonfinite + error.nonfinite
        unit = max(unit, torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0)
    allowed = max(ERROR_FACTOR * bed.eager_error, unit)
    if nonfinite > bed.eager_nonfinite:
        return worst, f"wrong numbers: {nonfinite} elements are NaN or Inf where fp64 is not, or the other way round"
    if worst > allowed:
        return worst, f"wrong numbers: relative error {worst:.1e} against fp64, at most {allowed:.1e} is allowed"
    return worst, ""


def _distribution(results: Iterable[torch.Tensor], bed: Bed) -> str:
    """A complaint when results that were drawn cannot come from the reference's distribution.

    The mean and the mean square of each output are compared with those of fp64, whose random numbers are others: the difference
    of two such means is within 6 of its standard errors but for one in 10^8.
    """
    results = list(results)
    if complaint := _shapes(results, bed):
        return complaint
    for result, truth in zip(results, bed.oracle, strict=True):
        got, want = result.double(), truth.double()
        for what, one, other in (("mean", got, want), ("mean square", got.square(), want.square())):
            spread = (one.var(correction=0) + other.var(correction=0)).div(max(one.numel(), 1)).sqrt()
            difference = (one.mean() - other.mean()).abs()
            rounding = torch.finfo(result.dtype).eps * other.abs().mean()
            if not float(difference) <= _STANDARD_ERRORS * float(spread) + float(rounding):
                usual = f"its standard error is {float(spread):.1e}"
                return f"wrong numbers: the {what} differs by {float(difference):.1e} from that of fp64, {usual}"
    return ""


def _shapes(results: Sequence[torch.Tensor], bed: Bed) -> str:
    if len(results) != len(bed.oracle):
        return f"returned {len(results)} tensors, the reference {len(bed.oracle)}"
    for result, truth in zip(results, bed.oracle, strict=True):
        if result.shape != truth.shape:
            return f"returned shape {tuple(result.shape)}, the reference {tuple(truth.shape)}"
    return ""


def release(device: torch.device) -> None:
    """Give memory back before the next row, whose tensors have other sizes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
