"""One way to run a training step, alone or with AdamW's step after it.

The optimizer runs over copies of the trained parameters and is given the gradients that the step has just made, so it reads them
in the layout that this way leaves them in, and no weight of the model is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.capture.training import loss_of
from fusion_advisor.fuse.train.step_parts import NO_MEMORY, why_no_optimizer

_COPIES = 3
"""Of a parameter: its copy and AdamW's two moments."""
_RATE = 1e-6
"""Of learning: the copies stay about where they are, however often they are updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWay:
    """Runs forward, loss and backward; called, it leaves no gradients, so that each step allocates its own.

    Attributes:
        model: whose parameters are trained.
        args: of a call.
        kwargs: of the same call.
        forward: takes both.
        model_id: for error messages.
        is_checked_alone: whether its gradients are checked in a thread of its own, which no other way's step has run in.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    forward: Callable[..., Any]
    model_id: str
    is_checked_alone: bool = False

    def __call__(self) -> None:
        """Run the step.

        Raises:
            NotTrainable: no output depends on a parameter.
        """
        self.with_gradients()
        self.model.zero_grad(set_to_none=True)

    def gives_sparse(self) -> bool:
        """Whether a gradient is sparse: AdamW takes none such. It runs the step."""
        self.with_gradients()
        found = any(one.grad is not None and one.grad.layout is not torch.strided for one in self.model.parameters())
        self.model.zero_grad(set_to_none=True)
        return found

    def with_gradients(self) -> torch.Tensor:
        """Run the step, leave the gradients of this step alone in the model's parameters, and return the loss.

        Raises:
            NotTrainable: no output depends on a parameter.
        """
        self.model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss, _ = loss_of(self.forward(*self.args, **self.kwargs), model_id=self.model_id)
            loss.backward()
        return loss.detach()


class CopiedAdamW:
    """AdamW with ``fused=True`` over copies of a model's trained parameters.

    Args:
        parameters: trained ones.

    Attributes:
        state_bytes: that it keeps between steps.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._pairs = [(one, one.detach().clone().requires_grad_()) for one in parameters]
        copies = [copy for _, copy in self._pairs]
        self._optimizer = torch.optim.AdamW(copies, lr=_RATE, fused=True)
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        self._optimizer.step()  # makes its state
        self._optimizer.zero_grad(set_to_none=True)
        self.state_bytes = sum(
            one.nbytes for state in self._optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)
        )

    def after(self, way: TrainingWay) -> Callable[[], None]:
        """Return a way's step with this optimizer's after it.

        Args:
            way: of the model whose parameters it was made of.
        """

        def run() -> None:
            way.with_gradients()
            for own, copy in self._pairs:
                copy.grad = own.grad
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            way.model.zero_grad(set_to_none=True)

        return run


def copied_adamw(model: torch.nn.Module, *, on_cuda: bool) -> CopiedAdamW | str:
    """Return the optimizer, or why there is none.

    Args:
        model: whose trained parameters are copied.
        on_cuda: whether they are on a GPU.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    if refusal := why_no_optimizer(trained, _COPIES, on_cuda=on_cuda):
        return refusal
    try:
        return CopiedAdamW(trained)
    except (torch.cuda.OutOfMemoryError, MemoryError):
        return NO_MEMORY
