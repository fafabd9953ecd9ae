"""From traced steps to the report's before and after: categories, kernels, and what the fused step launched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.capture.graph.fx_nodes import module_path
from fusion_advisor.capture.graph.op_classes import attention_backend
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import Step, median_step
from fusion_advisor.capture.trace.events import KERNEL_RANGE, MODULE_RANGE
from fusion_advisor.capture.trace.kernels import kernel_class
from fusion_advisor.fuse.decide.session import Bench, Variant
from fusion_advisor.records import Launch, OpClass, StepProfile, Timeline, Timing
from fusion_advisor.timing.clock_sampler import CURRENT_DEVICE, Gauge, is_held_down
from fusion_advisor.timing.host_timer import HostTimer, WallTimer, step_timer
from fusion_advisor.timing.interleaving import REST, TURN_S, interleave
from fusion_advisor.timing.known import is_known
from fusion_advisor.timing.wall_timer import as_timing, nothing

_KNOWN = 0.01
"""Share of a step's time to which its median is to be known."""


def step_profile(label: str, launches: tuple[Launch, ...], **more: Any) -> StepProfile:
    """Sum a step's launches by category and by kernel, the most expensive first."""
    kernels = _ranked(launches, lambda launch: (launch.kernel_name, str(launch.category)))
    return StepProfile(
        label=label,
        device_ns=sum(launch.duration_ns for launch in launches),
        launches=len(launches),
        categories=_ranked(launches, lambda launch: (str(launch.category),)),
        kernels=kernels,
        attention=attention_of(launches),
        timeline=timeline_of(launches, kernels),
        **more,
    )


def classed_by_name(launches: Iterable[Launch]) -> tuple[Launch, ...]:
    """Class the launches that no op was found for by what their kernels are called.

    For steps that are shown for comparison: a graph's replay and Inductor's code launch without ATen ops, and the report compares
    their kernels with ours by class.
    """
    return tuple(
        replace(launch, category=kernel_class(launch.kernel_name).value) if launch.category == OpClass.OTHER else launch
        for launch in launches
    )


def timeline_of(launches: Iterable[Launch], kernels: Iterable[tuple[str, str, int, int]]) -> Timeline:
    """Say when each launch ran, by its place in ``kernels``."""
    place = {(name, category): at for at, (name, category, _, _) in enumerate(kernels)}
    ordered = sorted(launches, key=lambda launch: launch.start_ns)
    has_calls = any(launch.call_ns for launch in ordered)
    return Timeline(
        kernel=tuple(place[launch.kernel_name, launch.category] for launch in ordered),
        start_ns=tuple(launch.start_ns for launch in ordered),
        duration_ns=tuple(launch.duration_ns for launch in ordered),
        call_start_ns=tuple(launch.call_start_ns for launch in ordered) if has_calls else (),
        call_ns=tuple(launch.call_ns for launch in ordered) if has_calls else (),
    )


def attention_of(launches: Iterable[Launch]) -> tuple[tuple[str, int, int], ...]:
    """Count a step's attention kernels by backend: (backend, kernels, ns), largest first."""
    found: dict[str, tuple[int, int]] = {}
    for launch in launches:
        if launch.category == OpClass.ATTENTION:
            backend = attention_backend(launch.kernel_name)
            count, ns = found.get(backend, (0, 0))
            found[backend] = (count + 1, ns + launch.duration_ns)
    return tuple(sorted(((name, count, ns) for name, (count, ns) in found.items()), key=lambda row: -row[2]))


def _ranked(launches: Iterable[Launch], group: Callable[[Launch], tuple[str, ...]]) -> tuple[Any, ...]:
    """Count and sum per group, largest sum first: (group …, count, ns). Without pandas, whose import takes half a second."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for launch in launches:
        count, ns = found.get(group(launch), (0, 0))
        found[group(launch)] = (count + 1, ns + launch.duration_ns)
    return tuple(sorted(((*names, *sums) for names, sums in found.items()), key=lambda row: -int(row[-1])))


class FusedRunner(torch.fx.Interpreter):
    """Runs a rewritten region op by op on a CPU, where a fused kernel is no ATen op and would leave no event.

    Each op lies in a range of the module that it comes from, for modules are not called here.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node in its ranges."""
        if n.op != "call_function":
            return super().run_node(n)
        names = [f"{MODULE_RANGE}{profiler.plain_name(path)}" for path in (module_path(n),) if path]
        if "fusion_id" in n.meta:
            names.append(f"{KERNEL_RANGE}{getattr(n.target, '__name__', n.name)}")
        with contextlib.ExitStack() as ranges:
            for name in names:
                ranges.enter_context(torch.profiler.record_function(name))
            return super().run_node(n)


@contextlib.contextmanager
def _op_by_op(regions: Sequence[Region], modules: Sequence[torch.fx.GraphModule]) -> Iterator[None]:
    """Let the model's call run its regions op by op; what lies outside of them, at a graph break, runs as it does anyway."""
    routes = [region.route for region in regions if region.route is not None]
    before = [route.forward for route in routes]
    for route, module in zip(routes, modules, strict=True):
        route.forward = FusedRunner(module).run
    try:
        yield
    finally:
        for route, forward in zip(routes, before, strict=True):
            route.forward = forward


