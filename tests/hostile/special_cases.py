"""Pointwise ops with a lowering, and the numbers that they go wrong on."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as f

UNARY = {
    **{name: getattr(torch, name) for name in (
        "neg", "abs", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "erfc",
        "sin", "cos", "floor", "ceil", "trunc", "round", "sign", "square", "isnan", "isinf", "isfinite",
    )},
    "silu": f.silu, "gelu": f.gelu, "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"), "relu": f.relu, "relu6": f.relu6,
    "leaky_relu": f.leaky_relu, "softplus": f.softplus, "softplus_sharp": lambda x: f.softplus(x, beta=3.0, threshold=5.0),
    "mish": f.mish, "elu": f.elu, "elu_2": lambda x: f.elu(x, 2.0), "log_sigmoid": f.logsigmoid, "selu": f.selu, "celu": f.celu,
    "celu_2": lambda x: f.celu(x, 2.0), "hardtanh": f.hardtanh, "hardsigmoid": f.hardsigmoid, "hardswish": f.hardswish,
    "threshold": lambda x: f.threshold(x, 0.5, -0.0), "clamp": lambda x: x.clamp(-1, 2), "clamp_zero": lambda x: x.clamp(0.0),
    "clamp_minus_zero": lambda x: x.clamp(-0.0), "clamp_max": lambda x: x.clamp(max=0.0), "add_zero": lambda x: x + 0.0,
    "add_minus_zero": lambda x: x + -0.0, "sub_zero": lambda x: x - 0.0, "sub_from": lambda x: 0.0 - x, "rsub": lambda x: 1 - x,
    "mul_minus": lambda x: x * -1.0, "mul_one": lambda x: x * 1.0, "mul_zero": lambda x: x * 0.0, "div_minus": lambda x: x / -2.0,
    "pow_2": lambda x: x**2, "pow_3": lambda x: x**3, "pow_half": lambda x: x**0.5, "pow_minus_half": lambda x: x**-0.5,
    "pow_minus_1": lambda x: x**-1, "pow_4": lambda x: x**4, "pow_1.5": lambda x: x**1.5,
    "where": lambda x: torch.where(x > 0, x, -0.0), "masked_fill": lambda x: x.masked_fill(x > 0, -0.0),
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum, "minimum": torch.minimum,
    "eq": torch.eq, "lt": torch.lt, "ge": torch.ge, "addcmul": lambda x, y: torch.addcmul(x, x, y),
}  # fmt: skip
NAMES = (*UNARY, *BINARY)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
CANCELS = {"gelu": "eager adds 1 to erf, and loses the tail", "gelu_tanh": "eager adds 1 to tanh, and loses the tail"}
CHOOSES = frozenset(
    {"relu", "relu6", "hardtanh", "hardsigmoid", "hardswish", "clamp_zero", "clamp_minus_zero", "clamp_max", "maximum", "minimum"}
)
"""Ops that choose between two zeros."""
UNDERFLOWS = {"mish": "the exponential of numbers below -87 is subnormal, and Triton's exp flushes it to 0"}
OVERFLOWS = {"hardswish": "eager multiplies the largest numbers by 6 before it divides by 6"}


def specials(dtype):
    """Zeros of both signs, the ends of the range, subnormals, halves, and a grid of magnitudes."""
    info = torch.finfo(dtype)
    ends = [info.max, info.max / 2, info.tiny, info.tiny / 2, info.smallest_normal * info.eps, info.eps, 1 + info.eps]
    halves = [0.5, 1.5, 2.5, 3.5, 0.49999997, 2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**23 + 1, 2.0**52 - 0.5]
    grid = [
        *torch.logspace(-8, 2, 61, dtype=torch.float64).tolist(),
        1.0,
        2.0,
        3.0,
        6.0,
        19.9,
        20.0,
        20.1,
        88.0,
        89.0,
        104.0,
        709.0,
    ]
    positive = [number for number in (*ends, *halves, *grid) if number <= info.max]
    return torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, *positive, *(-n for n in positive)], dtype=torch.float64).to(
        dtype
    )


def inputs(name, dtype):
    """Return a case's arguments: of two, each number with each."""
    if name in UNARY:
        return [specials(dtype)]
    some = specials(dtype)[::5]
    some = torch.cat((specials(dtype)[:5], some))
    return [some[:, None].expand(-1, len(some)).contiguous(), some[None].expand(len(some), -1).contiguous()]


