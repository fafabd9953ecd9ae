"""Makes a model's call with a graph that was read from a file: no dynamo, as long as all that the trace had read is as it was.

Dicts, classes and functions that lead to what was read are noted and compared in bulk before each call, as they are for a call
past dynamo (:mod:`fusion_advisor.fuse.direct`). Where one has changed, everything is read again. Where it is no longer what the
trace had read, the call goes to whoever traces the model.
"""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fusion_advisor.capture.graph.tracer import Route
from fusion_advisor.fuse.direct.direct_call import ChangesAlways, Frame, unchanged_of
from fusion_advisor.fuse.direct.straight_code import Constants
from fusion_advisor.fuse.direct.without_dynamo import UnchangedModel
from fusion_advisor.fuse.start.call_tensors import sharing
from fusion_advisor.fuse.start.guard_tree import Differs, Node, Seen, Tree, check, pattern, roots
from fusion_advisor.fuse.start.object_changes import Bound, ObjectCode
from fusion_advisor.fuse.start.open_call import Source
from fusion_advisor.fuse.start.outputs import Make
from fusion_advisor.fuse.start.size_conditions import all_hold
from fusion_advisor.runtime.torch_internals import compiled_code, dispatcher, dynamo
from fusion_advisor.runtime.torch_internals.tensor_memory import Addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What a trace had found.

    Attributes:
        frame: of the model's forward.
        tree: what was read.
        pattern: which of the tensors that were read are one.
        sources: for each input of the graph the place of one of the call's tensors, the name of one of the model's, or place and
            dim of an open size.
        leaves: of the tensors that the call passes as such, which are one, and which ask for gradients.
        sharing: which of these, and of the tensors that the call's objects hold, share memory.
        objects: reads and sets attributes of these objects; None where the call passes none.
        make: makes the output.
    """

    frame: Frame
    tree: Tree
    pattern: list[int]
    sources: list[Source]
    leaves: tuple[Any, ...]
    sharing: list[int]
    objects: ObjectCode | None
    make: Make


class UntracedCall:
    """A model's call, in place of dynamo's.

    Attributes:
        route: what runs in place of the graph.
        otherwise: makes the calls that are not as the traced one; set by whoever can trace the model.
        why: why the last such call was none of ours.
        traced_again: how often that was.
        left: what is compared node by node at each call, because nothing else tells that it is as it was.
        is_restless: of the last such call it is not known whether it was one: the model is changed too often to be read.
        clock: returns seconds.
    """

    def __init__(self, model: torch.nn.Module, traced: Traced, route: Route) -> None:
        self._model, self._traced = model, traced
        self.route = route
        self.otherwise: Callable[..., Any] | None = None
        self.why = ""
        self.traced_again = 0
        self.is_restless = False
        self.clock = time.perf_counter
        self._tries = self._runs = 0
        self._rests_until = 0.0
        self._was_same = False
        self._builtins = frozenset(traced.tree.builtins).difference(traced.frame.function.__globals__)
        self._is_unchanged: Callable[[], bool] | None = None
        self.left: list[tuple[Node, Any]] = []
        self._began = compiled_code.global_state()
        self._state: Callable[[], bool] = _never
        self._tensors: list[torch.Tensor] = []
        self._inputs: list[Any] = []
        self._fill = _filling(traced.sources)
        self._have_sizes = all_hold(traced.tree.conditions)
        self._layouts: list[Any] = []
        self._addresses: Addresses | None = None

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[torch.Tensor] = (), objects: Sequence[Any] = ()
    ) -> Any:
        """Run a call.

        Args:
            args: of the call.
            kwargs: likewise.
            leaves: all tensors that it passes, in the order of its signature.
            objects: what else it passes; see :class:`fusion_advisor.fuse.direct.direct_call.Shortcut`.

        Raises:
            Differs: the call is not as the traced one, and nobody makes such calls.
        """
        traced = self._traced
        call = kwargs if not args else {**{f"{place}": value for place, value in enumerate(args)}, **kwargs}
        passed, bound = leaves, None
        try:
            self._look(args, kwargs, leaves)
            if traced.objects is not None:
                bound = self._bound(call, objects)
                bound.compare_numbers(call)
                passed = [*leaves, *self._inside(bound, call, leaves, objects)]
            self._compare_sizes(passed)
        except Differs as difference:
            self.why, self.is_restless = str(difference), isinstance(difference, _Restless)
            self.traced_again += 1
            if self.otherwise is None:
                raise
            return self.otherwise(args, kwargs, leaves, objects)
        self._runs += 1
        if self._runs == _WORTH_A_LOOK:
            self._tries = 0
        inputs = self._inputs.copy()
        self._fill(inputs, passed)
        results = self.route(*inputs)
        output = traced.make(results, inputs, call)
        if bound is not None:
            bound.set(results, inputs, call)
        return output

    def _look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[torch.Tensor]) -> None:
        """Compare all that decides whether the graph is this call's.

        Raises:
            Differs: it is not.
        """
        alike, gradients = self._traced.leaves
        if pattern(leaves) != alike or [one.requires_grad for one in leaves] != gradients:
            raise Differs("the call's tensors are the same in another way, or ask for gradients")
        if not compiled_code.is_stance_default() or dispatcher.is_function_mode_on():
            raise Differs("dynamo's stance or a mode of torch functions was set")
        frame = self._traced.frame
        if getattr(self._model.forward, "__func__", None) is not frame.function or not frame.is_same():
            raise Differs("its forward was replaced")
        if not frame.function.__globals__.keys().isdisjoint(self._builtins):
            raise Differs("a global of its module hides a built-in that the trace had read")
        if self._is_unchanged is None or not self._is_unchanged():
            self.note(args, kwargs)
        if not self._state():
            raise Differs("torch's global state is another one")
        for node, value in self.left:
            check(node, value)
        if self._addresses is not None and not self._addresses.are_of(self._tensors):
            self._compare_tensors()

    def _bound(self, call: Mapping[str, Any], objects: Sequence[Any]) -> Bound:
        """Return what reads and sets attributes of a call's objects: the same while nothing but tensors in them is replaced.

        Raises:
            Differs: they are of another form than the traced ones.
        """
        assert self._traced.objects is not None
        kept = objects[0].kept if len(objects) == 1 else {}
        found = kept.get(self)
        if found is None:
            found = kept[self] = self._traced.objects.bind(call)
        return cast("Bound", found)

    def _inside(
        self, bound: Bound, call: Mapping[str, Any], leaves: Sequence[torch.Tensor], objects: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Return the tensors that a call's objects hold.

        What the fused model remembers of an object is another note as soon as the object holds something else. The tensors are
        kept with that note: nothing here keeps a cache alive.

        Raises:
            Differs: they share memory in another way than the traced ones.
        """
        note = objects[0].followed if len(objects) == 1 else {}
        found = note.get(self)
        if found is None:
            found = bound.tensors(call)
            if found and sharing([*leaves, *found]) != self._traced.sharing:
                raise Differs("tensors of the call share memory in another way")
            note[self] = found
        return cast("list[torch.Tensor]", found)

    def _compare_sizes(self, passed: Sequence[torch.Tensor]) -> None:
        """Compare what dynamo asked of sizes and strides.

        Raises:
            Differs: a condition does not hold.
        """
        try:
            holds = self._have_sizes(passed)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise Differs("the call has tensors of other ranks than the traced one") from error
        if not holds:
            raise Differs(f"the trace was not for sizes like {[*dict.fromkeys(tuple(one.shape) for one in passed)]}")

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what decides that everything that the trace had read stays as it is, and read it.

        Args:
            args: of a call like the traced one, which is about to be made.
            kwargs: likewise.

        Raises:
            Differs: something is not as it was.
        """
        began_s, is_often = self.clock(), self._tries >= _MOST_TRIES
        if is_often and began_s < self._rests_until:
            raise _Restless if self._was_same else Differs(self.why)
        if compiled_code.global_state() != self._began:
            raise Differs("torch's global state is another one")
        self._tries += 1
        self._was_same, self._is_unchanged = False, None
        try:
            if is_often:
                self.read(args, kwargs)
                self.left = []
                self._find_tensors()
                self._state = compiled_code.global_state_check()
            else:
                self._note(args, kwargs)
            self._was_same = True
        finally:
            if is_often:
                self._rests_until = self.clock() + _REST * (self.clock() - began_s)

    def _note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        frame, tree = self._traced.frame, self._traced.tree
        variables, space = frame.variables(args, kwargs), frame.function.__globals__
        more: list[tuple[Node, Any]] = [(node, sys.modules.get(name)) for name, node in tree.modules.items()]
        more += [(Node("built-ins", below=[("DictGetItemGuardAccessor", repr(name), node)]), vars(builtins))
                 for name, node in tree.builtins.items()]  # fmt: skip
        try:
            unchanged = unchanged_of(tree.frame_nodes(), frame, variables, UnchangedModel(), more)
        except (AttributeError, LookupError, TypeError, RuntimeError) as error:  # the last: a tensor without strides
            raise Differs("the model has other parts than when it was traced") from error
        self.read(args, kwargs)  # behind the notes: another thread may have changed the model meanwhile

        def is_implied(node: Node) -> bool:
            return id(node) in unchanged.implied

        common = [(node, value) for node, value in self._common(variables, space) if not is_implied(node)]
        self.left = [(node.without(is_implied), value) for node, value in common]
        self._find_tensors()
        self._state = compiled_code.global_state_check()
        self._is_unchanged, self._runs = unchanged.holds, 0

    def forget(self) -> None:
        """Hold nothing of the model any more, and begin anew."""
        self._is_unchanged, self._addresses, self._tries = None, None, 0
        self.left, self._tensors, self._inputs, self._layouts = [], [], [], []

    def _common(self, variables: Mapping[str, Any], space: dict[str, Any]) -> Iterator[tuple[Node, Any]]:
        """Yield the roots that every call has in common: not its own arguments, which its signature says all of."""
        frame, tree = self._traced.frame, self._traced.tree
        code = frame.function.__code__
        first = code.co_varnames[: min(code.co_argcount, 1)]
        for node, value in roots(tree, variables, space):
            if node.source == f"L['{frame.rest}']":
                is_owners = bool(frame.owner) and not code.co_argcount  # else the module has a name of its own
                yield from ((below, frame.owner[0]) for _, text, below in node.below if is_owners and text == "0")
            elif not node.source or node.source[3:-2] in (*first, *frame.cells):
                yield node, value

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Read everything that the trace had read.

        Args:
            args: of a call like the traced one, which is about to be made.
            kwargs: likewise.

        Raises:
            Differs: something is not as it was.
        """
        frame = self._traced.frame
        variables, space = frame.variables(args, kwargs), frame.function.__globals__
        seen = Seen()
        for node, value in roots(self._traced.tree, variables, space):
            check(node, value, seen)
        if pattern(seen.tensors) != self._traced.pattern:
            raise Differs("other tensors of it are one and the same than when it was traced")

    def _find_tensors(self) -> None:
        """Look up the model's tensors by their names."""
        sources = self._traced.sources
        self._inputs = [tensor_of(self._model, one) if isinstance(one, str) else None for one in sources]
        self._tensors = [one for one in self._inputs if one is not None]
        self._compare_tensors(is_first=True)

    def _compare_tensors(self, *, is_first: bool = False) -> None:
        """Compare the layouts of the model's tensors, one of which has another address: ``.data`` may have been set."""
        now = [(one.dtype, one.shape, one.stride(), one.device) for one in self._tensors]
        if is_first:
            self._layouts = now
        elif now != self._layouts:
            raise Differs("a parameter has another dtype, layout or device")
        # A torch without CUDA reads them one by one, which takes 40 µs for 340 tensors. What compares a model's tensors at each
        # call (``direct.tensor_guard``) compares dtypes and the shapes of parameters.
        self._addresses = Addresses(self._tensors) if Addresses.are_read_at_once() else None


