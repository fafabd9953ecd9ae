"""What a step feels of memory traffic and of launches at the device's power limit.

There the clock is what the energy allows. A copy draws less power than a GEMM; while it runs the device saves what lets the GEMMs
run faster, so taking away 1 ms of copies takes less than 1 ms off the step. A short launch draws less still: for most of its time
blocks start and end. How much less depends on the voltage, which no driver tells, so it is measured: the step with copies, and
with launches of next to nothing, of a known time in it, against the step as it is. Before that was known, savings of Qwen2.5-7B
(2,048 tokens, H200, 700 W) were expected 1.6 times too large: without its chains the GEMMs ran at 1,500 MHz instead of 1,680. And
with copies alone those of its 512 tokens were: there chains are many launches of 5 µs.

What is put in stands where the fused kernels do, so that the clock, which follows within a fraction of a second, meets the
mixture that it met before the fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.fuse.bench import Bench, Variant, calls_in_step
from fusion_advisor.fuse.decide import StepRunner
from fusion_advisor.records import Bandwidth
from fusion_advisor.timing.measure import TURN_S, difference, interleave
from fusion_advisor.timing.stopwatch import median_interval

_READ_ROUNDS, _READ_S = 9, 1.0
_BUDGET_S = 8.0
_LEAST_SHARE, _MOST_SHARE = 0.05, 0.3
"""Of the step: less is lost in its noise, more would set another clock than the one in question."""
_BUFFER_BYTES = 2**28
"""Read, and as many written: several times any cache."""
_SECTOR_BYTES = 32
_DEVICE = torch.device("cuda")


class Copies:
    """Copies the next part of a buffer at each call, so that no part is in the cache when its turn comes.

    Attributes:
        each_bytes: read by a call, and as many written.
    """

    __name__ = "copy_some"

    def __init__(self, each_bytes: int, device: torch.device, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        # Random bits: a copy of zeros draws less.
        self._source = torch.randn(buffer_bytes // 4, device=device)
        self._target = torch.empty_like(self._source)
        # Whole sectors of memory: else most parts would begin where no wide load may.
        self._count = min(max(each_bytes // _SECTOR_BYTES, 1) * (_SECTOR_BYTES // 4), len(self._source))
        self._at = 0
        self.each_bytes = 4 * self._count

    def __call__(self) -> None:
        """Copy."""
        if self._at + self._count > len(self._source):
            self._at = 0
        part = slice(self._at, self._at + self._count)
        # The kernel whose speed was measured (``measure_bandwidth``): ``copy_`` would be a memcpy node, which takes half as long
        # again for the same bytes (H200).
        torch.mul(self._source[part], 1.0, out=self._target[part])
        self._at += self._count


class Launches:
    """Launches kernels of one element at each call.

    Attributes:
        count: of them in a call.
    """

    __name__ = "launch_some"

    def __init__(self, count: int, device: torch.device) -> None:
        self._one = torch.zeros(1, device=device)
        self.count = count

    def __call__(self) -> None:
        """Launch."""
        for _ in range(self.count):
            self._one.add_(1)  # the kernel whose time was measured, see ``measure_bandwidth``


@dataclass(frozen=True, slots=True, kw_only=True)
class CostShares:
    """By how much a step gets longer for what is put into it, between 0 and 1 of the time that this takes by itself.

    Attributes:
        copies: for copies.
        launches: for launches, and for as much of every kernel as the smallest one takes.
        launch_ns: that: from its start to the start of the next one.
    """

    copies: float = 1.0
    launches: float = 1.0
    launch_ns: int = 0

    def cost_ns(self, kernels_ns: float, count: int, launch_cost_ns: int) -> float:
        """Return what so many kernels cost the step, their launches included.

        Args:
            kernels_ns: of all of them.
            count: of launches.
            launch_cost_ns: of each launch beside its kernel.
        """
        short_ns = min(kernels_ns, count * self.launch_ns)
        return self.copies * (kernels_ns - short_ns) + self.launches * (short_ns + count * launch_cost_ns)


def put_between(variant: Variant, extra: Callable[[], None]) -> None:
    """Let a variant's graphs do more behind each fused kernel."""
    for module in variant.modules:
        for node in list(module.graph.nodes):
            if "fusion_id" in node.meta:
                with module.graph.inserting_after(node):
                    module.graph.call_function(extra)
        module.recompile()