def trace_fused(bench: Bench, variant: Variant, call: Callable[[], Any], save_to: Path | None, *, traced_steps: int = 3) -> Step:
    """Trace the fused step: the model's own call, on a CPU with the rewritten regions op by op.

    Args:
        bench: the captured call's tensors.
        variant: what is installed.
        call: the fused model on the workload's inputs; it has run before.
        save_to: where the raw trace goes (``trace.after.json.gz``).
        traced_steps: how many steps are traced; the median is returned.
    """

    def by_node() -> None:
        with _op_by_op(bench.live.regions, variant.modules):
            call()

    step = call if bench.on_cuda else by_node
    rewind = bench.live.written.rewind
    with torch.no_grad():
        rewind()
        step()
        trace = profiler.record(step, steps=traced_steps, on_cuda=bench.on_cuda, save_to=save_to, before=rewind)
        return median_step(trace, on_cuda=bench.on_cuda)


def launches_of(step: Step, kernel_name: str) -> int:
    """Count a kernel's launches in a step by its entry point."""
    return sum(1 for launch in step.launches if launch.kernel_name.split("(")[0].strip() == kernel_name)


def walls(
    calls: Sequence[Callable[[], Any]],
    *,
    on_cuda: bool,
    runs: int,
    budget_s: float,
    least_s: float = 0.0,
    patience: float = 1.0,
    is_held: bool | None = None,
    rewind: Callable[[], object] = nothing,
    timer: HostTimer | None = None,
    gauge: Gauge = CURRENT_DEVICE,
) -> list[Timing]:
    """Time ways of calling the model against each other, from the host's side, interleaved; the clocks are read in between.

    Where the power limit holds any of them down, each runs on and on at its turn. The limit lets the clock swing: ten turns of
    Qwen2.5-7B's 512 tokens differed by 7 % (H200). So it goes on there until the quicker half of the calls is known to within a
    hundredth.

    Args:
        calls: warm.
        on_cuda: wait for the device after each.
        runs: rounds at most.
        budget_s: seconds in all.
        least_s: go on for so many seconds for each call, beyond ``runs`` and ``budget_s``.
        patience: go on for so many times ``budget_s`` at most, where the power limit lets the clock swing.
        is_held: whether the power limit holds one of them down, where that is known; None: found out.
        rewind: called ahead of each run, untimed.
        timer: times the runs; left out, the one of the device.
        gauge: watches the device.
    """
    timer = timer or step_timer(on_cuda=on_cuda)
    wait = gauge.wait if on_cuda else nothing

    if is_held is None:
        is_held = is_held_down(calls, on_cuda=on_cuda, before=rewind, gauge=gauge)
    turn_s = TURN_S if is_held else 0.0
    with torch.no_grad(), gauge.watching(on_cuda=on_cuda) as watch:

        def after(number: int, position: int, last_ns: int) -> None:
            watch.sample(number, position, _then(rewind, calls[position]), last_ns)

        times = interleave(
            [_then(call, wait) for call in calls],
            rounds=runs,
            budget_s=budget_s,
            turn_s=turn_s,
            least_s=least_s * len(calls),
            most_s=patience * budget_s if turn_s else 0.0,
            is_settled=is_known(_KNOWN),
            on_cuda=False,
            before=_then(rewind, wait),
            after=after,
            timer=timer,
        )
    return [as_timing(series, timer.method, watch.clocks(position)) for position, series in enumerate(times)]


def rested_walls(
    calls: Sequence[Callable[[], Any]],
    *,
    runs: int,
    budget_s: float,
    rewind: Callable[[], object] = nothing,
    timer: HostTimer | None = None,
    gauge: Gauge = CURRENT_DEVICE,
) -> list[Timing]:
    """Time ways of calling the model that the power limit holds down, one by one, each on a device that has rested.

    Args:
        calls: warm.
        runs: rounds at most.
        budget_s: seconds in all.
        rewind: called ahead of each run, untimed.
        timer: times the runs and the rests; left out, the wall clock.
        gauge: waits for the device.
    """
    wait = gauge.wait
    with torch.no_grad():
        times = interleave(
            [_then(call, wait) for call in calls],
            rounds=runs, budget_s=budget_s, rest=REST, on_cuda=False, before=_then(rewind, wait),
            timer=timer or WallTimer(),
        )  # fmt: skip
    return [as_timing(series, "wall", rest=REST) for series in times]


def _then(call: Callable[[], object], wait: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()
        wait()

    return run
