"""Runs what dynamo compiled for a call without asking it again, while all that its guards look at is as it was.

Dynamo evaluates every guard at each call, five for a parameter: 0.2 ms for 12 layers of GPT-2, 1 ms for SegFormer-B2. Here the
guards that hold as long as nothing in the model was replaced are left out (:mod:`fusion_advisor.fuse.direct.unchanged`). The rest
is asked as before: the call's own tensors, global state, modes. Whatever differs, the call goes through dynamo. Figures:
``docs/measurements/call_overhead.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch

from fusion_advisor.fuse.direct.known_tables import Arguments, with_known_tables
from fusion_advisor.fuse.direct.passed_object import PassedObjects
from fusion_advisor.fuse.direct.straight_code import variables_of
from fusion_advisor.fuse.direct.unchanged import Unchanged
from fusion_advisor.runtime.torch_internals import compiled_code, dynamo
from fusion_advisor.runtime.torch_internals.compiled_code import CompiledCode

_VARARGS, _VARKEYWORDS = 0x04, 0x08
_Found = TypeVar("_Found", bound=Unchanged)


class Frame:
    """How a call's arguments become the variables of a function."""

    def __init__(self, function: FunctionType, owner: tuple[Any, ...]) -> None:
        """Note what does not depend on the call.

        Args:
            function: that runs.
            owner: what is passed ahead of the call's arguments: the module, for a method.
        """
        code = function.__code__
        count = code.co_argcount
        self.function, self.owner = function, owner
        self.cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self._code, self._defaults = code, (function.__defaults__, function.__kwdefaults__)
        self._names = code.co_varnames[:count]
        last = count + code.co_kwonlyargcount
        self._by_name = frozenset(code.co_varnames[code.co_posonlyargcount : last])
        self.rest = code.co_varnames[last] if code.co_flags & _VARARGS else None
        self._others = code.co_varnames[last + bool(self.rest)] if code.co_flags & _VARKEYWORDS else None
        values = function.__defaults__ or ()
        closure = {name: cell.cell_contents for name, cell in self.cells.items()}
        self._fixed = {
            **dict(zip(self._names[count - len(values) :], values, strict=True)), **(function.__kwdefaults__ or {}), **closure,
        }  # fmt: skip
        self._bind = variables_of(function, closure)

    def is_same(self) -> bool:
        """Whether the function has the code and the defaults that it had."""
        function = self.function
        return (
            function.__code__ is self._code
            and function.__defaults__ is self._defaults[0]
            and function.__kwdefaults__ is self._defaults[1]
        )

    def variables(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's variables by name, those of the closure among them."""
        if self._bind is not None:
            return self._bind(*self.owner, *args, **kwargs)
        passed = self.owner + args
        found = {**self._fixed, **dict(zip(self._names, passed, strict=False))}
        if self.rest is not None:
            found[self.rest] = passed[len(self._names) :]
        if self._others is None:
            found.update(kwargs)
        elif self._by_name.isdisjoint(kwargs):
            found[self._others] = dict(kwargs)
        else:
            found[self._others] = {name: value for name, value in kwargs.items() if name not in self._by_name}
            found.update((name, value) for name, value in kwargs.items() if name in self._by_name)
        return found


class DirectCall:
    """The compiled code of one call, and what must be as it was for it to run."""

    def __init__(self, frame: Frame, compiled: CompiledCode, unchanged: Unchanged, *, in_words: bool = True) -> None:
        self._frame, self._compiled, self._unchanged = frame, compiled, unchanged
        self._passed = PassedObjects(compiled, unchanged, in_words=in_words)
        self._check = compiled.only(lambda node: id(node) not in unchanged.implied)
        function = frame.function
        self._run = FunctionType(self._short_code(), function.__globals__, closure=function.__closure__)
        self._run.__defaults__, self._run.__kwdefaults__ = function.__defaults__, function.__kwdefaults__

    def _short_code(self) -> CodeType:
        """Return dynamo's code without the ways from the module to its parameters, where it is understood."""
        code, frame = self._compiled.code, self._frame
        known: dict[str, Any]
        if frame.function.__code__.co_argcount:
            known = dict(zip(frame.function.__code__.co_varnames[:1], frame.owner, strict=False))
        else:
            known = {} if frame.rest is None or not frame.owner else {frame.rest: Arguments(frame.owner)}
        try:
            return with_known_tables(code, known, self._unchanged.compares, frame.function.__globals__) or code
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError):  # another torch's instructions
            return code

    @property
    def words(self) -> int:
        """How many words of memory stand for what was noted of the model; 0 where Python compares it."""
        return self._unchanged.words

    def variables(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's variables by name, as the guards find them."""
        return self._frame.variables(args, kwargs)

    def fits(self, variables: dict[str, Any], leaves: Sequence[torch.Tensor] = (), objects: Sequence[Any] = ()) -> bool:
        """Whether the guards hold that are not of the model, for a call's variables; see :meth:`may_run` for the rest."""
        return self._passed.check(variables, leaves, objects, self._check) if objects else self._check(variables)

    def passes_all_guards(self, variables: dict[str, Any]) -> bool:
        """Whether all of dynamo's guards hold for a call's variables: slow, and for measurements."""
        return bool(self._compiled.root.check(variables))

    def may_run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Sequence[torch.Tensor] = (),
        objects: Sequence[Any] = (),
    ) -> bool:
        """Whether every guard of the compiled code holds for a call.

        Args:
            args: of the call.
            kwargs: likewise.
            leaves: all tensors that it passes as such.
            objects: what is remembered of all others that it passes; empty asks dynamo about them.
        """
        if not compiled_code.is_stance_default() or not self.is_current():
            return False
        return self.fits(self.variables(args, kwargs), leaves, objects)

    def is_current(self) -> bool:
        """Whether all that was noted of the model is as it was, and dynamo still has the code."""
        return self._compiled.is_alive() and self._frame.is_same() and self._unchanged.holds()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the compiled code."""
        return self._run(*self._frame.owner, *args, **kwargs)


class ChangesAlways(Exception):
    """Dynamo would compile one more graph for a call, and has compiled too many. The text says so to users."""


class Shortcut:
    """A compiled call that finds out by itself whether it can do without dynamo.

    Args:
        model: the module.
        call: the compiled call.
        graphs: what may run in it, as dynamo's backend returned them.
        compiled: returns how many graphs dynamo's backend was given so far; None where nobody counts.
        in_words: compare words of memory, where they can be read; False compares in Python.
    """

    def __init__(
        self, model: torch.nn.Module, call: Callable[..., Any], graphs: Sequence[Any],
        compiled: Callable[[], int] | None = None, *, in_words: bool = True,
    ) -> None:  # fmt: skip
        self._model, self._call, self._graphs, self._in_words = model, call, graphs, in_words
        self._compiled = compiled or (lambda: 0)
        self._tries = self._runs = self._compilations = 0
        self.direct: DirectCall | None = None
        """What runs without dynamo; None where dynamo has to see the next call."""

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Sequence[torch.Tensor] = (),
        objects: Sequence[Any] = (),
    ) -> Any:
        """Run a call that dynamo has compiled already: past dynamo where that holds, through its guards otherwise.

        Args:
            args: of the call.
            kwargs: likewise.
            leaves: see :meth:`DirectCall.may_run`.
            objects: likewise.

        Raises:
            ChangesAlways: dynamo would compile once more.
        """
        if self.direct is None and self._tries < _MOST_TRIES:  # ahead of the call, which may change what it is given
            self._tries, self._runs = self._tries + 1, 0
            try:
                self.direct = direct_call(
                    self._model, self._call, self._graphs, args, kwargs,
                    in_words=self._in_words, with_lists=self._tries <= _TRIES_WITH_LISTS,
                )  # fmt: skip
            except (AttributeError, TypeError, RuntimeError):  # a torch whose guards are built another way
                self._tries = _MOST_TRIES
        direct = self.direct
        if direct is not None:
            if direct.may_run(args, kwargs, leaves, objects):
                self._runs += 1
                if self._runs == _WORTH_A_LOOK:
                    self._tries = 0
                return direct.run(args, kwargs)
            if not direct.is_current():  # what was noted of the model holds no longer: it is noted anew
                self.direct = None
        if self._compilations >= _MOST_COMPILATIONS and not has_graph(self._model, self._call, args, kwargs):
            raise ChangesAlways(f"the model changed at {_MOST_COMPILATIONS} calls, and dynamo compiled a graph for each")
        before = self._compiled()
        with dynamo.raise_recompile_limit(1024):  # at its own limit dynamo would run the original ops and say nothing
            result = self._call(*args, **kwargs)
        self._compilations += self._compiled() > before
        return result

    def forget(self) -> None:
        """Hold nothing of the model any more, and begin anew."""
        self.direct, self._tries = None, 0


_WORTH_A_LOOK = 50
"""Calls past dynamo after which a model that changed is looked through as often again."""
_MOST_TRIES = 4
"""A model that changes at each call is not looked through at each: it takes 10 ms for SegFormer-B2."""
_TRIES_WITH_LISTS = 2
"""Later tries leave lists to dynamo, which compares their items by value: a model may set equal ones at each call."""
_MOST_COMPILATIONS = 8
"""As many as dynamo compiles of one function by default: a model that counts its calls would be compiled at each."""


def has_graph(model: torch.nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether dynamo has compiled a graph of which all guards hold for a call.

    Args:
        model: the module.
        call: the compiled call.
        args: of a call that is about to be made.
        kwargs: likewise.
    """
    frame = _frame(model, call)
    if frame is None:
        return False
    variables = frame.variables(args, kwargs)
    return any(compiled.root.check(variables) for compiled in compiled_code.compiled_codes(frame.function))


