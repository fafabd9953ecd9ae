"""Programs by name for the numerics tests of all backends, their inputs, and how far a result may be from the oracle."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.kernel_cases import programs as p
from tests.kernel_cases.evaluate import allocate
from tests.kernel_cases.gathered import NAMES, gathered

UNARY = ("abs", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "sin", "cos",
         "floor", "ceil", "trunc", "round", "sign", "neg")  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "lt", "le", "gt", "ge")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 1e-3, -1e-3, 0.3, -0.3, 0.59, 0.61, 0.5, 1.5, 2.5, -2.5, 7.0, -7.0, 20.0, -20.0,
           87.0, -87.0, 88.5, -88.5, 1e4, -1e4, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 126.0)  # fmt: skip


class Cases(Mapping):
    """Name → Program. Those that come from torch code are traced when they are asked for, not while tests are collected."""

    def __init__(self, written):
        self._written = written

    def __getitem__(self, name):
        return self._written[name] if name in self._written else gathered(name)[0]

    def __iter__(self):
        return iter([*self._written, *NAMES])

    def __len__(self):
        return len(self._written) + len(NAMES)


def cases(many_rows=600):
    """Return name → Program; small, because the Triton interpreter is slow: it takes fewer for ``many_rows``."""
    found = {}
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        found[f"gelu_tanh-{dtype}"] = p.gelu_tanh((1001,), dtype)
        found[f"bias_gelu_erf-{dtype}"] = p.bias_gelu_erf(dtype=dtype)
        found[f"swiglu-{dtype}"] = p.swiglu(cols=40, dtype=dtype)
        found[f"swiglu_split-{dtype}"] = p.swiglu(cols=33, dtype=dtype, is_split=True)
        found[f"rmsnorm-{dtype}"] = p.rmsnorm(dtype=dtype)
        found[f"add_layernorm-{dtype}"] = p.add_layernorm(cols=40, dtype=dtype)
        found[f"softmax-{dtype}"] = p.softmax(dtype=dtype)
        found[f"rope-{dtype}"] = p.rope(dtype=dtype)
        found[f"rope_pairs-{dtype}"] = p.rope_pairs(dtype=dtype)
        found[f"swapped_pairs-{dtype}"] = p.swapped_pairs(dtype=dtype)
        found[f"normed_pairs-{dtype}"] = p.normed_pairs(dtype=dtype)
    for rows, cols in ((1, 1), (1, 77), (3, 1), (7, 129), (2, 2048), (many_rows, 3)):
        found[f"rmsnorm-{rows}x{cols}"] = p.rmsnorm(rows, cols)
        found[f"add_layernorm-{rows}x{cols}"] = p.add_layernorm(rows, cols, "bfloat16")
        found[f"bias_gelu_erf-{rows}x{cols}"] = p.bias_gelu_erf(rows, cols)
    for rows, cols in ((2, 16385), (1, 20000)):
        found[f"looped_softmax-{rows}x{cols}"] = p.softmax(rows, cols)
        found[f"looped_logsumexp-{rows}x{cols}"] = p.logsumexp(rows, cols, "float16")
        found[f"looped_add_layernorm-{rows}x{cols}"] = p.add_layernorm(rows, cols, "float16")
        found[f"looped_mean-{rows}x{cols}"] = p.mean_and_sum(rows, cols)
        found[f"looped_extremes-{rows}x{cols}"] = p.row_extremes(rows, cols)
    found["strided_rmsnorm"] = p.rmsnorm(4, 24, row_stride=37)
    found["transposed_add"] = p.transposed_add()
    found["five_dims"] = p.five_dims()
    found["batched_softmax"] = p.batched_softmax()
    found["causal_softmax"] = p.softmax(24, 24, is_causal=True)
    found["strided_flat"] = p.gelu_tanh((100,), strides=(3,))
    found["int_and_bool"] = p.int_and_bool()
    found["row_extremes"] = p.row_extremes()
    found["logsumexp"] = p.logsumexp()
    found["mean_and_sum"] = p.mean_and_sum()
    found["one_row_dim"] = p.one_row_dim()
    found["rope_wide"] = p.rope(1, 2, 70, 128, "bfloat16")
    found["odd_pairs"] = p.rope_pairs(2, 3, 5, 7, "bfloat16")
    found["shifted_pairs"] = p.rope_pairs(2, 3, 5, 8, "bfloat16", offset=3, row=21)
    found["wide_pairs"] = p.rope_pairs(1, 2, 70, 64, "bfloat16")
    found["looped_pairs"] = p.normed_pairs(2, 16390, "float16")
    found["pairs_of_less"] = p.pairs_of_less()
    found["pairs_of_less_reduced"] = p.pairs_of_less(is_reduced=True)
    found["three_of_a_kind"] = p.three_of_a_kind()
    for dtype in ("float32", "bfloat16"):
        found[f"beside_rope-{dtype}"] = p.rope_qk(dtype=dtype)
        found[f"beside_norms-{dtype}"] = p.norms_beside_softmax(dtype=dtype)
    found["beside_as_many_heads"] = p.rope_qk(4, 4, 1, 3, 128, "bfloat16")
    found["beside_nothing"] = p.siblings(p.rope(), p.renamed(p.rope(0), x="k", out="k_out"))
    found["beside_pairs"] = p.pairs_qk("bfloat16")
    found["beside_tiles"] = p.flat_beside_tiled()
    found["beside_runs"] = p.siblings(p.gelu_tanh((1001,)), p.renamed(p.gelu_tanh((10,)), x="y", out="out2"))
    found["beside_dropout"] = p.dropouts_beside()
    found["looped_beside"] = p.norms_beside_softmax(16390, "float16", (1, 2, 1, 1))
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        found[f"dropout_add-{dtype}"] = p.dropout_add(dtype=dtype)
        found[f"dropout_add_rmsnorm-{dtype}"] = p.dropout_add_rmsnorm(dtype=dtype)
    for rows, cols in ((1, 1), (1, 77), (3, 1), (7, 129), (5, 6), (many_rows, 3), (2, 20000)):
        found[f"dropout_add_rmsnorm-{rows}x{cols}"] = p.dropout_add_rmsnorm(rows, cols)
        found[f"dropout_add-{rows}x{cols}"] = p.dropout_add((rows, cols), strides=(cols + 3, 1))
    found["dropout_wide"] = p.dropout_add((1024,), "bfloat16")
    found["dropout_transposed"] = p.dropout_add((24, 40), strides=(1, 24), numbers=(1, 24))
    found["dropout_rows_off_by_2"] = p.dropout_add((6, 64), numbers=(66, 1), offset=2)
    found["dropout_rows_off_by_1"] = p.dropout_add((6, 64), numbers=(65, 1), offset=3)
    found["dropout_five_dims"] = p.dropout_add((2, 3, 2, 3, 8), numbers=(1000, 7 * 40, 80, 9, 1))
    found["dropout_past_32_bits"] = p.dropout_add((8, 40), numbers=(2**35 + 12, 1), offset=2**34)
    found["dropout_by_row"] = p.row_dropout()
    found["nan_dropout"] = p.dropout_add((3, 100), numbers=(100, 1))
    found["zero_elements"] = p.gelu_tanh((0,))
    found["zero_rows"] = p.rmsnorm(0, 24)
    found["zero_cols"] = p.rmsnorm(5, 0)
    found["zero_cols_sum"] = p.mean_and_sum(5, 0)
    found |= {f"special-{op}": p.special(op) for op in UNARY}
    found |= {f"binary-{op}": p.binary(op, 32 * 32) for op in BINARY}
    found["nan_row_extremes"] = p.row_extremes()
    found["nan_softmax"] = p.softmax()
    found["nan_looped_softmax"] = p.softmax(2, 16400)
    found["nan_looped_extremes"] = p.row_extremes(2, 16400)
    return Cases(found)


def inputs(name, program):
    """Seeded inputs; special values where the case asks for them."""
    if name in NAMES:
        return list(gathered(name)[1])
    found = allocate(program, is_output=False, generator=torch.Generator().manual_seed(0))
    special = torch.tensor(SPECIAL)
    if name.startswith("special-"):
        return [special]
    if name.startswith("binary-"):
        return [special.repeat_interleave(32), special.repeat(32)]
    if name.startswith("nan_"):
        cols = program.dims[1]
        found[0][3] = float("nan")
        found[0][cols + 5] = float("inf")
        found[0][cols + 7] = float("-inf")
    return found


def distance(name, got, oracle):
    """Largest error over the allowed one; more than 1 fails, as does NaN or Inf in the wrong place.

    Allowed: 8 rounding units of the output's dtype at the element itself, and 8 units of the intermediate dtype at the largest
    element of the output (a sum of terms that cancel keeps their absolute error).
    """
    if not got.is_floating_point():
        return 0.0 if torch.equal(got.to(oracle.dtype), oracle) else float("inf")
    info = torch.finfo(got.dtype)
    rounded = oracle.to(got.dtype)  # what overflows in the output's dtype is Inf there
    wide = got.double()
    if not torch.equal(rounded.isnan(), got.isnan()):
        return float("inf")
    is_inf = rounded.isinf() | got.isinf()
    near_limit = is_inf & (oracle.abs() > info.max * 0.999) & (oracle.abs() < info.max * 1.001)
    if not torch.equal(rounded[is_inf & ~near_limit], got[is_inf & ~near_limit]):
        return float("inf")
    use = ~(is_inf | rounded.isnan())
    if not use.any():
        return 0.0
    eps_inner = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
    units = 1 if got.dtype in (torch.float16, torch.bfloat16) else 8
    largest = 0.0 if name.startswith(("special", "binary")) else oracle[use].abs().max().item()
    allowed = units * info.eps * oracle[use].abs() + 8 * eps_inner * largest + info.smallest_normal
    return ((wide[use] - oracle[use]).abs() / allowed).max().item()
