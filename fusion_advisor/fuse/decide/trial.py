"""Try one fusion by itself: render, build, check its numbers, time it against the ops it replaces."""

from __future__ import annotations

import functools
import linecache
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.autotune.tune import Tuned, best_tuning
from fusion_advisor.capture.graph.fx_nodes import source_path
from fusion_advisor.capture.unchanged_step import named_range
from fusion_advisor.codegen.common.interface import BuiltKernel, KernelBuildFailed, Launcher
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.codegen.standalone import operand_layouts, with_launcher
from fusion_advisor.fuse.decide.alone import why_implausible
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.rewrite.first_call import call_in_child
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.lowering.builder.rounding import why_bits_differ
from fusion_advisor.records import Fusion, Numerics, Receipt, RenderedKernel, Status, Timing, Tolerance
from fusion_advisor.timing.interleaving import compare_alone
from fusion_advisor.timing.kernel_timer import cache_bytes
from fusion_advisor.verify import check_chain
from fusion_advisor.verify.known.passed_checks import CheckedSite, PassedChecks
from fusion_advisor.verify.subgraph_oracle import OriginalChain

_SOURCE_CONTEXT = 3
_TIMED_AGAIN = 3
"""Times that cannot be right are measured again; those of the last attempt are not shown either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fusion as it is known before the step is timed."""

    fusion: Fusion
    built: BuiltFusion | None
    """None when it was not built or is already out."""


def try_fusion(
    bench: Bench, planned: PlannedFusion, *, backend: str, fast_math: bool, tolerance: Tolerance | None = None, kernel_dir: Path,
    seed: int, with_nvtx: bool = False, is_timed: bool = True, log: Callable[[str], None] = lambda _: None,
    compare: Callable[..., tuple[Timing, Timing]] = compare_alone, tune: Callable[..., Tuned] | None = None,
    worst: Callable[[str], str] = str, ahead: BuildAhead | None = None, passed: PassedChecks | None = None,
) -> Trial:  # fmt: skip
    """Render, build, check and time one fusion.

    Args:
        bench: has observed the fusion's first site.
        planned: the fusion.
        backend: name of the backend.
        fast_math: let the kernel approximate.
        tolerance: the user's limit on its errors, instead of the original ops' own.
        kernel_dir: where its source goes, named after the fusion.
        seed: of the random inputs.
        with_nvtx: open an NVTX range for the check and for the timing.
        is_timed: time it too; a saved plan was timed when it was made.
        log: gets a compiler's full words.
        compare: times the original ops against the kernel.
        tune: chooses launch parameters; None: :func:`best_tuning`.
        worst: given what is wrong with the kernel, or an empty text, returns what counts.
        ahead: compiles kernels, and is waited for.
        passed: checks that no size decides; gets those that pass here.
    """
    base = untried(planned)
    chain, roots = bench.first_site(planned)
    try:
        made = _made(bench, planned, chain, roots, backend, kernel_dir, fast_math=fast_math, log=log, tune=tune, ahead=ahead)
        base = replace(base, rendered=(made.kernel,))
        inputs, name, launch = [check_chain.layout_of(root) for root in roots], made.kernel.name, made.launch
        outputs = [bench.ops[index].outputs[0] for index in planned.sites[0].outputs]
        call_in_child(made.built, planned.program, roots, inputs, outputs, in_place=chain.in_place)
        call = fused_call(name, launch, inputs, outputs, in_place=chain.in_place)
        checked = fused_call(name, launch, inputs, outputs, in_place=chain.in_place, is_poisoned=True)
        with named_range(f"fa:{planned.id}:check", is_on=with_nvtx):
            site = CheckedSite(chain=chain, roots=roots, program=planned.program, entry=name, tuning=made.built.tuning)
            known = PassedChecks() if passed is None else passed
            numerics = known.check(site, checked, seed=seed, fast_math=fast_math, tolerance=tolerance)
    except KernelBuildFailed as failure:  # Triton and NVRTC compile at the first launch
        log(f"{planned.id} {planned.match.kernel}: {failure.__cause__ or failure}")
        return Trial(fusion=replace(base, status=Status.BUILD_FAILED, reason=worst(str(failure))), built=None)
    base = replace(base, numerics=_with_reason(numerics, planned))
    if problem := worst("" if numerics.is_passed else check_chain.why_wrong(numerics, tolerance)):
        return Trial(fusion=replace(base, status=Status.WRONG_NUMBERS, reason=problem), built=None)
    if is_timed:
        with named_range(f"fa:{planned.id}:time", is_on=with_nvtx):
            pair = functools.partial(compare, lambda: chain.run(roots), lambda: call(*roots), timer=bench.timer)
            base, slower = _timed_once(planned, base, pair, known, site.exact(), on_cuda=bench.on_cuda)
        if slower is not None:
            return Trial(fusion=replace(base, status=Status.SLOWER, reason=slower), built=None)
    return _installed(bench, planned, made, base)


def untried(planned: PlannedFusion) -> Fusion:
    """Return the row of a fusion of which nothing is known yet."""
    return Fusion(
        id=planned.id,
        chain_id=planned.chain.id,
        kernel=planned.match.kernel,
        status=Status.PLANNED,
        reason="",
        receipt=Receipt(
            sites_found=len(planned.chain.sites),
            sites_matched=len(planned.sites),
            sites_replaced=0,
            launches_before=planned.chain.launches,
            launches_after=0,
        ),
        original_source=original_source(planned),
    )


