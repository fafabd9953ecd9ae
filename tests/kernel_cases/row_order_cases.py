"""Norms and softmaxes over operands that some rows share. Run as a script: Triton kernels of the norms in the interpreter."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

COLS = 520
"""Rows of 1040 bytes in bfloat16, and no power of two."""


def normed(x, *added):
    for one in added:
        x = x * 0.5 + one
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def boolean(scores, mask):
    return torch.softmax(torch.where(mask, scores, float("-inf")), -1)


def causal_with_bias(scores, bias):
    everything = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    hidden = everything.triu(scores.shape[-1] - scores.shape[-2] + 1)
    return torch.softmax((scores + bias).masked_fill(hidden, float("-inf")), -1)


CASES = {
    "mask of a batch": (normed, (2, 3, 5, COLS), (2, 1, 5, COLS)),
    "mask of all": (normed, (2, 3, 5, COLS), (1, 1, 5, COLS)),
    "one head": (normed, (2, 1, 5, COLS), (1, 1, 5, COLS)),
    "one batch": (normed, (1, 3, 5, COLS), (1, 1, 5, COLS)),
    "keys": (normed, (2, 3, 5, COLS), (2, 1, 1, COLS)),
    "keys of all": (normed, (2, 3, 5, COLS), (1, 1, 1, COLS)),
    "a number for each head": (normed, (2, 3, 5, COLS), (3, 1, 1)),
    "a row for each head": (normed, (2, 3, 5, COLS), (3, 1, COLS)),
    "bias of heads": (normed, (2, 3, 5, COLS), (3, 5, COLS)),
    "bias and mask": (normed, (2, 3, 5, COLS), (2, 1, 5, COLS), (3, 5, COLS)),
    "boolean": (boolean, (1, 2, 3, COLS), (1, 1, 3, COLS)),
    "positions": (normed, (3, 7, COLS), (7, COLS)),
    "causal with a bias": (causal_with_bias, (2, 1, 3, COLS), (3, COLS)),
    "wider than the registers hold": (normed, (2, 2, 16400), (1, 2, 16400)),
}
INTERPRETED = ("mask of a batch", "mask of all", "bias and mask", "wider than the registers hold")
"""No maximum is among them: the interpreter takes seconds for one."""


def make_inputs(name, dtype):
    """Return the tensors of a case; of a boolean mask every row keeps something."""
    function, *shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if function is boolean:
        found[1] = found[1] > -0.5
    return found


def main(folder):
    from fusion_advisor.codegen.common.interface import Header, Tuning
    from fusion_advisor.codegen.triton.backend import TritonBackend
    from tests.kernel_cases.lowered import lower_function

    header = Header(title="case", summary="a test", origin="a test")
    for name in INTERPRETED:
        function, inputs = CASES[name][0], make_inputs(name, torch.bfloat16)
        lowered = lower_function(function, *inputs)[0]
        expected = function(*(x.double() if x.is_floating_point() else x for x in inputs))
        for number, tuning in enumerate((Tuning(block_rows=4), Tuning())):  # rows of several heads; one row
            rendered = TritonBackend().render(lowered.program, header, tuning=tuning, fast_math=False)
            out = torch.zeros(expected.shape, dtype=torch.bfloat16)
            launch = TritonBackend().build(rendered, Path(folder) / f"{rendered.entry}_{number}.py").bind(lowered.program)
            launch(*(inputs[root] for root in lowered.inputs), out)
            # The interpreter cuts bfloat16 off where a GPU rounds it.
            words = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-5, msg=words)


if __name__ == "__main__":
    main(sys.argv[1])
