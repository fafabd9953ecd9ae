"""Finds the state that one call of a model changes (a KV cache, a running count, a buffer) and restores it.

A step that is measured, traced or checked runs hundreds of times, and each run must be the same work: a decode step that moves
its cache on by one token would soon write past its end. So one call is watched: every tensor among its arguments and the model's
buffers, and every attribute of the objects among its arguments, is compared with a copy from before. What a second call would
write again just the same (keys and values at one position) may stay; what moves on (the position itself) is put back before every
repeat. Which of both it is gets tried, not guessed. The cost while it is measured: one copy of what the call writes.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_advisor.errors import NotRepeatable
from fusion_advisor.runtime.call_tensors import objects_in, tensors_in, what_it_lacks
from fusion_advisor.runtime.torch_internals import aten_ops, module_call

_COPIED_BYTES = 1 << 20
"""Of a parameter: for larger parameters only torch's count of writes is compared, and a call that writes to them is refused."""
_SMALL_BYTES = 1024
"""A count or a position, not contents."""
_ABSENT = object()
_CONTAINERS = (list, dict, set, deque)
_DEEPEST = 4
"""Containers inside one another that are looked into."""


@dataclass(slots=True, kw_only=True)
class Written:
    """State that a call changes outside its result.

    Attributes:
        tensors: every tensor written to, by name, live.
        before: their values before the call.
        made: names of the tensors that the call puts in place of others (a cache that allocates itself at its first use).
        moving: names of the tensors that must be put back before the call is repeated.
        attributes: (object, attribute, value before the call) for every attribute that the call sets to something else.
        modules: (attributes or buffers of a module, name, value before the call) that every call sets again.
        contents: (list, dict or set of a module, its content before the call) that every call changes.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    made: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    modules: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)

    def rewind(self) -> None:
        """Put back what moves on, so that the next call does the same work again."""
        self._put_back(self.moving)

    def restore(self) -> None:
        """Put everything back as it was before the first call."""
        self._put_back(tuple(self.tensors))

    def _put_back(self, names: tuple[str, ...]) -> None:
        for owner, name, value in self.attributes:
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
        for space, name, value in self.modules:
            if value is _ABSENT:
                space.pop(name, None)
            else:
                space[name] = value
        for container, content in self.contents:
            _put_back(container, content)
        if names:
            aten_ops.copy_all([self.tensors[name] for name in names], [self.before[name] for name in names])


def written_by(
    call: Callable[[], object],
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    model_id: str = "model",
) -> Written:
    """Watch one call, and another if it writes anything.

    Args:
        call: the model on these arguments.
        model: its buffers are watched.
        args: positional arguments, looked into.
        kwargs: keyword arguments, looked into.
        model_id: for the error message only.

    Returns:
        What it writes; the state is as before the call, as far as a repeated call can tell.

    Raises:
        NotRepeatable: after everything was put back a second call is another one than the first (a list that grows, say).
    """
    layouts, state = _layouts(args, kwargs), Before.of(model)
    written = _written_by_first_call(call, model, args, kwargs, model_id)
    if state.is_changed():
        tell_what_moves(written, state, call, model)
    elif not written.tensors and not written.attributes and _layouts(args, kwargs) == layouts:
        return written
    after = {name: tensor.detach().clone() for name, tensor in written.tensors.items()}
    small = tuple(name for name, tensor in written.tensors.items() if tensor.nbytes <= _SMALL_BYTES)
    for moving in (small, tuple(written.tensors)):
        written.moving = moving
        written.rewind()
        if _layouts(args, kwargs) != layouts:
            raise NotRepeatable(model_id=model_id)
        call()
        if all(holds(tensor, after[name]) for name, tensor in written.tensors.items()):
            break
    written.rewind()
    return written


def _written_by_first_call(
    call: Callable[[], object], model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], model_id: str
) -> Written:
    """Call the model once, and return the tensors and attributes that hold something else than before.

    Copies of tensors that stayed the same are freed when this returns.
    """
    found = live_tensors(model, args, kwargs)
    large = [tensor for tensor in model.parameters() if tensor.nbytes > _COPIED_BYTES and not tensor.is_inference()]
    versions = [tensor._version for tensor in large]
    copies = {name: tensor.detach().clone() for name, tensor in found.items()}
    attributes = [(owner, dict(vars(owner))) for owner in objects_in((args, dict(kwargs)))]
    try:
        call()
    except BaseException:
        changed = [name for name, tensor in found.items() if not holds(tensor, copies[name])]
        aten_ops.copy_all([found[name] for name in changed], [copies[name] for name in changed])
        raise
    if [tensor._version for tensor in large] != versions:
        raise NotRepeatable(model_id=model_id)
    written = Written(attributes=[change for owner, earlier in attributes for change in _changes(owner, earlier)])
    written.tensors = {name: tensor for name, tensor in found.items() if not holds(tensor, copies[name])}
    written.made = tuple(name for name, tensor in arguments(args, kwargs).items() if tensor is not found.get(name))
    written.before = {name: copies[name] for name in written.tensors}
    return written


def tell_what_moves(written: Written, state: Before, call: Callable[[], object], model: torch.nn.Module) -> None:
    """Let a call follow on the first: what it sets again in the modules moves, what stays was made once (a table, say).

    Args:
        written: gets it, and is restored.
        state: from before the first call.
        call: the second one.
        model: whose modules are looked at.
    """
    between = Before.of(model)
    call()
    for (space, first), (_, second) in zip(state.spaces, between.spaces, strict=False):
        names = dict.fromkeys((*second, *space))
        moved = [name for name in names if space.get(name, _ABSENT) is not second.get(name, _ABSENT)]
        written.modules += [(space, name, first.get(name, _ABSENT)) for name in moved]
    earlier = {id(value): copy for value, copy in state.contents}
    moved_contents = [value for value, copy in between.contents if not _is_same(value, copy) and id(value) in earlier]
    written.contents = [(value, earlier[id(value)]) for value in moved_contents]
    written.restore()


def live_tensors(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a call may write to, by name, as it is now.

    That is: the tensors of the arguments, buffers, small parameters, and tensors that modules have as plain attributes. Those
    whose numbers cannot be compared are left out: a capture refuses them with the reason.
    """
    found = {**arguments(args, kwargs), **dict(model.named_buffers())}
    found |= {name: tensor for name, tensor in model.named_parameters() if _is_small(tensor)}
    for path, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        found |= {f"{path}.{name}".lstrip("."): value for name, value in plain.items()}
    return {name: tensor for name, tensor in found.items() if not what_it_lacks(tensor)}


