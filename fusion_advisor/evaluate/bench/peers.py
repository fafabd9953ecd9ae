"""The contenders of a bench row: what users run today, and our kernels.

Each is made ready outside the timing (compiled, tuned, its inputs laid out as it wants them) and then is one call per set of
inputs. Peers allocate their results as they do for their users; ours write into preallocated ones, as they do inside a model.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.evaluate.bench.inputs import TensorSet, as_list
from fusion_advisor.evaluate.kinds import Place, Reference, Subject, Timed
from fusion_advisor.library.spec import KernelSpec
from fusion_advisor.timing.kernel_timer import Call

NO_LIGER = "liger-kernel is not installed: pip install liger-kernel"


@dataclass(slots=True, kw_only=True)
class Contender:
    """Something that can be timed, or the sentence that says why not."""

    name: str
    call: Call | None = None
    outputs: Callable[[Any], list[torch.Tensor]] = as_list
    """Turns what a call returns into the reference's outputs, in their order; for the check of the numbers only."""
    note: str = ""
    tuning: str = ""
    build_ns: int = 0
    draws: bool = False
    """Whether it draws random numbers of its own, so that its results can only be compared in distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One bench case: a reference, what our kernels compute of it, and its tensors."""

    spec: KernelSpec
    variant: str
    function: Reference
    """The reference itself."""
    reference: Reference
    """With the manifest's constants bound."""
    baseline: Reference | None
    """What users run where that draws random numbers of its own."""
    subject: Subject | None
    """What our kernels compute."""
    refusal: str
    """Why there is no subject."""
    sets: Sequence[TensorSet]
    place: Place


def eager(work: Work) -> Contender:
    """The baseline, or where there is none the reference as written."""
    if work.baseline is None:
        return Contender(name="eager", call=lambda number: work.reference(*work.sets[number].inputs))
    baseline, constants = work.baseline, dict(work.spec.constants)
    return Contender(name="eager", call=lambda number: baseline(*work.sets[number].inputs, **constants), draws=True)


def compiled(work: Work) -> Contender:
    """The same under ``torch.compile``, with its default mode and fixed shapes."""
    torch._dynamo.reset()  # shapes of earlier rows would count against the recompile limit, and turn this one into a fallback
    # The function itself, not the one with its constants bound: dynamo finds an inlined function's globals through sys.modules,
    # where references are not.
    call, constants = torch.compile(work.baseline or work.function, dynamic=False), dict(work.spec.constants)
    started = time.perf_counter_ns()
    with torch.no_grad():
        call(*work.sets[0].inputs, **constants)
    took = time.perf_counter_ns() - started
    return Contender(
        name="compile",
        call=lambda number: call(*work.sets[number].inputs, **constants),
        build_ns=took,
        draws=work.baseline is not None,
    )


def ours(work: Work, backend: str) -> Contender:
    """Our kernel, tuned for this shape."""
    if work.subject is None:
        return Contender(name=backend, note=work.refusal)
    return as_contender(work, backend, work.subject.tuned(backend, work.place))


def peer(name: str, make: Callable[[Any, Place], Timed]) -> Callable[[Work], Contender]:
    """Return what makes a contender of a kind's peer, which is built from the work's subject."""
    return lambda work: as_contender(work, name, make(work.subject, work.place))


def as_contender(work: Work, name: str, timed: Timed) -> Contender:
    """Something that was built, as a contender that writes into preallocated outputs."""
    if timed.launch is None:
        return Contender(name=name, note=timed.note)
    launch = timed.launch
    operands = [(*(s.inputs[index] for index in timed.inputs), *s.outputs) for s in work.sets]

    def call(number: int) -> list[torch.Tensor]:
        launch(*operands[number])
        return work.sets[number].outputs

    return Contender(name=name, call=call, tuning=timed.tuning, build_ns=timed.build_ns, note=timed.note)


# -- liger-kernel ----------------------------------------------------------------------------------------------------------

_Prepared = tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], Reference, Callable[[Any], list[torch.Tensor]]]
"""Lays inputs out, calls the op, and turns its result into the reference's outputs."""


def _same(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return inputs


def _rmsnorm(ops: Any, variant: str, constants: Mapping[str, float]) -> _Prepared:
    offset, casting = (1.0, "gemma") if variant == "gemma" else (0.0, "llama")
    apply = ops.LigerRMSNormFunction.apply
    return _same, lambda x, weight: apply(x, weight, constants["eps"], offset, casting), as_list


def _add_rmsnorm(ops: Any, variant: str, constants: Mapping[str, float]) -> _Prepared:
    offset, casting = (1.0, "gemma") if variant == "gemma" else (0.0, "llama")
    apply = ops.LigerFusedAddRMSNormFunction.apply
    # It returns the normed rows first.
    return (
        _same,
        lambda x, residual, weight: apply(x, residual, weight, constants["eps"], offset, casting),
        lambda r: [r[1], r[0]],
    )


def _layernorm(ops: Any, _variant: str, constants: Mapping[str, float]) -> _Prepared:
    apply = ops.LigerLayerNormFunction.apply
    return _same, lambda x, weight, bias: apply(x, weight, bias, constants["eps"]), as_list


def _pointwise(function: str) -> Callable[[Any, str, Mapping[str, float]], _Prepared]:
    return lambda ops, _variant, _constants: (_same, getattr(ops, function).apply, as_list)


LIGER: dict[str, Callable[[Any, str, Mapping[str, float]], _Prepared]] = {
    "rmsnorm": _rmsnorm,
    "add_rmsnorm": _add_rmsnorm,
    "layernorm": _layernorm,
    "swiglu": _pointwise("LigerSiLUMulFunction"),
    "swiglu_packed": _pointwise("LigerFusedGateUpSiLUMulFunction"),
    "geglu_tanh": _pointwise("LigerGELUMulFunction"),
    "relu_squared": _pointwise("LigerReLUSquaredFunction"),
    "softmax": _pointwise("LigerSoftmaxFunction"),
}
"""Our kernels that liger-kernel has an op for. A wrong pairing costs nothing: wrong numbers are never timed.

Its rope is left out: a run over sequence lengths with it in ended in an illegal memory access (liger-kernel 0.8.5, H200); the
same run without it does not, and memcheck saw no invalid access in ours at the shortest length.
"""


def liger(work: Work) -> Contender:
    """liger-kernel's op, where it has one."""
    make = LIGER.get(work.spec.name)
    if make is None:
        return Contender(name="liger", note=f"liger-kernel has no op for {work.spec.name}")
    try:
        ops = importlib.import_module("liger_kernel.ops")
    except ImportError:
        return Contender(name="liger", note=NO_LIGER)
    lay_out, function, outputs = make(ops, work.variant, dict(work.spec.constants))
    inputs = [lay_out(s.inputs) for s in work.sets]
    return Contender(name="liger", call=lambda number: function(*inputs[number]), outputs=outputs)
