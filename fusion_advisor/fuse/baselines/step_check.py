"""Compares the loss and all gradients of a way to run a training step with those of eager's.

Where the step draws no random numbers, the same step in a wider dtype is the truth, and eager's own error is the measure.

Where it draws some (dropout), a compiler draws others, and no step can be compared number by number. Then the distances between
eager's steps of several seeds are the measure: a wrong loss and a missing or doubled gradient still show, a small error does not.

A compiler's step is checked in a thread of its own (:mod:`fusion_advisor.runtime.own_thread`): behind other steps of the process
torch.compile's gradients of Llama-3.2-1B were off by their own size on an H200, and right in a process of their own.

A gradient of which eager has no digit right (a key's bias in attention: its true gradient is 0) is judged in neither case. Of a
random step the wider one draws other numbers: there such a gradient is one that all but vanishes in it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.fuse.baselines.training_step import TrainingWay
from fusion_advisor.fuse.rewrite.device_memory import release_cached_memory
from fusion_advisor.records import StepCheck
from fusion_advisor.runtime.own_thread import in_own_thread
from fusion_advisor.verify.accuracy import error_of
from fusion_advisor.verify.subgraph_oracle import widened
from fusion_advisor.verify.wide_copies import widened_copy

_logger = logging.getLogger(__name__)

OTHER_NUMBERS = "other random numbers"
_SEEDS = (1, 2, 3)
"""Of eager's steps that tell how far random numbers move loss and gradients; every way is compared at seed 0."""
_POOLED, _SINGLE = 4.0, 16.0
"""Times eager's own error that all gradients' and one gradient's may be. Both are wide: they are to find what is wrong, and the
report shows the errors themselves."""
_POOLED_RANDOM, _SINGLE_RANDOM, _LOSS_RANDOM = 1.5, 3.0, 3.0
"""The same for distances between steps of different random numbers; the last one is of the loss."""
_SIZES_RANDOM, _LEAST_SIZE = 3.0, math.log(1.25)
"""Times the change of a gradient's size between eager's seeds that its logarithm may change, and what it may change always."""
_NO_DIGIT = 0.5
"""Relative error from which eager's gradient has no digit right."""
_VANISHING = 0.01
"""Of a gradient's size, what is left of it in a wider dtype where it is nothing but rounding."""
_UNITS = {2: 0.5, 4: 32.0, 8: 32.0}
"""By the bytes of a parameter: units of the last place that a loss may be off by, whatever eager's own error is. A mean of
thousands of fp32 rows is a few units away in another order; a loss of 16-bit logits is computed in fp32."""
_USUAL = {2: 0.03, 4: 1e-4, 8: 1e-12}
"""Stands for eager's own error of all gradients where no truth tells it, by the bytes of a parameter."""

