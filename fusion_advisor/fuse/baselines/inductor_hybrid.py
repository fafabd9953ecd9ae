"""Ours, and torch.compile for the rest: the rewritten graphs through Inductor, our kernels in them as opaque ops.

Inductor traces what it compiles on fake tensors, which a kernel's launch cannot take. So each fused call becomes an op of torch's
with a result that is known by its layout, and what the graph keeps between calls (folded values, views over joined weights)
becomes an input: a constant it would not be, for Inductor reads constants number by number to name its cache, weights too. That
holds for the tensors of this run only: it is measured, and never left in the model.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.baselines.liger import NotAvailable
from fusion_advisor.fuse.rewrite.layout_copy import PlainCopy
from fusion_advisor.fuse.rewrite.odd_width_gemm import OddRows
from fusion_advisor.runtime.torch_internals import inductor

_NAMESPACE = "fusion_advisor_rest"

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def compile_rest(
    regions: Sequence[Region], modules: Sequence[GraphModule], compiler: Compiler = inductor.compile_graph
) -> tuple[GraphModule, ...]:
    """Compile rewritten regions; the results hold the ops in them.

    Args:
        regions: as captured, with the tensors that they were called with.
        modules: what runs in their place; left as they are.
        compiler: takes a graph and its inputs.

    Raises:
        NotAvailable: a graph holds something that cannot be compiled.
    """
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    unique = uuid.uuid4().hex[:12]  # torch keeps one table of ops for the whole process
    compiled = []
    for region, module in zip(regions, modules, strict=True):
        opaque, kept = _opaque(module, region.example_args, library, f"call_{unique}_{region.index}")
        runner = GraphModule(opaque, opaque.graph)
        runner.forward = _with(compiler(opaque, [*region.example_args, *kept]), kept)
        object.__setattr__(runner, "library", library)  # the ops exist as long as it does
        compiled.append(runner)
    return tuple(compiled)


def _with(compiled: Callable[..., Any], kept: Sequence[torch.Tensor]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        return compiled(*args, *kept)

    return forward


def _opaque(
    module: GraphModule, inputs: Sequence[Any], library: torch.library.Library, name: str
) -> tuple[GraphModule, list[torch.Tensor]]:
    """Copy a rewritten graph, with ops and inputs in place of Python functions; also return the tensors for the added inputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, inputs, strict=True))
    inputs_of_graph = [node for node in graph.nodes if node.op == "placeholder"]
    kept: list[torch.Tensor] = []

    def keep(node: Node, value: torch.Tensor) -> None:
        # Behind an input: the first op may be a fused call, which is replaced.
        with graph.inserting_after(inputs_of_graph[-1]):
            inputs_of_graph.append(graph.placeholder(f"kept_{len(kept)}"))
        node.replace_all_uses_with(inputs_of_graph[-1])
        kept.append(value)

    for number, (original, node) in enumerate(list(copies.items())):
        if original.op == "get_attr":
            keep(node, getattr(module, str(original.target)))
            continue
        if original.op != "call_function" or not _is_ours(original):
            continue
        if "results" in original.meta:  # a fused call, or a loop that Inductor would unroll
            if original.meta.get("written"):
                raise NotAvailable(f"`{original.name}` writes into a cache, which Inductor does not know")
            _call_op(graph, original, node, library, f"{name}_{number}")
            continue
        if isinstance(original.target, PlainCopy):  # a copy that Inductor writes as well
            node.target, node.kwargs = torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}
            continue
        if isinstance(original.target, OddRows):  # products into parts of a tensor are no op; Inductor pads by itself
            node.target = torch.ops.aten.linear.default
            continue
        if not all(source in given for source in original.all_input_nodes):
            raise NotAvailable(f"`{original.name}` depends on values of the step itself")
        assert callable(original.target)
        keep(node, original.target(*(given[source] for source in original.args)))
    for node in reversed(list(graph.nodes)):
        is_kept = node.op == "get_attr" or (node.op == "call_function" and _is_ours(node))
        if is_kept and not node.users:
            graph.erase_node(node)
    return GraphModule(torch.nn.Module(), graph), kept


def _is_ours(node: Node) -> bool:
    """Whether a node calls a Python function of ours: a fused kernel, a folded value, joined weights."""
    return "fusion_id" in node.meta or (
        not isinstance(node.target, torch._ops.OpOverload)
        and str(getattr(node.target, "__module__", "")).startswith("fusion_advisor.")
    )


def _call_op(graph: Graph, original: Node, node: Node, library: torch.library.Library, name: str) -> None:
    """Replace a fused call by an op that returns the list of its results."""
    values = original.meta["results"]
    layouts = [(tuple(value.shape), tuple(value.stride()), value.dtype) for value in values]
    call = original.target
    assert callable(call)

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        result = call(*tensors)
        return list(result) if isinstance(result, list | tuple) else [result]

    def fake(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty_strided(shape, stride, dtype=dtype, device=tensors[0].device) for shape, stride, dtype in layouts]

    # Its inputs must come as they were verified: any other strides are refused.
    library.define(f"{name}(Tensor[] tensors) -> Tensor[]", tags=(torch.Tag.needs_exact_strides,))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    op = getattr(getattr(torch.ops, _NAMESPACE), name).default
    inductor.call_without_lowering(op)
    with graph.inserting_before(node):
        made = graph.call_function(op, (list(node.args),))
        if len(values) == 1:
            made = graph.call_function(operator.getitem, (made, 0))
    node.replace_all_uses_with(made)
    graph.erase_node(node)