def measure_cost_shares(bench: Bench, build: Callable[[], Variant], *, saving_ns: int, bandwidth: Bandwidth) -> CostShares:
    """Measure how much longer the step takes for each nanosecond of copies and of short launches in it.

    Args:
        bench: of the captured step.
        build: makes the step with what was kept: savings lead to this one, so traffic and launches are given back to it.
        saving_ns: that was expected of kernels bound by memory; about so much is copied, and launched for half of it.
        bandwidth: of the device.

    Returns:
        all of both where no power limit holds the step down, or where the device's memory is too full for copies: what a
        prediction needs must not end a run.
    """
    variant = build()
    calls = sum(calls_in_step(variant, bench.live.runs_of_regions()).values())
    if not bench.on_cuda or not calls:
        return CostShares()
    runner = StepRunner(bench)
    (step,) = runner.recorded([lambda: bench.run(variant)])
    if not runner.turn_s([step]) or not _has_room():
        return CostShares()
    with torch.no_grad():
        (times_ns,) = interleave([step], rounds=_READ_ROUNDS, budget_s=_READ_S, on_cuda=True, before=runner.rewind)
    step_ns = median_interval(times_ns)[0]
    wanted_ns = min(max(saving_ns, _LEAST_SHARE * step_ns), _MOST_SHARE * step_ns)
    copies = Copies(round(wanted_ns * bandwidth.copy_bytes_per_s / 2e9 / calls), _DEVICE)
    copies_ns = calls * 2 * copies.each_bytes * 1e9 / bandwidth.copy_bytes_per_s
    launches = Launches(max(1, round(wanted_ns / 2 / calls / bandwidth.launch_ns)), _DEVICE)
    launches_ns = calls * launches.count * bandwidth.launch_ns
    return CostShares(
        copies=measured_share(runner, step, bench, build(), copies, alone_ns=copies_ns),
        launches=measured_share(runner, step, bench, build(), launches, alone_ns=launches_ns),
        launch_ns=bandwidth.launch_ns,
    )


def _has_room() -> bool:
    """Whether the two buffers leave as much free again, beside what the recorded step holds."""
    torch.cuda.empty_cache()  # what is only cached is free, but for the recorded step's own
    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes >= 4 * _BUFFER_BYTES


def measured_share(
    runner: StepRunner,
    step: Callable[[], Any],
    bench: Bench,
    variant: Variant,
    extra: Callable[[], None],
    *,
    alone_ns: float,
    budget_s: float = _BUDGET_S,
) -> float:
    """Time a step against the same step with more behind each of its fused kernels.

    Args:
        runner: of the step.
        step: as it is, recorded where it can be.
        bench: of the captured step.
        variant: the same step, for more to be put into.
        extra: what is put in.
        alone_ns: that all of it takes where nothing else draws power.
        budget_s: seconds.
    """
    put_between(variant, extra)
    (longer,) = runner.recorded([lambda: bench.run(variant)])
    with torch.no_grad():
        times = interleave(
            [step, longer], rounds=200, budget_s=budget_s, turn_s=TURN_S, on_cuda=runner.on_cuda, before=runner.rewind
        )
    return share_of(times[0], times[1], alone_ns)


def share_of(alone_ns: Sequence[int], longer_ns: Sequence[int], extra_ns: float) -> float:
    """Return the part of its own time by which what was put in made the step longer, between 0 and 1.

    Args:
        alone_ns: the step, per round.
        longer_ns: the step with more in it.
        extra_ns: what that takes where nothing else draws power.
    """
    return min(1.0, max(0.0, difference(alone_ns, longer_ns).median_ns / extra_ns))