def _with_reason(numerics: Numerics, planned: PlannedFusion) -> Numerics:
    """Add why the bits of an exact program differ, where they do."""
    if not planned.program.is_exact or numerics.is_bit_equal:
        return numerics
    return replace(numerics, differs_by=why_bits_differ(planned.program))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    kernel: RenderedKernel
    built: BuiltKernel
    launch: Launcher


def _installed(bench: Bench, planned: PlannedFusion, made: _Made, base: Fusion) -> Trial:
    """Bind a kernel that passed to the fusion's sites."""
    installed = bench.install(planned, made.kernel, made.built)
    receipt = replace(base.receipt, refusals=installed.refusals)
    if not installed.sites:
        reason = "no site could be replaced: " + installed.refusals[0]
        return Trial(fusion=replace(base, receipt=receipt, status=Status.NOT_REPLACED, reason=reason), built=None)
    return Trial(fusion=replace(base, receipt=receipt), built=installed)


def _made(
    bench: Bench,
    planned: PlannedFusion,
    chain: OriginalChain,
    roots: Sequence[torch.Tensor],
    backend: str,
    kernel_dir: Path,
    *,
    fast_math: bool,
    log: Callable[[str], None],
    tune: Callable[..., Tuned] | None,
    ahead: BuildAhead | None,
) -> _Made:
    """Tune, render and build a fusion's kernel."""
    maker = backend_named(backend)
    store = TuningStore(warn=log)
    tuned = (tune or best_tuning)(
        planned.program,
        planned.tunables,
        backend,
        roots[0].device,
        header=planned.header,
        fast_math=fast_math,
        store=store,
        ahead=ahead,
    )
    rendered = maker.render(planned.program, planned.header, tuning=tuned.tuning, fast_math=fast_math)
    made = [bench.ops[index].outputs[0] for index in planned.sites[0].outputs]
    layouts = operand_layouts(list(map(check_chain.layout_of, roots)), made, chain.in_place)
    rendered = with_launcher(rendered, planned.program, tensors=layouts, fast_math=fast_math)
    path = kernel_dir / f"{planned.id}_{planned.match.kernel}{rendered.suffix}"
    started = time.perf_counter_ns()
    built = maker.build(rendered, path)
    launch = built.bind(planned.program)
    kernel = RenderedKernel(
        name=rendered.entry,
        backend=backend,
        path=f"kernels/{path.name}",
        source=rendered.file_text,
        origin=planned.header.origin,
        build_ns=time.perf_counter_ns() - started,
        tuning=f"{built.tuning} ({tuned.text})" if built.tuning else tuned.text,
        parameters=tuned.tuning,
        fast_math=fast_math,
    )
    return _Made(kernel=kernel, built=built, launch=launch)


def _timed(
    planned: PlannedFusion, base: Fusion, compare: Callable[..., tuple[Timing, Timing]], *, on_cuda: bool
) -> tuple[Fusion, str | None]:
    """Time the original ops and the kernel, again where the times cannot be right; the second result says why it is out."""
    cache, implausible = cache_bytes(torch.device("cuda" if on_cuda else "cpu")), ""
    for _ in range(_TIMED_AGAIN):
        times = compare(on_cuda=on_cuda)
        implausible = why_implausible(planned.chain, *times, cache_bytes=cache)
        if not implausible:
            return _with_times(planned, base, *times)
    return replace(base, implausible=implausible, predicted_saving_ns=None), None


def _timed_once(
    planned: PlannedFusion, base: Fusion, compare: Callable[..., tuple[Timing, Timing]], known: PassedChecks, key: Hashable,
    *, on_cuda: bool,
) -> tuple[Fusion, str | None]:  # fmt: skip
    """As :func:`_timed`; a site of which an equal one was timed has its times."""
    if key in known.times:
        return _with_times(planned, base, *known.times[key])
    timed, slower = _timed(planned, base, compare, on_cuda=on_cuda)
    if timed.chain_before is not None and timed.chain_after is not None:
        known.times[key] = timed.chain_before, timed.chain_after
    return timed, slower


def _with_times(planned: PlannedFusion, base: Fusion, before: Timing, after: Timing) -> tuple[Fusion, str | None]:
    """Add the times of the original ops and of the kernel; the second result says why it is out, None when it is not."""
    saving_ns = max(0, planned.chain.device_ns - after.median_ns * planned.chain.runs)
    base = replace(base, chain_before=before, chain_after=after, predicted_saving_ns=saving_ns)
    if after.ci_low_ns >= before.ci_high_ns:
        return base, f"alone it takes {after.median_ns / 1e3:.1f} µs, the original ops {before.median_ns / 1e3:.1f} µs"
    return base, None


def original_source(planned: PlannedFusion) -> tuple[tuple[int, str], ...]:
    """Return the lines around a chain's most expensive op in the model's own source; empty where the file cannot be read."""
    site = planned.chain.sites[0]
    return source_around(site.source_file, site.source_line)


def source_around(file: str, line: int) -> tuple[tuple[int, str], ...]:
    """Return numbered lines around one; empty where the file cannot be read."""
    path = source_path(file)
    if path is None or not line:
        return ()
    first = max(1, line - _SOURCE_CONTEXT)
    lines = linecache.getlines(str(path))[first - 1 : line + _SOURCE_CONTEXT]
    return tuple((first + number, line.rstrip("\n")) for number, line in enumerate(lines))
