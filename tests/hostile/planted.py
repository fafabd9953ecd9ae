"""Faults planted into kernels, in all backends: by an edit of the rendered source, or around the launch.

Run as a script it tries the Triton ones in Triton's interpreter and prints name → what the verifier says, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.codegen.common.horizontal_fusion import nests
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.arguments import Layout
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.codegen.triton.backend import TritonBackend
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.lowering.lower import lower
from fusion_advisor.verify.check_chain import check_chain, layout_of
from fusion_advisor.verify.subgraph_oracle import original_chain
from tests.kernel_cases.cpp_at_once import build_all
from tests.kernel_cases.cuda_on_host import _PRELUDE, Launch, _unit

HEADER = Header(title="case", summary="a test", origin="a test")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        edit: (old, new) in the source; every occurrence, or the one that ``nth`` counts.
        around: takes a launcher and returns a faulty one.
    """

    name: str
    backend: str
    chain: str
    edit: tuple[str, str] | None = None
    nth: int | None = None
    around: Callable[..., Callable[..., None]] | None = None

    def source(self, source):
        if self.edit is None:
            return source
        old, new = self.edit
        parts = source.split(old)
        assert len(parts) > 1, f"{self.name}: {old!r} is not in the source"
        if self.nth is None:
            return new.join(parts)
        return old.join(parts[: self.nth + 1]) + new + old.join(parts[self.nth + 1 :])


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def norm(x, residual, weight, bias):
    total = x + residual
    return total, torch.nn.functional.layer_norm(total, (x.shape[-1],), weight, bias, 1e-5)


def masked_softmax(x, mask):
    return torch.softmax(torch.where(mask, x, -1e9), -1)


