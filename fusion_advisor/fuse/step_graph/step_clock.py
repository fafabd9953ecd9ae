"""Times two ways to run a training step in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.timing.host_timer import HostTimer, WallTimer, step_timer
from fusion_advisor.timing.interleaving import interleave
from fusion_advisor.timing.paired import Comparison, compare_rounds

_ROUNDS, _BUDGET_S = 40, 3.0

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClock:
    """Times steps.

    Attributes:
        confidence: of the interval.
        timer: of steps; None: the one of the device.
        planted: compares instead; None: by the clock.
    """

    confidence: float
    timer: HostTimer | None = None
    planted: Callable[[Call, Call], Comparison] | None = None

    def compared(self, before: Call, after: Call, *, on_cuda: bool) -> Comparison:
        """Time two ways to run a step.

        Args:
            before: one of them.
            after: the other.
            on_cuda: whether they run on a GPU.
        """
        if self.planted is not None:
            return self.planted(before, after)
        before_ns, after_ns = interleave(
            [before, after], rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=on_cuda, timer=self.timer or step_timer(on_cuda=on_cuda)
        )  # fmt: skip
        return compare_rounds(before_ns, after_ns, self.confidence)

    def compared_by_wall(self, before: Call, after: Call, *, on_cuda: bool) -> Comparison:
        """Time them as a user calls them: graphs change the host's time between kernels alone.

        Args:
            before: one of them.
            after: the other.
            on_cuda: whether they run on a GPU.
        """

        def waited(call: Call) -> Call:
            def run() -> None:
                call()
                torch.cuda.synchronize()

            return run if on_cuda else call

        if self.planted is not None:
            return self.planted(before, after)
        before_ns, after_ns = interleave(
            [waited(before), waited(after)], rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=False, timer=self.timer or WallTimer()
        )
        return compare_rounds(before_ns, after_ns, self.confidence)