_Errors = dict[str, tuple[float, float, float]]
"""By a gradient's name: its relative error, the norm of the gradient that it is compared with, and its own norm."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What one run gave; gradients lie in the host's memory, so that they take none of what the ways need."""

    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReference:
    """What ways are compared with.

    Attributes:
        eager: eager's step.
        truth: the same in a wider dtype; eager's where there is none, or where the step is random.
        oracle: as in :class:`StepCheck`.
        own: eager's own error of each gradient, or the largest distance between its seeds; empty: not known.
        sizes: of each gradient the largest logarithm of its size's change between eager's seeds; empty for a step without random
            numbers.
        loss: the truth's, or the mean of eager's seeds.
        loss_limit: how far from that a loss may be.
        itemsize: bytes of the narrowest parameter.
    """

    eager: _Step
    truth: _Step
    oracle: str
    own: dict[str, float]
    sizes: dict[str, float]
    loss: float
    loss_limit: float
    itemsize: int

    def check(self, way: TrainingWay) -> StepCheck:
        """Run a way once with seed 0, and compare it.

        Args:
            way: of the same model and call.
        """
        step, _ = _run(way, 0)
        errors = _errors(step, self.truth, way)
        judged = [name for name in errors if name in self.own and (self.oracle == OTHER_NUMBERS or self.own[name] < _NO_DIGIT)]
        worst = max(judged, key=lambda name: errors[name][0] / max(self.own[name], self._unit), default="")
        if self.own:
            pooled, own = _mean([errors[name][0] for name in judged]), _mean([self.own[name] for name in judged])
        else:
            pooled, own = _of_all(errors), 0.0
        found = StepCheck(
            oracle=self.oracle, loss=step.loss, eager_loss=self.eager.loss, gradients=len(errors), rel_l2=pooled,
            eager_rel_l2=own, worst=worst, worst_rel_l2=errors[worst][0] if worst else 0.0,
            worst_eager_rel_l2=self.own[worst] if worst else 0.0,
        )  # fmt: skip
        return replace(found, reason=self._wrong(found, step) or self._wrong_size(errors))

    @property
    def _unit(self) -> float:
        return {2: 2.0**-8, 4: 2.0**-23}.get(self.itemsize, 2.0**-52)

    def _wrong(self, found: StepCheck, step: _Step) -> str:
        """Say what is wrong; empty where nothing is."""
        if lost := self.eager.gradients.keys() ^ step.gradients.keys():
            name = min(lost)
            return f"`{name}` has {'no gradient' if name in self.eager.gradients else 'a gradient, and none in eager'}"
        if not math.isfinite(self.loss):
            return ""  # there is nothing to compare with
        if not all(map(math.isfinite, (found.loss, found.rel_l2, found.worst_rel_l2))):
            return "its loss or a gradient is not finite, and eager's are"
        if abs(found.loss - self.loss) > self.loss_limit:
            return f"its loss is {found.loss:.5g}, eager's {found.eager_loss:.5g}"
        is_random = self.oracle == OTHER_NUMBERS
        pooled, single = (_POOLED_RANDOM, _SINGLE_RANDOM) if is_random else (_POOLED, _SINGLE)
        own = found.eager_rel_l2 if self.own else _USUAL.get(self.itemsize, _USUAL[8])
        measure = "eager's with other random numbers" if is_random else "eager's own" if self.own else "usual"
        for what, error, usual, times in (
            ("all gradients together", found.rel_l2, own, pooled),
            (f"the gradient of `{found.worst}`", found.worst_rel_l2, found.worst_eager_rel_l2, single),
        ):
            if error > times * max(usual, self._unit):
                return f"the error of {what} is {error:.2g}, {measure} {usual:.2g}"
        return ""

    def _wrong_size(self, errors: _Errors) -> str:
        """Name a gradient that is larger or smaller than random numbers make it; a doubled one may lie within the distances."""
        for name, usual in self.sizes.items():
            size = _size(errors[name])
            if size > max(_SIZES_RANDOM * usual, _LEAST_SIZE):
                times = errors[name][2] / max(errors[name][1], 1e-300)
                return f"the gradient of `{name}` is {times:.2g} times as large as eager's"
        return ""


