"""Replays both passes of a training step as CUDA graphs, instead of hundreds of launches from Python in each.

Forward and backward pass are a graph each, in one memory pool: what the forward pass keeps for the backward pass stays where it
was recorded, and the backward graph reads it there. After the last use of each it writes other values there, as a backward pass
does that frees what it has read. A graph repeats kernels on recorded addresses, so at each call:

- Parameters are read where they lie, so an optimizer that writes to them is seen. Where one lies elsewhere (``p.data = …``) the
  step is recorded again.
- Arguments that lie elsewhere at each call (a batch) are copied into memory of the graph's own.
- Results and gradients are copied out. So no later replay overwrites what a caller has, or what ``.grad`` holds. Gradients of
  which no reference is left are copied too: another stream may still read one (``record_stream``), and torch waits for none in
  memory that its allocator has not given out.
- A forward pass is replayed only where nothing waits any longer for what the last replay kept: else its backward pass would read
  another step's activations. A step of several forward passes before one backward pass is launched kernel by kernel. So is one
  under ``saved_tensors_hooks``, which may drop some of what is kept early.
- A backward pass is replayed only where it is given what the recorded forward pass keeps, and where autograd frees that then:
  with ``retain_graph`` it is launched kernel by kernel, and may run again.
- Random numbers are those of a step launched kernel by kernel: torch moves its generator on ahead of each replay.

The first call only shows which arguments move, the second is recorded. Figures: ``docs/measurements/training_steps.md``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from fusion_advisor.fuse.cuda_graph.capturable import host_work, seed_slots
from fusion_advisor.fuse.cuda_graph.recording import Recorder
from fusion_advisor.fuse.rewrite.launch_count import tallies_in, total
from fusion_advisor.fuse.step_graph.pass_graph import Kept, PassGraph, record_pass
from fusion_advisor.runtime.fallback_warning import warn_caller
from fusion_advisor.runtime.torch_internals import dispatcher, tensor_memory
from fusion_advisor.timing.interleaving import CannotRecord

HOOKED = (
    "saved_tensors_hooks are active (a checkpoint, say), which may keep some of what the forward pass keeps and drop the rest"
)
WAITING = "what an earlier forward pass kept still waits for its backward pass"
_MOST_RECORDED = 8
"""A step that had to be recorded this often is launched kernel by kernel from then on: recording costs more than it saves."""
_LEASED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
"""Dtypes that DLPack hands over in every version of torch."""
_TANGENT = "tangents"
"""How AOTAutograd's names of the outputs' gradients begin."""


class Pass(Protocol):
    """One of the two passes.

    Attributes:
        around: where it is set, what AOTAutograd calls with the list of arguments.
    """

    around: Callable[[list[Any]], Any] | None

    @property
    def graph(self) -> GraphModule:
        """As AOTAutograd made it."""

    @property
    def module(self) -> GraphModule:
        """As it runs."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""

    def run(self, args: list[Any]) -> Any:
        """Run it launch by launch on a list of arguments that may be emptied."""


@dataclass(slots=True)
class _Recorded:
    """The graphs of both passes, which belong together.

    Attributes:
        forward: of the forward pass.
        kept: what holds the memory that the backward pass reads; nothing once that pass was recorded.
        kept_at: addresses of all that the forward pass keeps.
        lease: the memory by which the last replay's kept results are known to be held; None where none lies in the graph.
        backward: of the backward pass, once it was recorded.
    """

    forward: PassGraph
    kept: Kept
    kept_at: frozenset[int] = frozenset()
    lease: weakref.ref[Any] | None = None
    backward: PassGraph | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether something may still read what the last replay kept."""
        return self.lease is not None and self.lease() is not None

    @property
    def leased(self) -> int | None:
        """Place of the kept result that stands for all; None where none lies in the graph."""
        kept = enumerate(self.forward.kept)
        return next((place for place, one in kept if isinstance(one, torch.Tensor) and one.dtype in _LEASED), None)

    @property
    def is_unwatched(self) -> bool:
        """Whether something is kept in the graph and nothing of it can stand for all."""
        return self.leased is None and any(isinstance(one, torch.Tensor) for one in self.forward.kept)


@dataclass(slots=True)
class _Arguments:
    """Which arguments of the forward pass lie elsewhere at each call.

    Attributes:
        last: addresses at the call before; None ahead of the first.
        moving: slots.
    """

    last: list[int] | None = None
    moving: set[int] = field(default_factory=set)

    def seen(self, args: Sequence[Any]) -> bool:
        """Look at a call's arguments; returns whether a call before it was seen too."""
        now = [arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 for arg in args]
        before, self.last = self.last, now
        if before is None or len(before) != len(now):
            return False
        self.note([slot for slot, (old, new) in enumerate(zip(before, now, strict=True)) if old != new], args)
        return True

    def note(self, slots: Sequence[int], args: Sequence[Any]) -> None:
        """Remember arguments that moved; a parameter that was given other memory stays where it is from then on."""
        self.moving.update(slot for slot in slots if not isinstance(args[slot], torch.nn.Parameter))


