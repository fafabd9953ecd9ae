"""Compares a step with another layout and without, each with the kernels that it would get.

A change of layouts is first timed without kernels of ours. Eager's norms, pools and copies may lose in channels last: its group
norm returns contiguous images, so that each is copied back. Our kernels take their place, and read and write any layout. A
Stable Diffusion decoder (bf16, H100) was 5.96 ms slower so, though its convolutions spared 2.41 of 8.84 ms.

The convolutions are the reason for channels last, and no kernel of ours replaces them. So, cheapest question first:

1. Do the convolutions take less time in a trace of the step? They have to save more than the keep rule's least gain.
2. Is the step expected to be faster? Convolutions and other ops count as traced, chains as what memory needs for them.
3. Is it faster? Its kernels are built and checked. It is timed against the other step without kernels, whose chains tell how
   much kernels can save there at most. Is it slower, or faster by more than that, then the answer is known.
4. Otherwise the other step's kernels are built and checked too, and both steps are timed with kernels.

The last two take some seconds each. The kernels of the step that wins are compiled and tuned then, and need neither again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusion_advisor import units
from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.capture.layout_trial import Fused, time_difference
from fusion_advisor.capture.profile import profile_as_it_is
from fusion_advisor.fuse.cuda_graph.capturable import host_work
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.trial import try_fusion
from fusion_advisor.fuse.decide.try_fusions import backends_of, kernel_dir_of, submit
from fusion_advisor.fuse.decide.verdict import span_of
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.fuse.plan.plan import Plan, PlannedFusion, make_plan
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.library.patterns import library_on_demand
from fusion_advisor.records import Bandwidth, Capture
from fusion_advisor.timing.host_timer import HostTimer, step_timer
from fusion_advisor.timing.interleaving import Difference

_CONVOLUTIONS = ("aten.conv1d.", "aten.conv2d.", "aten.conv3d.", "aten.convolution.")
_TRACED = 1
_OF_CACHE = 0.5
"""Of the time that memory needs for a chain: what a cache may spare of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a trace and the chains of a step say of it.

    Attributes:
        device_ns: the traced ops.
        convolutions_ns: the convolutions among them, with the copies of images that they make.
        fused_ns: the ops outside chains as traced, and the least that memory needs for the chains.
        most_saved_ns: more than kernels for the chains can save.
    """

    device_ns: int
    convolutions_ns: int
    fused_ns: int
    most_saved_ns: int


def expected_of(capture: Capture, plan: Plan) -> Expected:
    """Return what is expected of a step once it is fused.

    Args:
        capture: of the step.
        plan: its chains and the kernels for them.
    """
    total = sum(launch.duration_ns for launch in capture.launches)
    convolutions = sum(
        launch.duration_ns for launch in capture.launches
        if launch.op_index is not None and capture.ops[launch.op_index].target.startswith(_CONVOLUTIONS)
    )  # fmt: skip
    chains = [planned.chain for planned in plan.fusions]
    saved = sum(chain.saving_bound_ns for chain in chains)
    in_cache = sum(round(_OF_CACHE * chain.floor_ns) for chain in chains)
    launched = round(capture.bandwidth.launch_ns * sum(chain.launches for chain in chains))
    return Expected(
        device_ns=total, convolutions_ns=convolutions, fused_ns=total - saved, most_saved_ns=saved + in_cache + launched
    )  # fmt: skip


def why_not(before: Expected, after: Expected, min_gain: float) -> str:
    """Say why a layout is not worth a trial with kernels; empty where it is.

    Args:
        before: of the step as the model lays it out.
        after: of the step in the other layout.
        min_gain: what the convolutions must save at least, as a share of the step.
    """
    saved = before.convolutions_ns - after.convolutions_ns
    if saved <= min_gain * before.device_ns:
        return f"convolutions save {units.duration(max(saved, 0))}, too little"
    if after.fused_ns >= before.fused_ns:
        both = f"{units.duration(after.fused_ns)} expected with kernels against {units.duration(before.fused_ns)}"
        return f"convolutions save {units.duration(saved)}, the rest loses more: {both}"
    return ""


def settled(found: Difference, before: Expected, *, is_recordable: bool) -> str:
    """Say why a step with kernels needs no kernels on the other side to be compared; empty where it does.

    Args:
        found: the step in the other layout with kernels, minus the step as the model lays it out without any.
        before: of the latter.
        is_recordable: whether a CUDA graph can hold the latter. Otherwise its launches cost the host more than is known here.
    """
    against = f"{span_of(found.median_ns, (found.low_ns, found.high_ns))} with its kernels against the step without any"
    if found.low_ns >= 0:
        return against
    if is_recordable and found.high_ns < -before.most_saved_ns:
        return f"{against}, where kernels save less than {units.duration(before.most_saved_ns)}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTrial:
    """Compares two steps that differ in layouts.

    Attributes:
        options: of the run.
        bandwidth: of the device.
        device: of the step.
        timer: of steps on a CPU.
        note: gets a sentence on each finding.
        difference: times two steps against each other.
        profile: traces a step.
        ahead: compiles kernels in other processes.
        instruments: settle what was traced, and what is wrong with a kernel.
    """

    options: ApplyOptions
    bandwidth: Bandwidth
    device: torch.device
    timer: HostTimer
    note: Callable[[str], None] = lambda _: None
    difference: Callable[..., Difference] = time_difference
    profile: Callable[..., Capture] = profile_as_it_is
    ahead: BuildAhead | None = None
    instruments: Instruments = MEASURED

    def __call__(self, changed: LiveCapture, unchanged: LiveCapture) -> Fused:
        """Compare the steps with kernels, where the changed one may win.

        Args:
            changed: the step in the other layout.
            unchanged: the step as the model lays it out.
        """
        steps = (unchanged, changed)
        settled = self.instruments.settled_capture
        captures = [settled(self.profile(live, self.bandwidth, self.device, traced_steps=_TRACED)) for live in steps]
        plans = [self._plan(capture) for capture in captures]
        before, after = map(expected_of, captures, plans)
        found = Fused(change=None, reason=why_not(before, after, self.options.min_gain))
        if not found.reason:
            chosen = [_worth(plan, self.options.min_gain * before.device_ns) for plan in plans]
            expected = f"{units.delta(after.fused_ns - before.fused_ns)} expected"
            found = self._timed([self._bench(live) for live in steps], chosen, before, expected)
        self.note(f"layout: {found.reason}")
        return found

    def _timed(
        self, benches: Sequence[Bench], fusions: Sequence[list[PlannedFusion]], before: Expected, expected: str
    ) -> Fused:  # fmt: skip
        """Time the steps, the unchanged one first in each argument, with the kernels that it takes to know which is faster."""
        unchanged, changed = benches
        with kernel_dir_of(self.options) as folder:
            try:
                fused, plain = self._fused(changed, fusions[1], folder), self._fused(unchanged, (), folder)
                found = self._difference(plain, fused, changed.live)
                is_recordable = not any(map(host_work, unchanged.build((), self._passes()).modules))
                if reason := settled(found, before, is_recordable=is_recordable):
                    return Fused(change=found, reason=reason)
                found = self._difference(self._fused(unchanged, fusions[0], folder), fused, changed.live)
            except LayoutChanged as change:  # a rewrite of the one lays a value out as a kernel of the other does not expect it
                return Fused(change=None, reason=f"not timed with kernels ({change})")
        span = span_of(found.median_ns, (found.low_ns, found.high_ns))
        return Fused(change=found, reason=f"{span} with the kernels of both layouts ({expected})")

    def _difference(self, before: Callable[[], None], after: Callable[[], None], live: LiveCapture) -> Difference:
        return self.difference(before, after, live=live, on_cuda=self.device.type == "cuda", timer=self.timer)

    def _plan(self, capture: Capture) -> Plan:
        patterns, sources = library_on_demand(self.options.kernel_dirs)
        options = self.options
        return make_plan(
            capture, patterns, min_share=options.min_share, top=options.top, only=options.only_kernels,
            skip=options.skipped_kernels, sources=sources,
        )  # fmt: skip

    def _bench(self, live: LiveCapture) -> Bench:
        given = self.instruments
        return Bench(live, on_cuda=self.device.type == "cuda", timer=self.timer, rest=given.rest, record=given.record)

    def _fused(self, bench: Bench, fusions: Sequence[PlannedFusion], folder: Path) -> Callable[[], None]:
        """Return the step with every kernel whose numbers are right, and every graph pass that the run may use.

        Raises:
            LayoutChanged: some of these do not go together.
        """
        options = self.options
        if self.ahead is not None:
            submit(self.ahead, bench, fusions, options)
        if fusions:
            bench.observe(fusions)
        tried = [
            try_fusion(
                bench, planned, backend=backends_of(options.backend, planned.program, on_cuda=bench.on_cuda)[0],
                fast_math=options.fast_math, tolerance=options.tolerance, kernel_dir=folder, seed=number, is_timed=False,
                ahead=self.ahead, tune=self.instruments.tune, worst=self.instruments.worst,
            ).built
            for number, planned in enumerate(fusions)
        ]  # fmt: skip
        variant = bench.build([built for built in tried if built is not None], self._passes())

        def run() -> None:
            bench.run(variant)

        bench.live.written.rewind()
        run()
        return run

    def _passes(self) -> list[str]:
        options = self.options
        return [name for name, one in PASSES.items() if options.wants(name) and (options.freeze or not one.needs_freeze)]


def _worth(plan: Plan, least_ns: float) -> list[PlannedFusion]:
    """Return the fusions that may save enough to tell; without the others both steps run eager's ops there."""
    return [planned for planned in plan.fusions if planned.chain.saving_bound_ns >= least_ns]


def second_look(
    options: ProfileOptions,
    bandwidth: Bandwidth,
    device: torch.device,
    timer: HostTimer | None,
    note: Callable[[str], None],
    ahead: BuildAhead | None,
    *,
    is_timed: bool,
    instruments: Instruments = MEASURED,
) -> FusedTrial | None:
    """Return what compares layouts with kernels; None in a run that makes none, or times none.

    Args:
        options: of the run.
        bandwidth: of the device.
        device: of the step.
        timer: of steps on a CPU; None: the device's own.
        note: gets a sentence on each finding.
        ahead: compiles kernels in other processes.
        is_timed: whether times decide.
        instruments: settle what was traced, and what is wrong with a kernel.
    """
    if not isinstance(options, ApplyOptions) or options.dry_run or not is_timed:
        return None
    timer = timer or step_timer(on_cuda=device.type == "cuda")
    own = replace(options, run_dir=None)
    return FusedTrial(
        options=own, bandwidth=bandwidth, device=device, timer=timer, note=note, ahead=ahead, instruments=instruments
    )