def reference_of(eager: TrainingWay) -> StepReference:
    """Run eager's step, and the same step in a wider dtype or with other random numbers.

    Args:
        eager: the model's own ops.
    """
    step, is_random = _run(eager, 0)
    itemsize = min((one.element_size() for one in eager.model.parameters() if one.is_floating_point()), default=4)
    slack = _UNITS.get(itemsize, _UNITS[8]) * {2: 2.0**-8, 4: 2.0**-23}.get(itemsize, 2.0**-52) * abs(step.loss)
    wide = torch.float32 if itemsize == 2 else torch.float64
    truth = _wide_step(eager, wide)
    if is_random:
        others = [_run(eager, seed)[0] for seed in _SEEDS]
        distances = [_errors(one, step, eager) for one in others]
        noise = set() if truth is None else _vanishing(step, truth)
        shared = [name for name in step.gradients if name not in noise and all(name in one for one in distances)]
        own = {name: max(one[name][0] for one in distances) for name in shared}
        sizes = {name: max(_size(one[name]) for one in distances) for name in shared}
        losses = [step.loss, *(one.loss for one in others)]
        return StepReference(
            eager=step, truth=step, oracle=OTHER_NUMBERS, own=own, sizes=sizes, loss=sum(losses) / len(losses),
            loss_limit=max(_LOSS_RANDOM * (max(losses) - min(losses)), slack), itemsize=itemsize,
        )  # fmt: skip
    if truth is None:
        return StepReference(
            eager=step, truth=step, oracle="eager", own={}, sizes={}, loss=step.loss, loss_limit=slack, itemsize=itemsize
        )  # fmt: skip
    own = {name: error for name, (error, _, _) in _errors(step, truth, eager).items()}
    return StepReference(
        eager=step, truth=truth, oracle=str(wide).removeprefix("torch."), own=own, sizes={}, loss=truth.loss,
        loss_limit=max(_POOLED * abs(step.loss - truth.loss), slack), itemsize=itemsize,
    )  # fmt: skip


def _vanishing(step: _Step, wide: _Step) -> set[str]:
    """Name the gradients that are nothing but rounding."""

    def norm(gradient: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))

    both = step.gradients.keys() & wide.gradients.keys()
    return {name for name in both if norm(wide.gradients[name]) < _VANISHING * norm(step.gradients[name])}


def _run(way: TrainingWay, seed: int) -> tuple[_Step, bool]:
    """Run a step with a seed; also return whether it drew random numbers."""
    return in_own_thread(lambda: _run_here(way, seed)) if way.is_checked_alone else _run_here(way, seed)


def _run_here(way: TrainingWay, seed: int) -> tuple[_Step, bool]:
    devices = sorted({one.device.index for one in way.model.parameters() if one.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        before = _states(devices)
        loss = way.with_gradients()
        is_random = any(not torch.equal(one, two) for one, two in zip(before, _states(devices), strict=True))
    gradients = {
        name: parameter.grad.detach().to("cpu", copy=True)
        for name, parameter in way.model.named_parameters()
        if parameter.grad is not None
    }
    way.model.zero_grad(set_to_none=True)
    return _Step(float(loss), gradients), is_random


def _states(devices: Sequence[int]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _wide_step(eager: TrainingWay, wide: torch.dtype) -> _Step | None:
    """Run the step of a copy of the model in a wider dtype; None where there is no memory or no kernel for it."""
    try:
        twin = widened_copy(eager.model, wide)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: widened(one, wide), (eager.args, dict(eager.kwargs)))
        way = TrainingWay(model=twin, args=args, kwargs=kwargs, forward=twin, model_id=eager.model_id)
        return _run(way, 0)[0]
    except Exception:  # the model's own code refuses another dtype in whatever way it likes
        _logger.info("no step of a copy in %s", wide, exc_info=True)
        return None
    finally:
        release_cached_memory()


def _errors(step: _Step, truth: _Step, way: TrainingWay) -> _Errors:
    """Compare the gradients that both have, one after another on the model's device."""
    device = next(iter(way.model.parameters())).device
    found = {}
    for name, gradient in step.gradients.items():
        if name in truth.gradients:
            true, own = truth.gradients[name].to(device), gradient.to(device)
            norms = [float(torch.linalg.vector_norm(one, dtype=torch.float64)) for one in (true, own)]
            found[name] = (error_of(own, true).rel_l2, norms[0], norms[1])
    return found


def _mean(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1))


def _of_all(errors: _Errors) -> float:
    """The error of all gradients as one vector: what is nothing but rounding is small there."""
    norm = math.hypot(*(norm for _, norm, _ in errors.values()))
    return math.hypot(*(error * norm for error, norm, _ in errors.values())) / max(norm, 1e-300)


def _size(one: tuple[float, float, float]) -> float:
    """How far a gradient's size is from the other's, as the logarithm of their ratio."""
    return abs(math.log(max(one[2], 1e-300) / max(one[1], 1e-300)))