def chains():
    """Name → (function, its tensors)."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(20, 40), torch.rand(40) + 0.5, torch.randn(40)
    mask = torch.arange(24) < torch.arange(1, 25)[:, None]
    return {
        "gelu": (gelu, [x]),
        "gelu16": (gelu, [torch.randn(20, 40, dtype=torch.bfloat16)]),
        "half": (gelu, [torch.randn(20, 40, dtype=torch.float16)]),
        "norm": (norm, [x, torch.randn(20, 40), weight, bias]),
        "softmax": (masked_softmax, [torch.randn(24, 24), mask]),
    }


class Case:
    """A chain lowered, with its original ops and tensors."""

    def __init__(self, function, inputs):
        graph = trace(function, inputs)
        region = Region(
            index=0, graph=graph, original=graph, names=tuple(f"x{n}" for n in range(len(inputs))), roles=("input",) * len(inputs)
        )
        ops, index_of = describe(region)
        returned = ops[-1].args[0]
        outputs = [one.index for one in (returned if isinstance(returned, tuple) else (returned,))]
        members = [op.index for op in ops if op.role == "op"]
        lowered = lower(ops, members, outputs)
        at = [op.index for op in ops if op.role not in ("op", "output")]
        self.program = lowered.program
        self.chain = original_chain(ops, index_of, members, lowered.given, lowered.outputs)
        self.roots = [inputs[at.index(index)] for index in lowered.given]
        self.outputs = [ops[index].outputs[0] for index in lowered.outputs]

    def check(self, launch):
        layouts = list(map(layout_of, self.roots))
        call = fused_call("fa_case", launch, layouts, self.outputs, in_place=self.chain.in_place, is_poisoned=True)
        return check_chain(self.chain, call, self.roots, seed=0)


# ---------------------------------------------------------------------- faults around a launch


def outputs_of(launch, tensors, count=1):
    launch(*tensors)
    return tensors[-count:]


def on_result(change):
    """A fault that changes the last output in place, given the first input."""

    def around(launch):
        def faulty(*tensors):
            launch(*tensors)
            change(tensors[0], tensors[-1])

        return faulty

    return around


def stale(launch):
    first = []

    def faulty(*tensors):
        launch(*tensors)
        first.append(tensors[-1].clone())
        tensors[-1].copy_(first[0])

    return faulty


def accumulating(launch):
    def faulty(*tensors):
        before = tensors[-1].clone()
        launch(*tensors)
        tensors[-1].copy_(torch.where(before.isfinite(), tensors[-1] + before * 1e-3, tensors[-1]))

    return faulty


def past_the_end(launch):
    def faulty(*tensors):
        launch(*tensors)
        out = tensors[-1]
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)

    return faulty


def before_the_start(launch):
    def faulty(*tensors):
        launch(*tensors)
        tensors[-1].as_strided((1,), (1,), tensors[-1].storage_offset() - 1).fill_(1.0)

    return faulty


def racing(launch):
    calls = []

    def faulty(*tensors):
        launch(*tensors)
        calls.append(1)
        tensors[-1].view(-1)[len(calls) % 7].mul_(1 + 1e-6 * (len(calls) % 3))

    return faulty


def writing_inputs(launch):
    def faulty(*tensors):
        launch(*tensors)
        tensors[0].view(-1)[0] = 5.0

    return faulty


def unmasked(launch):
    def faulty(x, mask, out):
        launch(x, torch.ones_like(mask), out)

    return faulty


def first_mask(launch):
    masks = []

    def faulty(x, mask, out):
        masks.append(mask)
        launch(x, masks[0], out)

    return faulty


def causal_anyway(launch):
    def faulty(x, mask, out):
        launch(x, torch.ones_like(mask).tril(), out)

    return faulty


def keep_tail(x, out):
    out.view(-1)[-1] = x.view(-1)[-1] * 0 + 3.0


AROUND = {
    "NaN becomes zero": ("gelu", on_result(lambda x, out: out.nan_to_num_(0.0, math.inf, -math.inf))),
    "Inf becomes the largest number": (
        "gelu", on_result(lambda x, out: out.clamp_(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max)),
    ),
    "huge numbers become Inf": ("gelu", on_result(lambda x, out: out.masked_fill_(out.abs() > 1e18, math.inf))),
    "a row of zeros becomes NaN": ("norm", on_result(lambda x, out: out.masked_fill_((x == 0).all(-1, True), math.nan))),
    "a constant row becomes NaN": ("norm", on_result(lambda x, out: out.masked_fill_((x == x[:, :1]).all(-1, True), math.nan))),
    "the last element is another": ("gelu", on_result(keep_tail)),
    "rows are swapped": ("norm", on_result(lambda x, out: out.copy_(out.flip(0)))),
    "result of the first call": ("norm", stale),
    "adds to what memory held": ("gelu", accumulating),
    "writes past the end": ("gelu", past_the_end),
    "writes before the start": ("norm", before_the_start),
    "a race": ("softmax", racing),
    "writes to its input": ("norm", writing_inputs),
    "mask ignored": ("softmax", unmasked),
    "mask of the first call": ("softmax", first_mask),
    "any mask taken as causal": ("softmax", causal_anyway),
}  # fmt: skip

_CPP, _TRITON, _CUDA = "cpp", "triton", "cuda"

EDITED = [
    Fault("bfloat16 cut off", _CPP, "gelu16", ("bits + 0x7fffu + ((bits >> 16) & 1u)", "bits")),
    Fault("bfloat16 NaN becomes 0", _CPP, "gelu16", ("x != x ? 0x7fc00000u", "x != x ? 0u")),
    Fault("another constant", _CPP, "gelu", ("0.044715f", "0.04471f")),
    Fault("another root", _CPP, "gelu", ("1.5957691216f", "1.5956691216f")),
    Fault("exp ends too early", _CPP, "gelu", ("x < -104.0f", "x < -8.0f")),
    Fault("NaN becomes 0", _CPP, "gelu", ("out[i] = x_value *", "out[i] = x_value != x_value ? 0.0f : x_value *")),
    Fault("last element left out", _CPP, "gelu", ("i < n; ++i", "i < n - 1; ++i")),
    Fault("first element left out", _CPP, "gelu", ("int64_t i = 0;", "int64_t i = 1;")),
    Fault("one element too many", _CPP, "gelu", ("i < n; ++i", "i <= n; ++i")),
    Fault("eps ten times smaller", _CPP, "norm", ("1e-05f", "1e-06f")),
    Fault("eps left out", _CPP, "norm", ("variance + 1e-05f", "variance")),
    Fault("last row left out", _CPP, "norm", ("row < rows;", "row < rows - 1;")),
    Fault("bias left out", _CPP, "norm", (" + x4[col]", "")),
    Fault("one weight for all", _CPP, "norm", ("x3[col]", "x3[0]")),
    Fault("wrong stride", _CPP, "norm", ("row * x2_row_stride", "row * (x2_row_stride - 1)")),
    Fault("sum not stored", _CPP, "norm", ("out1_row[col] = sum;", "")),
    Fault("variance of n + 1", _CPP, "norm", ("(square_sum) / static_cast<float>(", "(square_sum) / static_cast<float>(1 + ")),
    Fault("another constant", _TRITON, "gelu", ("0.044715", "0.04471")),
    Fault("tail past the mask", _TRITON, "gelu", ("mask = index < size", "mask = index < size - 1")),
    Fault("eps ten times smaller", _TRITON, "norm", ("1e-05", "1e-06")),
    Fault("bias left out", _TRITON, "norm", (" + x4", "")),
    Fault("last column left out", _TRITON, "norm", ("row_mask & col_mask", "row_mask & (col < cols - 1)")),
    Fault("wrong stride", _TRITON, "norm", ("row * x2_stride0", "row * (x2_stride0 - 1)")),
    Fault("mean of one more", _TRITON, "norm", ("tl.cast(cols, tl.float32)", "tl.cast(cols + 1, tl.float32)")),
    Fault("another constant", _CUDA, "gelu", ("0.044715f", "0.04471f")),
    Fault("erf for tanh", _CUDA, "gelu", ("x * sigmoid(product)", "0.5f * x * (1.0f + erff(x * 0.70710678f))")),
    Fault("half cut off", _CUDA, "half", ("(_Float16)x;", "(_Float16)(x * 0.9997f);")),
    Fault("eps ten times smaller", _CUDA, "norm", ("1e-05f", "1e-06f")),
    Fault("wrong stride", _CUDA, "norm", ("row * x2_stride0", "row * (x2_stride0 - 1)")),
    Fault("one bias for all", _CUDA, "norm", ("+ x4;", "+ x4_packs[0][0];")),
]  # fmt: skip

FAULTS = [
    *EDITED,
    *(Fault(name, backend, chain, around=around) for backend in (_CPP, _CUDA) for name, (chain, around) in AROUND.items()),
]


# ---------------------------------------------------------------------- backends


def cpp_launchers(work, folder):
    """Return one launcher for each (fault, case): all sources in one file."""
    rendered = []
    for number, (fault, case) in enumerate(work):
        one = backend_named(_CPP).render(case.program, HEADER, tuning=Tuning(), fast_math=False)
        entry = f"{one.entry}_{number}"
        rendered.append(replace(one, entry=entry, source=fault.source(one.source).replace(one.entry, entry)))
    built = build_all(rendered, folder)
    launchers = []
    for (_, case), one in zip(work, rendered, strict=True):
        function = getattr(built[one.entry].handle, one.entry)
        fixed = [ctypes.c_int64(p.value) for part in nests(case.program) for p in Layout(part.program).parameters]

        def launch(*tensors, function=function, fixed=fixed):
            function(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), *fixed, ctypes.c_int(1))

        launchers.append(launch)
    return launchers


def cuda_launchers(work, folder):
    """The same for CUDA kernels, run on the host."""
    units = []
    for number, (fault, case) in enumerate(work):
        one = backend_named(_CUDA).render(case.program, HEADER, tuning=Tuning(), fast_math=False)
        outputs = [torch.empty_strided(m.shape, m.stride, dtype=getattr(torch, m.dtype)) for m in case.outputs]
        source, arguments = _unit(number, Launch(rendered=one, program=case.program, inputs=case.roots, outputs=outputs))
        units.append((fault.source(source), arguments))
    path, library = folder / "cuda.cpp", folder / "cuda.so"
    path.write_text("\n".join([_PRELUDE, *(source for source, _ in units)]))
    command = ["g++", "-O1", "-fno-strict-aliasing", "-std=c++17", "-fPIC", "-shared", "-w", "-o", str(library), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    handle = ctypes.CDLL(str(library))
    launchers = []
    for number, (_, arguments) in enumerate(units):
        integers = (ctypes.c_longlong * max(1, len(arguments)))(*(value for _, value in arguments))

        def launch(*tensors, run=handle[f"run_{number}"], integers=integers):
            run((ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors)), integers)

        launchers.append(launch)
    return launchers


def triton_launchers(work, folder):
    """The same in Triton's interpreter."""
    launchers = []
    for number, (fault, case) in enumerate(work):
        one = TritonBackend().render(case.program, HEADER, tuning=Tuning(), fast_math=False)
        one = replace(one, source=fault.source(one.source))
        launchers.append(TritonBackend().build(one, folder / f"{one.entry}_{number}.py").bind(case.program))
    return launchers


MAKERS = {_CPP: cpp_launchers, _CUDA: cuda_launchers, _TRITON: triton_launchers}


def verdicts(backend, folder):
    """Return name → what the verifier says of each fault ("" where it accepts it), and of each right kernel."""
    cases = {name: Case(*one) for name, one in chains().items()}
    mine = [fault for fault in FAULTS if fault.backend == backend]
    right = [Fault(f"right {chain}", backend, chain) for chain in dict.fromkeys(fault.chain for fault in mine)]
    work = [(fault, cases[fault.chain]) for fault in (*mine, *right)]
    found = {}
    for (fault, case), launch in zip(work, MAKERS[backend](work, folder), strict=True):
        numerics = case.check(launch if fault.around is None else fault.around(launch))
        words = "; ".join(numerics.faults) or f"relative error {numerics.fused_rel_l2:.1e}, eager {numerics.eager_rel_l2:.1e}"
        found[f"{backend}: {fault.name} ({fault.chain})"] = "" if numerics.is_passed else words
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(verdicts(_TRITON, Path(name))))  # noqa: T201