def direct_call(
    model: torch.nn.Module,
    call: Callable[..., Any],
    graphs: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    in_words: bool = True,
    with_lists: bool = True,
) -> DirectCall | None:
    """Find what dynamo runs for a call, and what must stay as it is for it to be run directly.

    Args:
        model: the module.
        call: the compiled call.
        graphs: what may run in it, as dynamo's backend returned them.
        args: of a call that is about to be made.
        kwargs: likewise.
        in_words: see :class:`Shortcut`.
        with_lists: compare lists of the model here; False leaves them to dynamo.

    Returns:
        None where dynamo has to see each call: several graphs, hooks on the model itself, a forward of another kind.
    """
    frame = _frame(model, call)
    if frame is None:
        return None
    variables = frame.variables(args, kwargs)
    for compiled in compiled_code.compiled_codes(frame.function):
        if not any(compiled.graph is graph or compiled.graph == graph for graph in graphs):
            continue
        if compiled.root.check(variables):
            nodes = compiled.root.get_child_managers()
            unchanged = unchanged_of(nodes, frame, variables, Unchanged(in_words=in_words, with_lists=with_lists))
            # Once more, so that all of it held after it was noted: another thread may have changed the model meanwhile.
            return DirectCall(frame, compiled, unchanged, in_words=in_words) if compiled.root.check(variables) else None
    return None


