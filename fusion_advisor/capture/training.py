"""A training step: forward, a scalar loss and backward, the optimizer left out; its kernels joined to the modules they serve.

Autograd numbers the nodes that a forward op makes, and an op of the backward pass carries the number of its node. So a kernel of
the backward pass is joined to the forward op that made its node, and that op lies in the range of a module's call. Nothing is
captured: the ops of a backward pass are autograd's own.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.capture.graph.side_effects import holds
from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.capture.trace.events import MODULE_RANGE, Event, Trace
from fusion_advisor.capture.written_parameters import parameters_kept
from fusion_advisor.errors import NotTrainable
from fusion_advisor.records import ModuleTime, Training
from fusion_advisor.runtime.call_tensors import tensors_in, what_it_lacks
from fusion_advisor.runtime.torch_internals.dispatcher import hooks_on_leaves_paused

OWN_LOSS = "the model's own"
MEAN_LOSS = "the mean of the outputs in fp32"
_FROZEN = "all of its parameters are frozen; call requires_grad_() on those that are to learn"
_NO_LOSS = "none of its floating-point outputs depends on a parameter with gradients"
_ENGINE = "autograd::engine::evaluate_function: "
_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")
"""A number inside a path is a layer's; the last number in a path distinguishes the members of a ``Sequential``."""


