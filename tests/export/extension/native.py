"""A kernel repository with CUDA C++ kernels of every kind, made without a GPU and without a run.

Called as ``python -m tests.export.extension.native FOLDER`` it writes the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fusion_advisor.codegen.common.interface import Header
from fusion_advisor.codegen.gemm.problem import GATED_TILES, GemvProblem
from fusion_advisor.codegen.registry import backend
from fusion_advisor.export.hub_kernels.repository import repository_files
from fusion_advisor.export.kernel_ops import OpSource, chain_op
from fusion_advisor.export.linear_ops import linear_op
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.decide.session import LinearSource
from fusion_advisor.records import TensorMeta, Tuning
from fusion_advisor.records.serialize import read_report
from tests.kernel_cases import programs

REPORT = Path(__file__).parents[3] / "reports" / "examples" / "gpt2-bf16-8x512-h200" / "report.json"
PROBLEM = GemvProblem(m=300, n=136, k=72, dtype="bfloat16", is_gated=True)


def header(title):
    return Header(title=title, summary=f"{title} in one kernel", origin="generated")


def meta(shape, dtype):
    return TensorMeta(shape=shape, stride=torch.empty(shape, device="meta").stride(), dtype=dtype, device="cuda")


def chain(title, program, inputs, outputs, in_place=(), taken=(), language="cuda"):
    """Return the op of a chain.

    Args:
        title: of the kernel.
        program: that it computes.
        inputs: layouts.
        outputs: layouts.
        in_place: positions of outputs that it is given.
        taken: names of other ops.
        language: of its kernel.
    """
    rendered = backend(language).render(program, header(title), tuning=Tuning(), fast_math=False)
    return chain_op(OpSource(program, header(title), "F1"), rendered, inputs, outputs, taken, in_place)


def gated():
    """Return a gated linear on Hopper's tensor cores, which is launched with tensor maps."""
    shapes = [(2, PROBLEM.m // 2, shape[1]) if name in ("x", "out") else shape for name, shape in PROBLEM.operands]
    source = LinearSource(problem=PROBLEM, config=GATED_TILES[0], header=header("gate_up"))
    return linear_op(source, "G1", [meta(shape, PROBLEM.dtype) for shape in shapes], ())


def ops():
    """Return a flat kernel, one of rows, one with two results, one of several loop nests, and one with tensor maps."""
    x = meta((4, 24), "bfloat16")
    heads, key, table = meta((2, 3, 5, 16), "float32"), meta((2, 1, 5, 16), "float32"), meta((2, 5, 16), "float32")
    rope = programs.rope_qk()
    layouts = {"q": heads, "k": key, "q_out": heads, "k_out": key}
    named = [(operand, layouts.get(operand.name, table)) for operand in rope.operands]
    return [
        chain("gelu_tanh", programs.gelu_tanh((1001,)), [meta((1001,), "float32")], [meta((1001,), "float32")]),
        chain("rmsnorm", programs.rmsnorm(4, 24, "bfloat16"), [x, meta((24,), "bfloat16")], [x]),
        chain("add_layernorm", programs.add_layernorm(4, 24, "bfloat16"), [x, x, *[meta((24,), "bfloat16")] * 2], [x, x]),
        chain(
            "rope_qk", rope, [one for operand, one in named if not operand.is_output], [one for o, one in named if o.is_output]
        ),
        gated(),
    ]


def files(listed, name="native_kernels"):
    """Return the repository's files by path.

    Args:
        listed: its ops.
        name: of its package.
    """
    return repository_files(listed, [], [], (), read_report(REPORT), name)


if __name__ == "__main__":
    write_folder(files(ops()), Path(sys.argv[1]), force=True)
