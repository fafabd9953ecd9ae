"""Whether a fused call did what eager does: numbers, dtypes, layouts, what shares memory, and what became of the inputs.

Numbers are judged by the package's own rule first: at most half again as far from the fp64 truth as eager. Random programs have
jumps and cancellations, at which a rounding error that anyone may make moves the result by more. Where the rule fails, the
program runs in fp64 several times with every computed value moved by up to a unit of its dtype: an element fails only if it lies
farther from the truth than these runs do, and an integer only if they all agree on another one. Among numbers whose sums overflow
no element fails where eager has no right digit itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_advisor.verify.accuracy import error_of, is_within
from tests.hostile.programs import Noise, Program, run_wide, units_of

_NOISY_RUNS = 16
_SLACK = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one call left: its outputs and its inputs."""

    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Everything that is compared, named."""
        named = [(f"output {number}", value) for number, value in enumerate(self.outputs)]
        return named + [(f"input {number} after the call", value) for number, value in enumerate(self.inputs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was found wrong, and whether rounding noise explains what the plain rule refuses."""

    wrong: tuple[str, ...] = ()
    is_noisy: bool = False


def judge(program: Program, fused: Side, eager: Side, fresh: Sequence[tuple[torch.Tensor, ...]]) -> Judgement:
    """Compare a fused call with eager's.

    Args:
        program: what ran.
        fused: after the fused call.
        eager: after eager's, on inputs of its own.
        fresh: two more sets of the same inputs.
    """
    wrong = layout_faults(fused, eager)
    if wrong:
        return Judgement(wrong=tuple(wrong))
    outputs, inputs = run_wide(program, fresh[0])
    truth = Side(outputs=outputs, inputs=inputs)
    suspects = [
        number for number, ((_, ours), (_, theirs), (_, exact)) in enumerate(
            zip(fused.tensors, eager.tensors, truth.tensors, strict=True)
        ) if not _passes(ours, theirs, exact)
    ]  # fmt: skip
    if not suspects:
        return Judgement()
    units = units_of(program, fresh[1])
    runs = [Side(outputs=one[0], inputs=one[1]) for one in _noisy(program, fresh[0], units)]
    may_overflow = any(one.values.startswith("special") for one in program.inputs)
    for number in suspects:
        name, ours = fused.tensors[number]
        exact, moved = truth.tensors[number][1], [run.tensors[number][1] for run in runs]
        fault = _fault(ours, eager.tensors[number][1], exact, moved, may_overflow=may_overflow)
        if fault:
            wrong.append(f"{name}: {fault}")
    return Judgement(wrong=tuple(wrong), is_noisy=not wrong)


def _noisy(
    program: Program, inputs: tuple[torch.Tensor, ...], units: dict[str, float]
) -> list[tuple[tuple[torch.Tensor, ...], ...]]:
    return [run_wide(program, inputs, Noise(units, random.Random(seed))) for seed in range(_NOISY_RUNS)]


def _passes(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> bool:
    if ours.is_complex():
        ours, theirs, truth = torch.view_as_real(ours), torch.view_as_real(theirs), torch.view_as_real(truth)
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    if bool((_off(ours, truth) & ~_off(theirs, truth)).any()):
        return False
    return is_within(error_of(ours, truth), error_of(theirs, truth), ours.dtype)


def _off(result: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Where one is finite and the other is not, or both are not and differ."""
    got, want = result.to(torch.float64), truth.to(result.dtype).to(torch.float64)
    both = torch.isfinite(got) & torch.isfinite(truth.to(torch.float64))
    return ~(both | (got.isnan() & want.isnan()) | (got == want))


def _fault(
    ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor, runs: Sequence[torch.Tensor], *, may_overflow: bool = False
) -> str:
    if ours.is_complex():
        return f"complex numbers off by {float((ours - theirs).abs().max()):.2e}" if not torch.allclose(ours, theirs) else ""
    if not ours.is_floating_point():
        steady = torch.stack([run == truth for run in runs]).all(0) & (theirs == truth)
        wrong = steady & (ours != theirs)
        if not wrong.any():
            return ""
        return f"{int(wrong.sum())} of {ours.numel()} differ: {_first(ours, theirs, truth, wrong)}"
    exact, got = truth.to(torch.float64), ours.to(torch.float64)
    steady = torch.stack([~_off(run.to(ours.dtype), truth.to(ours.dtype)) for run in runs]).all(0)
    spread = torch.stack([(run.to(torch.float64) - exact).abs() for run in runs]).amax(0).nan_to_num(0.0, 0.0)
    info = torch.finfo(ours.dtype)
    allowed = _SLACK * (spread + info.eps * exact.abs() + info.smallest_normal * info.eps)
    # Eager's own error counts too: its kernels may approximate (a table for exp, say) within more than a unit.
    allowed = torch.maximum(allowed, 1.5 * (theirs.to(torch.float64) - exact).abs().nan_to_num(0.0, 0.0))
    off = _off(ours, truth)
    far = ~off & ((got - exact).abs() > allowed)
    wrong = steady & ((off & ~_off(theirs, truth)) | far)
    if may_overflow:  # a sum of the largest numbers has left eager NaN, or no digit: nothing is farther from the truth
        wrong &= ~_off(theirs, truth) & ~((theirs.to(torch.float64) - exact).abs() > 0.5 * exact.abs())
    if not wrong.any():
        return ""
    return f"{int(wrong.sum())} of {ours.numel()} are off: {_first(ours, theirs, truth, wrong)}"


def _first(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor, where: torch.Tensor) -> str:
    place = tuple(where.nonzero()[0].tolist())
    return f"at {place} fused {ours[place].item()!r}, eager {theirs[place].item()!r}, fp64 {truth[place].item()!r}"


def layout_faults(fused: Side, eager: Side) -> list[str]:
    """Say where dtypes, shapes, strides or shared memory are others than eager's."""
    if len(fused.outputs) != len(eager.outputs):
        return [f"{len(fused.outputs)} outputs instead of {len(eager.outputs)}"]
    wrong = []
    for (name, ours), (_, theirs) in zip(fused.tensors, eager.tensors, strict=True):
        for what, one, other in (
            ("dtype", ours.dtype, theirs.dtype),
            ("shape", tuple(ours.shape), tuple(theirs.shape)),
            ("strides", _strides(ours), _strides(theirs)),
        ):
            if one != other:
                wrong.append(f"{name}: {what} {one}, eager {other}")
    if _sharing(fused) != _sharing(eager):
        wrong.append(f"what shares memory: {_sharing(fused)}, eager {_sharing(eager)}")
    return wrong


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides that mean something: not of a dim of one element, nor of a tensor of none."""
    if value.numel() == 0:
        return ()
    return tuple(stride if size != 1 else 0 for stride, size in zip(value.stride(), value.shape, strict=True))


def _sharing(side: Side) -> list[int]:
    """For each tensor the number of the first one in the same memory, and whether it is the same object."""
    values = [value for _, value in side.tensors]
    memory = [value.untyped_storage().data_ptr() if value.numel() else -1 - number for number, value in enumerate(values)]
    return [memory.index(address) for address in memory] + [next(n for n, one in enumerate(values) if one is v) for v in values]
