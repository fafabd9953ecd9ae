"""What pays at one point of a piece: its graph at these sizes is profiled, and rewrites are chosen by their own times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.profile import profile_as_it_is
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import OneSizeOnly, OpenCapture
from fusion_advisor.fuse.decide.choose import choose
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.decide.try_fusions import try_all
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.start.call_tensors import given_by
from fusion_advisor.library.patterns import library_on_demand
from fusion_advisor.records import Bandwidth
from fusion_advisor.verify.known.passed_checks import PassedChecks


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedAt:
    """What stays at one point.

    Attributes:
        region: the graph at these sizes, with the tensors of a call.
        fusions: built and checked there.
        passes: ids.
        refused: ids of passes that pay here and may not be put in.
    """

    region: Region
    fusions: tuple[BuiltFusion, ...]
    passes: tuple[str, ...]
    refused: tuple[str, ...] = ()


def example_args(opened: OpenCapture, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the piece's graph is called with in a call of the model.

    Args:
        opened: the graph, with the call that leads to it.
        args: of the call.
        kwargs: of the call.

    Raises:
        OneSizeOnly: the call does not lead to the graph.
    """
    route, compiled, untraced = opened.region.route, opened.live.compiled, opened.live.untraced
    assert route is not None
    route.seen = seen = []  # type: ignore[var-annotated]
    try:
        with torch.no_grad():
            if compiled is None:
                untraced(args, kwargs, list(given_by(tuple(args), kwargs).leaves.values()))
            else:
                compiled.call(*args, **kwargs)
    finally:
        route.seen = route.results = None
    if not seen:
        raise OneSizeOnly("a call of the same sizes makes another graph: it depends on more than sizes")
    return tuple(seen[-1][1])


def decide_at(
    opened: OpenCapture, given: Sequence[Any], options: ApplyOptions, bandwidth: Bandwidth, instruments: Instruments,
    progress: Progress, *, budget_s: float, only: Callable[[str], bool] = lambda _: True, written: Written | None = None,
    ahead: BuildAhead | None = None, passed: PassedChecks | None = None,
) -> DecidedAt:  # fmt: skip
    """Find, build, check and choose rewrites on a piece's graph at the sizes of one call.

    Args:
        opened: the piece's graph.
        given: what it is called with, from :func:`example_args`.
        options: of the run; nothing is written to its directory.
        bandwidth: of the device.
        instruments: measure and decide.
        progress: gets lines.
        budget_s: seconds for timing the step.
        only: says which graph passes may be tried.
        written: what the call writes to.
        ahead: compiles all kernels side by side.
        passed: checks that no size decides; gets those that pass here.
    """
    live = at_one_size(opened, given, written)
    device = next(value.device for value in given if isinstance(value, torch.Tensor))
    options = replace(options, run_dir=None, effort="quick" if options.is_timed else options.effort, freeze=False)
    bench = Bench(live, on_cuda=device.type == "cuda", timer=instruments.timer, rest=instruments.rest, record=instruments.record)
    capture = profile_as_it_is(live, bandwidth, device)
    patterns, sources = library_on_demand(options.kernel_dirs)
    plan = make_plan(
        capture, patterns, min_share=options.min_share, top=options.top, only=options.only_kernels, skip=options.skipped_kernels,
        sources=sources, is_exact=options.exact, is_timed=options.is_timed,
    )  # fmt: skip
    fusions, built = try_all(bench, plan, options, progress, lambda _: None, instruments, ahead, passed=passed)
    _, rewrites, _, kept = choose(
        bench, fusions, built, options, progress, budget_s=budget_s, instruments=instruments.with_effort(options.effort),
        capture=capture, predicts=False,
    )  # fmt: skip
    paying = kept_passes(rewrites)
    return DecidedAt(
        region=live.regions[0], fusions=tuple(kept), passes=tuple(filter(only, paying)),
        refused=tuple(name for name in paying if not only(name)),
    )  # fmt: skip
