"""One function as one kernel, run where its tensors are and compared with fp64 next to eager: what the device tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_advisor.autotune.tune import best_tuning
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.evaluate.check_inputs import eager, oracle
from fusion_advisor.library.patterns import lower_graph
from fusion_advisor.verify.accuracy import error_of, is_within

HEADER = Header(title="case", summary="a test", origin="a test")


@dataclass
class Site:
    """A traced function, its kernel bound to one layout, and which of the inputs are the kernel's operands."""

    graph: torch.fx.GraphModule
    program: object
    launch: object
    order: tuple[int, ...]

    def run(self, inputs, outputs=None):
        """Launch on the inputs; fresh outputs unless some are given."""
        outputs = like(eager(self.graph, inputs)) if outputs is None else outputs
        self.launch(*(inputs[index] for index in self.order), *outputs)
        return outputs

    def complaints(self, inputs, outputs):
        """Errors that are larger than eager's own allows; empty when the kernel is right."""
        found = []
        for ours, theirs, truth in zip(outputs, eager(self.graph, inputs), oracle(self.graph, inputs), strict=True):
            error, own = error_of(ours, truth), error_of(theirs, truth)
            if not is_within(error, own, theirs.dtype):
                found.append((error, own))
        return found


def plain(function):
    """A Python function to trace, which torch's own are not."""

    def call(*tensors):
        return function(*tensors)

    return call


def site(function, inputs, backend, folder, *, is_tuned=False):
    """Lower, render, build and bind; tuned as ``apply`` does it, or with the backend's own launch parameters."""
    examples = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inputs]
    graph = trace(plain(function), examples)
    lowered = next(lower_graph(graph, tuple(f"x{n}" for n in range(len(inputs)))))
    tuning = best_tuning(lowered.program, (), backend, "cuda", header=HEADER).tuning if is_tuned else Tuning()
    rendered = backend_of(backend).render(lowered.program, HEADER, tuning=tuning, fast_math=False)
    built = backend_of(backend).build(rendered, folder / f"{rendered.entry}{rendered.suffix}")
    return Site(graph, lowered.program, built.bind(lowered.program), lowered.inputs)


def like(tensors):
    """Outputs of the same layout, filled with what no kernel writes."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).fill_(3) for t in tensors]


def laid_out(layout, rows, cols, dtype, device, seed=0):
    """A random tensor of (rows, cols) in one of several layouts."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    if layout == "contiguous":
        return random(rows, cols)
    if layout == "one element off":
        return random(rows * cols + 1)[1:].view(rows, cols)
    if layout == "columns of a wider one":
        return random(rows, 2 * cols + 3)[:, 3 : 3 + cols]
    if layout == "every other row":
        return random(2 * rows, cols)[::2]
    if layout == "transposed":
        return random(cols, rows).t()
    raise ValueError(layout)


LAYOUTS = ("contiguous", "one element off", "columns of a wider one", "every other row", "transposed")
SHAPES = ((33, 1001), (1, 4096), (5, 1), (1, 1), (3, 17), (2, 16391), (0, 64), (600, 8))
