"""What else a training step could be run with: torch.compile's modes for both passes, Liger with its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from fusion_advisor.fuse.baselines.contenders import AUTOTUNED_TRAINING, LIMITS_S, Call, Contender
from fusion_advisor.fuse.baselines.liger import NotAvailable, liger_model
from fusion_advisor.fuse.baselines.step_check import StepReference, reference_of
from fusion_advisor.fuse.baselines.training_step import CopiedAdamW, TrainingWay
from fusion_advisor.fuse.rewrite.device_memory import release_cached_memory
from fusion_advisor.records import COMPILED, StepCheck
from fusion_advisor.runtime.torch_internals import dynamo
from fusion_advisor.workload.load import LoadedWorkload


def training_peers(
    loaded: LoadedWorkload,
    way: Callable[[Call], TrainingWay],
    *,
    on_cuda: bool,
    max_autotune: bool,
    limit_s: float | None = None,
) -> list[Contender]:
    """Return the other ways to run a training step, eager left out.

    Args:
        loaded: the model and its inputs.
        way: makes the step of a forward pass.
        on_cuda: whether there are Liger's kernels.
        max_autotune: torch.compile's slowest mode too, without CUDA graphs: those hand out memory of theirs as gradients.
        limit_s: for each mode of torch.compile, which compiles both passes; None: those of ``contenders.LIMITS_S``. On two cores
            a step of GPT-2 takes the default mode about a minute.
    """

    def compiled(mode: str) -> Call:
        return replace(way(dynamo.compiled_call(loaded.model, "inductor", mode=mode)), is_checked_alone=True)

    def liger() -> Call:
        if not on_cuda:
            raise NotAvailable("Liger's kernels run on CUDA only")
        return way(liger_model(loaded.model))

    def mode(name: str) -> Contender:
        return Contender(
            name=f"{COMPILED}{name}", make=functools.partial(compiled, name), is_compiled=True,
            limit_s=LIMITS_S[name] if limit_s is None else limit_s, note="first call with empty caches",
        )  # fmt: skip

    liger_row = Contender(
        name="Liger", make=liger,
        note="with its loss of the last linear layer, where it has one for the model; its rotary embedding left out: kernels "
        "bench saw it end in an illegal memory access",
    )  # fmt: skip
    # The one that compiles longest comes last: a run that is cut off has the others.
    return [mode("default"), liger_row, *([mode(AUTOTUNED_TRAINING)] if max_autotune else [])]


@dataclass(slots=True)
class StepWatch:
    """Checks each way to run a training step, and makes the step with AdamW's after it.

    Attributes:
        eager: the model's own ops.
        optimizer: None where there is none.
    """

    eager: TrainingWay
    optimizer: CopiedAdamW | None = None
    _reference: StepReference | None = field(default=None, init=False)

    def check(self, way: Call) -> StepCheck | None:
        """Compare a way's loss and gradients with eager's; eager's own are what the others are compared with.

        Args:
            way: a step.
        """
        if not isinstance(way, TrainingWay):
            return None
        try:
            if self._reference is None:
                self._reference = reference_of(self.eager)
            return self._reference.check(way)
        except torch.cuda.OutOfMemoryError:  # its times are figures still
            self.eager.model.zero_grad(set_to_none=True)
            release_cached_memory()
            return None

    def larger(self, way: Call) -> Call | None:
        """Return a way's step with AdamW's after it; None without an optimizer, and where AdamW takes no such gradients.

        Args:
            way: a step.
        """
        if self.optimizer is None or not isinstance(way, TrainingWay) or way.gives_sparse():
            return None
        return self.optimizer.after(way)
