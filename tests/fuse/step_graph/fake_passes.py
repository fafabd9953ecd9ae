"""A recorder of passes for machines without CUDA, and a step whose passes it records."""

from __future__ import annotations

import torch

from fusion_advisor.fuse.cuda_graph.input_copies import flat
from fusion_advisor.fuse.step_graph.pass_graph import Kept
from fusion_advisor.fuse.step_graph.step_graph import StepGraph
from fusion_advisor.fuse.train.passes.freed_arguments import taking_a_list
from fusion_advisor.fuse.train.passes.kept_values import keep_less
from fusion_advisor.runtime.torch_internals import autograd_graphs
from tests.fuse.cuda_graph.fake_graph import FakeRecorder


class FakePasses(FakeRecorder):
    """Records a pass: nothing is computed then, and a replay computes on the recorded memory alone.

    A replayed backward pass overwrites what the forward pass has kept for it.

    Attributes:
        is_busy: a pass runs that is recorded or replayed.
    """

    is_busy = False

    def record(self, call):
        if self.fails is not None:
            raise self.fails
        self.recorded += 1
        self.is_busy = True
        overwritten = _held(call)
        state = torch.get_rng_state()
        results = list(call())
        self.is_busy = False
        torch.set_rng_state(state)  # nothing has run
        given = {value.untyped_storage().data_ptr() for value in _arguments(call)}
        own = _own(results, given)
        for value in own:
            if value.is_floating_point():
                flat(value).fill_(float("nan"))

        def replay():
            self.replayed += 1
            self.is_busy = True
            for old, new in zip(own, _own(call(), given), strict=True):
                flat(old).copy_(flat(new))
            for one in overwritten:
                flat(one).fill_(float("nan"))
            self.is_busy = False

        return replay, results


def _own(results, given):
    """The results that lie in the graph's own memory."""
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    return [value for value in tensors if value.untyped_storage().data_ptr() not in given]


def _held(call):
    """The floats whose memory a backward pass is given to use again."""
    cells = [cell.cell_contents for cell in call.__closure__ or ()]
    owners = [one for cell in cells if isinstance(cell, Kept) for one in cell.owners]
    return [one for one in owners if one is not None and one.is_floating_point()]


def _arguments(call):
    """The tensors that a recorded call closes over."""
    cells = [cell.cell_contents for cell in call.__closure__ or ()]
    return [one for cell in cells if isinstance(cell, list) for one in cell if isinstance(one, torch.Tensor)]


class Launched:
    """A pass that is not rewritten; counts how often it ran launch by launch."""

    def __init__(self, graph, recorder):
        self.graph = self.module = graph
        self.around, self.runs, self._recorder = None, 0, recorder
        self._freeing = taking_a_list(graph).forward

    def take(self, args):
        return self.run(args) if self.around is None else self.around(args)

    def run(self, args):
        self.runs += not getattr(self._recorder, "is_busy", False)
        return self._freeing(args)

    def __call__(self, *args):
        return self.graph(*args)


class Backend:
    """A backend of dynamo's with graphs of both passes; the step's graphs are on from the start, if they are at all.

    Attributes:
        recorder: of all graphs; a fake one unless another is given.
        passes: forward and backward.
        graphs: of the step.
    """

    def __init__(self, recorder=None, *, is_on=True):
        self.recorder, self.passes, self.graphs, self.is_on = recorder or FakePasses(), {}, None, is_on

    def __call__(self, graph_module, inputs):
        def taken(name):
            def take(graph):
                self.passes[name] = Launched(graph, self.recorder)
                return self.passes[name]

            return take

        call = autograd_graphs.with_backward(graph_module, inputs, taken("forward"), taken("backward"), prepare=keep_less)
        self.graphs = StepGraph(self.passes["forward"], self.passes["backward"], lambda: self.recorder)
        self.graphs.is_on = self.is_on
        return call
