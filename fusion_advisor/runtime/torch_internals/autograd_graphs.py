"""AOTAutograd: a graph's forward and backward pass as two graphs of ATen ops, inside one autograd function."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fusion_advisor.errors import NoSecondDerivative
from fusion_advisor.runtime.torch_internals import dispatcher, fake_mode

_LEAST_BUDGET = 1e-6
"""With 0 torch keeps the inputs alone, and draws random numbers again whatever is said of them."""

MakeCall = Callable[[GraphModule], Callable[..., Any]]
"""Takes one of the two graphs and returns what runs in its place: a call.

Where the call has a method ``take``, that is given the arguments as one list instead, which it may empty. Where it has the
attribute ``takes_none`` too, the gradient of an output that was given none is None there; else autograd makes zeros of it.
"""


class _Boxed:
    """Hands on the list in which AOTAutograd gives a graph its arguments; it keeps none of them itself."""

    def __init__(self, take: Callable[[list[Any]], Any]) -> None:
        self._take = take
        self._boxed_call = True  # asks AOTAutograd for that list; an attribute of the class is lost where torch wraps the call

    def __call__(self, args: list[Any]) -> Any:
        return self._take(args)


def within_this_trace() -> Callable[[], AbstractContextManager[object]]:
    """Return what makes a context in which :func:`with_backward` can be called after dynamo's trace; call it in that.

    AOTAutograd reads and writes what dynamo notes of its trace.
    """
    context = TracingContext.try_get()
    return functools.partial(tracing, context) if context is not None else contextlib.nullcontext


def with_backward(
    graph_module: GraphModule,
    inputs: list[Any],
    forward: MakeCall,
    backward: MakeCall,
    *,
    memory_budget: float = 1.0,
    prepare: Callable[[GraphModule], object] | None = None,
    watch: Callable[[GraphModule], Iterable[Node]] = lambda _: (),
) -> Callable[..., Any]:
    """Return a graph as a function that autograd differentiates by a second graph; call it in dynamo's trace.

    What the backward pass reads is chosen by torch's min-cut partitioner: it computes again what is cheaper to compute than to
    keep. Nothing that is random is drawn again. A backward pass may run twice (``retain_graph``), and has no gradient itself.

    Args:
        graph_module: dynamo's graph.
        inputs: its fake inputs.
        forward: makes the call for the forward graph, which returns the outputs and what is kept.
        backward: makes the call for the backward graph, which is given what was kept and the outputs' gradients.
        memory_budget: share of what would be kept by default that may be; with 0 little but the inputs and what is random.
        prepare: changes the graph of both passes before it is parted, or tags what the second computes again.
        watch: returns inputs of the graph of both passes that may not be written between them, though the second reads none.
    """
    # AOTAutograd brings in networkx: 0.13 to 0.3 s, which no start of a saved plan is to wait for.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch._aot_autograd.utils import make_boxed_func

    takes_none, writes = [False], [False]

    def compiler(make: MakeCall) -> Callable[[GraphModule, list[Any]], Callable[..., Any]]:
        def compiled(half: GraphModule, _: list[Any]) -> Callable[..., Any]:
            writes[0] |= _keep_what_is_given()
            call = make(half)
            takes_none[0] |= getattr(call, "takes_none", False)
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
        partition_fn=functools.partial(_partitioned, is_budgeted=memory_budget < 1, prepare=prepare, watch=watch),
    )
    # Else the backward graph would be handed over in the middle of the first backward pass: on a GPU in a thread of autograd's.
    own = {
        "donated_buffer": False, "force_non_lazy_backward_lowering": True,
        "activation_memory_budget": max(memory_budget, _LEAST_BUDGET),
    }  # fmt: skip
    with config.patch(own):
        call: Callable[..., Any] = to_graphs(graph_module, inputs)

    return functools.partial(_watched, call, takes_none[0], writes[0])


def _watched(call: Callable[..., Any], takes_none: bool, writes: bool, *args: Any) -> Any:
    # AOTAutograd writes to inputs at the end, which the second forward pass of a checkpoint never comes to: a batch norm would
    # count a batch once that eager counts twice.
    with dispatcher.whole_second_pass() if writes else contextlib.nullcontext():
        results = call(*args)
    node = _backward_node(results, args)
    if node is not None:
        if takes_none:
            node.set_materialize_grads(False)
        node.register_prehook(functools.partial(_watch_step, weakref.ref(node)))
    return results


def _watch_where_differentiated(node: weakref.ref[Any], given: tuple[torch.Tensor | None, ...]) -> None:
    """Have gradients watched in a backward pass that is differentiated itself: only ``create_graph`` enables gradients there.

    Not always: torch keeps what a node is given until its hooks have run, and that is a step's largest tensors.
    """
    if torch.is_grad_enabled() and (found := node()) is not None and not hasattr(found, "is_watched"):
        found.is_watched = True
        found.register_hook(_watch_gradients)
    if any(one is None for one in given) and (found := node()) is not None:
        dispatcher.call_hooks_with_tensors_alone(source for source, _ in found.next_functions)


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient of a compiled backward pass that is to be differentiated itself.

    Torch raises too, where something that the pass reads asks for a gradient. Where nothing does, torch before 2.12 returned
    gradients like constants: a penalty on them would have had no effect, and nobody would have been told.
    """

    @staticmethod
    def forward(_ctx: Any, _asks: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradient.detach()

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        """Say that there is none.

        Raises:
            NoSecondDerivative: always.
        """
        raise NoSecondDerivative


def _without_second(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...] | None:
    """Have gradients raise where they are differentiated."""
    if not torch.is_grad_enabled():
        return None
    asks = torch.empty(0, requires_grad=True)
    return tuple(one if one is None else _NoSecondDerivative.apply(asks, one) for one in gradients)


# A model that differentiates by itself runs both in a frame that dynamo compiles.
_watch_gradients: Any = torch.compiler.disable(_without_second)
_watch_step: Any = torch.compiler.disable(_watch_where_differentiated)


def _backward_node(results: Any, args: tuple[Any, ...]) -> Any:
    """Return the node of autograd's that the call has just made; None where no result asks for a gradient.

    AOTAutograd makes views of some results behind it. What lies behind the arguments is somebody else's.
    """
    given = {one.grad_fn for one in args if isinstance(one, torch.Tensor)}
    waiting: list[Any] = [one.grad_fn for one in results if isinstance(one, torch.Tensor)]
    while waiting:
        node = waiting.pop(0)
        if node is None or node in given:
            continue
        if node.name() == "CompiledFunctionBackward" and hasattr(node, "set_materialize_grads"):
            return node
        waiting.extend(source for source, _ in node.next_functions)
    return None


def _partitioned(
    joint: GraphModule, *args: Any, is_budgeted: bool, prepare: Callable[[GraphModule], object] | None,
    watch: Callable[[GraphModule], Iterable[Node]], **more: Any,
) -> tuple[GraphModule, GraphModule]:  # fmt: skip
    """Part a joint graph in two; under a checkpoint or a budget too, what may be random is kept and not computed again.

    Under a budget torch would draw a dropout's numbers again, other ones. And it would read the running mean of a batch norm
    again, which has been written by then.

    Torch would keep the generator's state for it, a tensor of unknown size, and run it again by an op that takes the state. Such
    an op is attention, whatever it drops: of each layer its result and one number a row are kept.
    """
    read_once = _of_written_inputs(joint) if is_budgeted else set()
    for node in joint.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if (is_random or node in read_once) and (node.meta.pop("recompute", None) is not None or is_budgeted):
            parts = [user for user in node.users if user.target is operator.getitem]
            for kept in [*parts, node] if is_budgeted else parts or [node]:
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if prepare is not None:
        prepare(joint)
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    watched = [node.name for node in watch(joint)]
    forward, backward = min_cut_rematerialization_partition(joint, *args, **more)
    for name in watched:
        _keep_input(forward, backward, name, more["num_fwd_outputs"])
    return forward, backward


def _of_written_inputs(joint: GraphModule) -> set[Node]:
    """Return what a joint graph computes straight from inputs that hold other numbers once the forward pass is done."""
    given = {node.meta["desc"]: node for node in joint.graph.find_nodes(op="placeholder") if "desc" in node.meta}
    written, found = {given[kind.mutated_input] for _, kind in _writes(joint) if kind.mutated_input in given}, set[Node]()
    for node in joint.graph.nodes:
        if not written.isdisjoint(node.all_input_nodes):
            returns = getattr(getattr(node.target, "_schema", None), "returns", ())
            (written if any(one.alias_info for one in returns) else found).add(node)
    return found


def _writes(joint: GraphModule) -> Iterator[tuple[Any, Any]]:
    """Yield what a joint graph returns for its inputs to hold from then on, and torch's description of it."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    result = joint.graph.output_node()
    results = result.args[0]
    assert isinstance(results, tuple | list)
    yield from (pair for pair in zip(results, result.meta["desc"], strict=True) if isinstance(pair[1], InputMutationAOTOutput))


def writes_in_checkpoint(joint: GraphModule) -> bool:
    """Whether a checkpoint writes to an input of a joint graph, such as the running mean of a batch norm; call it in ``prepare``.

    In eager its second forward pass writes again. The parted graphs write once, or read what was written meanwhile.

    Args:
        joint: the graph of both passes.
    """
    return any(isinstance(one, Node) and "recompute" in one.meta for one, _ in _writes(joint))


def _keep_input(forward: GraphModule, backward: GraphModule, name: str, outputs: int) -> None:
    """Hand an input to the backward pass, which leaves it unread: autograd raises where it was written meanwhile, as in eager.

    Args:
        forward: the first pass.
        backward: the second.
        name: of the input, in both.
        outputs: how many results of the first are not kept.
    """
    result = forward.graph.output_node()
    results = result.args[0]
    assert isinstance(results, tuple | list)
    node = next(one for one in forward.graph.find_nodes(op="placeholder") if one.name == name)
    if node in results[outputs:]:
        return
    result.args = ((*results[:outputs], node, *results[outputs:]),)
    first = next(iter(backward.graph.nodes))
    with backward.graph.inserting_before(first):
        given = backward.graph.placeholder(name)
    given.meta = dict(node.meta)
    forward.recompile()
    backward.recompile()


def _keep_what_is_given() -> bool:
    """Say that the backward pass frees nothing of what the forward pass kept: then it may run again (``retain_graph``).

    Torch refuses that where the list of what is freed is not empty, and leaves it unset where it was not asked for.

    Returns:
        Whether AOTAutograd writes to inputs once the forward pass is done.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return False
    context.fw_metadata.bw_donated_idxs = []
    return bool(context.fw_metadata.mutated_inp_runtime_indices)


def output_of_gradient(node: Node) -> int | None:
    """Return the place of the output whose gradient an input of a backward graph is.

    Args:
        node: an input of a backward graph.

    Returns:
        None for another input, and for the gradient of what no output is itself: the base of views, a tensor that is written.
    """
    about = node.meta.get("desc")
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, TangentAOTInput

    if not isinstance(about, TangentAOTInput) or not isinstance(about.output, PlainAOTOutput):
        return None
    return about.output.idx


def own_call(graph_module: GraphModule) -> Callable[..., Any]:
    """Return dynamo's graph as a function with the gradients that the model has in eager.

    Dynamo's op for a checkpoint is made for a compiler. Run as it is, it draws the numbers of a dropout again in the backward
    pass, other ones (torch 2.13), or keeps all activations (2.11).

    Args:
        graph_module: dynamo's.
    """
    op = torch.ops.higher_order.tag_activation_checkpoint
    if not graph_module.graph.find_nodes(op="call_function", target=op):
        forward: Callable[..., Any] = graph_module.forward
        return forward
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    module = GraphModule(graph_module, graph)
    for number, node in enumerate(graph.find_nodes(op="call_function", target=op)):
        body, *args = node.args
        assert isinstance(body, Node)
        name = f"checkpointed_{number}"
        module.add_submodule(name, _Checkpointed(getattr(graph_module, str(body.target))))
        given = {key: value for key, value in node.kwargs.items() if key not in _OF_CHECKPOINT}
        with graph.inserting_before(node):
            called = graph.call_module(name, tuple(args), given)
        node.replace_all_uses_with(called)
        graph.erase_node(node)
    module.recompile()
    call: Callable[..., Any] = module.forward
    return call


_OF_CHECKPOINT = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""What dynamo's op is given for the checkpoint and not for what runs inside of it."""


class _Checkpointed(torch.nn.Module):
    """Runs a graph under a checkpoint.

    Args:
        body: the graph.
    """

    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self._run = own_call(body)
        chosen = body.meta.get("_checkpoint_context_fn")
        self._how = {} if chosen is None else {"context_fn": chosen}
        self._written: frozenset[int] | None = None

    def forward(self, *args: Any, **given: Any) -> Any:
        """Run it.

        Autograd lets nobody write to what a checkpoint is given, and the body may write to a buffer, which in the model is no
        argument.
        """
        if self._written is None:
            self._written = fake_mode.written_arguments(self._run, args)
        read = [one for place, one in enumerate(args) if place not in self._written]

        def run(*read: Any, **given: Any) -> Any:
            others = iter(read)
            return self._run(*(args[place] if place in written else next(others) for place in range(len(args))), **given)

        written = self._written
        return checkpoint(run if written else self._run, *read, use_reentrant=False, **self._how, **given)