class _Restless(Differs):
    """The model is as it was, and was changed too often to be read after each change."""

    def __init__(self) -> None:
        super().__init__("the model is changed so often that reading it each time takes too long")


class TracedAgain:
    """Makes calls where the model is no longer as it was: dynamo traces it.

    Args:
        model: whose calls they are.
        untraced: that cannot make them.
        backend: takes dynamo's graphs.
        on_trace: takes the reason, at each call that is traced.
    """

    def __init__(
        self, model: torch.nn.Module, untraced: UntracedCall, backend: Callable[..., Any], on_trace: Callable[[str], object]
    ) -> None:
        self._model, self._untraced, self._backend, self._on_trace = model, untraced, backend, on_trace
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], _leaves: Any = (), _objects: Any = ()) -> Any:
        """Make a call.

        Raises:
            ChangesAlways: the model was changed too often, and not in what the trace had read: no trace would end that.
        """
        if self._untraced.is_restless:
            raise ChangesAlways(self._untraced.why)
        self._on_trace(self._untraced.why)
        if self._compiled is None:
            self._compiled = dynamo.compiled_call(self._model, self._backend)
        with dynamo.room_for_graphs():
            return self._compiled(*args, **kwargs)


def tensor_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    """Return a parameter or a buffer.

    Args:
        model: that has it.
        name: as in ``named_parameters``.

    Raises:
        Differs: it has none of that name.
    """
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError as error:
        raise Differs(f"it has no tensor `{name}`") from error
    for table in (owner._parameters, owner._buffers):
        found = table.get(leaf)
        if found is not None:
            return found
    raise Differs(f"it has no tensor `{name}`")


def _filling(sources: Sequence[Source]) -> Callable[[list[Any], Sequence[torch.Tensor]], None]:
    """Return what puts a call's tensors, and open sizes of them, in the places of a graph's inputs that are theirs."""
    tensors = [f"inputs[{place}] = passed[{int(one)}]" for place, one in enumerate(sources) if isinstance(one, int)]
    sizes = [
        f"inputs[{place}] = passed[{int(one[0])}].shape[{int(one[1])}]"
        for place, one in enumerate(sources)
        if isinstance(one, list)
    ]
    return Constants().function(["inputs", "passed"], [*tensors, *sizes, "return"])


_WORTH_A_LOOK = 50
"""Calls after which a model that changed is read as often again."""
_MOST_TRIES = 4
"""A model that changes at each call is read at each, and nothing noted: 2.4 ms for two layers of Qwen2, not 11 (an EPYC)."""
_REST = 20
"""Times as long as reading took the model is not read again, after those: a server may set an attribute for each request."""


def _never() -> bool:
    return False
