"""The one tracer: dynamo's graph, retraced into ATen ops that still read like the model.

TorchDynamo hands its graph to a backend; that graph is retraced pre-dispatch on dynamo's own fake tensors. Every op then is an
ATen op (``linear``, ``layer_norm`` and ``scaled_dot_product_attention`` stay whole, so cuBLAS and cuDNN still run them), knows
its module path and its source line, and in-place writes stay in place and in order: nothing is functionalised. Dynamo supplies
guards, graph breaks and fallback. AOTAutograd (post-dispatch) was tried and is worse here: it decomposes linear and attention.

What aliases what is read off the fake tensors' storages, so a view is a view whatever its op is called, and a ``to`` or
``dropout`` that changes nothing is one too.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.fx_nodes import relative_path, written_inputs
from fusion_advisor.capture.graph.retrace import dynamos_cause, retrace, tracing_cause
from fusion_advisor.capture.graph.side_effects import Written, arguments, written_by
from fusion_advisor.errors import CannotCapture, NoSecondDerivative
from fusion_advisor.records import GraphBreak
from fusion_advisor.runtime.call_tensors import tensors_in, without_numbers
from fusion_advisor.runtime.deep_stack import in_one_piece
from fusion_advisor.runtime.gc_pause import collector_paused
from fusion_advisor.runtime.torch_internals import dispatcher, dynamo, fake_mode, module_call


@dataclass(slots=True)
class Route:
    """Stands in for a region in dynamo's compiled code.

    Attributes:
        forward: the graph.
        seen: during the captured call, gets each run of a route with its tensors; None afterwards.
        results: of the last run during the captured call.
    """

    forward: Callable[..., Any]
    seen: list[tuple[Route, tuple[Any, ...]]] | None = None
    results: Any = None

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if self.seen is None:
            return self.forward(*args)
        self.seen.append((self, args))
        self.results = self.forward(*args)
        return self.results


@dataclass(slots=True)
class Region:
    """One captured graph, live: the ATen graph and the tensors it was called with.

    Attributes:
        graph: placeholders are the region's inputs in call order (parameters and buffers included).
        original: dynamo's own graph, which runs the model's ops unchanged.
        names: one qualified name per placeholder, known after the first call.
        roles: ``input``, ``parameter`` or ``buffer`` per placeholder.
        example_args: the tensors of the first call.
        route: what runs in its place when the captured call is made again; None for a graph that no dynamo call leads to.
        code: of every function that dynamo looked through for it.
        training_pass: ``forward`` or ``backward`` of a training step; empty in any other.
        effects: what its call changes in Python that outlives it, and the ``id`` of the object whose attributes it sets or 0.
        digests: of dynamo's graph, and of the graphs inside it.
    """

    index: int
    graph: GraphModule
    original: GraphModule
    names: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    example_args: tuple[Any, ...] = ()
    route: Route | None = None
    code: tuple[CodeType, ...] = ()
    training_pass: str = ""
    effects: tuple[tuple[str, int], ...] = ()
    digests: tuple[str, ...] = ()


@dataclass(slots=True)
class DynamoCall:
    """The model's call as dynamo compiled it for a capture: it evaluates its guards and runs each region's route.

    Attributes:
        call: the compiled call.
        later: takes the graphs that are compiled after the capture, where a guard failed; None until the call is taken over.
        takes_recurrent: whether LSTMs and their like are ops of the graphs.
    """

    call: Callable[..., Any]
    later: Callable[[GraphModule, list[Any]], Callable[..., Any]] | None = None
    takes_recurrent: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a captured graph within a call.

    Attributes:
        place: of the region in :attr:`LiveCapture.regions`.
        args: its tensors.
    """

    place: int
    args: tuple[Any, ...]


