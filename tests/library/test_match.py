"""Matching by what is computed: forms of one formula are equal, other formulas are not, constants bind."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from fusion_advisor.library.match import find_match, structure
from fusion_advisor.library.patterns import library_patterns
from tests.kernel_cases.lowered import lower_function

X, Y, W, B = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8), torch.randn(8)


SCORES, KEEP = torch.randn(2, 3, 5, 8), torch.ones(2, 1, 5, 8, dtype=torch.bool).tril()


def found(function, *inputs):
    return find_match(lower_function(function, *inputs)[0].program, library_patterns()[0])


def rms(x, w, eps):
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).type_as(x)


SAME = {
    "gelu_tanh": (lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))), (X,)),
    "gelu_tanh turned around": (lambda x: (torch.tanh((x * x * x * 0.044715 + x) * 0.7978845608028654) + 1) * (x * 0.5), (X,)),
    "gelu_tanh built in": (lambda x: functional.gelu(x, approximate="tanh"), (X,)),
    "gelu_erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), (X,)),
    "swiglu": (lambda g, u: functional.silu(g) * u, (X, Y)),
    "swiglu turned around": (lambda g, u: u * (torch.sigmoid(g) * g), (X, Y)),
    "rmsnorm": (lambda x, w: rms(x, w, 1e-6), (X, W)),
    "layernorm": (lambda x, w, b: functional.layer_norm(x, (8,), w, b), (X, W, B)),
    "add_layernorm": (lambda x, r, w, b: (t := r + x, functional.layer_norm(t, (8,), w, b)), (X, Y, W, B)),
    "add_rmsnorm": (lambda x, r, w: (t := x + r, rms(t, w, 1e-5)), (X, Y, W)),
    "quick_gelu": (lambda x: torch.sigmoid(x * 1.702) * x, (X,)),
    "silu": (lambda x: torch.sigmoid(x) * x, (X,)),
    "relu_squared": (lambda x: functional.relu(x) ** 2, (X,)),
    "relu_squared with a clamp": (lambda x: torch.clamp(x, min=0).square(), (X,)),
    "softcap": (lambda x: torch.tanh(x / 50.0) * 50.0, (X,)),
    "scale_gelu_tanh": (lambda x: functional.gelu(1.3 * x, approximate="tanh"), (X,)),
    "scale_gelu_erf": (lambda x: functional.gelu(x * 1.3), (X,)),
    "scale_silu": (lambda x: functional.silu(0.5 * x), (X,)),
    "bias_gelu_tanh": (lambda x, b: functional.gelu(b + x, approximate="tanh"), (X, B)),
    "bias_gelu_erf": (lambda x, b: functional.gelu(x + b), (X, B)),
    "bias_quick_gelu": (lambda x, b: (y := x + b) * torch.sigmoid(1.702 * y), (X, B)),
    "bias_silu": (lambda x, b: functional.silu(x + b), (X, B)),
    "bias_relu_squared": (lambda x, b: functional.relu(x + b).square(), (X, B)),
    "geglu_tanh": (lambda g, u: u * functional.gelu(g, approximate="tanh"), (X, Y)),
    "geglu_erf": (lambda g, u: functional.gelu(g) * u, (X, Y)),
    "reglu": (lambda g, u: u * functional.relu(g), (X, Y)),
    "swiglu_packed": (lambda p: functional.silu((halves := p.chunk(2, -1))[0]) * halves[1], (X,)),
    "swiglu_packed by split": (lambda p: (halves := p.split(4, -1))[0] * functional.silu(halves[1]), (X,)),
    "geglu_tanh_packed": (lambda p: functional.gelu(p[:, :4], approximate="tanh") * p[:, 4:], (X,)),
    "geglu_erf_packed": (lambda p: p[:, :4] * functional.gelu(p[:, 4:]), (X,)),
    "reglu_packed": (lambda p: functional.relu(p.narrow(-1, 0, 4)) * p.narrow(-1, 4, 4), (X,)),
    "layernorm_gelu_erf": (lambda x, w, b: functional.gelu(functional.layer_norm(x, (8,), w, b)), (X, W, B)),
    "layernorm_gelu_tanh": (
        lambda x, w, b: functional.gelu(functional.layer_norm(x, (8,), w, b), approximate="tanh"), (X, W, B),
    ),
    "softmax": (lambda x: functional.softmax(x, -1, dtype=torch.float32).type_as(x), (X,)),
    "log_softmax": (lambda x: functional.log_softmax(x, -1), (X,)),
    "log_softmax in two steps": (lambda x: (y := x - x.amax(-1, True)) - y.exp().sum(-1, True).log(), (X,)),
    "masked_softmax_additive": (lambda s, m: functional.softmax(s * 0.3 + m, -1), (SCORES, torch.zeros(2, 1, 5, 8))),
    "masked_softmax_additive of padding": (lambda s, m: functional.softmax(m + s / 8.0, -1), (SCORES, torch.zeros(2, 1, 1, 8))),
    "masked_softmax_boolean": (lambda s, m: torch.where(m, s * 0.3, -torch.inf).softmax(-1), (SCORES, KEEP)),
    "masked_softmax_boolean filled": (lambda s, m: (s * 0.3).masked_fill(~m, -1e9).softmax(-1), (SCORES, KEEP)),
    "masked_softmax_boolean of blocked": (lambda s, m: (s * 0.3).masked_fill(m, -1e4).softmax(-1), (SCORES, KEEP)),
    "rmsnorm of queries": (lambda x, w: rms(x, w, 1e-6).transpose(1, 2), (torch.randn(2, 5, 3, 8), W)),
    "rmsnorm of transposed queries": (lambda x, w: rms(x, w, 1e-6), (torch.randn(2, 5, 3, 8).transpose(1, 2), W)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_same_formula_matches_however_it_is_written(name):
    function, inputs = SAME[name]
    match = found(function, *inputs)
    assert match is not None and match.kernel == name.split()[0]


OTHER = {
    "another cubic": (lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.05 * torch.pow(x, 3.0)))), (X,)),
    "no half": (lambda x: 1.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0)))), (X,)),
    "minus": (lambda g, u: functional.silu(g) - u, (X, Y)),
    "silu of both": (lambda g, u: functional.silu(g) * functional.silu(u), (X, Y)),
    "sum, not mean": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)), (X, W)),
    "weight per row": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), (X, torch.randn(6, 1))),
    "squared once more": (lambda x, w: w * (x * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), (X, W)),
    "centred by another": (lambda x, r, w, b: (r, functional.layer_norm(x - r, (8,), w, b)), (X, Y, W, B)),
    "quick_gelu with another slope": (lambda x: x * torch.sigmoid(1.5 * x), (X,)),
    "a cap that is no cap": (lambda x: 50.0 * torch.tanh(x / 30.0), (X,)),
    "relu cubed": (lambda x: functional.relu(x) ** 3, (X,)),
    "gate of itself": (lambda p: functional.silu(p[:, :4]) * p[:, :4], (X,)),
    "gelu and a norm after it": (lambda x, w, b: functional.layer_norm(functional.gelu(x), (8,), w, b), (X, W, B)),
    "a scale that GELU's constants take in": (lambda x: functional.gelu(0.5 * x), (X,)),
    "double": (lambda x: functional.gelu(x, approximate="tanh"), (X.double(),)),
    "half a rotation": (
        lambda x, c, s: x * c + torch.cat((-x[..., 6:], x[..., :6]), -1) * s,
        (torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8)),
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_formula_does_not_match(name):
    function, inputs = OTHER[name]
    match = found(function, *inputs)
    assert match is None or match.kernel == "none"


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.25])
def test_eps_binds_to_the_models_value_and_names_its_constant(eps):
    match = found(lambda x, w: rms(x, w, eps), X, W)
    assert match.constants == (("eps", eps),)
    assert [value.constant for value in match.program.values if value.constant_name == "eps"] == [eps]
    norm = found(lambda x, w, b: functional.layer_norm(x, (8,), w, b, eps), X, W, B)
    assert norm.constants == (("eps", eps),)


def test_constants_that_are_written_in_two_ways_are_the_same():
    match = found(lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3)))), X)
    assert match is not None and match.kernel == "gelu_tanh"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_pattern_serves_every_dtype(dtype):
    assert found(lambda x: functional.gelu(x), X.to(dtype)).kernel == "gelu_erf"  # noqa: PLW0108


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (3, 1, 8), (1, 5, 8), (4, 5, 8)], ids=str)
def test_batches_and_sequences_of_one_match_too(shape):
    x = torch.randn(shape)
    assert found(lambda x, w: rms(x, w, 1e-6), x, W).kernel == "rmsnorm"
    assert found(lambda g, u: functional.silu(g) * u, x, x + 1).kernel == "swiglu"


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (1, 3, 4, 8), (2, 3, 1, 8), (1, 3, 1, 8), (1, 1, 4, 6), (2, 1, 4, 128)], ids=str)
def test_rope_matches_at_every_head_size(shape):
    batch, heads, seq, dim = shape

    def rope(x, cos, sin):
        return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin

    x = torch.randn(batch, seq, heads, dim).transpose(1, 2)
    table = torch.randn(batch, 1, seq, dim)
    match = found(rope, x, table, table + 1)
    assert match is not None and match.kernel == "rope"
    normed = found(lambda x, w, *tables: rope(rms(x, w, 1e-5), *tables), x, torch.randn(dim), table, table + 1)
    assert normed is not None and (normed.kernel, dict(normed.constants)) == ("qk_norm_rope", {"eps": 1e-5})


def test_operands_get_the_kernels_names_in_the_programs_own_order():
    match = found(lambda u, g: functional.silu(g) * u, X, Y)
    assert [operand.name for operand in match.program.operands] == ["gate", "up", "out"] or [
        operand.name for operand in match.program.operands
    ] == ["up", "gate", "out"]
    gate = [operand.name for operand in match.program.operands].index("gate")
    sigmoid = next(value for value in match.program.values if value.op == "sigmoid")
    assert match.program.values[sigmoid.args[0]].operand == gate


def test_structure_is_blind_to_sizes_and_sees_everything_else():
    def of(function, *inputs):
        return structure(lower_function(function, *inputs)[0].program).text

    wide = of(lambda x, w: x * w + x, X, W)
    assert wide == of(lambda x, w: x + w * x, torch.randn(9, 33), torch.randn(33))
    assert wide != of(lambda x, w: x * w + w, X, W)
    assert wide != of(lambda x, w: x * w + x, X, Y)
    assert wide != of(lambda x, w: x * w - x, X, W)
    assert structure(lower_function(lambda x: x * 3.0, X)[0].program).constants == (3.0,)
