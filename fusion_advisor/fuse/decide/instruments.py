"""What measures kernels, steps and memory and decides on rewrites, as one value that a run is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fusion_advisor.autotune.tune import Tuned
from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.collectives.group_kernels import GroupKernels
from fusion_advisor.fuse.decide.graph_diff_cost import change_alone, saving_alone_ns
from fusion_advisor.fuse.decide.keep_rule import Decision, decide, on_top
from fusion_advisor.fuse.decide.quick import decide_quickly, on_top_quickly
from fusion_advisor.fuse.decide.step_profile import rested_walls, walls
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.plan.options import Effort
from fusion_advisor.records import Capture, Timing
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.interleaving import Difference, Record, compare_alone
from fusion_advisor.workload.device import memory_bytes

T = TypeVar("T")


def as_it_is(value: T) -> T:
    """Return what is given: one process has nobody to agree with."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """Measures the device and decides by the clock; a test plants its own answers in place of some of these.

    Attributes:
        timer: of steps from the host's side; None: the one of the device.
        compare_alone: times a chain's original ops against its kernel.
        decide: the keep rule for all candidates at once.
        on_top: the keep rule for one more rewrite on top of what was kept.
        change_alone: times the ops in which two steps differ, with an interval.
        saving_alone_ns: times the ops in which two steps differ.
        walls: times ways to call the model against each other.
        rested_walls: times them one by one on a device that has rested.
        memory_bytes: tells how much memory of a device is free, and how much there is.
        settled_capture: given the capture that was made, returns the one that a plan follows from.
        settled_step: given the traced step with all that stays in it, returns the one that the report and the last gate read.
        tune: chooses a kernel's launch parameters; None: this process by itself.
        worst: given what is wrong with a kernel, or an empty text, returns what counts.
        exchange: given what is exchanged and a value, returns the values of all ranks; None: one process runs the step.
        group_kernels: given a process group's name and a device, returns the kernels in which its ranks meet, or why there are
            none, equal on all ranks; None: one process runs the step.
        rest: idle time ahead of each timed run of a step, as a multiple of the run before it; None: found out.
        record: records a step into a CUDA graph to time it, on all ranks together; None: each process by itself, unless the step
            meets others.
    """

    timer: HostTimer | None = None
    compare_alone: Callable[..., tuple[Timing, Timing]] = compare_alone
    decide: Callable[..., Decision] = decide
    on_top: Callable[..., Verdict] = on_top
    change_alone: Callable[..., Difference | None] = change_alone
    saving_alone_ns: Callable[..., int | None] = saving_alone_ns
    walls: Callable[..., list[Timing]] = walls
    rested_walls: Callable[..., list[Timing]] = rested_walls
    memory_bytes: Callable[[torch.device], tuple[int, int]] = memory_bytes
    settled_capture: Callable[[Capture], Capture] = as_it_is
    settled_step: Callable[[Step], Step] = as_it_is
    tune: Callable[..., Tuned] | None = None
    worst: Callable[[str], str] = as_it_is
    exchange: Callable[[str, Any], Sequence[Any]] | None = None
    group_kernels: Callable[[str, torch.device], GroupKernels | str] | None = None
    rest: float | None = None
    record: Record | None = None

    def with_effort(self, effort: Effort) -> Instruments:
        """Return the same with the keep rule of an effort; a rule that is not our own stays.

        Args:
            effort: of the run.
        """
        if effort != "quick":
            return self
        own = self.decide is decide, self.on_top is on_top
        chosen = decide_quickly if own[0] else self.decide
        return replace(self, decide=chosen, on_top=on_top_quickly if own[1] else self.on_top)


MEASURED = Instruments()
"""Everything by the clock."""
