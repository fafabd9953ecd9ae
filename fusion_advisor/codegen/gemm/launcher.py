"""A linear layer's file that runs by itself: the kernel at its site's sizes, then a launch, a reference and a main program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.gemm.problem import GemvConfig, GemvProblem

_ELEMENTS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
_MAP_TYPES = {"float16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16", "bfloat16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"}
_FLOOR = 2e-6
"""Relative error that is allowed even where the op-by-op computation has none: sums of thousands of products in another order."""
_ROUNDED_FLOORS = {"float16": 2.0**-12, "bfloat16": 2.0**-9}
"""The same where x * norm_weight is rounded before it is multiplied: half a unit in the last place."""
_PREAMBLE = """\
// Build and run: nvcc -O3 -std=c++17 {target} {entry}.cu -o check && ./check
#ifndef __CUDACC_RTC__  // before the macros of the kernel, whose names these headers use
{includes}
typedef {element} element;
#endif

"""
_HEADERS = ("algorithm", "cmath", "cstdio", "cstring", "vector", "cuda.h", "cuda_bf16.h", "cuda_fp16.h")


def floor_of(problem: GemvProblem, config: GemvConfig) -> float:
    """Relative error that a kernel may have besides that of an op-by-op computation."""
    is_rounded = problem.has_norm and config.form in ("cuda_mma", "triton_dot")
    return _FLOOR + (_ROUNDED_FLOORS[problem.dtype] if is_rounded else 0.0)


def cuda_file(
    rendered: Rendered, problem: GemvProblem, config: GemvConfig, *, arch: int = 90, tensor_maps: Mapping[str, Any] | None = None
) -> str:
    """Return the whole file of a CUDA kernel.

    Args:
        rendered: the kernel.
        problem: at its sizes, which are macros of the kernel.
        config: as rendered.
        arch: compute capability that the command line at the top names.
        tensor_maps: what a kernel that takes tensor maps is launched with: ``tensor_maps``, ``threads`` and ``shared_bytes``.
    """
    # `-arch=sm_90a` alone has nvcc make PTX for compute_90 too, which lacks the instructions.
    target = f"-gencode arch=compute_{arch}a,code=sm_{arch}a" if rendered.is_for_one_arch else f"-arch=sm_{arch}"
    includes = "\n".join(f"#include <{header}>" for header in _HEADERS)
    element = _ELEMENTS[problem.dtype]
    preamble = _PREAMBLE.format(target=target, entry=rendered.entry, includes=includes, element=element)
    tensors = [
        {
            "name": name, "count": math.prod(shape), "is_output": name == "out",
            "scale": f"{problem.k**-0.5 if name == 'weight' else 1.0:.6f}f",
        }
        for name, shape in problem.operands
    ]  # fmt: skip
    context: dict[str, Any] = {
        "entry": rendered.entry, "problem": problem, "tensors": tensors, "type": cuda_type(problem.dtype),
        "inputs": ", ".join(str(t["name"]) for t in tensors if not t["is_output"]), "eps": repr(problem.eps),
        "normed": f" * inverse_rms * (number<T>(norm_weight[k]) + T({problem.norm_offset!r}))" if problem.has_norm else "",
        "floor": f"{floor_of(problem, config):.3g}", "moved_bytes": problem.moved_bytes,
        "flops": 2 * problem.m * problem.weight_rows * problem.k, "map_type": _MAP_TYPES.get(problem.dtype, ""),
        "tensor_maps": [],
        **(tensor_maps or {}),
    }  # fmt: skip
    return preamble + rendered.source + environment().get_template("cuda/gemm_launcher.cu.jinja").render(context)


def cuda_type(dtype: str) -> str:
    """The name of an element in the kernel, which includes no header."""
    return {"float32": "float", "float16": "half_bits", "bfloat16": "bfloat16_bits"}[dtype]


def triton_file(
    rendered: Rendered, problem: GemvProblem, config: GemvConfig, *, constants: Mapping[str, int], options: Mapping[str, object]
) -> str:
    """Return the whole file of a Triton kernel.

    Args:
        rendered: the kernel.
        problem: at its sizes.
        config: as rendered.
        constants: the kernel's constexpr arguments.
        options: what it is compiled with.
    """
    names = [name for name, _ in problem.operands]
    text = environment().get_template("triton/launcher.py.jinja").render(
        file=f"{rendered.entry}.py", entry=rendered.entry,
        blocks=[f"{name} = {value}" for name, value in constants.items()], grid="triton.cdiv(N, BLOCK_N)",
        constants=", ".join(f"{name}={name}" for name in constants), options=", ".join(f"{k}={v}" for k, v in options.items()),
        tensors=[{"name": name, "made": _made(problem, name, shape)} for name, shape in problem.operands],
        given=", ".join(names), scalars=[], arguments=[", ".join(names)], helpers=frozenset[str](), reference=_reference(problem),
        own="float32", moved_bytes=problem.moved_bytes, input_count=len(names) - 1, output_names="('out',)",
        floor=floor_of(problem, config),
    )  # fmt: skip
    return rendered.source + text


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearReference:
    """The same computation in plain PyTorch.

    Attributes:
        tensors: name and the expression that makes it, in the order of a launch.
        lines: statements that compute the result in ``dtype`` and write it.
        floor: relative error that a kernel may have besides that of these statements.
    """

    tensors: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    floor: float


def reference_of(problem: GemvProblem, config: GemvConfig, shapes: Sequence[tuple[int, ...]]) -> LinearReference:
    """Return what a kernel is compared with.

    Args:
        problem: at its sizes.
        config: as rendered.
        shapes: of the operands at a site, whose rows may be divided among several dims.
    """
    names = [name for name, _ in problem.operands]
    return LinearReference(
        tensors=tuple((name, _made(problem, name, shape)) for name, shape in zip(names, shapes, strict=True)),
        lines=tuple(_reference(problem)),
        floor=floor_of(problem, config),
    )


def _made(problem: GemvProblem, name: str, shape: tuple[int, ...]) -> str:
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    place, dtype = f"{shape}, {strides}, ", f"torch.{problem.dtype}"
    if name == "out":
        return f"torch.empty_strided({place}dtype={dtype}, device=device).zero_()"
    if problem.dtype == "bfloat16":  # the interpreter's dot takes the bits of bfloat16 for integers
        dtype = 'torch.float32 if device == "cpu" else torch.bfloat16'
    return f"normal({place}{dtype})" + (f".mul_({problem.k**-0.5:.6g})" if name == "weight" else "")


def _reference(problem: GemvProblem) -> list[str]:
    lines = ["value = x.to(dtype)"]
    if problem.has_norm:
        offset = f" + {problem.norm_offset!r}" if problem.norm_offset else ""
        lines.append(f"value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + {problem.eps!r})")
        lines.append(f"value = value * (norm_weight.to(dtype){offset})")
    lines.append("value = value @ weight.to(dtype).T")
    if problem.has_bias:
        lines.append("value = value + bias.to(dtype)")
    if problem.is_gated:
        lines += ["gate, up = value.chunk(2, -1)", "value = torch.nn.functional.silu(gate) * up"]
    if problem.has_residual:
        lines.append("value = value + residual.to(dtype)")
    return [*lines, "out.copy_(value)"]
