"""Run kernels of the library in Triton's interpreter and print name → (runs, complaints) as JSON; a process of its own, see
test_library_interpreted.py."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend
from fusion_advisor.evaluate.check_inputs import eager, make_inputs, oracle, planned_layouts
from fusion_advisor.library.discover import list_kernels, load_references
from fusion_advisor.library.patterns import lower_graph, trace_reference
from fusion_advisor.verify.accuracy import error_of, is_within

SMALL = 5000
"""Elements of the cases that run; of the larger ones only rows wider than the registers hold."""
WIDE = 16384
HEADER = Header(title="case", summary="a test", origin="a test")


def jobs(spec):
    """(variant, function, case, dtype, kinds of inputs): everything in float32, the first reference in the other dtypes too."""
    for number, (variant, function) in enumerate(load_references(spec).references):
        for case in spec.check:
            elements = max(math.prod(spec.shape_of(tensor, case)) for tensor in spec.inputs)
            if elements <= SMALL:
                yield variant, function, case, "float32", ("normal", "NaN and Inf")
                if number == 0:
                    yield variant, function, case, "float16", ("normal",)
                    yield variant, function, case, "bfloat16", ("normal",)
            elif case.sizes[-1][1] > WIDE and number == 0:
                yield variant, function, case, "float32", ("normal",)


def complaints(spec, folder):
    """How many launches were made, and what was wrong with them.

    References that are one Program are one kernel, which is launched once: that they compute the same is a test of its own.
    """
    backend, built, launched, found = TritonBackend(), {}, set(), []
    for variant, function, case, dtype, kinds in jobs(spec):
        laid_out = spec.laid_out(case)
        graph = trace_reference(laid_out, function, dict(case.sizes), dtype=getattr(torch, dtype))
        for lowered in lower_graph(graph, tuple(tensor.name for tensor in spec.inputs)):
            rendered = backend.render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
            if rendered.entry not in built:
                built[rendered.entry] = backend.build(rendered, folder / f"{rendered.entry}.py")
            launch = built[rendered.entry].bind(lowered.program)
            for kind in kinds:
                key = (lowered.program, lowered.inputs, case, dtype, kind)
                if key in launched:
                    continue
                launched.add(key)
                inputs = make_inputs(laid_out, case, dtype, kind)
                found += [f"{variant}, {case}, {dtype}, {kind}: {words}" for words in wrong(graph, lowered, launch, inputs)]
    return len(launched), found


def wrong(graph, lowered, launch, inputs):
    kept = len(lowered.outputs)
    apart = [[t.clone() if n in lowered.written else t for n, t in enumerate(inputs)] for _ in range(3)]
    theirs, truth, planned = eager(graph, apart[0])[-kept:], oracle(graph, apart[1])[-kept:], planned_layouts(graph)[-kept:]
    # The interpreter cuts bfloat16 off where a GPU rounds it: there the kernel stores float32 and torch rounds.
    stored = [torch.float32 if t.dtype == torch.bfloat16 else t.dtype for t in theirs]
    outputs = [torch.empty_strided(t.shape, t.stride(), dtype=d).fill_(3) for t, d in zip(planned, stored, strict=True)]
    for place, index in enumerate(lowered.written, start=kept - len(lowered.written)):
        outputs[place].copy_(apart[2][index])
    launch(*(inputs[index] for index in lowered.inputs), *outputs)
    for ours, own, exact in zip(outputs, theirs, truth, strict=True):
        error, limit = error_of(ours.to(own.dtype), exact), error_of(own, exact)
        if not is_within(error, limit, own.dtype):
            yield f"error {error.rel_l2:.1e} (eager {limit.rel_l2:.1e}), {error.nonfinite} NaN or Inf out of place"


def main(*names):
    with tempfile.TemporaryDirectory() as folder:
        specs = [spec for spec in list_kernels() if spec.name in names]
        print(json.dumps({spec.name: complaints(spec, Path(folder)) for spec in specs}))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
