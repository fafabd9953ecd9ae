"""Expected saving of a rewrite that changes more than chains: the ops in which two steps differ, timed by themselves.

Merged GEMMs, rows left out, activations in epilogues and GEMV kernels replace ops and fused calls, so their saving is not a
difference of two chains. It follows from the graphs of the two steps: the ops of one graph that the other does not have run by
themselves, all layers in a row (one layer's weight alone would stay in the cache), on the model's own weights and random
activations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import is_in_autocast, storages, tensors_of, written_storages
from fusion_advisor.capture.graph.split_bias import LAUNCHES_OF
from fusion_advisor.fuse.decide.session import Step
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.interleaving import Difference
from fusion_advisor.timing.known import until_known_alone
from fusion_advisor.timing.wall_timer import median_interval
from fusion_advisor.workload.device import is_out_of_memory

_BUDGET_S = 0.5
_ROUNDS = 60
_LEAST_OPS = 20
"""In one timed run: events tell no fraction of a microsecond, so fewer ops run several times over."""
_DIVIDE = frozenset({"div", "floor_divide", "remainder", "fmod"})
_ALIGNED = 64
"""Elements: where in such a piece a tensor begins is kept, for kernels load less at once from what is not aligned."""


class _CannotRunAlone(Exception):
    """These ops say something only within their step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """Ops of one region, to be called on its own."""

    module: GraphModule
    given: tuple[int | torch.Tensor, ...]
    """What they read: the number of one of the region's inputs, or a tensor made up."""

    def run(self, args: Sequence[Any]) -> None:
        self.module(*(args[value] if isinstance(value, int) else value for value in self.given))


def saving_alone_ns(runner: StepRunner, before: Step, after: Step, *, worst: Callable[[str], str] | None = None) -> int | None:
    """Return what the ops in which two steps differ save by themselves: :func:`change_alone`, as one figure."""
    change = change_alone(runner, before, after, worst=worst)
    return None if change is None else -change.median_ns


