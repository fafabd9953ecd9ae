"""AOTAutograd: a graph's forward and backward pass as two graphs of ATen ops, inside one autograd function."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fusion_advisor.runtime.torch_internals import fx_trace

_LEAST_BUDGET = 1e-6
"""With 0 torch keeps the inputs alone, and draws random numbers again whatever is said of them."""

_aten = torch.ops.aten
_SEEN_THROUGH = (
    _aten._to_copy.default, _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.slice.Tensor,
    _aten.alias.default, _aten.detach.default,
)  # fmt: skip
"""Casts and views that the partitioner computes again for nothing."""

MakeCall = Callable[[GraphModule], Callable[..., Any]]
"""Takes one of the two graphs and returns what runs in its place: a call.

Where the call has a method ``take``, that is given the arguments as one list instead, which it may empty.
"""


class _Boxed:
    """Hands on the list in which AOTAutograd gives a graph its arguments; it keeps none of them itself."""

    def __init__(self, take: Callable[[list[Any]], Any]) -> None:
        self._take = take
        self._boxed_call = True  # asks AOTAutograd for that list; an attribute of the class is lost where torch wraps the call

    def __call__(self, args: list[Any]) -> Any:
        return self._take(args)


def with_backward(
    graph_module: GraphModule,
    inputs: list[Any],
    forward: MakeCall,
    backward: MakeCall,
    *,
    memory_budget: float = 1.0,
    prepare: Callable[[GraphModule], object] | None = None,
) -> Callable[..., Any]:
    """Return a graph as a function that autograd differentiates by a second graph; call it in dynamo's backend.

    What the backward pass reads is chosen by torch's min-cut partitioner: it computes again what is cheaper to compute than to
    keep. Nothing that is random is drawn again. A backward pass may run twice (``retain_graph``), and has no gradient itself.

    Args:
        graph_module: dynamo's graph.
        inputs: its fake inputs.
        forward: makes the call for the forward graph, which returns the outputs and what is kept.
        backward: makes the call for the backward graph, which is given what was kept and the outputs' gradients.
        memory_budget: share of what would be kept by default that may be; with 0 little but the inputs and what is random.
        prepare: changes the graph of both passes before it is parted, or tags what the second computes again.
    """
    # AOTAutograd brings in networkx: 0.13 to 0.3 s, which no start of a saved plan is to wait for.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compiler(make: MakeCall) -> Callable[[GraphModule, list[Any]], Callable[..., Any]]:
        def compiled(half: GraphModule, _: list[Any]) -> Callable[..., Any]:
            _keep_what_is_given()
            call = make(half)
            take = getattr(call, "take", None)
            if take is not None:
                return _Boxed(take)
            boxed: Callable[..., Any] = make_boxed_func(call)
            return boxed

        return compiled

    to_graphs = aot_autograd(
        fw_compiler=compiler(forward),
        bw_compiler=compiler(backward),
        inference_compiler=compiler(forward),
        partition_fn=functools.partial(_partitioned, is_budgeted=memory_budget < 1, prepare=prepare),
    )
    # Else the backward graph would be handed over in the middle of the first backward pass: on a GPU in a thread of autograd's.
    own = {
        "donated_buffer": False, "force_non_lazy_backward_lowering": True,
        "activation_memory_budget": max(memory_budget, _LEAST_BUDGET),
    }  # fmt: skip
    with config.patch(own):
        call: Callable[..., Any] = to_graphs(graph_module, inputs)
    return call


def _partitioned(
    joint: GraphModule, *args: Any, is_budgeted: bool, prepare: Callable[[GraphModule], object] | None, **more: Any
) -> tuple[GraphModule, GraphModule]:  # fmt: skip
    """Part a joint graph in two; under a checkpoint or a budget too, what may be random is kept and not computed again.

    Under a budget torch would draw a dropout's numbers again, other ones.

    Torch would keep the generator's state for it, a tensor of unknown size, and run it again by an op that takes the state. Such
    an op is attention, whatever it drops: of each layer its result and one number a row are kept.
    """
    _skip_detached(joint)
    _compute_log_softmax_again(joint)
    for node in joint.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if is_random and (node.meta.pop("recompute", None) is not None or is_budgeted):
            parts = [user for user in node.users if user.target is operator.getitem]
            for kept in [*parts, node] if is_budgeted else parts or [node]:
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if prepare is not None:
        prepare(joint)
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, *args, **more)


def _skip_detached(joint: GraphModule) -> None:
    """Let ops read a value itself where they read it detached, which autograd does with results that a backward pass reads.

    Torch's partitioner takes ``detach`` for an op that no kernel can join. It would keep such a result, a tanh's say, and compute
    nothing again of which it is made. Inductor's decompositions make views of them, which it sees through.
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        (source,) = node.args
        assert isinstance(source, Node)
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


def _compute_log_softmax_again(joint: GraphModule) -> None:
    """Have the backward pass compute a log-softmax again where what it is made of takes fewer bytes, or is returned anyway.

    A loss takes 16-bit logits in fp32, and torch would keep their log-softmax: twice the bytes of the logits. Models of
    transformers return the logits too, so that keeping these costs nothing. The gradient of the loss is one kernel: it reads each
    row of logits twice, the second time from the cache, and writes their gradient.
    """
    returned = set(joint.graph.output_node().all_input_nodes)
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten._log_softmax.default):
        path = _narrowing_path(node)
        is_returned = not returned.isdisjoint(path) and node not in returned
        is_smaller = min(one.meta["val"].element_size() for one in path) < node.meta["val"].element_size()
        if (is_returned or is_smaller) and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _narrowing_path(node: Node) -> list[Node]:
    """The op's operand, and what that is a cast or a view of."""
    path: list[Node] = []
    source = node.args[0]
    while isinstance(source, Node):
        path.append(source)
        is_passed = source.op == "call_function" and source.target in _SEEN_THROUGH
        source = source.args[0] if is_passed else None
    return path


def _keep_what_is_given() -> None:
    """Say that the backward pass frees nothing of what the forward pass kept: then it may run again (``retain_graph``).

    Torch refuses that where the list of what is freed is not empty, and leaves it unset where it was not asked for.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def saves_through_hooks() -> bool:
    """Whether ``saved_tensors_hooks`` are active in this thread: what is kept for a backward pass then is what they return."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def copied_graph(graph_module: GraphModule) -> GraphModule:
    """Return a graph that may be changed, over the same tensors; its nodes keep what was traced."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx_trace.lazy_graph_module(graph_module, graph, class_name="Half")


def draws_numbers(graph_module: GraphModule) -> bool:
    """Whether an op of a graph is random; attention and dropout are where they drop something.

    Args:
        graph_module: of ATen ops.
    """
    return any(map(_draws, graph_module.graph.nodes))


def _draws(node: Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | dict(node.kwargs)
    share = given.get("dropout_p", given.get("p"))
    return bool(share != 0 and given.get("train") is not False)