class StepGraph:
    """The CUDA graphs of one graph of dynamo's that trains.

    Args:
        forward: the forward pass.
        backward: the backward pass.
        make_recorder: called once, at the first call that may be recorded, on its device.

    Attributes:
        is_on: calls are replayed; off, every call is launched kernel by kernel.
        refusals: why passes were launched kernel by kernel, and how often.
        replays: of forward and of backward passes.
        launches: generated kernels that replays launched, less those that were counted while a graph was recorded.
    """

    def __init__(self, forward: Pass, backward: Pass, make_recorder: Callable[[], Recorder]) -> None:
        self.is_on = False
        self.refusals: dict[str, int] = {}
        self.replays = [0, 0]
        self.launches = 0
        self._passes = forward, backward
        self._saved = saved_names(backward.graph)
        self._seeds = seed_slots(backward.graph)
        self._make_recorder = make_recorder
        self._recorder: Recorder | None = None
        self._recorded: _Recorded | None = None
        self._arguments = _Arguments()
        self._records = 0
        self._refusal = ""
        self._lock = threading.Lock()
        forward.around, backward.around = self._forward, self._backward

    @property
    def pool_bytes(self) -> int:
        """Device memory that the graphs hold, copies of arguments included."""
        recorded = self._recorded
        if recorded is None or self._recorder is None:
            return 0
        graphs = [recorded.forward, *(() if recorded.backward is None else (recorded.backward,))]
        return self._recorder.pool_bytes() + sum(copy.static.nbytes for graph in graphs for copy in graph.copies)

    @property
    def is_refused(self) -> bool:
        """Whether the step is launched kernel by kernel from now on."""
        return bool(self._refusal)

    def forget(self) -> None:
        """Free the graphs. The next call shows again which arguments move, and the second one is recorded."""
        self._recorded, self._recorder = None, None
        self._arguments = _Arguments()
        self._records, self._refusal = 0, ""

    def _forward(self, args: list[Any]) -> Any:
        return self._guarded(0, args, self._replay_forward)

    def _backward(self, args: list[Any]) -> Any:
        if self._recorded is None:  # there is nothing to say: its forward pass was launched kernel by kernel
            return self._launch(1, args)
        return self._guarded(1, args, self._replay_backward)

    def _guarded(self, which: int, args: list[Any], replay: Callable[[Sequence[Any]], list[Any] | None]) -> Any:
        """Replay a pass, or launch it kernel by kernel."""
        found = None
        if self.is_on and not self._refusal:
            if self._lock.acquire(blocking=False):
                try:
                    found = replay(args)
                finally:
                    self._lock.release()
            else:
                self._say("another thread is running it")
        if found is None:
            return self._launch(which, args)
        self.replays[which] += 1
        if which:
            args.clear()  # as a backward pass does that frees what it has read
        return found

    def _launch(self, which: int, args: list[Any]) -> Any:
        """Launch a pass kernel by kernel; a backward pass may get what a replay of the forward pass kept."""
        for slot in self._seeds if which else ():
            args[slot] = args[slot].cpu()
        return self._passes[which].run(args)

    def _replay_forward(self, args: Sequence[Any]) -> list[Any] | None:
        if self._recorder is None:
            self._recorder = self._make_recorder()
        recorded = self._recorded
        reason = self._recorder.refusal()
        if reason is None and dispatcher.saves_through_hooks():
            reason = HOOKED
        if reason is None and recorded is not None and recorded.is_awaited:
            reason = WAITING
        if reason is not None:
            self._say(reason)
            return None
        if recorded is not None:
            moved = recorded.forward.moved(args)
            if moved or not recorded.forward.fits(args):
                self._arguments.note(moved, args)
                recorded = self._recorded = None
        elif not self._arguments.seen(args):
            return None
        if recorded is None:
            recorded = self._record_forward(args)
        if recorded is None:
            return None
        results = recorded.forward.replay(args)
        self.launches += recorded.forward.launches
        return self._leased(recorded, results)

    def _record_forward(self, args: Sequence[Any]) -> _Recorded | None:
        forward, _ = self._passes
        self._records += 1
        if self._records > _MOST_RECORDED:
            self._refuse(f"what it reads in place changed its address or its layout {_MOST_RECORDED} times")
            return None
        saved = len(self._saved)
        if saved and result_names(forward.graph)[-saved:] != self._saved:
            self._refuse("AOTAutograd hands the backward pass other values than the forward pass keeps")
            return None
        for one in self._passes:
            if (reason := host_work(one.module)) is not None:
                self._refuse(reason)
                return None
        copied = frozenset(slot for slot in self._arguments.moving if isinstance(args[slot], torch.Tensor))
        found = self._record(forward, args, copied=copied, kept=Kept([]), keeps=saved)
        if found is None:
            return None
        graph, owners = found
        kept = (args[one] if isinstance(one, int) else one for one in graph.kept)
        at = frozenset(one.data_ptr() for one in kept if isinstance(one, torch.Tensor))
        recorded = _Recorded(graph, owners, at)
        if recorded.is_unwatched:
            self._refuse("nobody can tell when what the forward pass keeps is no longer read")
            return None
        self._recorded = recorded
        return recorded

    def _leased(self, recorded: _Recorded, results: list[Any]) -> list[Any]:
        """Give one kept result a storage of its own over the same memory: it lives as long as anything may read what was kept.

        Autograd drops all of them at once, after the backward pass or with the loss.
        """
        if recorded.leased is not None:
            place = len(results) - len(recorded.forward.kept) + recorded.leased
            results[place] = tensor_memory.with_own_storage(results[place])
            recorded.lease = tensor_memory.storage_reference(results[place], _nothing)
        return results

    def _replay_backward(self, args: Sequence[Any]) -> list[Any] | None:
        recorded = self._recorded
        assert recorded is not None and self._recorder is not None
        saved = len(self._saved)
        if any(isinstance(arg, torch.Tensor) and arg.data_ptr() not in recorded.kept_at for arg in args[:saved]):
            return None  # its forward pass was launched kernel by kernel, and that was said
        if (reason := self._recorder.refusal()) is not None:
            self._say(reason)
            return None
        if tensor_memory.is_retained():
            return None  # nothing is wrong: the caller asked for what the graph would overwrite
        graph = recorded.backward
        if graph is not None and (graph.moved(args) or not graph.fits(args)):
            # What is recorded next would be laid out over what this pass still reads.
            self._recorded, self._recorder = None, None
            return None
        if graph is None:
            copied = frozenset(slot for slot in range(saved, len(args)) if isinstance(args[slot], torch.Tensor))
            # Not the one that stands for all: a recording that held it would wait for itself.
            own = [one if isinstance(one, torch.Tensor) else arg for one, arg in zip(recorded.forward.kept, args, strict=False)]
            found = self._record(self._passes[1], [*own, *args[saved:]], copied=copied, kept=recorded.kept, keeps=0)
            if found is None:
                return None
            graph = recorded.backward = found[0]
        self.launches += graph.launches
        return graph.replay(args)

    def _record(self, one: Pass, args: Sequence[Any], **how: Any) -> tuple[PassGraph, Kept] | None:
        assert self._recorder is not None
        tallies = tallies_in([one.module])
        before = total(tallies)
        try:
            found = record_pass(self._recorder, one.run, args, **how)
        except CannotRecord as error:
            self._recorded = None
            self._refuse(str(error))
            return None
        finally:
            counted = total(tallies) - before
            self.launches -= counted  # none ran
        found[0].launches = counted
        return found

    def _refuse(self, reason: str) -> None:
        """Launch kernel by kernel from now on."""
        self._refusal = reason
        self._say(reason)

    def _say(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if self.refusals[reason] == 1:
            warn_caller(f"fusion-advisor runs this step without its CUDA graphs: {reason}")


def saved_names(backward: GraphModule) -> tuple[str, ...]:
    """Return the names of what a backward pass is given of its forward pass; the outputs' gradients follow it.

    Args:
        backward: as AOTAutograd made it.
    """
    names = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    return tuple(name for name in names if not name.startswith(_TANGENT))


def result_names(forward: GraphModule) -> tuple[str, ...]:
    """Return the names of a forward pass's results; empty for one that is no op's.

    Args:
        forward: as AOTAutograd made it.
    """
    results = forward.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    return tuple(getattr(one, "name", "") for one in results)


def _nothing(_: object) -> None:
    """Take note of freed memory: whoever asks looks at the reference."""
