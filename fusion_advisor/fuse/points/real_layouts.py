"""Whether a changed graph's results lie as torch's fake tensors say: kernels are made for these, and callers get the last.

Some ops lay their result out in another way than their fake form: of what lies channels last, ``roll`` keeps the layout on a CPU
and a batch norm of series does not, and torch 2.13 traces the contrary of both. Contiguous inputs are laid alike by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.capture.graph.op_records import SizeNumbers, tensor_metas
from fusion_advisor.verify.subgraph_oracle import has_strides


def laid_otherwise(module: GraphModule, number: SizeNumbers, given: Sequence[Any]) -> list[str]:
    """Run a graph and return the names of the ops whose results lie otherwise than was traced, up to the first that fails for it.

    Args:
        module: with fake results.
        number: turns its sizes into numbers.
        given: its arguments. The caller puts back what the graph writes to.
    """
    run = _Layouts(module, number)
    try:
        with torch.no_grad():
            run.run(*given)
    except RuntimeError:  # a view that such a layout does not allow
        if not run.others:
            raise
    return run.others


class _Layouts(Interpreter):
    """Runs a graph and notes the ops whose results lie otherwise than was traced."""

    def __init__(self, module: GraphModule, number: SizeNumbers) -> None:
        super().__init__(module)
        self.number = number
        self.others: list[str] = []

    def run_node(self, n: Node) -> Any:
        """Run one op."""
        result = super().run_node(n)
        if n.op == "call_function":
            pairs = zip(tensors_of(result), tensor_metas(n, self.number), strict=True)
            if not all(one.numel() == 0 or has_strides(one, meta.stride) for one, meta in pairs):
                self.others.append(n.name)
        return result
