"""What a step feels of memory traffic at the device's power limit.

There the clock is what the energy allows. A copy draws less power than a GEMM; while it runs the device saves what lets the GEMMs
run faster, so taking away 1 ms of copies takes less than 1 ms off the step. How much less depends on the voltage, which no driver
tells, so it is measured: the step with copies of a known time behind it, against the step alone. Before that was known, savings
of Qwen2.5-7B (2,048 tokens, H200, 700 W) were expected 1.6 times too large: without its chains the GEMMs ran at 1,500 MHz
instead of 1,680.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_advisor.fuse.decide import StepRunner
from fusion_advisor.records import Clocks
from fusion_advisor.timing.clock import free_bytes
from fusion_advisor.timing.measure import difference, interleave, recorded
from fusion_advisor.timing.stopwatch import median_interval
from fusion_advisor.timing.watch import watching

_POWER_LIMIT = "sw_power_cap"
_READ_ROUNDS, _READ_S = 9, 1.0
_BUDGET_S = 8.0
_LEAST_SHARE, _MOST_SHARE = 0.05, 0.3
"""Of the step: less is lost in its noise, more would set another clock than the one in question."""
_COPY_BYTES = 2**28
"""Read, and as many written: several times any cache."""


def is_at_power_limit(clocks: Clocks | None) -> bool:
    """Whether the device was held down by its power limit in most of what was read."""
    samples = clocks.samples if clocks is not None else ()
    return 2 * sum(_POWER_LIMIT in (sample.reasons or ()) for sample in samples) > len(samples)


def copy_cost_share(runner: StepRunner, step: Callable[[], Any], *, saving_ns: int, copy_bytes_per_s: float) -> float:
    """Measure how much longer a step takes for each nanosecond of copying behind it; 1 where no power limit holds it down.

    Args:
        runner: of the step.
        step: with what was kept: savings lead to this one, so traffic is given back to it.
        saving_ns: that was expected of kernels bound by memory; about so much is copied.
        copy_bytes_per_s: read plus written.
    """
    if not runner.on_cuda:
        return 1.0
    with torch.no_grad(), watching(on_cuda=True) as watch:
        (call,) = runner.recorded([step])

        def again() -> None:
            runner.rewind()
            call()

        def read(number: int, _: int, last_ns: int) -> None:
            watch.sample(number, 0, again, last_ns)

        (times_ns,) = interleave([call], rounds=_READ_ROUNDS, budget_s=_READ_S, on_cuda=True, before=runner.rewind, after=read)
        if not is_at_power_limit(watch.clocks()):
            return 1.0
        step_ns = median_interval(times_ns)[0]
        wanted_ns = min(max(saving_ns, _LEAST_SHARE * step_ns), _MOST_SHARE * step_ns)
        # Random bits: a copy of zeros draws less.
        source = torch.randn(min(_COPY_BYTES, free_bytes(torch.device("cuda")) // 8) // 4, device="cuda")
        target = torch.empty_like(source)
        once_ns = 2 * source.nbytes * 1e9 / copy_bytes_per_s
        count = max(1, round(wanted_ns / once_ns))
        copies = recorded(lambda: target.copy_(source), repeats=count)

        def followed() -> None:
            call()
            copies()

        alone, longer = interleave([call, followed], rounds=200, budget_s=_BUDGET_S, on_cuda=True, before=runner.rewind)
    runner.forget()
    return share_of(alone, longer, count * once_ns)


def share_of(alone_ns: Sequence[int], followed_ns: Sequence[int], copies_ns: float) -> float:
    """Return the part of the copies' own time by which the step became longer, between 0 and 1.

    Args:
        alone_ns: the step, per round.
        followed_ns: the step with the copies behind it.
        copies_ns: what these take where nothing else draws power.
    """
    return min(1.0, max(0.0, difference(alone_ns, followed_ns).median_ns / copies_ns))
