"""Every lowering rule against torch in fp64, through the evaluator that also judges the backends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fusion_advisor.lowering.rules.norm_backward import RESULTS
from fusion_advisor.lowering.rules.tables import LOWERABLE, POINTWISE, RESHAPES, SPECIAL, VIEWS, CannotLower, compute_dtype
from tests.kernel_cases.lowered import check, lower_function, run

SHAPES = [(3, 5), (1, 7), (4, 1), (1, 1), (2, 3, 4), (6,)]


def rand(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# Lambdas, because the tracer would take a default argument for an input.
UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "sign": torch.sign,
    "silu": lambda x: functional.silu(x),  # noqa: PLW0108
    "relu": lambda x: functional.relu(x),  # noqa: PLW0108
    "gelu": lambda x: functional.gelu(x),  # noqa: PLW0108
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: functional.leaky_relu(x),  # noqa: PLW0108
    "leaky_slope": lambda x: functional.leaky_relu(x, 0.3),
    "clamp": lambda x: x.clamp(-0.5, 0.25),
    "clamp_low": lambda x: x.clamp(min=0.1),
    "clamp_high": lambda x: x.clamp(max=0.1),
    "pow0.5": lambda x: x.abs().pow(0.5),
    "pow-0.5": lambda x: x.abs().pow(-0.5),
    "pow-1": lambda x: x.pow(-1),
    "pow1": lambda x: x.pow(1) * 1.5,
    "pow2": lambda x: x.pow(2),
    "pow3": lambda x: x.pow(3.0),
    "pow4": lambda x: x.pow(4),
    "pow2.5": lambda x: x.abs().pow(2.5),
    "scalar_pow": lambda x: torch.pow(2.5, x),
    "rsub": lambda x: 1.5 - x,
    "add_scalar": lambda x: x + 2,
    "div_scalar": lambda x: x / 3,
    "scalar_div": lambda x: 3 / x,
    "times_zero": lambda x: x * 0,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, shape):
    check(UNARY[name], rand(*shape))


SPECIAL_VALUES = [0.0, -0.0, 1.0, -1.0, 1e-30, 3.0, -3.0, 300.0, -300.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("name", UNARY)
def test_unary_on_special_values(name):
    if name == "silu":
        pytest.skip("x·sigmoid(x) at -inf is NaN in torch's fp64 as well as 0 in its fp32: torch disagrees with itself")
    if name.startswith("gelu"):
        pytest.skip("-inf: the formula gives NaN where torch's own kernels differ by dtype")
    check(UNARY[name], torch.tensor(SPECIAL_VALUES, dtype=torch.float64))


BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "true_divide": torch.true_divide,
    "maximum": torch.maximum, "minimum": torch.minimum,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=2.5), "sub_alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "pow": lambda x, y: torch.pow(x.abs(), y), "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "where": lambda x, y: torch.where(x > y, x, y * 2), "masked_fill": lambda x, y: x.masked_fill(y > 0, -7.0),
    "logical_and": lambda x, y: torch.logical_and(x > 0, y > 0), "or": lambda x, y: (x > 0) | (y > 0),
    "xor": lambda x, y: (x > 0) ^ (y > 0), "not": lambda x, y: ~(x > y), "logical_or_of_floats": torch.logical_or,
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5), "addcmul_plain": lambda x, y: torch.addcmul(x, y, x),
    "clamp_tensor": lambda x, y: torch.clamp(x, min=y), "where_scalar": lambda x, y: torch.where(x > y, x, 0.5) + y,
}  # fmt: skip


def test_a_small_scale_keeps_a_product_finite_that_overflows_alone():
    large = torch.tensor([2e154, -2e154, 1.0], dtype=torch.float64)
    check(lambda x, y: torch.addcmul(x, y, y, value=0.1), torch.zeros(3, dtype=torch.float64), large)


PAIRS = [
    ((3, 5), (3, 5)),
    ((3, 5), (5,)),
    ((3, 5), (3, 1)),
    ((1, 5), (3, 1)),
    ((2, 3, 4), (3, 1)),
    ((4,), (2, 1, 4)),
    ((1,), (6,)),
]


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary_with_broadcasting(name, shapes):
    one, two = shapes
    check(BINARY[name], rand(*one, seed=1).round(decimals=1), rand(*two, seed=2).round(decimals=1))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_broadcast_and_any_layout(data):
    rank = data.draw(st.integers(1, 4))
    full = data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))

    def operand(seed):
        kept = full[data.draw(st.integers(0, rank - 1)) :]
        shape = [size if data.draw(st.booleans()) else 1 for size in kept]
        order = data.draw(st.permutations(range(len(shape))))
        made = rand(*(shape[dim] for dim in order), seed=seed)
        return made.permute([order.index(dim) for dim in range(len(shape))])

    whole = rand(*full, seed=9)
    check(lambda x, y, z: torch.tanh(x * y) + (z - y) * 0.5, whole, operand(1), operand(2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_integers_and_booleans_mix_with_floats(dtype):
    ids = torch.arange(-3, 9).reshape(3, 4).to(dtype)
    check(lambda x, i: x * i + (i > 2), rand(3, 4), ids)
    check(lambda x, i: torch.where(i == 2, x, x + 1), rand(3, 4), ids)


def test_integer_arithmetic_stays_integer():
    ids = torch.arange(-6, 6).reshape(3, 4)
    check(lambda i: (i * 3 - 1) % 4, ids)
    check(lambda i: -i.abs() + i.clamp(min=-2), ids)


def test_casts_between_floats_leave_the_program():
    program = check(
        lambda x: torch.tanh(x.to(torch.float32)).to(torch.float16) * 2, rand(3, 5, dtype=torch.float16), rtol=2e-3, atol=2e-3
    )
    assert "cast" not in {value.op for value in program.values}
    assert {value.dtype for value in program.values} == {"float32"}


def test_casts_that_change_values_stay():
    x = rand(3, 5) * 4
    check(lambda x: x.to(torch.int64) * 2, x)
    check(lambda x: x.to(torch.int32).to(torch.float64) + 0.5, x)
    check(lambda x: x.bool().to(torch.float64) - x, x)
    check(lambda x, y: x.type_as(y) * y, rand(3, 5, dtype=torch.float32), x)


def test_a_scalar_tensor_is_an_operand():
    check(lambda x, s: x * s + s, rand(3, 5), torch.tensor(2.5, dtype=torch.float64))


VIEW_CASES = {
    "transpose": lambda x: torch.tanh(x).transpose(0, 1) * 2,
    "permute": lambda x: torch.tanh(x).permute(2, 0, -2) * 2,
    "unsqueeze": lambda x: torch.tanh(x).unsqueeze(1) * 2,
    "unsqueeze_last": lambda x: torch.tanh(x).unsqueeze(-1) * 2,
    "slice": lambda x: torch.tanh(x)[:, 1:, :2] * 2,
    "slice_negative": lambda x: torch.tanh(x)[..., -2:] * 2,
    "squeeze": lambda x: torch.tanh(x[:1]).squeeze(0) * 2,
    "reshape_ones": lambda x: torch.tanh(x).reshape(2, 1, 3, 4) * 2,
    "view_ones": lambda x: torch.tanh(x).view(1, 2, 3, 4) * 2,
    "detach": lambda x: torch.tanh(x).detach() * 2,
    "contiguous": lambda x: torch.tanh(x.transpose(0, 2)).contiguous() * 2,
    "clone": lambda x: torch.tanh(x).clone() * 2,
    "before": lambda x: torch.tanh(x.transpose(1, 2)[1:]) * 2,
    "flatten_behind": lambda x: (torch.tanh(x) * 2).flatten(1),
}


@pytest.mark.parametrize("name", VIEW_CASES)
def test_views(name):
    check(VIEW_CASES[name], rand(2, 3, 4))


def test_an_expand_inside_is_not_materialised():
    check(lambda x, y: torch.tanh(x).expand(5, 3, 4) * y, rand(3, 4), rand(5, 3, 4))
    check(lambda x, y: torch.tanh(x).expand(5, -1, 4) + y, rand(1, 3, 1), rand(5, 3, 4))


ROWS = [(3, 5), (1, 7), (4, 1), (2, 3, 4), (6,)]
REDUCTIONS = {
    "sum": lambda x: x - x.sum(-1, keepdim=True),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "amin": lambda x: x / (x.amin(-1, keepdim=True) + 9),
    "softmax": lambda x: torch.softmax(x * 3, -1),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1),
    "safe_softmax": lambda x: torch.ops.aten._safe_softmax.default(x * 3, -1),
    "layer_norm_plain": lambda x: functional.layer_norm(x, x.shape[-1:]) * 2,
    "rms_norm_plain": lambda x: functional.rms_norm(x, x.shape[-1:], None, 1e-6),
    "layer_norm_eps": lambda x: functional.layer_norm(x * 2, x.shape[-1:], eps=0.1),
    "alone": lambda x: (x * x).sum(-1),
    "mean_alone": lambda x: torch.tanh(x).mean(-1, keepdim=True) + 1,
    "two_passes": lambda x: (x - x.mean(-1, keepdim=True)).pow(2).mean(-1),
    "sum_dtype": lambda x: x.sum(-1, keepdim=True, dtype=torch.float64) * x,
}


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_row_reductions(name, shape):
    if shape == (4, 1) and name.startswith("layer_norm"):
        pytest.skip("a row of one: refused, there is nothing to normalise")
    if shape == (6,) and name in ("alone", "two_passes"):
        pytest.skip("a single number")
    check(REDUCTIONS[name], rand(*shape), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 1), (3, 2, 5)], ids=str)
def test_a_safe_softmax_gives_zeros_where_all_is_hidden_and_only_there(shape):
    x = rand(*shape)
    rows = x.flatten(0, -2)
    rows[0], rows[1, 0], rows[2, -1], rows[-1] = -math.inf, -math.inf, math.nan, math.inf
    rows[-2, 0] = math.inf
    program = check(lambda x: torch.ops.aten._safe_softmax.default(x, -1) * 2, x, rtol=1e-10)
    assert [value.op for value in program.values].count("reduce_max") == 1
    wide = torch.ops.aten._safe_softmax.default(x.float(), -1, torch.float64)
    (got,) = run(*lower_function(lambda x: torch.ops.aten._safe_softmax.default(x, -1, torch.float64), x.float()), [x.float()])
    torch.testing.assert_close(got, wide, rtol=1e-10, atol=1e-12, equal_nan=True)
    assert not got.flatten(0, -2)[0].any() and got.isnan().any()


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 5), (4, 3, 2, 2), (1, 7)], ids=str)
def test_weights_of_given_lengths(shape):
    lengths = rand(shape[0], *[1] * (len(shape) - 1))
    check(lambda v, g: torch._weight_norm(v, g, 0), rand(*shape), lengths, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "no_bias"])
def test_norms_scale_and_shift_by_column(kind, shape):
    cols = shape[-1]
    weight, bias = rand(cols, seed=3), rand(cols, seed=4)
    norms = {
        "layer_norm": lambda x, w, b: functional.layer_norm(x, (cols,), w, b, 1e-5),
        "rms_norm": lambda x, w, b: functional.rms_norm(x, (cols,), w, 1e-6) + b,
        "no_bias": lambda x, w, b: functional.layer_norm(x + b, (cols,), w, None, 1e-5),
    }
    check(norms[kind], rand(*shape), weight, bias, rtol=1e-10)


def test_a_norm_over_two_trailing_dims():
    check(
        lambda x, w, b: functional.layer_norm(x, (3, 4), w, b), rand(2, 3, 4), rand(3, 4, seed=1), rand(3, 4, seed=2), rtol=1e-10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rms_norm_without_eps_takes_torchs_own(dtype):
    tiny = rand(4, 64, dtype=dtype) * 1e-3  # so small that eps decides
    lowered, ops = lower_function(lambda x: functional.rms_norm(x, (64,)), tiny)
    (got,) = run(lowered, ops, [tiny])
    want = functional.rms_norm(tiny, (64,)).double()
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=0)


CAT_CASES = {
    "last": lambda x, y: torch.cat((x, y), -1) * 2, "first": lambda x, y: torch.cat((torch.tanh(x), y), 0) + 1,
    "three": lambda x, y: torch.cat((x, -y, x), dim=1) * 2, "halves": lambda x, y: torch.cat((-x[..., 2:], x[..., :2]), -1) * y,
    "inside": lambda x, y: torch.cat((x, y), -1)[..., 1:] * 3, "one": lambda x, y: torch.cat((x * y,), -1) * 2,
    "in_a_row": lambda x, y: torch.softmax(torch.cat((x, y), -1), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", CAT_CASES)
def test_cat_is_a_choice_by_index(name):
    check(CAT_CASES[name], rand(3, 4, seed=1), rand(3, 4, seed=2))


def test_rotary_embedding():
    def rope(x, cos, sin):
        return x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin

    check(rope, rand(2, 5, 4, 6).transpose(1, 2), rand(2, 1, 5, 6), rand(2, 1, 5, 6, seed=1))


REFUSED = {
    "floor_division": (lambda x: torch.div(x, 2, rounding_mode="floor"), "FA601", "rounding mode"),
    "live_dropout": (lambda x: torch.dropout(x, 0.5, True) * 2, "FA601", ""),
    "no_rule": (lambda x: torch.lgamma(x) * 2, "FA601", "no lowering"),
    "columns": (lambda x: x - x.mean(0, keepdim=True), "FA604", "kernel of its own"),
    "two_axes": (lambda x: x.sum(-1, keepdim=True) + x.sum((0, 1), keepdim=True), "FA604", ""),
    "reshape": (lambda x: torch.tanh(x).reshape(2, 6) * torch.tanh(x).sum(), "FA603", ""),
    "softmax_of_columns": (lambda x: torch.softmax(x, 0), "FA604", ""),
    "complex": (lambda x: torch.complex(x, x) * 2, "FA606", "complex"),
    "integer_logic": (lambda x: x.to(torch.int64) & 3, "FA601", "integers"),
    "read_by_floats": (lambda x: torch.gather(x, 1, (x > 0).sum(-1, keepdim=True) - 1), "FA601", "computed from floating-point"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_refused_with_a_reason(name):
    function, code, words = REFUSED[name]
    with pytest.raises(CannotLower, match=words) as caught:
        lower_function(function, rand(3, 4))
    assert caught.value.code == code


def test_compute_dtypes():
    assert [compute_dtype(name) for name in ("float64", "float32", "bfloat16", "int8", "bool")] == [
        "float64", "float32", "float32", "int64", "bool",
    ]  # fmt: skip


def test_every_rule_belongs_to_an_op_of_torch():
    assert {*POINTWISE, *SPECIAL, *VIEWS, *RESHAPES, *RESULTS, "repeat_interleave"} == LOWERABLE
    for name in LOWERABLE - {"lift_fresh", "seeded_dropout"}:
        assert hasattr(torch.ops.aten, name), name
    assert torch.ops.fusion_advisor.seeded_dropout is not None


EASILY_WRONG = {
    "round_decimals": (lambda x: torch.round(x * 3, decimals=1), rand(3, 4)),
    "rsub_alpha": (lambda x: torch.rsub(x, 2.0, alpha=3), rand(3, 4)),
    "narrow_integers_wrap": (lambda i: (i * 2).to(torch.float64) * 1.5, torch.tensor([100, 200, 255], dtype=torch.uint8)),
    "narrowing_cast_wraps": (lambda i: i.to(torch.int8).to(torch.float64) * 1.5, torch.tensor([100, 200, 255])),
    "cat_with_an_old_style_empty": (lambda x, e: torch.cat((e, x), -2) * 2, rand(3, 4), torch.empty(0, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", EASILY_WRONG)
def test_what_is_easily_wrong_computes_the_same_or_is_refused(name):
    function, *inputs = EASILY_WRONG[name]
    try:
        check(function, *inputs)
    except CannotLower:
        return


def test_a_remainder_of_floats_is_refused_and_one_of_integers_is_not():
    with pytest.raises(CannotLower, match="remainder"):
        check(torch.remainder, rand(3, 5), rand(3, 5, seed=1))
    check(lambda x: torch.remainder(x, 7), torch.arange(-20, 20).reshape(8, 5))


TABLE = rand(11, 8, seed=3)
IDS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(4))
PLACES = torch.arange(10, -1, -1).reshape(11, 1)
GATHERS = {
    "embedding": (lambda w, i: functional.embedding(i, w), TABLE, IDS),
    "embedding_padding": (lambda w, i: functional.embedding(i, w, padding_idx=3) * 2, TABLE, IDS),
    "embedding_int32": (lambda w, i: functional.embedding(i, w) + 1, TABLE, IDS.int()),
    "embedding_of_one_row": (lambda w, i: functional.embedding(i, w) + 1, TABLE[:1], IDS * 0),
    "embedding_of_a_slice": (lambda w, i: functional.embedding(i[:, 1:], w[2:, ::2]), TABLE, IDS % 9),
    "embedding_of_a_transposed_table": (lambda w, i: functional.embedding(i, w.t()), rand(8, 11), IDS),
    "embedding_of_what_the_chain_computes": (lambda w, i: functional.embedding(i + 1, w * 2), TABLE, IDS % 10),
    "embedding_of_places": (lambda w, n, i: functional.embedding(functional.embedding(i, n)[..., 0], w), TABLE, PLACES, IDS),
    "index_select": (lambda w, i: w.index_select(0, i) * 2, TABLE, IDS[0]),
    "index_select_columns": (lambda w, i: w.index_select(-1, i) * 2, TABLE, IDS[0] % 8),
    "gather": (lambda w, i: w.gather(-1, i) * 2, TABLE, IDS % 8),
    "gather_rows": (lambda w, i: w.gather(0, i) * 2, TABLE, IDS),
    "gather_integers": (lambda w, i: w.gather(1, i) + 1, torch.arange(22).reshape(2, 11), IDS),
    "index": (lambda w, i: w[i] * 2, TABLE, IDS),
    "index_negative": (lambda w, i: w[i] * 2, TABLE, IDS - 11),
    "index_columns": (lambda w, i: w[:, i] * 2, TABLE, IDS % 16 - 8 + (IDS > 7) * 3),
    "arange": (lambda w, _i: w + functional.embedding(torch.arange(2, 13, 1), torch.cat((w, w))), TABLE, IDS),
    "arange_stepped": (lambda w, _i: w[torch.arange(1, 9, 3)] + 1, TABLE, IDS),
    "arange_of_elements": (lambda w, _i: w * torch.arange(8), TABLE, IDS),
    "embedding_then_norm": (lambda w, i: functional.layer_norm(functional.embedding(i, w), (8,), w[0], w[1]), TABLE, IDS),
}  # fmt: skip


@pytest.mark.parametrize("name", GATHERS)
def test_reads_where_a_tensor_says(name):
    function, *inputs = GATHERS[name]
    check(function, *inputs)


def evaluated(function, *inputs):
    lowered, ops = lower_function(function, *inputs)
    return run(lowered, ops, inputs)[0]


def test_a_table_moves_the_rows_that_are_read():
    wide = rand(1000, 8)
    program = check(lambda w, i: functional.embedding(i, w), wide, IDS)
    assert [operand.element_count for operand in program.operands] == [10, 80, 80]
    program = check(lambda w, i: functional.embedding(i, w), wide[:3], IDS % 3)
    assert [operand.element_count for operand in program.operands] == [10, 24, 80]


TARGETS = torch.tensor([0, 7, 3, -100, 2, 5, 5, -100, 1, 6, 4])
LOSSES = {
    "cross_entropy": lambda x, t: functional.cross_entropy(x, t, reduction="none"),
    "cross_entropy_scaled": lambda x, t: functional.cross_entropy(x * 30, t, reduction="none") * 2,
    "cross_entropy_ignoring": lambda x, t: functional.cross_entropy(x, t.clamp(min=0), reduction="none", ignore_index=5),
    "log_softmax_and_nll": lambda x, t: functional.nll_loss(functional.log_softmax(x, -1), t, reduction="none"),
    "nll": lambda x, t: functional.nll_loss(x, t, reduction="none") * 2,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    check(LOSSES[name], TABLE, TARGETS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "reduction='none'"),
        ({"reduction": "sum"}, "reduction='none'"),
        ({"reduction": "none", "label_smoothing": 0.1}, "label_smoothing"),
        ({"reduction": "none", "weighted": True}, "weight for each class"),
    ],
)
def test_losses_that_are_refused(options, sentence):
    named = {name: value for name, value in options.items() if name != "weighted"}

    def loss(x, t):
        weight = x[0] if "weighted" in options else None
        return functional.cross_entropy(x, t, weight=weight, **named).reshape(-1, 1) * x

    with pytest.raises(CannotLower) as error:
        lower_function(loss, TABLE, TARGETS)
    assert sentence in error.value.reason


@pytest.mark.parametrize(
    "function",
    [
        lambda w, i: w[i, i] * 2,
        lambda w, i: w[i > 3] * 2,
        lambda w, i: (w > 0)[i] ^ (w > 1)[i],
    ],
    ids=["two tensors", "a mask", "a table of booleans"],
)
def test_reads_that_are_refused(function):
    with pytest.raises(Exception, match="|".join(("no lowering", "out of range", "data-dependent", "nonzero"))):
        check(function, TABLE, IDS)


GROUPS = [((2, 6, 4, 5), 3), ((2, 6, 4, 5), 1), ((2, 6, 4, 5), 6), ((1, 4, 3), 2), ((2, 6), 2), ((2, 6, 1, 1), 3), ((1, 1, 7), 1),
          ((3, 4, 2, 3, 2), 2), ((2, 1, 1, 1), 1)]  # fmt: skip


@pytest.mark.parametrize(("shape", "groups"), GROUPS, ids=str)
def test_group_norm(shape, groups):
    x, weight, bias = rand(*shape), rand(shape[1], seed=1), rand(shape[1], seed=2)
    check(lambda x: functional.group_norm(x, groups), x)
    check(lambda x, w, b: functional.silu(functional.group_norm(x + 1, groups, w, b, 1e-3)), x, weight, bias)


def test_a_channels_weight_is_read_at_a_quotient_of_the_column():
    program = check(lambda x, w: functional.group_norm(x, 3, w), rand(2, 6, 4, 5), rand(6))
    quotient = next(value for value in program.values if value.op == "quotient")
    assert program.dims == (2, 3, 40)
    assert program.values[quotient.args[1]].constant == 20
    assert [operand.element_count for operand in program.operands] == [240, 6, 240]


def test_group_norm_from_channels_last_to_channels_first_is_refused():
    x = rand(2, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    with pytest.raises(CannotLower, match="one run of memory"):
        lower_function(lambda x: functional.group_norm(x, 3).contiguous(), x)
