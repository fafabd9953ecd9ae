"""A live model whose training step is fused: the user's own module, its own ops for every call that was not verified.

What is in place is dynamo's compiled call of the model, with a :class:`TrainedGraph` for each graph that it captured. Autograd
sees one function for each graph, so whatever works on a model's outputs, gradients and parameters works as before: optimizers,
accumulation, hooks on gradients, scaled losses. Dynamo guards what its graphs take for granted; after :meth:`TrainedModel.seal`
a graph that was not verified runs its own ops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.fx_nodes import relative_path
from fusion_advisor.fuse.decide.session import Variant
from fusion_advisor.fuse.live.call_difference import describe_difference, why_never
from fusion_advisor.fuse.live.call_signature import device_of, signature
from fusion_advisor.fuse.live.graph_table import failed_guard
from fusion_advisor.fuse.live.module_guard import ModuleGuard
from fusion_advisor.fuse.slot.in_place import TRANSFORMED, InPlace
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from fusion_advisor.records import GraphBreak
from fusion_advisor.runtime.torch_internals import autograd_graphs, cuda_state, dispatcher, dynamo, fake_mode

Call = Callable[..., Any]
FuseGraph = Callable[[GraphModule, list[Any]], Call]
"""Returns what runs in place of one of dynamo's graphs: a :class:`TrainedGraph` for one that asks for gradients."""

EVALUATED = "the model is in eval() mode, and what was verified is its training step"
NO_GRADIENTS = "gradients are disabled, and what was verified is a training step"
AUTOCAST = "autocast is another than in the training step that was verified"
UNSEEN = "these inputs (names, shapes, dtypes or strides) were not verified"
OTHER_GRAPH = "dynamo captured a graph that was not verified"
OWN_OPS = "an input is of a tensor class that handles its ops by itself (__torch_function__ or __torch_dispatch__)"
MODE = "a TorchFunctionMode or TorchDispatchMode is active, and it is to see the model's own ops"


