"""Makes a capture from a file, where this process's model and call are those that were traced; says what differs where not.

Beside the facts of the model, the model's own ops run once: what they write is watched as for any capture, the classes of their
output are used for ours, and the graph's results are compared with theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusion_advisor.capture.graph.side_effects import Numbers, Written, written_by
from fusion_advisor.capture.graph.tracer import LiveCapture, Region, Route, Run, refuse_own_ops
from fusion_advisor.capture.sizes.open_capture import Sizes
from fusion_advisor.export.copied import model_facts
from fusion_advisor.fuse.direct.code_guard import WatchedCode
from fusion_advisor.fuse.direct.direct_call import frame_of
from fusion_advisor.fuse.start.call_tensors import Given, given_by, sharing
from fusion_advisor.fuse.start.code_facts import attributes, find
from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.fuse.start.graph_text import decode_graph
from fusion_advisor.fuse.start.guard_tree import Differs, pattern
from fusion_advisor.fuse.start.object_changes import ObjectCode, ObjectState, Place, in_order, untold_change
from fusion_advisor.fuse.start.open_call import Source, sizes_from
from fusion_advisor.fuse.start.outputs import form_of, furthest, maker, without_places
from fusion_advisor.fuse.start.record import has_hooks, lasting_change, versions
from fusion_advisor.fuse.start.tree_text import decode_tree
from fusion_advisor.fuse.start.untraced_call import Traced, UntracedCall, tensor_of
from fusion_advisor.runtime.torch_internals import compiled_code, dispatcher, module_call
from fusion_advisor.runtime.torch_internals.stored_sizes import OpenSizes
from fusion_advisor.workload.load import LoadedWorkload


class Started:
    """A capture that was made without a trace.

    Attributes:
        live: the capture.
    """

    def __init__(self, live: LiveCapture, expected: dict[int, torch.Tensor]) -> None:
        self.live = live
        self._expected = expected
        self._numbers = Numbers.now()  # as the model's own ops found them

    def compare(self, run: Callable[[], Any]) -> None:
        """Compare what the graph returns with what the model's own ops returned, and forget the latter.

        Args:
            run: runs the graph, op by op; it is to draw the random numbers that the model's own ops drew.

        Raises:
            Differs: they are too far apart.
        """
        self._numbers.restore()
        results = run()
        found = results if isinstance(results, tuple | list) else [results]
        expected, self._expected = self._expected, {}
        problem = furthest([found[number] for number in expected], list(expected.values()))
        if problem:
            raise Differs(f"the stored graph computes something else: {problem}")


def start_again(loaded: LoadedWorkload, start: Mapping[str, Any]) -> Started:
    """Make a capture from a file.

    Args:
        loaded: the model, and a call like the one that was traced.
        start: from :func:`fusion_advisor.fuse.start.record.read_start`.

    Raises:
        Differs: the model, its code, the call or a version is another one, or the file is none of ours.
        CannotCapture: the model is one that no capture takes.
    """
    refuse_own_ops(loaded.model, loaded.args, loaded.kwargs, loaded.record.model_id)
    with differences_told():
        _compare_surroundings(loaded.model, start)
        live, expected, _ = call_again(loaded.model, loaded.args, loaded.kwargs, start, loaded.record.model_id)
        return Started(live, expected)


@contextlib.contextmanager
def differences_told() -> Iterator[None]:
    """Turn whatever a file that is none of ours leads to into a difference.

    Raises:
        Differs: with what was wrong.
    """
    try:
        with torch.no_grad():
            yield
    except CannotDescribe as error:
        raise Differs(str(error)) from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError, OverflowError) as error:
        # The file is read as what we wrote; somebody may have changed it.
        raise Differs(f"start.json.gz does not fit this model ({type(error).__name__}: {error})"[:200]) from error


def call_again(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], row: Mapping[str, Any], model_id: str,
    sizes: Sizes | None = None,
) -> tuple[LiveCapture, dict[int, torch.Tensor], OpenSizes | None]:  # fmt: skip
    """Make the capture of one call; whoever calls this has compared the model, and tells differences as :func:`start_again` does.

    Args:
        model: as it was traced.
        args: of a call like the traced one.
        kwargs: likewise.
        row: what is stored of the call.
        model_id: for errors.
        sizes: of its open dims.

    Returns:
        The capture, the tensors that its results must be, and its open sizes.

    Raises:
        Differs: the code or the call is another one.
    """
    given = given_by(args, kwargs)
    _compare_call(given, row)
    places = [(str(path), str(name)) for path, name, _ in row["sets"]]
    output, set_to, written = _own_ops(model, args, kwargs, given, places, model_id)
    code = find(row["code"])
    _compare_attributes(row["attributes"], attributes(WatchedCode(model, code)))
    frame = frame_of(model)
    if frame is None:
        raise Differs("its forward is another one than its class's, or a call runs hooks")
    known = sizes_from(row["open"], sizes or {}, given.tensors)
    sources = [one if isinstance(one, int | list) else str(one) for one in row["sources"]]
    inputs = tuple(_input(one, given.tensors, model) for one in sources)
    device = next((one.device for one in inputs if isinstance(one, torch.Tensor) and one.device.type != "cpu"), _CPU)
    graph = decode_graph(row["graph"], device, known)
    _compare_inputs(graph, inputs, known)
    numbers = _numbers_of(graph, known)
    expected = _made(row["output"], output, inputs, given, numbers)
    sets = [(*place, form, set_to[place]) for place, (*_, form) in zip(places, row["sets"], strict=True)]
    for *_, form, value in sets:
        expected |= _made(form, value, inputs, given, numbers)
    route = Route(graph.forward)
    region = Region(
        index=0, graph=graph, original=graph, names=tuple(map(str, row["names"])), roles=tuple(map(str, row["roles"])),
        example_args=inputs, route=route, code=tuple(code), digests=tuple(map(str, row["digests"])),
    )  # fmt: skip
    if not len(inputs) == len(region.names) == len(region.roles):
        raise Differs("start.json.gz has another number of inputs than its graph")
    traced = Traced(
        frame=frame, tree=decode_tree(row["tree"]), pattern=row["pattern"], sources=sources, leaves=tuple(row["leaves"][1:]),
        sharing=row["inside"][1], make=maker(row["output"], output),
        objects=ObjectCode([*given.inside], row["numbers"], sets) if given.objects else None,
    )  # fmt: skip
    untraced = UntracedCall(model, traced, route)
    untraced.read(args, kwargs)
    runs = [Run(0, inputs)]
    return LiveCapture(regions=[region], output=output, written=written, runs=runs, untraced=untraced), expected, known


def _own_ops(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Given, places: Sequence[Place], model_id: str
) -> tuple[Any, dict[Place, Any], Written]:  # fmt: skip
    """Make a call by the model's own ops; return its output, what it sets at some places, and what it writes, put back.

    Raises:
        Differs: it sets other attributes, or something else that it changes outlives it.
    """
    outputs: list[Any] = []
    set_to: dict[Place, Any] = {}
    original, state, numbers = module_call.original_call(model), ObjectState.of(args, kwargs, given), Numbers.now()

    def call() -> None:
        numbers.restore()
        outputs[:] = [original(*args, **kwargs)]
        set_to.update(state.changes())

    written = written_by(call, model, args, kwargs, model_id=model_id)
    numbers.restore()
    changed = lasting_change(written) or untold_change(written, places)
    if changed:
        raise Differs(changed)
    in_order(set_to, places)
    return outputs[0], set_to, written


_CPU = torch.device("cpu")


def _input(source: Source, tensors: Sequence[torch.Tensor], model: torch.nn.Module) -> Any:
    if isinstance(source, list):
        place, dim = source
        return tensors[place].shape[dim]
    return tensors[source] if isinstance(source, int) else tensor_of(model, source)


def _compare_surroundings(model: torch.nn.Module, start: Mapping[str, Any]) -> None:
    """Compare versions, torch's state and the facts of a model."""
    for name, version in versions().items():
        if start["versions"].get(name) != version:
            raise Differs(f"{name} is {version}, and was {start['versions'].get(name)}")
    now = compiled_code.global_state()
    for name in sorted({*now, *start["state"]}):
        if now.get(name) != start["state"].get(name):
            raise Differs(f"torch's {name} is {now.get(name)}, and was {start['state'].get(name)}")
    if dispatcher.is_function_mode_on():
        raise Differs("a mode of torch functions is on, torch.device, say")
    facts = start["facts"]
    found = model_facts.differences(facts, model_facts.facts(model, facts["code"]), made="traced")
    if found:
        raise Differs(found[0])
    if has_hooks(model):
        raise Differs("a hook is registered on a module")


