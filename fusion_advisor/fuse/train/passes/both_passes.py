"""Both passes of a graph that trains, as AOTAutograd parts them, and other calls in their place for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.fuse.loss.loss_op import read_at_once
from fusion_advisor.fuse.loss.peak_memory import step_peak_bytes
from fusion_advisor.fuse.train.passes.as_autograd import AsAutograd
from fusion_advisor.fuse.train.passes.kept_values import keep_less
from fusion_advisor.fuse.train.passes.loss_alone import LEAST_BYTES, EitherBackward, for_loss_alone
from fusion_advisor.runtime.fallback_warning import warn_caller
from fusion_advisor.runtime.torch_internals import autograd_graphs, fx_trace

Call = Callable[..., Any]


class Half(Protocol):
    """One of the two passes.

    Attributes:
        instead: where it is set, what runs in its place.
        around: where it is set, what AOTAutograd calls with the list of arguments.
    """

    instead: Call | None
    around: Callable[[list[Any]], Any] | None

    @property
    def graph(self) -> GraphModule:
        """As AOTAutograd made it."""

    @property
    def module(self) -> GraphModule:
        """As it runs."""

    @property
    def is_changed(self) -> bool:
        """Whether something was rewritten."""

    def optimise(self, args: tuple[Any, ...]) -> Call:
        """Rewrite it, by the tensors of a call."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""

    def take(self, args: list[Any]) -> Any:
        """Run it on a list of arguments that may be emptied."""

    def run(self, args: list[Any]) -> Any:
        """Do so launch by launch."""


class BothPasses:
    """A graph as a function that autograd differentiates by a second graph.

    Args:
        graph_module: in dynamo's ops.
        inputs: its fake inputs.
        half: makes a pass's call from its graph and its name, ``forward`` or ``backward``.
        memory_budget: share of the activations that may be kept.
        prepare: tags what the second pass computes again in the graph of both; returns at how many sites.
        least_bytes: of the gradient of an output beside the loss that the second pass is made without.

    Attributes:
        graphs: both passes as they were traced, as ``forward`` and ``backward``.
        halves: both passes, in the order in which AOTAutograd hands them over.
        by_name: the same, as ``forward`` and ``backward``.
        call: runs the first, and the second when autograd asks for it.
        sites: of what was tagged.
        writes_in_checkpoint: whether eager writes to an input once more in the second forward pass of a checkpoint.
        unasked: places of outputs whose gradients the second pass is made without.
    """

    def __init__(
        self, graph_module: GraphModule, inputs: list[Any], half: Callable[[GraphModule, str], Half], memory_budget: float = 1.0,
        prepare: Callable[[GraphModule], int] = lambda _: 0, least_bytes: int = LEAST_BYTES,
    ) -> None:  # fmt: skip
        self.halves: list[Half] = []
        self.by_name: dict[str, Half] = {}
        self.graphs: dict[str, GraphModule] = {}
        self.sites, self.writes_in_checkpoint = 0, False
        self.unasked: frozenset[int] = frozenset()

        def prepared(joint: GraphModule) -> None:
            self.writes_in_checkpoint = autograd_graphs.writes_in_checkpoint(joint)
            keep_less(joint)
            self.sites = prepare(joint)

        def made(graph: GraphModule, name: str) -> Half:
            self.halves.append(half(graph, name))
            self.graphs[name], self.by_name[name] = graph, self.halves[-1]
            return self.halves[-1]

        def backward(graph: GraphModule) -> Any:
            alone = for_loss_alone(graph, least_bytes)
            if alone is None:
                return AsAutograd(graph, made(graph, "backward"))
            self.unasked = alone.outputs
            return AsAutograd(graph, EitherBackward(graph, alone, made(alone.graph, "backward"), _said))

        self.call: Call = autograd_graphs.with_backward(
            graph_module,
            inputs,
            lambda graph: made(graph, "forward"),
            backward,
            memory_budget=memory_budget,
            prepare=prepared,
            watch=read_at_once,
        )

    @contextmanager
    def instead(self, run: Callable[[GraphModule], Call]) -> Iterator[None]:
        """Let other calls run in place of both passes while the context lasts; one inside another gives way to it again.

        Args:
            run: makes a call from a pass's graph.
        """
        before = [(half, half.instead) for half in self.halves]
        for half in self.halves:
            half.instead = run(half.graph)
        try:
            yield
        finally:
            for half, one in before:
                half.instead = one

    def optimise(self, run: Callable[[], object]) -> None:
        """Rewrite both passes on what one step gives them.

        Not in the step: autograd runs the backward pass of a GPU in a thread of its own, which nothing should be profiled in.

        Args:
            run: runs a step of :attr:`call`.

        Raises:
            FailsAsTraced: a pass cannot run as it was traced.
        """
        given: list[tuple[Half, tuple[Any, ...]]] = []

        def noting(half: Half) -> Call:
            call = as_traced(half.graph)

            def noted(*args: Any) -> Any:
                given.append((half, args))
                return call(*args)

            return noted

        for half in self.halves:
            half.instead = noting(half)
        try:
            run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of autograd, between the passes
            raise FailsAsTraced.by(error) from error
        finally:
            for half in self.halves:
                half.instead = None
        with torch.no_grad():
            while given:
                half, args = given.pop(0)
                half.optimise(args)

    @property
    def draws_numbers(self) -> bool:
        """Whether an op of either pass is random."""
        return any(fx_trace.draws_numbers(half.graph) for half in self.halves)

    @property
    def holds_sparse(self) -> bool:
        """Whether a value of either pass is no strided tensor: the gradient of an embedding with ``sparse=True``, say."""
        values = (
            value for graph in self.graphs.values() for node in graph.graph.nodes for value in tensors_of(node.meta.get("val"))
        )
        return any(value.layout is not torch.strided for value in values)

    def peak_bytes(self, inside: Callable[[Node], int]) -> int:
        """Return how much memory a step takes at its peak.

        Args:
            inside: says what an op holds while it runs and does not return.
        """
        if len(self.graphs) < 2:
            return 0
        return step_peak_bytes(self.graphs["forward"], self.graphs["backward"], inside)


def _said(reason: str) -> None:
    warn_caller(f"fusion-advisor runs the original ops: {reason}")


class FailsAsTraced(Exception):
    """A pass raises as AOTAutograd traced it, though the graph's own ops do not.

    Torch then lays a value out otherwise than its trace says: a batch norm's of transposed rows on a CPU (torch 2.13), which
    ``reshape`` copies and the trace's ``view`` cannot show.
    """

    @classmethod
    def by(cls, error: RuntimeError) -> Self:
        """Return it with the first sentence of what torch raised."""
        why = str(error).strip().partition("\n")[0].partition(". ")[0]
        return cls(f"the step fails as torch's AOTAutograd traces it: {why}")


def as_traced(graph: GraphModule) -> Call:
    """Return a call that runs a pass as AOTAutograd traced it.

    Args:
        graph: the pass. What runs it raises FailsAsTraced where torch does.
    """

    def call(*args: Any) -> Any:
        try:
            return graph(*args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise FailsAsTraced.by(error) from error

    return call