class TrainingStep:
    """One forward and backward pass of a model; every call computes new gradients.

    Args:
        model: whose gradients are new.
        args: of a call.
        kwargs: of the same call.
        model_id: for error messages.
        call: runs the forward pass; None: the model itself.

    Attributes:
        loss: what the backward pass begins at, in words; known after the first call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        model_id: str,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._args, self._kwargs, self._model_id = model, args, kwargs, model_id
        self._asking = [one for one in pytree.tree_leaves((args, kwargs)) if _asks(one) and one.is_leaf]
        self._call = call or model
        self.loss = ""

    def __call__(self) -> None:
        """Run it.

        Raises:
            NotTrainable: no output depends on a parameter.
        """
        self._model.zero_grad(set_to_none=True)
        for one in self._asking:
            one.grad = None
        with torch.enable_grad():
            output, weights = self._call(*self._args, **self._kwargs), list(self._model.parameters())
            is_frozen = bool(weights) and not any(one.requires_grad for one in weights)
            loss, self.loss = loss_of(output, model_id=self._model_id, is_frozen=is_frozen)
            loss.backward()


def loss_of(output: Any, *, model_id: str = "model", is_frozen: bool = False) -> tuple[torch.Tensor, str]:
    """Return the scalar that a backward pass begins at, and what it is in words.

    Args:
        output: of a forward pass with gradients. Its ``loss``, where it is a scalar that depends on a parameter; else the mean of
            every floating-point output, computed in fp32, and the sum of these means.
        model_id: for the error message only.
        is_frozen: no parameter asks for a gradient; for the message too.

    Raises:
        NotTrainable: no output depends on a parameter.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own.reshape(()), OWN_LOSS
    leaves = [tensor for leaf in pytree.tree_leaves(output) for _, tensor in tensors_in("output", leaf)]
    means = [leaf.float().mean() for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    if not means:
        raise NotTrainable(model_id=model_id, detail=_FROZEN if is_frozen else _NO_LOSS)
    return torch.stack(means).sum(), MEAN_LOSS


def without_history(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a call whose gradients end at its inputs: the caller's tensors get none, and what made them is not run backward.

    The tensors share the caller's memory. Where no input asks for a gradient, the call is returned as it is.

    Args:
        model: whose own parameters stay what they are: a model may be called with one of them.
        args: of a call.
        kwargs: of the same call.
    """
    own = {id(parameter) for parameter in model.parameters()}
    asking = {id(one): one for one in pytree.tree_leaves((args, kwargs)) if _asks(one) and id(one) not in own}
    if not asking:
        return args, kwargs
    ends = {number: _ended(one) for number, one in asking.items()}  # a tensor that is given twice stays one
    ended: tuple[tuple[Any, ...], Mapping[str, Any]] = pytree.tree_map(lambda one: ends.get(id(one), one), (args, kwargs))
    return ended


def _asks(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.requires_grad


def _ended(one: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as a leaf of the same class, without hooks."""
    if type(one) is torch.nn.Parameter:
        return torch.nn.Parameter(one.detach())
    return one.detach().requires_grad_()


@contextlib.contextmanager
def in_training(model: torch.nn.Module) -> Iterator[None]:
    """Switch a model to ``train()`` inside; modes, buffers and gradients are put back after, as the steps have changed them.

    So are tensors that are plain attributes, and parameters that the forward pass itself writes to (:func:`parameters_kept`).
    Other attributes stay as the steps leave them: in one DistributedDataParallel notes that it has counted the gradients.
    The parts of a model that is in ``train()`` mode already keep their modes: a frozen batch norm stays in ``eval()``. Hooks on
    the gradients of parameters are not called: an optimizer that steps in the backward pass would train the model meanwhile.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    spaces = list(map(vars, model.modules()))
    owned = [(space, name, one) for space in spaces for name, one in space.items() if isinstance(one, torch.Tensor)]
    banks = [(one, one.detach().clone()) for _, _, one in owned if not (one.is_inference() or what_it_lacks(one))]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    if not model.training:
        model.train()
    try:
        with parameters_kept(model), hooks_on_leaves_paused(list(model.parameters())):
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for space, name, tensor in owned:
            space[name] = tensor
        with torch.no_grad():
            for buffer, before in buffers:
                if buffer.requires_grad and not before.requires_grad:
                    buffer.detach_()  # a step wrote to it what depends on parameters
                if buffer.shape != before.shape:
                    buffer.resize_(before.shape)  # an observer's ranges are empty until it has seen a batch
                buffer.copy_(before)
            for bank, before in banks:
                if not holds(bank, before):  # one that is expanded cannot be written to
                    bank.detach().copy_(before)


def join_modules(trace: Trace, step: Step, loss: str) -> Training:
    """Sum a step's kernels by pass and by module; modules of equal layers are one row.

    Args:
        trace: with module ranges around the forward pass.
        step: one of its steps.
        loss: in words.
    """
    origins = Origins(trace)
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    paths: dict[str, set[str]] = {}
    launches: dict[str, int] = {}
    totals = {False: 0, True: 0}
    for launch in step.launches:
        moment = step.origin_ns + (launch.call_start_ns if launch.call_ns else launch.start_ns)
        path, is_backward = origins.at(moment)
        row = layers_folded(path)
        side = backward if is_backward else forward
        side[row] = side.get(row, 0) + launch.duration_ns
        totals[is_backward] += launch.duration_ns
        paths.setdefault(row, set()).add(path)
        launches[row] = launches.get(row, 0) + 1
    rows = [
        ModuleTime(
            path=row,
            modules=len(paths[row]),
            launches=count,
            forward_ns=forward.get(row, 0),
            backward_ns=backward.get(row, 0),
        )
        for row, count in launches.items()
    ]
    rows.sort(key=lambda row: -(row.forward_ns + row.backward_ns))
    return Training(loss=loss, forward_ns=totals[False], backward_ns=totals[True], modules=tuple(rows))


class Origins:
    """Says which module a moment of traced training steps serves, and whether it lies in the backward pass.

    Args:
        trace: with module ranges around the forward pass.
    """

    def __init__(self, trace: Trace) -> None:
        self._engine = Nested([op for op in trace.cpu_ops if op.name.startswith(_ENGINE)])
        self._modules = Nested([event for event in trace.ranges if event.name.startswith(MODULE_RANGE)])
        # The last op with a number made its node: the ones before it, views without gradients say, only saw what number is next.
        self._made_at = {
            op.sequence: op.start_ns
            for op in trace.cpu_ops
            if op.sequence >= 0 and not _evaluates(self._engine.at(op.start_ns), op)
        }

    def at(self, moment_ns: int) -> tuple[str, bool]:
        """Return the path of a module, empty where there is none, and whether autograd was evaluating a node.

        Args:
            moment_ns: on the trace's clock.
        """
        node = self._engine.at(moment_ns)
        module = self._modules.at(moment_ns)  # in the backward pass too, where a checkpointed module is called again
        if module is None and node is not None and node.sequence in self._made_at:
            module = self._modules.at(self._made_at[node.sequence])
        return "" if module is None else module.name.removeprefix(MODULE_RANGE), node is not None


def layers_folded(path: str) -> str:
    """Return a module's path with a star for the number of a layer.

    Args:
        path: ``model.layers.3.mlp``.
    """
    return _LAYER.sub("*", path)


def _evaluates(node: Event | None, op: Event) -> bool:
    """Whether an op is the evaluation of a node, or a part of it; a node's evaluation may call forward ops again."""
    return node is not None and node.sequence == op.sequence


class Nested:
    """Finds the innermost of ranges that lie in each other.

    Threads are taken as one line: while the backward pass runs in a thread of its own, the one that called it waits.

    Args:
        events: in any order.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._starts: list[int] = []
        self._owners: list[Event | None] = []
        open_ranges: list[Event] = []

        def close(until_ns: float) -> None:
            while open_ranges and open_ranges[-1].end_ns <= until_ns:
                ended = open_ranges.pop()
                self._mark(ended.end_ns, open_ranges[-1] if open_ranges else None)

        for event in sorted(events, key=lambda event: (event.start_ns, -event.duration_ns)):
            close(event.start_ns)
            open_ranges.append(event)
            self._mark(event.start_ns, event)
        close(float("inf"))

    def _mark(self, moment_ns: int, owner: Event | None) -> None:
        self._starts.append(moment_ns)
        self._owners.append(owner)

    def at(self, moment_ns: int) -> Event | None:
        """Return the innermost range that covers a moment."""
        position = bisect.bisect_right(self._starts, moment_ns) - 1
        return None if position < 0 else self._owners[position]