class TrainedModel(InPlace):
    """A live model with a fused training step in place.

    Call it like the model and train as before. ``revert()`` puts the original call back exactly, and so does leaving a ``with``
    block. Calls in ``eval()`` mode, without gradients, under another autocast or of other shapes run the original ops; each
    reason is said once and counted in ``fallbacks``.

    Args:
        model: the live model.
        args: of the call to verify.
        kwargs: of the same call.
        fuse: called for each graph that dynamo captures of that call.
    """

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], fuse: FuseGraph) -> None:
        super().__init__(model)
        self.graphs_of_step: list[TrainedGraph] = []
        """Graphs that ask for gradients, in the order of capture."""
        self.breaks: list[GraphBreak] = []
        """Where dynamo split the call."""
        self._fuse = fuse
        self._is_sealed = False
        self._told = _Told()
        self._fake_modes: list[Any] = []
        self._known: list[MutableMapping[Any, Any]] = []
        self._guard = ModuleGuard(model, is_trained=True)
        self._verified = signature(args, kwargs)
        self._autocast = _autocast()
        self._compiled = dynamo.compiled_call(model, self._backend)

    def _backend(self, graph_module: GraphModule, inputs: list[Any]) -> Call:
        self._fake_modes += dynamo.fake_modes_of(graph_module)
        self._known.append(dynamo.known_tensors())
        if self._is_sealed:
            return self._counted(autograd_graphs.own_call(graph_module), failed_guard())
        self._guard.watch(dynamo.traced_code())
        reason = dynamo.break_reason(graph_module)
        if reason is not None:
            self.breaks.append(GraphBreak(reason=reason[0], source=relative_path(reason[1])))
        call = self._fuse(graph_module, inputs)
        if isinstance(call, TrainedGraph):
            self.graphs_of_step.append(call)
        return call

    def _counted(self, own_call: Call, why: str) -> Call:
        """Count each call of the model that runs a graph which was not verified, however many of its graphs are such."""

        def counted(*args: Any) -> Any:
            if not self._told.is_counted:
                self._told.is_counted = True
                self._fallbacks.add(OTHER_GRAPH, why)
            return own_call(*args)

        return counted

    def seal(self, variants: list[Variant]) -> None:
        """Rewrite no further graph: all that the verified call needs are there.

        Args:
            variants: the graphs with kernels of ours, whose launches are counted.
        """
        self._is_sealed = True
        self._forget_traces()
        self._launches.include([module for variant in variants for module in variant.modules])
        self._launches.include_replays([graph.step_graph for graph in self.graphs_of_step if graph.step_graph is not None])

    @property
    def original_call(self) -> Call:
        """The model's own call, whatever is in place."""
        return self._original

    def compiled_call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled call, whatever is in place; it captures the graphs the first time."""
        # Every model of a class adds graphs to its code object; at dynamo's default limit it would silently run eager.
        with dynamo.raise_recompile_limit(1024), dynamo.without_repeated_warnings():
            return self._compiled(*args, **kwargs)

    def forget_recorded(self) -> None:
        """Free the CUDA graphs of the step; a later step records them again."""
        for graph in self.graphs_of_step:
            if graph.step_graph is not None:
                graph.step_graph.forget()

    def forget(self) -> None:
        """Free the CUDA graphs of the step, and what dynamo's traces keep of the tensors that were traced."""
        self.forget_recorded()
        self._forget_traces()

    def _forget_traces(self) -> None:
        fake_mode.forget_real_tensors(self._fake_modes)
        for tensors in self._known:
            tensors.clear()
        self._fake_modes.clear()
        self._known.clear()

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused graphs if this call was verified, the original ops if not."""
        if dispatcher.is_mode_active():  # it would see what is read of the tensors below
            self._fallbacks.add(MODE)
            return self._original(*args, **kwargs)
        if dispatcher.is_transformed():
            self._fallbacks.add(TRANSFORMED)
            return self._original(*args, **kwargs)
        leaves: list[torch.Tensor] = []
        key = signature(args, kwargs, leaves)
        device = device_of(leaves)
        if device >= 0 and cuda_state.current_device_number() != device:
            with torch.cuda.device(device):  # as every op of torch does: streams belong to it
                return self.dispatch(*args, **kwargs)
        refusal = self._refusal(key, leaves)
        if refusal is None:
            self._told.is_counted = False
            result = self._compiled(*args, **kwargs)
            if self._known:  # dynamo captured a graph that was not verified
                self._forget_traces()
            return result
        is_new = refusal == UNSEEN and UNSEEN not in self.fallbacks
        never = why_never(key) if refusal == UNSEEN else ""
        self._fallbacks.add(never or refusal, describe_difference(key, [self._verified]) if is_new and not never else "")
        return self._original(*args, **kwargs)

    def _refusal(self, key: Any, leaves: list[torch.Tensor]) -> str | None:
        if not self.model.training:
            return EVALUATED
        if not torch.is_grad_enabled():
            return NO_GRADIENTS
        if _autocast() != self._autocast:
            return AUTOCAST
        if any(type(leaf) is not torch.Tensor and dispatcher.sees_its_ops(type(leaf)) for leaf in leaves):
            return OWN_OPS
        return UNSEEN if key != self._verified else self._guard.change()

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Launch every pass kernel by kernel while the context lasts, for whoever looks at single kernels or tensors."""
        graphs = [graph.step_graph for graph in self.graphs_of_step if graph.step_graph is not None and graph.step_graph.is_on]
        for one in graphs:
            one.is_on = False
        try:
            yield
        finally:
            for one in graphs:
                one.is_on = True

    @contextmanager
    def running(self, runners: Mapping[int, Call]) -> Iterator[None]:
        """Let other calls run in place of passes while the context lasts.

        Args:
            runners: by the ``id`` of the pass's graph as it was traced; a pass without one runs as it does.
        """
        halves = [half for graph in self.graphs_of_step for half in graph.halves if id(half.graph) in runners]
        for half in halves:
            half.instead = runners[id(half.graph)]
        try:
            yield
        finally:
            for half in halves:
                half.instead = None


class _Told(threading.local):
    """Whether this thread's call of the model was counted as one that ran the original ops."""

    is_counted = False


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """Whether autocast is on, and its dtype, for each kind of device."""
    return tuple(
        (is_on, torch.get_autocast_dtype(kind) if is_on else torch.float32)
        for kind in ("cuda", "cpu")
        for is_on in (torch.is_autocast_enabled(kind),)
    )
