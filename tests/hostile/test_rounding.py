"""Random chains that cast on purpose, and that jump: a kernel must round where the model rounds.

In exact mode a chain of exactly rounded ops must give eager's bits. In the usual mode a chain's decisions (comparisons, whole
numbers) must be eager's, because every 16-bit value in front of a jump is rounded.
"""

from __future__ import annotations

import random

import pytest
import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.lowering.builder import builder
from fusion_advisor.lowering.lower import lower

_HALVES = (torch.bfloat16, torch.float16)
_JUMPS = {
    "ceil": torch.ceil, "floor": torch.floor, "round": torch.round, "trunc": torch.trunc, "sign": torch.sign,
    "above": lambda x: x > 0.1, "at most": lambda x: x <= 0.3, "equal": lambda x: x == 1.5, "int": lambda x: x.to(torch.int32),
    "bool": lambda x: x.to(torch.bool), "isinf": torch.isinf, "threshold": lambda x: torch.threshold(x, 0.25, -7.0),
    "not": torch.logical_not,
}  # fmt: skip


def kernel_of(function, inputs, tmp_path, *, is_exact=False):
    """Run a function's chain as one C++ kernel; return its result."""
    graph = trace(function, inputs)
    names = tuple(f"x{number}" for number in range(len(inputs)))
    ops, _ = describe(Region(index=0, graph=graph, original=graph, names=names, roles=("input",) * len(inputs)))
    members = [op.index for op in ops if op.role == "op"]
    found = lower(ops, members, [ops[-1].args[0].index], is_exact=is_exact)
    backend = CppBackend()
    rendered = backend.render(found.program, Header(title="chain", summary="", origin="a test"), tuning=Tuning(), fast_math=False)
    launch = backend.build(rendered, tmp_path / f"{rendered.entry}.cpp").bind(found.program)
    out = torch.empty_like(function(*inputs))
    launch(*(inputs[index] for index in found.inputs), out)
    return out


def drawn(seed, dtype):
    """A chain of exactly rounded ops with a narrowing cast or a widening one here and there."""
    picks = random.Random(seed)
    steps = []
    for _ in range(picks.randint(3, 7)):
        number, narrow = picks.choice([0.1, 0.3, 1.1, 1.5, -0.7, 3.0]), picks.choice(_HALVES)
        steps.append(picks.choice([
            lambda a, b, n=number: a * n, lambda a, b, n=number: a + n, lambda a, b, n=number: a - n, lambda a, b: a * b,
            lambda a, b: a + b, torch.maximum, lambda a, b: torch.relu(a), lambda a, b: -a,
            lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b, t=narrow: a.to(t).to(torch.float32),
            lambda a, b: a.float() * 1.3, lambda a, b, d=dtype: a.to(d),
        ]))  # fmt: skip

    def chain(x, y):
        value = x * 1.1
        for step in steps:
            value = step(value, y)
        return value

    return chain


def inputs_of(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(64, 48, generator=generator) * 2).to(dtype) for _ in range(2)]


def differing(one, other):
    return int((~((one == other) | ((one != one) & (other != other)))).sum())


@pytest.mark.parametrize("dtype", [torch.float32, *_HALVES], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_an_exact_chain_has_eagers_bits(tmp_path, seed, dtype):
    chain, inputs = drawn(seed, dtype), inputs_of(dtype, seed)
    assert differing(kernel_of(chain, inputs, tmp_path, is_exact=True), chain(*inputs)) == 0


@pytest.mark.parametrize("narrow", _HALVES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_an_explicit_cast_in_an_fp32_chain_keeps_its_rounding(tmp_path, seed, narrow):
    picks = random.Random(seed)
    first, last = picks.uniform(0.5, 2), picks.uniform(0.5, 2)

    def chain(x, y):
        return (x * first).to(narrow).to(torch.float32) * last + y

    inputs = inputs_of(torch.float32, seed)
    assert differing(kernel_of(chain, inputs, tmp_path), chain(*inputs)) == 0


@pytest.mark.parametrize("dtype", _HALVES, ids=str)
@pytest.mark.parametrize("jump", _JUMPS)
def test_a_jump_of_a_16_bit_chain_is_eagers(tmp_path, jump, dtype):
    def chain(x, y):
        return _JUMPS[jump](x * 1.5 + y)

    inputs = inputs_of(dtype)
    assert differing(kernel_of(chain, inputs, tmp_path), chain(*inputs)) == 0


def test_what_eager_overflows_is_infinite_for_a_jump(tmp_path):
    def chain(x, y):
        return torch.isinf(x * 300.0) | (x * 300.0 * 0.0001 > y)

    inputs = [torch.linspace(-400, 400, 512).to(torch.float16), torch.full((512,), 3.0, dtype=torch.float16)]
    assert chain(*inputs).any()
    assert not chain(*inputs).all()
    assert differing(kernel_of(chain, inputs, tmp_path), chain(*inputs)) == 0


def test_a_scalar_that_a_16_bit_value_is_compared_with_is_rounded(tmp_path):
    x = torch.full((64,), 0.1, dtype=torch.bfloat16)
    out = kernel_of(lambda x: torch.where(x == 0.1, x + 1, x - 1), [x], tmp_path)
    assert torch.equal(out, torch.where(x == 0.1, x + 1, x - 1))


@pytest.mark.parametrize("planted", ["cast", "jump"])
def test_one_rounding_left_out_is_caught(tmp_path, monkeypatch, planted):
    """The tests above see a lowering that forgets to round."""
    monkeypatch.setattr(builder, "rounded", lambda _lowering, number, _dtype: number)

    def cast(x, y):
        return (x * 1.3).to(torch.bfloat16).to(torch.float32) * 0.7 + y

    def jump(x, y):
        return torch.ceil(x * 1.5 + y)

    chain, dtype = (cast, torch.float32) if planted == "cast" else (jump, torch.bfloat16)
    inputs = inputs_of(dtype)
    assert differing(kernel_of(chain, inputs, tmp_path), chain(*inputs)) > 0