def function(name):
    """Return the op as a function of its tensors alone: an op's own default arguments would be traced as inputs."""
    op = UNARY.get(name) or BINARY[name]

    def one(x):
        return op(x)

    def two(x, y):
        return op(x, y)

    return one if name in UNARY else two


def result_for(lowered, ops, given, *, stores_float32=False):
    """Return what a kernel is called with, and where it writes.

    Args:
        lowered: of :func:`function`.
        ops: of the trace.
        given: the op's arguments.
        stores_float32: have bfloat16 results stored in float32: Triton's interpreter cuts off where a GPU rounds.
    """
    at = [op.index for op in ops if op.role not in ("op", "output")]
    dtype = getattr(torch, ops[lowered.outputs[0]].outputs[0].dtype)
    if dtype == torch.bfloat16 and stores_float32:
        dtype = torch.float32
    return [given[at.index(root)] for root in lowered.inputs], torch.empty(given[0].shape, dtype=dtype, device=given[0].device)


def problem(got, name, dtype, *, is_gpu=False, device="cpu"):
    """What differs from eager: class, the sign of a zero, or more than the dtype's usual error from fp64; empty where nothing.

    Args:
        got: the result.
        name: of the op.
        dtype: of its arguments.
        is_gpu: the kernel is a GPU's, whose minimum and maximum put -0 below 0: eager's on a CPU take the second of two zeros.
        device: whose eager it is compared with.
    """
    given = [tensor.to(device) for tensor in inputs(name, dtype)]
    want = function(name)(*given)
    got = got.to(want.dtype)
    if want.dtype == torch.bool:
        return "" if torch.equal(got, want) else f"at {[t[got != want][:4].tolist() for t in given]}"
    # A CPU's, because CUDA's eager hardsigmoid and hardswish round 1/6 to fp32 in fp64 too.
    exact = function(name)(*(t.double().cpu() for t in given)).to(device)
    both_nan = got.isnan() & want.isnan()
    info = torch.finfo(dtype)
    own = (want.double() - exact).abs()
    limit = torch.maximum(4 * own, 4 * info.eps * exact.abs() + 2 * info.tiny * info.eps)
    near = (got.double() - exact).abs() <= limit
    if name in CANCELS:
        near |= (got.double() - exact).abs() <= 4 * info.eps * given[0].double().abs()
    if name in UNDERFLOWS and device == "cuda":
        near |= (got.double() - exact).abs() <= info.tiny * given[0].double().abs()
    if name in OVERFLOWS:
        near |= got.isfinite() & want.isinf()
    # With AVX2, eager's GELU of -0.0 is 0.0 in a full vector and -0.0 in the rest of a row; fp64's sign is right too.
    same_zero = (got != 0) | (want != 0) | (got.signbit() == want.signbit()) | (got.signbit() == exact.signbit())
    if is_gpu and name in CHOOSES:
        same_zero |= given[0] == 0
    # Where eager overflows on the way (gelu, hardswish) or underflows (gelu), what fp64 gives is right.
    same = both_nan | (got == want) | (got.double() == exact.to(dtype).double()) | (near & got.isfinite())
    right = same & same_zero
    if bool(right.all()):
        return ""
    wrong = [tuple(t[~right][n].item() for t in given) for n in range(min(4, int((~right).sum())))]
    return f"{wrong}: {got[~right][:4].tolist()}, eager {want[~right][:4].tolist()}"