def _compare_call(given: Given, row: Mapping[str, Any]) -> None:
    """Compare which tensors and objects a call passes; what they hold is compared with what was read of them."""
    leaves = list(given.leaves.values())
    if row["leaves"] != [list(given.leaves), pattern(leaves), [one.requires_grad for one in leaves]]:
        raise Differs("the call passes other tensors, in another order, or such that ask for gradients")
    if row["inside"] != [list(given.inside), sharing(given.tensors), list(given.objects)]:
        raise Differs("the call passes other objects, or such that hold other tensors")


def _compare_attributes(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise Differs(f"the code of `{name}` is another one")


def _compare_inputs(graph: torch.fx.GraphModule, inputs: Sequence[Any], known: OpenSizes | None) -> None:
    """Compare the tensors and sizes that the graph will get with those that it was made for."""

    def now(sizes: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(sizes) if known is None else tuple(map(known.number_of, sizes))

    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, value in zip(places, inputs, strict=True):
        expected = node.meta["val"]
        if not isinstance(expected, torch.Tensor) or not isinstance(value, torch.Tensor):
            if now([expected]) != (value,):
                raise Differs(f"the graph's input `{node.name}` is not what it was")
            continue
        found = (tuple(value.shape), value.stride(), value.dtype, value.device)
        if found != (now(expected.shape), now(expected.stride()), expected.dtype, expected.device):
            shown = f"{value.dtype}{list(value.shape)} on {value.device}, and was {expected.dtype}{list(expected.shape)}"
            raise Differs(f"the graph's input `{node.name}` is {shown} on {expected.device}")


def _numbers_of(graph: torch.fx.GraphModule, known: OpenSizes | None) -> dict[int, Any]:
    """Return by place the whole numbers among a graph's results, as they are at the sizes of one call."""
    (output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    results = output if isinstance(output, tuple | list) else [output]
    values = [one.meta.get("val") if isinstance(one, torch.fx.Node) else one for one in results]
    numbers = [(place, value) for place, value in enumerate(values) if isinstance(value, torch.SymInt) or type(value) is int]
    return {place: value if known is None else known.number_of(value) for place, value in numbers}


def _made(form: Any, output: Any, inputs: Sequence[Any], given: Given, numbers: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    """Compare an output, or what is set, with the form of the traced one; return its tensors by result."""
    place = {id(value): number for number, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    objects = {id(value): name for name, value in given.objects.items()}
    now = form_of(output, lambda one: {"input": place[id(one)]} if id(one) in place else {"result": None}, objects)
    if now != without_places(form, numbers):
        raise Differs("its output has another form, or holds another number")
    return dict(results_in(form, output))


def results_in(form: Any, output: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of each result of a graph with the tensor of an output that stands for it.

    Args:
        form: of outputs.
        output: of that form.
    """
    if not isinstance(form, dict):
        return
    if "result" in form:
        yield form["result"], output
    elif "fields" in form:
        for name, item in form["fields"]:
            yield from results_in(item, getattr(output, name))
    elif "holds" in form:
        for name, item in form["holds"]:
            yield from results_in(item, vars(output)[name])
    elif "dict" in form:
        for key, item in form["dict"]:
            yield from results_in(item, output[key])
    else:
        for word in ("list", "tuple"):
            for item, part in zip(form.get(word, ()), output if word in form else (), strict=True):
                yield from results_in(item, part)