def _is_small(parameter: torch.Tensor) -> bool:
    return not what_it_lacks(parameter) and parameter.nbytes <= _COPIED_BYTES


@dataclass(slots=True)
class Before:
    """A model, its call's objects and the random generators, as they are when this is made.

    Of modules: which parameters, buffers, submodules and attributes they have, and what the lists, dicts and sets among the
    attributes hold. Of the arguments' objects: their attributes. Of random numbers: torch's generators of the CPU and of every
    GPU in use, those that a module or an argument holds, ``random`` and ``numpy.random``. What tensors hold is for
    :class:`Written`. What a call does outside Python's memory (a file, a socket) cannot be undone.
    """

    model: torch.nn.Module
    spaces: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)
    generators: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    numbers: Numbers | None = None

    @classmethod
    def of(cls, model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Before:
        """Look at a model and a call of it."""
        found = cls(model, numbers=Numbers.now())
        seen: set[int] = set()
        for module in model.modules():
            found._note_space(vars(module), seen)
        for owner in objects_in((args, dict(kwargs or {}))):
            found._note_space(vars(owner), seen)
        for value in (*args, *(kwargs or {}).values()):
            found._note(value, seen, 0)
        return found

    def _note_space(self, space: dict[str, Any], seen: set[int]) -> None:
        if id(space) in seen:
            return
        seen.add(id(space))
        self.spaces.append((space, dict(space)))
        for value in space.values():
            self._note(value, seen, 0)

    def _note(self, value: Any, seen: set[int], depth: int) -> None:
        """Remember what a container holds, and the state of a generator."""
        if isinstance(value, torch.Generator):
            if id(value) not in seen:
                self.generators.append((value, value.get_state()))
        elif isinstance(value, _CONTAINERS) and id(value) not in seen and depth < _DEEPEST:
            self.contents.append((value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                self._note(item, seen | {id(value)}, depth + 1)
        elif isinstance(value, tuple) and depth < _DEEPEST:
            for item in value:
                self._note(item, seen, depth + 1)
        seen.add(id(value))

    def is_changed(self) -> bool:
        """Whether an attribute, or what a container holds, is another object than then."""
        return not all(_is_same(value, before) for value, before in (*self.spaces, *self.contents))

    def has_drawn(self) -> bool:
        """Whether a random generator has moved."""
        moved = any(not torch.equal(generator.get_state(), state) for generator, state in self.generators)
        return moved or (self.numbers is not None and not self.numbers.are_now())

    def restore(self) -> None:
        """Put all of it back; what is as it was is not touched."""
        for space, before in self.spaces:
            _put_back(space, before)
        for value, before in self.contents:
            _put_back(value, before)
        self.restore_generators()

    def restore_generators(self) -> None:
        """Put random generators back: the model's own, and those that nobody passes."""
        for generator, state in self.generators:
            generator.set_state(state)
        if self.numbers is not None:
            self.numbers.restore()


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The state of the random generators that nobody passes: torch's on each device in use, ``random``, ``numpy.random``."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Numbers:
        """Read it."""
        is_cuda = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
        numpy = sys.modules.get("numpy.random")
        return cls(
            cpu=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if is_cuda else (),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.get_state(),
        )

    def are_now(self) -> bool:
        """Whether no generator has moved since."""
        now = Numbers.now()
        if len(self.cuda) != len(now.cuda) or (self.python, repr(self.numpy)) != (now.python, repr(now.numpy)):
            return False
        return all(map(torch.equal, (self.cpu, *self.cuda), (now.cpu, *now.cuda)))

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self.cpu)
        for index, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


@contextmanager
def kept_as_it_is(model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Put everything that calls of a model move back when the context ends, with an exception too.

    See :class:`Before`. What tensors of up to a mebibyte hold is put back too; larger ones are :class:`Written`'s.
    """
    before = Before.of(model, args, kwargs)
    small = [tensor for tensor in live_tensors(model, args, kwargs or {}).values() if tensor.nbytes <= _COPIED_BYTES]
    copies = [tensor.detach().clone() for tensor in small]
    slots = module_call.call_slots(model)
    try:
        yield
    finally:
        now = module_call.call_slots(model)
        before.restore()
        with torch.no_grad():
            changed = [pair for pair in zip(small, copies, strict=True) if not holds(*pair)]
            aten_ops.copy_all([tensor for tensor, _ in changed], [copy for _, copy in changed])
        if now != slots:  # a fused call was put in, which is to stay
            module_call.fill_call_slots(model, now)


@contextmanager
def arguments_kept(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Put back what a call's tensors hold when the context ends, with an exception too; all of them are copied.

    Args:
        args: of a call, looked into.
        kwargs: of the same call.
    """
    kept = [one for one in arguments(args, kwargs).values() if not what_it_lacks(one)]
    copies = [one.detach().clone() for one in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            changed = [pair for pair in zip(kept, copies, strict=True) if not holds(*pair)]
            aten_ops.copy_all([one.detach() for one, _ in changed], [copy for _, copy in changed])


def holds(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor holds what it did; a NaN that stayed is no change.

    Args:
        tensor: as it is now.
        copy: of it, from before, on the same device.
    """
    if torch.equal(tensor, copy):
        return True
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    was, now = copy != copy, tensor != tensor  # noqa: PLR0124  (NaN alone differs from itself)
    return torch.equal(now, was) and torch.equal(tensor.masked_fill(now, 0), copy.masked_fill(was, 0))


def _is_same(value: Any, before: Any) -> bool:
    """Whether a container holds the very objects that it did: equal ones may be others, and tensors cannot be asked."""
    if isinstance(value, set):  # a copy may have another order than the set that it was made of
        return set(map(id, value)) == set(map(id, before))
    if len(value) != len(before) or not all(map(operator.is_, value, before)):
        return isinstance(value, dict) and list(value) == list(before) and _is_same(list(value.values()), list(before.values()))
    return not isinstance(value, dict) or all(map(operator.is_, value.values(), before.values()))


def _put_back(value: Any, before: Any) -> None:
    """Let a container hold what it did."""
    if _is_same(value, before):
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(before)
    else:
        value.update(before)


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor among the arguments by name, as it is now."""
    named = [("args", args), *kwargs.items()]
    return {name: tensor for key, value in named for name, tensor in tensors_in(key, value)}


def _layouts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in arguments(args, kwargs).items()}


def _changes(owner: Any, earlier: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    now = vars(owner)
    names = dict.fromkeys((*earlier, *now))
    return [
        (owner, name, earlier.get(name, _ABSENT)) for name in names if earlier.get(name, _ABSENT) is not now.get(name, _ABSENT)
    ]
