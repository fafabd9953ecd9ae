"""Times the parts of a training step by themselves, and counts what a step trains on.

The forward pass runs with its loss and without a backward pass. An optimizer runs over copies of the trained parameters, so that
no weight of the model is written.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.capture.training import loss_of
from fusion_advisor.records import Finding, OptimizerTime
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.interleaving import interleave
from fusion_advisor.units import duration

Call = Callable[..., Any]

_COPIES = 4
"""Of a parameter: its copy, a gradient, and AdamW's two moments."""
_CLEAR_SHARE = 0.95
"""What is faster takes at most this share of the default's time: less is no finding."""
_USUALLY_FREE_BYTES = 4 << 30
"""On a CPU whose system does not tell."""
NO_MEMORY = "no memory is left for copies of the parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocked:
    """How parts are timed.

    Attributes:
        on_cuda: whether they run on a GPU.
        rounds: at most.
        budget_s: seconds for all rounds.
        timer: of each run; a GPU is waited for inside it.
    """

    on_cuda: bool
    rounds: int
    budget_s: float
    timer: HostTimer


def pass_times(
    calls: Sequence[Call], args: Sequence[Any], kwargs: dict[str, Any], step: Callable[[Call], Callable[[], object]], how: Clocked
) -> list[tuple[int, int]]:  # fmt: skip
    """Return the medians of forward and backward pass of each call; all are timed in turn.

    Args:
        calls: ways to run the forward pass.
        args: of a call.
        kwargs: of a call.
        step: makes the whole step of a call.
        how: they are timed.
    """

    def waited(run: Callable[[], object]) -> Callable[[], object]:
        def timed() -> None:
            run()
            if how.on_cuda:
                torch.cuda.synchronize()

        return timed

    def forward(call: Call) -> Callable[[], object]:
        def run() -> None:
            with torch.enable_grad():  # what it keeps for a backward pass is dropped
                loss_of(call(*args, **kwargs))

        return run

    candidates = [waited(part) for call in calls for part in (forward(call), step(call))]
    times = interleave(candidates, rounds=how.rounds, budget_s=how.budget_s, on_cuda=False, timer=how.timer)
    medians = [round(statistics.median(own)) for own in times]
    return [(first, max(whole - first, 0)) for first, whole in zip(medians[::2], medians[1::2], strict=True)]


def tokens_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, str]:
    """Return how much one call trains on, and the word for it: tokens of integer ids in rows, samples of all else.

    Args:
        args: of the call.
        kwargs: of the call.
    """
    tensors = [one for one in pytree.tree_leaves((list(args), kwargs)) if isinstance(one, torch.Tensor) and one.dim()]
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return ids.numel(), "tokens"
    return (int(tensors[0].shape[0]), "samples") if tensors else (0, "")


def time_optimizers(
    parameters: Iterable[torch.nn.Parameter], how: Clocked
) -> tuple[tuple[OptimizerTime, ...], str]:  # fmt: skip
    """Time a step of AdamW over copies of parameters, as torch makes it by default and in the other ways it offers.

    Args:
        parameters: of the model; only those that are trained count.
        how: they are timed; on a GPU by its own clock.

    Returns:
        The times, the default's first; or none, and the reason.
    """
    trained = [one for one in parameters if one.requires_grad]
    if refusal := why_no_optimizer(trained, _COPIES, on_cuda=how.on_cuda):
        return (), refusal
    times = []
    try:
        copies = [one.detach().clone().requires_grad_() for one in trained]
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        for names in ((), ("fused",)) if how.on_cuda else ((), ("foreach",), ("fused",)):
            optimizer = torch.optim.AdamW(copies, lr=1e-6, foreach="foreach" in names or None, fused="fused" in names or None)
            (own,) = interleave(
                [optimizer.step], rounds=how.rounds, budget_s=how.budget_s / 3, on_cuda=how.on_cuda, timer=how.timer
            )
            given = "".join(f", {name}=True" for name in names)
            change = f"torch.optim.AdamW(model.parameters(){given})"
            times.append(OptimizerTime(change=change, step_ns=round(statistics.median(own))))
            del optimizer  # its state, before the next one's is made
    except (torch.cuda.OutOfMemoryError, MemoryError):
        return (), NO_MEMORY
    return tuple(times), ""


def why_no_optimizer(trained: Sequence[torch.Tensor], copies: int, *, on_cuda: bool) -> str:
    """Say why fused AdamW cannot run over copies of parameters; empty where it can.

    Args:
        trained: the parameters.
        copies: how many times their bytes it takes.
        on_cuda: whether they are on a GPU.
    """
    if not trained:
        return "the step trains no parameter: its gradients are those of its inputs"
    if any(type(one.data) is not torch.Tensor for one in trained):
        return "a parameter is of a tensor class that only an optimizer of the program itself may write"
    if not all(one.is_floating_point() for one in trained):
        return "a parameter is complex: fused AdamW takes floating-point ones alone"
    return NO_MEMORY if copies * sum(one.nbytes for one in trained) > _free_bytes(on_cuda=on_cuda) else ""


def _free_bytes(*, on_cuda: bool) -> int:
    if on_cuda:
        return torch.cuda.mem_get_info()[0]
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return _USUALLY_FREE_BYTES
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def optimizer_finding(times: Sequence[OptimizerTime], *, device_ns: int, number: int) -> tuple[Finding, ...]:
    """Return what a faster way to make the optimizer would save; empty where the default is about as fast.

    Args:
        times: of :func:`time_optimizers`.
        device_ns: of the step.
        number: of the finding.
    """
    if not times:
        return ()
    default, best = times[0], min(times, key=lambda one: one.step_ns)
    if best.step_ns > _CLEAR_SHARE * default.step_ns:
        return ()
    gain_ns = default.step_ns - best.step_ns
    return (
        Finding(
            id=f"N{number}", title="AdamW updates all parameters in fewer kernels", change=best.change, gain_ns=gain_ns,
            reason=f"on copies of the trained parameters torch's default takes {duration(default.step_ns)} a step, this "
            f"{duration(best.step_ns)}; both come on top of forward and backward",
            is_measured=True, share=gain_ns / max(device_ns, 1),
        ),
    )  # fmt: skip
