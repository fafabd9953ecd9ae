"""Problems for the tests of the GEMV kernels, their tensors, and eager and fp64 answers."""

from __future__ import annotations

import torch

from fusion_advisor.codegen.common.interface import Header
from fusion_advisor.codegen.gemm.problem import GemvProblem
from fusion_advisor.verify.accuracy import error_of, is_within

HEADER = Header(title="case", summary="a test", origin="a test")
EPILOGUES = {
    "plain": {},
    "norm": {"has_norm": True},
    "gemma_bias": {"has_norm": True, "norm_offset": 1.0, "has_bias": True},
    "residual": {"has_residual": True},
    "gated": {"has_norm": True, "is_gated": True},
    "all": {"has_norm": True, "has_bias": True, "is_gated": True, "has_residual": True},
}


def problems():
    """Name → problem: rows around every tile, sizes that are no multiple of any, every dtype and epilogue."""
    found = {}
    for number, m in enumerate((1, 2, 7, 8, 9, 16, 33, 64)):
        for k, dtype in ((264, "bfloat16"), (520, "float16"), (1031, ("float32", "bfloat16", "float16")[number % 3])):
            has_norm = number % 2 == 0 if dtype == "bfloat16" else m <= 8
            name = f"{'norm' if has_norm else 'plain'}-{dtype}-{m}x13x{k}"
            found[name] = GemvProblem(m=m, n=13, k=k, dtype=dtype, has_norm=has_norm)
    for number, (name, given) in enumerate(EPILOGUES.items()):
        m = (1, 3, 17)[number % 3]
        found[f"{name}-{m}x19x520"] = GemvProblem(m=m, n=19, k=520, dtype="bfloat16", **given)
    found["tiny"] = GemvProblem(m=1, n=1, k=1, dtype="bfloat16", has_norm=True)
    found["wide"] = GemvProblem(m=2, n=5, k=9000, dtype="bfloat16", has_norm=True)
    return found


def gated_on_many_rows():
    """Name → problem: around a tile's rows and a cluster's, widths that no tile divides, fewer columns than are under way."""
    sizes = ((65, 8, 8), (100, 344, 520), (128, 256, 64), (129, 136, 4096), (300, 1000, 72), (513, 1080, 776), (1024, 4096, 512))
    return {
        f"{dtype}-{m}x{n}x{k}": GemvProblem(m=m, n=n, k=k, dtype=dtype, is_gated=True)
        for number, (m, n, k) in enumerate(sizes)
        for dtype in (("bfloat16",), ("bfloat16", "float16"))[number % 2]
    }


def surrounded():
    """Name → problem: on both sides of the rows that GEMV kernels take, what cuBLAS computes between kernels of the library."""
    found = {}
    for number, m in enumerate((3, 16, 70)):
        dtype = ("float32", "float16")[number % 2]  # the interpreter cuts bfloat16 off where a GPU rounds it
        for name in ("norm", "gemma_bias", "gated", "all"):
            found[f"{name}-{m}x19x72"] = GemvProblem(m=m, n=19, k=72, dtype=dtype, **EPILOGUES[name])
    return found


def tensors(problem, kind="normal", seed=0):
    """Operands but the output; ``kind`` is normal, large or special (NaN and Inf in the first rows)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, shape in problem.operands[:-1]:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name == "weight":
            made /= problem.k**0.5
        if name == "x" and kind == "large":
            made = (made * 3e3).clamp(-1e4, 1e4)
        if name == "x" and kind == "special":
            made[0, 0] = float("nan")
            if problem.m > 1:
                made[1, -1] = float("inf")
        found.append(made.to(getattr(torch, problem.dtype)))
    return found


def reference(problem, given):
    """The problem in the dtype of its tensors, as a model spells it."""
    named = dict(zip((name for name, _ in problem.operands), given, strict=False))
    x = named["x"]
    if problem.has_norm:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + problem.eps)
        x = (problem.norm_offset + named["norm_weight"]) * wide.to(x.dtype)
    out = torch.nn.functional.linear(x, named["weight"], named.get("bias"))
    if problem.is_gated:
        out = torch.nn.functional.silu(out[:, : problem.n]) * out[:, problem.n :]
    return out + named["residual"] if problem.has_residual else out


def complaint(problem, given, out):
    """What is wrong with a result, next to eager's own error; empty when nothing is."""
    eager = reference(problem, given)
    truth = reference(problem, [tensor.double() for tensor in given])
    ours, theirs = error_of(out.to(eager.dtype), truth), error_of(eager, truth)
    return "" if is_within(ours, theirs, eager.dtype) else f"ours {ours}, eager's {theirs}"
