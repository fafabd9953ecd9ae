"""Traces the Triton ops of a package as its export as a compiled model does: python trace_ops.py FOLDER NAME.

Prints the calls of torch.export's graph, and those of the graph that Inductor is given, with what launches the kernels.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch
import torch._dynamo.backends.common
from torch._higher_order_ops import triton_kernel_wrap


class Calls(torch.nn.Module):
    """Calls every op of a package."""

    def __init__(self, ops):
        super().__init__()
        self.ops = ops

    def forward(self, *tensors):
        """Give each op its inputs."""
        given, results = iter(tensors), []
        for name in self.ops.ALL:
            inputs, outputs, in_place, _ = self.ops.LAYOUTS[name]
            found = getattr(self.ops, name)(*(next(given) for _ in range(len(inputs) + len(in_place))))
            results += [*(found if isinstance(found, tuple) else (found,))] if len(in_place) < len(outputs) else []
        return tuple(results)


def calls(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def main(folder, name):
    sys.path.insert(0, folder)
    ops = importlib.import_module(f"{name}.ops")
    given = []
    for inputs, outputs, in_place, device in ops.LAYOUTS.values():
        given += [one.empty(torch.device(device)) for one in (*inputs, *(outputs[place] for place in in_place))]
    program = torch.export.export(Calls(ops), tuple(given), strict=False)
    seen = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    graph, kernels = lowered(program, given), []
    for node in graph.nodes:
        if "triton_kernel_wrapper" in str(node.target):
            kernel = triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            constants = triton_kernel_wrap.kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
            kernels.append({
                "name": getattr(kernel, "fn", kernel).__name__, "grid": [list(grid) for grid in node.kwargs["grid"]],
                "configs": [(one.num_warps, one.num_stages) for one in getattr(kernel, "configs", [])],
                "constants": {key: value for key, value in constants.items() if isinstance(value, int)},
                "given": sorted(node.kwargs["kwargs"]),
            })  # fmt: skip
    sys.stdout.write("\n" + json.dumps({"seen": seen, "lowered": calls(graph), "kernels": kernels}) + "\n")


def lowered(program, given):
    """Return the graph that Inductor is given of a program; on a CPU its kernels cannot be compiled."""
    graphs = []

    def compiled(module, inputs):
        graphs.append(module.graph)
        return lambda *args: [torch.empty(()) for _ in module.graph.output_node().args[0]]

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiled)
    with torch.no_grad():
        torch.compile(program.module(), backend=backend)(*given)
    return graphs[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