@dataclass(slots=True)
class LiveCapture:
    """All regions of one call of a model, in the order they first ran, and what dynamo could not capture.

    Attributes:
        runs: of the regions, in order; empty: each ran once. Layers with a graph break in them share their graphs and run them
            on their own weights.
        written: what the call changes outside its result; ``written.rewind()`` goes before every repeat.
        compiled: None where no dynamo call leads to the regions.
        results: of the graph, where the call is one graph.
        untraced: what makes the call where the graph was read from a file.
        layouts: by rule, what its copies change that give values another layout; empty where nobody timed them.
    """

    regions: list[Region] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    output: Any = None
    written: Written = field(default_factory=Written)
    compiled: DynamoCall | None = None
    layouts: Mapping[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    results: Any = None
    untraced: Any = None

    def in_order(self) -> list[Run]:
        """Return every run of a region, as the call made them."""
        return self.runs or [Run(place, region.example_args) for place, region in enumerate(self.regions)]

    def is_whole(self) -> bool:
        """Whether the call is one graph, run once: no Python of the model's own lies between its ops."""
        return len(self.in_order()) == 1 and not self.breaks

    def runs_of_regions(self) -> tuple[int, ...]:
        """Return how often the call runs each region."""
        count = Counter(run.place for run in self.in_order())
        return tuple(count[place] for place in range(len(self.regions)))


def capture_regions(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    model_id: str = "model",
    with_lines: bool = True,
) -> LiveCapture:
    """Run the model once under dynamo and return its graphs with the tensors they were called with.

    Args:
        model: any module; it is called as ``model(*args, **kwargs)`` and left as it was.
        model_id: for the error message only.
        with_lines: note the source line of each op; without, for a model that was captured before, it takes an eighth less time,
            and dynamo does not try the guards at once.

    Raises:
        CannotCapture: dynamo captured no graph at all.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise CannotCapture(model_id=model_id, detail="it is TorchScript, which dynamo does not look into")
    refuse_own_ops(model, args, kwargs, model_id)
    original = module_call.original_call(model)
    with torch.no_grad():
        written = written_by(lambda: original(*args, **kwargs), model, args, kwargs, model_id=model_id)
    captured = functools.partial(_captured, model, args, kwargs, written, model_id=model_id, with_lines=with_lines)
    try:
        live = captured()
    except CannotCapture:  # dynamo before 2.12 fails on packed sequences, for one
        if not any(isinstance(one, torch.nn.RNNBase) for one in model.modules()):
            raise
        captured = functools.partial(captured, takes_recurrent=False)
        live = captured()
    if not live.regions and not live.breaks and not dynamo.isolates():
        dynamo.forget_graphs(model)
        live = captured()
    if not live.regions:
        own = next((one.reason for one in live.breaks if one.reason in (OWN_GRADIENTS, OWN_SIZES)), None)
        raise CannotCapture(model_id=model_id, detail=own or _why_no_graph(live, model, args, kwargs))
    known = _known_tensors(model, args, kwargs)
    for place, region in enumerate(live.regions):
        mine = [run.args for run in live.runs if run.place == place]
        region.example_args = mine[0]
        region.names, region.roles = _name_inputs(mine, known)
    return live


def _why_no_graph(live: LiveCapture, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Say why dynamo has captured nothing; where a call may have no break, it names the op that makes one, and its line."""
    cause = ""
    with torch.no_grad():
        with dispatcher.OpLog() as log:
            module_call.original_call(model)(*args, **kwargs)
        live.written.rewind()
        if not log.seen:
            return "its call runs no op"
        if not dynamo.isolates():
            dynamo.forget_graphs(model)  # it looks at no code again that it has skipped
        try:
            dynamo.compiled_call(model, "eager", fullgraph=True)(*args, **kwargs)
        except RuntimeError as error:
            cause = f": {dynamos_cause(str(error))}"
        live.written.rewind()
    return f"dynamo ran it op by op; every frame was skipped or broke at its first op{cause}"


_DOUBLE_BACKWARD = (
    "its step differentiates a gradient (create_graph=True), and a compiled backward pass has no gradient of its own"
)
OWN_GRADIENTS = "the model asks for gradients by itself (enable_grad), so the ops that they go through run as they are"
OWN_SIZES = "a whole number that it computes with is read from a tensor or a NumPy number, and may be another one at each call"


class _Collector:
    """The backend that dynamo hands the graphs of one call to.

    Dynamo keeps it for as long as the compiled call lives, so that what it has collected is handed over and forgotten.
    """

    def __init__(self, *, with_lines: bool) -> None:
        self.with_lines = with_lines
        self.compiled: DynamoCall | None = None
        self._regions: list[Region] = []
        self._breaks: list[GraphBreak] = []
        self._seen: list[tuple[Route, tuple[Any, ...]]] = []
        self._modes: list[Any] = []

    def backend(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Retrace a graph and return a route to it that notes the tensors of each run."""
        assert self.compiled is not None
        if self.compiled.later is not None:
            return self.compiled.later(graph_module, example_inputs)
        own = OWN_GRADIENTS if dynamo.gives_gradients(graph_module) else OWN_SIZES if dynamo.reads_sizes(graph_module) else ""
        if own:
            self._breaks.append(GraphBreak(reason=own, source=""))
            return graph_module.forward
        if not self.with_lines:
            dynamo.leave_new_guards_untried()
        dynamo.name_self(graph_module)
        route = Route(graph_module.forward, self._seen)
        self._modes.extend(dynamo.fake_modes_of(graph_module))
        region = Region(
            index=len(self._regions), graph=retrace(graph_module), original=graph_module, route=route,
            code=dynamo.traced_code(), effects=dynamo.lasting_effects(),
        )  # fmt: skip
        reason = dynamo.break_reason(graph_module)
        if reason is not None:
            self._breaks.append(GraphBreak(reason=reason[0], source=relative_path(reason[1])))
        self._regions.append(region)
        return route

    def forget_traces(self) -> None:
        """Drop what dynamo's fake modes keep of the tensors that were traced."""
        fake_mode.forget_real_tensors(self._modes)
        self._modes.clear()

    def hand_over(self, live: LiveCapture) -> None:
        """Give the graphs that ran to a capture, with their runs in order, and forget them."""
        ran = {id(route) for route, _ in self._seen}
        live.breaks = self._breaks
        live.regions = [region for region in self._regions if id(region.route) in ran]
        places = {id(region.route): place for place, region in enumerate(live.regions)}
        live.runs = [Run(places[id(route)], values) for route, values in self._seen]
        live.results = live.regions[0].route.results if len(live.runs) == 1 and live.regions[0].route else None
        for region in self._regions:
            assert region.route is not None
            region.route.seen = region.route.results = None
        self._regions.clear()
        self._seen.clear()


def _captured(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    written: Written,
    *,
    model_id: str,
    with_lines: bool,
    takes_recurrent: bool = True,
) -> LiveCapture:
    live = LiveCapture(written=written)
    collector = _Collector(with_lines=with_lines)
    live.compiled = collector.compiled = DynamoCall(
        dynamo.compiled_call(model, collector.backend), takes_recurrent=takes_recurrent
    )
    live.output = _run_under_dynamo(collector, live.compiled, args, kwargs, model_id=model_id)
    written.rewind()
    collector.hand_over(live)
    return live


def _run_under_dynamo(
    collector: _Collector, compiled: DynamoCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, model_id: str
) -> Any:
    """Run the compiled call once, and return the model's output.

    Raises:
        CannotCapture: with dynamo's own sentence.
    """
    lines = contextlib.nullcontext() if collector.with_lines else dynamo.without_source_lines()
    try:
        with (
            refusals_told(model_id), torch.no_grad(), dynamo.raise_recompile_limit(1024), dynamo.no_collection(),
            dynamo.recurrent_layers_in_graphs(is_on=compiled.takes_recurrent), collector_paused(),
            dispatcher.linear_in_one_step(), lines,
        ):  # fmt: skip
            return in_one_piece(lambda: compiled.call(*args, **kwargs))
    finally:
        collector.forget_traces()


@contextlib.contextmanager
def refusals_told(model_id: str) -> Iterator[None]:
    """Turn what dynamo and its backend raise into the error of ours that names the model.

    Raises:
        CannotCapture: with dynamo's own sentence.
    """
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:  # its own first line names no cause
        raise CannotCapture(model_id=model_id, detail=tracing_cause(error.inner_exception)) from error
    except torch._dynamo.exc.TorchDynamoException as error:
        raise CannotCapture(model_id=model_id, detail=dynamos_cause(str(error))) from error
    except RuntimeError as error:
        if not isinstance(error, NoSecondDerivative) and "does not currently support double backward" not in str(error):
            raise
        raise CannotCapture(model_id=model_id, detail=_DOUBLE_BACKWARD) from error


def refuse_own_ops(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], model_id: str) -> None:
    """Leave to the model's own ops what sees each op by itself, and tensors whose numbers cannot be compared.

    Raises:
        CannotCapture: with the mode, or the name of the tensor.
    """
    if dispatcher.is_mode_active():
        detail = "a TorchFunctionMode or TorchDispatchMode is active, and it is to see the model's own ops"
        raise CannotCapture(model_id=model_id, detail=detail)
    lack = without_numbers(model, args, kwargs)
    if lack:
        raise CannotCapture(model_id=model_id, detail=lack)
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *arguments(args, kwargs).items()):
        if dispatcher.sees_its_ops(type(tensor)):
            kind = f"a {type(tensor).__name__}, a tensor class that handles its ops by itself"
            raise CannotCapture(model_id=model_id, detail=f"`{name}` is {kind} (__torch_function__ or __torch_dispatch__)")


def writes_to_inputs(region: Region) -> bool:
    """Whether a region writes to a tensor that it was given: it then cannot be run twice and give the same."""
    return bool(written_inputs(region.graph))


def _known_tensors(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    known: dict[int, tuple[str, str]] = {}
    for name, value in (("args", args), *kwargs.items()):
        known.update({id(tensor): (found, "input") for found, tensor in tensors_in(name, value)})
    for name, tensor in model.named_buffers(remove_duplicate=False):
        known.setdefault(id(tensor), (name, "buffer"))
    for name, tensor in model.named_parameters(remove_duplicate=False):
        known.setdefault(id(tensor), (name, "parameter"))
    return known


def _name_inputs(
    runs: Sequence[tuple[Any, ...]], known: Mapping[int, tuple[str, str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name a region's inputs after its first run.

    What is another tensor in another run (the weights, where layers share a graph) is an input: nothing may be made of its value.
    """
    found = [known.get(id(value), (f"input.{position}", "input")) for position, value in enumerate(runs[0])]
    roles = [
        role if all(values[position] is runs[0][position] for values in runs) else "input"
        for position, (_, role) in enumerate(found)
    ]
    return tuple(name for name, _ in found), tuple(roles)