def change_alone(
    runner: StepRunner,
    before: Step,
    after: Step,
    confidence: float = 0.95,
    *,
    least_ops: int = _LEAST_OPS,
    interleave: Callable[..., list[list[int]]] = interleaving.interleave,
    worst: Callable[[str], str] | None = None,
) -> Difference | None:
    """Return what the ops in which two steps differ take in the second beyond what they take in the first.

    Args:
        runner: of the step; its method says how such calls are timed.
        before: a step.
        after: the same with one more rewrite; its regions stand for those of ``before``, in order.
        confidence: of the interval.
        least_ops: in one timed run; fewer run several times over.
        interleave: times the two sides against each other.
        worst: given what is wrong on this rank, or an empty text, returns what counts; None: one process runs the step.

    Raises:
        RuntimeError: memory ran out on one of several ranks while the others ran the ops.

    Returns:
        Nanoseconds per step, negative where the second is faster; None where the ops cannot run by themselves: they write to
        what the model holds or is given, run in autocast that the model enters, divide integers that are not known, cannot be
        recorded as the step can, or do not fit into memory together with the model.
    """
    method, problem = runner.method, ""
    found: dict[int, _Pair] = {}
    calls: list[Callable[[], None]] = []
    times_over = 1
    try:
        found = _differing(before, after)
        differing = sum(len(nodes) for pair in found.values() for nodes in pair)
        times_over = max(1, least_ops // max(1, differing))
        calls = _calls(before, after, found, times_over)
    except _CannotRunAlone as error:
        problem = repr(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = str(error) or "no memory"
    if (worst or str)(problem):
        return None
    try:
        one, other = _took_ns(runner, calls, interleave) if found else ([0], [0])
    except (RuntimeError, MemoryError) as error:
        if worst is not None or not is_out_of_memory(error):
            raise
        return None
    finally:
        runner.forget()
        is_as_the_step = runner.method == method
        runner.method = method
    return _change(one, other, confidence, times_over) if is_as_the_step else None


def _change(before_ns: Sequence[int], after_ns: Sequence[int], confidence: float, times_over: int) -> Difference:
    """Return a difference in nanoseconds and its interval: one side may be no op at all, and its times say nothing as a ratio."""
    rounds = [after - before for before, after in zip(before_ns, after_ns, strict=True)]
    _, low_ns, high_ns = median_interval(rounds, confidence)
    middle_ns = median_interval(after_ns)[0] - median_interval(before_ns)[0]
    ends = (middle_ns, min(low_ns, middle_ns), max(high_ns, middle_ns))
    median_ns, low_ns, high_ns = (round(value / times_over) for value in ends)
    return Difference(median_ns=median_ns, low_ns=low_ns, high_ns=high_ns)


_Pair = tuple[list[Node], list[Node]]


def _differing(before: Step, after: Step) -> dict[int, _Pair]:
    """Return, for each region that differs, the ops that only the first step has and those that only the second one has."""
    found = {}
    for place, modules in enumerate(zip(before.variant.modules, after.variant.modules, strict=True)):
        one, other = (_keys(module.graph) for module in modules)
        pair = _only_in(one, set(other.values())), _only_in(other, set(one.values()))
        if not any(pair):
            continue
        for module, nodes in zip(modules, pair, strict=True):
            read = {key for node in module.graph.nodes if node.op in ("placeholder", "get_attr") for key in storages(node)}
            if any(not read.isdisjoint(written_storages(node)) for node in nodes):
                raise _CannotRunAlone
            if _enters_autocast(module) and any(map(is_in_autocast, nodes)):
                raise _CannotRunAlone
        found[place] = pair
    return found


def _took_ns(runner: StepRunner, calls: list[Callable[[], None]], interleave: Callable[..., list[list[int]]]) -> list[list[int]]:
    """Time both sides."""
    calls = runner.recorded(calls)
    return interleave(
        calls, rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=runner.on_cuda, rest=runner.rest(calls),
        still_open=until_known_alone(on_cuda=runner.on_cuda), timer=runner.timer,
    )  # fmt: skip


def _calls(before: Step, after: Step, found: Mapping[int, _Pair], times_over: int) -> list[Callable[[], None]]:
    """Return calls of both sides, as often as a step runs each region and on the tensors of each run."""
    made: dict[Hashable, torch.Tensor] = {}
    runs = [run for run in before.bench.live.in_order() if run.place in found]

    def all_of(step: Step, side: int) -> Callable[[], None]:
        alone = {place: _alone(step.variant.modules[place], pair[side], made) for place, pair in found.items()}

        def call() -> None:
            with torch.no_grad():
                for _ in range(times_over):
                    for run in runs:
                        alone[run.place].run(run.args)

        return call

    return [all_of(before, 0), all_of(after, 1)]


def _only_in(keys: Mapping[Node, Hashable], there: Collection[Hashable]) -> list[Node]:
    """Return the ops of a graph that another does not have, in order; items of a list go with the op that returns it.

    Args:
        keys: of the graph's nodes.
        there: of the other's.
    """
    chosen: dict[Node, None] = {}
    for node, key in keys.items():
        is_item = node.target is operator.getitem and node.args[0] in chosen
        if is_item or (node.op == "call_function" and node.target is not operator.getitem and key not in there):
            chosen[node] = None
    return list(chosen)


def _keys(graph: Graph) -> dict[Node, Hashable]:
    """Identify a graph's ops by the captured ops that they compute, and by the layouts of their inputs and outputs.

    Each variant makes its own ops that hold a tensor or a view, under the same names. An op that joins a GEMM with its bias has a
    new name, and its node lists the captured ops that it is made of.
    """
    keys: dict[Node, Hashable] = {}
    layouts: dict[Node, Hashable] = {}
    memory: dict[Node, set[int]] = {}
    for node in graph.nodes:
        layouts[node], memory[node] = _layouts(node), set(storages(node))
        name: Hashable = (getattr(node.target, "__name__", str(node.target)), node.name)
        if "fusion_id" in node.meta:
            name = (node.meta["fusion_id"], node.meta["replaces"])
        elif LAUNCHES_OF in node.meta:
            name = tuple(node.meta[LAUNCHES_OF])
        read = node.all_input_nodes
        is_view = any(not memory[node].isdisjoint(memory[source]) for source in read)
        keys[node] = name, tuple(layouts[source] for source in read), layouts[node], is_view
    return keys


def _layouts(node: Node) -> Hashable:
    return tuple(map(_layout, tensors_of(node.meta.get("results", node.meta.get("val")))))


def _layout(value: torch.Tensor) -> Hashable:
    return tuple(value.shape), value.stride(), value.storage_offset() % _ALIGNED, value.dtype, value.device


def _enters_autocast(module: GraphModule) -> bool:
    return any(getattr(node.target, "__name__", "") == "_enter_autocast" for node in module.graph.nodes)


def _alone(module: GraphModule, nodes: list[Node], made: dict[Hashable, torch.Tensor]) -> _Alone:
    """Return these ops as a module: on the region's own inputs, parameters among them, and on random values in between."""
    number = {node: at for at, node in enumerate(node for node in module.graph.nodes if node.op == "placeholder")}
    mine = set(nodes)
    graph = Graph()
    copies: dict[Node, Node] = {}
    given: list[int | torch.Tensor] = []
    for node in nodes:
        for position, source in enumerate(node.all_input_nodes):
            if source in copies or source in mine:
                continue
            copies[source] = graph.placeholder(source.name)
            if source in number:
                given.append(number[source])
            elif source.op == "get_attr":
                given.append(getattr(module, str(source.target)))
            else:
                given.append(_made_up(source, position, mine, made))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(None)  # so that each result is freed after the last op that reads it
    return _Alone(module=GraphModule(torch.nn.Module(), graph, class_name="Alone"), given=tuple(given))


def _made_up(source: Node, position: int, mine: set[Node], made: dict[Hashable, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of a value's layout: normal, or zeros where it holds no floats, for these may be indices.

    Values of one layout share one, but for those that an op reads at different positions.
    """
    value = source.meta["val"]
    is_divisor = any(user in mine and _packet(user) in _DIVIDE for user in source.users)
    if is_divisor and not value.is_floating_point():
        raise _CannotRunAlone  # on a CPU a division of integers by 0 is an error
    key = (_layout(value), position)
    if key not in made:
        start = value.storage_offset() % _ALIGNED
        reach = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        extent = start + reach if value.numel() else start
        if value.is_floating_point():
            own = torch.Generator(value.device).manual_seed(len(made))  # the user's random numbers go on as if this had not run
            memory = torch.randn(extent, generator=own, device=value.device).to(value.dtype)
        else:
            memory = torch.zeros(extent, dtype=value.dtype, device=value.device)
        made[key] = memory.as_strided(value.shape, value.stride(), start)
    return made[key]


def _packet(node: Node) -> str:
    return node.target.overloadpacket.__name__.rstrip("_") if isinstance(node.target, torch._ops.OpOverload) else ""
