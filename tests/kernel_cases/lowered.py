"""A traced function lowered and evaluated: the road from torch code to numbers, without a backend."""

from __future__ import annotations

import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.op_inputs import viewed
from fusion_advisor.lowering.lower import lower
from fusion_advisor.records import Ref
from tests.kernel_cases.evaluate import evaluate


def records(function, *inputs, roles=None, names=None):
    """Return the op records of a traced function."""
    graph = trace(function, inputs)
    names = names or tuple(f"x{number}" for number in range(len(inputs)))
    region = Region(index=0, graph=graph, original=graph, names=names, roles=roles or ("input",) * len(inputs))
    return describe(region)[0]


def lower_function(function, *inputs, **kind):
    """Lower a whole function; return the Lowered and the ops."""
    ops = records(function, *inputs, **kind)
    returned = ops[-1].args[0]
    outputs = [ref.index for ref in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(ref, Ref)]
    while any(viewed(ops[index], ops) is not None for index in outputs):
        outputs = [index if (shown := viewed(ops[index], ops)) is None else shown for index in outputs]
    members = [op.index for op in ops if op.role == "op"]
    return lower(ops, members, outputs), ops


def run(lowered, ops, inputs):
    """Evaluate a lowered function in fp64; return its outputs in their own shapes."""
    at = [op.index for op in ops if op.role not in ("op", "output")]
    flat = []
    for root in lowered.inputs:
        tensor = inputs[at.index(root)]
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat.append(tensor.as_strided((reach,), (1,)))
    found = []
    for index, result in zip(lowered.outputs, evaluate(lowered.program, *flat), strict=True):
        meta = ops[index].outputs[0]
        found.append(result.as_strided(meta.shape, meta.stride))
    return found


def check(function, *inputs, rtol=1e-12, atol=1e-12):
    """Lower ``function`` as traced on ``inputs``, and compare with torch in fp64; returns the Program."""
    lowered, ops = lower_function(function, *inputs)
    wide = [value.double() if value.is_floating_point() else value for value in inputs]
    expected = function(*wide)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, want in zip(run(lowered, ops, inputs), expected, strict=True):
        want = want.double() if want.is_floating_point() else want.to(got.dtype)  # noqa: PLW2901
        torch.testing.assert_close(got.reshape(want.shape), want, rtol=rtol, atol=atol, equal_nan=True)
    return lowered.program