def _frame(model: torch.nn.Module, call: Callable[..., Any]) -> Frame | None:
    """Return the frame that dynamo compiles for a module's call."""
    inner = compiled_code.innermost(call)
    if isinstance(inner, FunctionType):  # around a forward of torch's own; what it calls was looked through with its hooks
        return Frame(inner, ())
    return frame_of(model)


def frame_of(model: torch.nn.Module) -> Frame | None:
    """Return the frame of a module's own forward; None where a call does more than run it."""
    forward: Any = model.forward
    if not isinstance(forward, MethodType) or forward.__self__ is not model or not compiled_code.has_plain_call(model):
        return None
    function = forward.__func__
    return Frame(function, (model,)) if isinstance(function, FunctionType) else None


def unchanged_of(
    nodes: Iterable[Any], frame: Frame, variables: Mapping[str, Any], found: _Found, more: Iterable[tuple[Any, Any]] = ()
) -> _Found:
    """Follow the guards of what every call has in common: the module, the closure, the globals.

    Args:
        nodes: of the frame's variables and of its globals.
        frame: of the call.
        variables: of the frame.
        found: gets what they look at, and is returned.
        more: further nodes with what each guards, the same for every call.
    """
    common = {f"L['{name}']": variables[name] for name in frame.cells} | {"G": frame.function.__globals__}
    if frame.owner and frame.function.__code__.co_argcount:
        common[f"L['{frame.function.__code__.co_varnames[0]}']"] = frame.owner[0]
    for cell in frame.cells.values():
        found.read(cell, "cell_contents")
    for node in nodes:
        source = node.get_source()
        if source in common:
            found.begin_at(node, common[source])
        elif source == f"L['{frame.rest}']":
            _follow_owner(found, node, frame.owner)
        elif source[3:-2] in variables:
            found.follow_classes(node, variables[source[3:-2]])
    for node, value in more:
        found.begin_at(node, value)
    found.finish()
    return found


def _follow_owner(found: Unchanged, node: Any, owner: tuple[Any, ...]) -> None:
    """Follow the module where a function takes all of its arguments in one tuple (``def forward(*args, **kwargs)``)."""
    for accessor, below in zip(node.get_accessors(), node.get_child_managers(), strict=True):
        if owner and accessor.repr() == "TupleGetItemGuardAccessor(0)":
            found.begin_at(below, owner[0])
