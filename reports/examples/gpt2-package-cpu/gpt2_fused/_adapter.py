"""Puts the fused forward into a model and takes it out again; decides for each call whether it is one that was verified."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter, is_
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch

from . import _facts, _objects, ops
from ._graphs import CudaRecorder, Graphs, Recorder
from .forward import ARGUMENTS, JOINED, SAVED, SETS, TENSORS, VALUES, WRITTEN, forward

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))
_OBJECTS_FILE = Path(__file__).parent / "objects.json"
OBJECTS = json.loads(_OBJECTS_FILE.read_text(encoding="utf-8")) if _OBJECTS_FILE.exists() else {}
"""What the objects among the call's arguments hold: a cache's classes and plain values."""
PASSED = [(name, laid) for name, laid in TENSORS.items() if "." not in name]
"""Tensors that are arguments themselves."""
HELD = [(name, laid) for name, laid in TENSORS.items() if "." in name]
"""Those that its objects hold."""
_MISSING = object()
_DTYPE, _IS_CUDA = attrgetter("dtype"), attrgetter("is_cuda")


class ModelDiffers(ValueError):
    """A model that is not the one that was exported; the message says what differs."""


def apply(model: torch.nn.Module, *, cuda_graph: bool = False, recorder: Recorder | None = None) -> torch.nn.Module:
    """Let a model's verified calls run the kernels, and return the model.

    The model's class, parameters and state_dict stay as they are. Parameters that one matrix product reads are moved next to each
    other in memory, with the same values.

    Args:
        model: like the exported one, on its device.
        cuda_graph: from the second call on the same cache on, replay the call as a CUDA graph.
        recorder: records it; torch's CUDA graphs by default.

    Raises:
        ValueError: a graph is asked for, and the call grows a cache or the model is on no GPU.
        ModelDiffers: another class, configuration, code, parameter or device than that of the export.
    """
    if cuda_graph and SETS:
        raise ValueError("a call that grows its cache is another at every step: no CUDA graph holds it; use a static cache")
    if cuda_graph and recorder is None and EXPECTED["device"] != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, and this package is for a {EXPECTED['device']}")
    if _fused(model) is not None:
        return model
    if "forward" in vars(model):
        raise ModelDiffers("its forward was replaced by somebody else: revert that first")
    found = _facts.differences(EXPECTED, _facts.facts(model, EXPECTED["code"]))
    if found:
        shown = "".join(f"\n  {line}" for line in found[:10])
        more = f"\n  and {len(found) - 10} more" if len(found) > 10 else ""
        raise ModelDiffers(f"this model is not the one that {__package__} was exported from:{shown}{more}")
    ops.prepare()
    _join(model)
    fused = FusedForward(model)
    if cuda_graph:
        tensors = [*model.parameters(), *model.buffers()]
        fused.graphs = Graphs(recorder or CudaRecorder(), tensors, WRITTEN, fused.note, SAVED)
    model.forward = fused.method()
    return model


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model its own forward back; nothing happens to a model that has it."""
    if _fused(model) is not None:
        del model.forward
        for name in JOINED:
            parent, _, leaf = name.rpartition(".")
            delattr(model.get_submodule(parent), leaf)
    return model


def fallbacks(model: torch.nn.Module) -> dict[str, int]:
    """Return why calls ran the model's own forward, and how often."""
    fused = _fused(model)
    return dict(fused.fallbacks) if fused is not None else {}


def _fused(model: torch.nn.Module) -> FusedForward | None:
    found = getattr(vars(model).get("forward"), "__self__", None)
    return found if isinstance(found, FusedForward) else None


class FusedForward:
    """Stands for a model's forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.original = model.forward
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(model.forward).parameters.values()
        self.positions = tuple(one.name for one in parameters if one.kind in kinds)
        self.defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
        self.constants = _constants(EXPECTED["device"], model)
        self.fallbacks: Counter[str] = Counter()
        self.guard = guard = _Guard(model)
        self.changed = torch.compiler.assume_constant_result(lambda: guard.change())  # dynamo calls it once, as it traces
        self.graphs: Graphs | None = None
        self.seen = _objects.Seen()

    def method(self) -> Callable[..., Any]:
        """Return what takes the forward's place: with its signature, since callers read that, and bound to this object."""

        @functools.wraps(getattr(self.original, "__func__", self.original))
        def forward(fused: FusedForward, *args: Any, **kwargs: Any) -> Any:
            return fused.run(*args, **kwargs)

        return MethodType(forward, self)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernels on a verified call, the model's own forward on any other."""
        call = dict(zip(self.positions, args))
        call.update(kwargs)
        is_compiling = torch.compiler.is_compiling()
        refusal = self._refusal_at_once(call, len(args))
        if is_compiling and not refusal:
            refusal = self._refusal_of_objects(call, is_compiling=True)
            if not refusal and torch.compiler.is_dynamo_compiling():
                refusal = self.changed()
            if not refusal:
                return self.launched({name: call[name] for name in ARGUMENTS})
        elif not refusal:
            refusal, result = self._fused(call) if self.graphs is None else self.graphs.alone(self._fused, call)
            if not refusal:
                return result
        if not is_compiling:
            self.fallbacks[refusal] += 1
        return self.original(*args, **kwargs)

    def _fused(self, call: dict[str, Any]) -> tuple[str, Any]:
        """Run the kernels: a graph is replayed before the call's objects and the model are looked at, while the GPU works.

        Returns:
            why the call is not the verified one, or an empty text and the output.
        """
        is_held = not OBJECTS or self.seen.holds_the_same(call)
        if WRITTEN and is_held and self._share_memory(call):
            return _SHARED, None
        started = self.graphs.started(call, self.seen.tensors) if self.graphs is not None and is_held else None
        try:
            refusal = self._refusal_of_objects(call, is_held=is_held) or self.guard.change()
            if started is not None and not refusal and started.is_for(self.guard.addresses):
                return "", started.results()
        except BaseException:
            if started is not None:
                started.undo()
            raise
        if started is not None:
            started.undo()
        if refusal:
            return refusal, None
        given = {name: call[name] for name in ARGUMENTS}
        if self.graphs is None:
            return "", self.launched(given)
        tensors = {name: _objects.at(name, call) for name in TENSORS}
        return "", self.graphs.run(given, tensors, self.launched)

    def launched(self, given: Mapping[str, Any]) -> Any:
        """Run the kernels, one launch after the other."""
        return forward(self.model, self.constants, **given)

    def note(self, reason: str) -> None:
        """Count a call that was not made as it was asked for."""
        self.fallbacks[reason] += 1

    def _refusal_at_once(self, call: dict[str, Any], count: int) -> str:
        """Say why a call is not the verified one, as far as that shows without a look into its objects."""
        if torch.is_grad_enabled():
            return "gradients are enabled: call it under torch.no_grad()"
        if self.model.training:
            return "the model is in train() mode"
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return "autocast is on"
        if count > len(self.positions):
            return "it has more positional arguments than the forward names"
        for name, laid in PASSED:
            refusal = _layout_refusal(name, laid, call.get(name))
            if refusal:
                return refusal
        for name, value in VALUES.items():
            found = call.get(name, self.defaults.get(name, _MISSING))
            if type(found) is not type(value) or found != value:
                return f"`{name}` is not {value!r}"
        for name, value in call.items():
            if name not in ARGUMENTS and name not in VALUES and value is not self.defaults.get(name, _MISSING):
                return f"`{name}` was not given when it was verified"
        return ""

    def _refusal_of_objects(self, call: dict[str, Any], *, is_held: bool = False, is_compiling: bool = False) -> str:
        """Say why a call's objects are not as the verified one's; is_held: they hold what those of the last call held."""
        if not OBJECTS or (is_held and self.seen.is_unchanged(call, holds_the_same=True)):
            return ""
        for name, spec in OBJECTS.items():
            if name not in call or not (is_compiling or _objects.is_like(spec, call[name])):
                return f"`{name}` is of other classes or holds other values"
        for name, laid in HELD:
            refusal = _layout_refusal(name, laid, _objects.at(name, call))
            if refusal:
                return refusal
        if WRITTEN and not is_compiling:
            addresses = {_objects.at(name, call).untyped_storage().data_ptr() for name in TENSORS}
            if len(addresses) < len(TENSORS):
                return _SHARED
        if not is_compiling and not SETS:
            self.seen.note(call, OBJECTS, [name for name, _ in HELD])
        return ""

    def _share_memory(self, call: dict[str, Any]) -> bool:
        """Whether two of a call's tensors lie in one memory; those of its objects do not, as the last call's did not."""
        addresses = {call[name].untyped_storage().data_ptr() for name, _ in PASSED}
        return len(addresses) < len(PASSED) or not addresses.isdisjoint(self.seen.storages)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a copy would go on calling this model."""
        raise TypeError(f"revert the model before it is copied or pickled: {__package__}.revert(model)")


_SHARED = "tensors of the call share memory, and it writes into some of them"


def _layout_refusal(name: str, laid: Any, value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"`{name}` is no tensor"
    if value.shape != laid.shape or value.dtype != laid.dtype or value.device.type != EXPECTED["device"]:
        return f"`{name}` has other sizes, another dtype or another device"
    if value.stride() != laid.stride:
        return f"`{name}` has other strides"
    return ""


class _Guard:
    """A model as it was when the kernels were put in: submodules, their forwards and hooks, tensors, dropouts, attributes.

    It is looked at at each call: with 28 layers of Qwen2.5 it has 371 modules and 341 tensors, so all loops are in C.

    Attributes:
        addresses: of the parameters and buffers, as they were when it was last looked at.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        parts = [module._modules for module in model.modules()]
        self._parts, self._then = parts, [dict(one) for one in parts]
        inner = [module for module in model.modules() if module is not model]
        self._hooks = [table for one in inner for table in (one._forward_hooks, one._forward_pre_hooks)]
        self._hook_count = sum(map(len, self._hooks))
        every = torch.nn.modules.module
        self._hooks_of_all = [getattr(every, name, {}) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")]
        self._inner, self._own = inner, [*map(vars, inner)]
        self._kinds, self._forwards = [*map(type, inner)], [*map(dict.get, self._own, itertools.repeat("forward"))]
        self._tables = [table for one in model.modules() for table in (one._parameters, one._buffers) if table]
        self._known = [*itertools.chain.from_iterable(map(dict.values, self._tables))]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._dtypes, self._on_gpu = [*map(_DTYPE, self._tensors)], [*map(_IS_CUDA, self._tensors)]
        self.addresses = [*map(torch.Tensor.data_ptr, self._tensors)]
        self._layouts = [(one.shape, one.stride()) for one in self._tensors]
        self._joined = [
            (model.get_buffer(name), [*map(model.get_parameter, sources)]) for name, (_, *sources) in JOINED.items()
        ]
        self._attributes = _attributes(model)
        self._plain = self._read()
        self._dropouts = [one for one in model.modules() if isinstance(one, torch.nn.Dropout) and one.p > 0]

    def change(self) -> str:
        """Say what changed; empty where nothing did."""
        if self._parts != self._then:
            return "a submodule was replaced after apply"
        if sum(map(len, self._hooks)) != self._hook_count:
            return "a hook was added to a submodule after apply"
        if any(self._hooks_of_all):
            return "a hook for all modules is registered"
        if [*map(type, self._inner)] != self._kinds:
            return "a submodule has another class than at apply"
        if [*map(dict.get, self._own, itertools.repeat("forward"))] != self._forwards:
            return "the forward of a submodule was replaced after apply"
        held = itertools.chain.from_iterable(map(dict.values, self._tables))
        if not all(map(is_, held, self._known)) or sum(map(len, self._tables)) != len(self._known):
            return "a parameter or buffer is another one than at apply: revert, and apply again"
        if [*map(_DTYPE, self._tensors)] != self._dtypes:
            return _OTHER_KIND
        if any(one.training for one in self._dropouts):
            return "a dropout is in train() mode"
        if self._have_changed():
            return "an attribute of a module is another than at apply"
        return self._moved()

    def _read(self) -> list[list[Any]]:
        """Return the plain attributes of all modules: 387 of 28 layers of Qwen2 take 12 µs."""
        return [[*map(read, modules)] for read, modules in self._attributes]

    def _have_changed(self) -> bool:
        try:
            return self._read() != self._plain
        except (AttributeError, RuntimeError, ValueError):  # one is gone, or holds many numbers now
            return True

    def _moved(self) -> str:
        """Say why tensors cannot be read where they lie now; empty where they can: what has its address is on its device."""
        found = [*map(torch.Tensor.data_ptr, self._tensors)]
        if found == self.addresses:
            return ""
        if [*map(_IS_CUDA, self._tensors)] != self._on_gpu:
            return _OTHER_KIND
        if [(one.shape, one.stride()) for one in self._tensors] != self._layouts:
            return "parameters have other sizes or strides than at apply"
        if not all(_lie_in(whole, parts) for whole, parts in self._joined):
            return "parameters that one product reads lie elsewhere than at apply: revert, and apply again"
        self.addresses = found
        return ""


_OTHER_KIND = "parameters have another dtype or device than at apply"


def _attributes(model: torch.nn.Module) -> list[tuple[Callable[[Any], Any], list[torch.nn.Module]]]:
    """Return what reads the plain attributes of modules, each with its modules; those of a linear layer are only shown."""
    found: dict[tuple[str, ...], list[torch.nn.Module]] = {}
    for path, module in model.named_modules():
        names = tuple(name for name in EXPECTED["modules"].get(path, {}) if name in vars(module) and name.isidentifier())
        if names and type(module) is not torch.nn.Linear:
            found.setdefault(names, []).append(module)
    return [(attrgetter(*names), modules) for names, modules in found.items()]


def _lie_in(whole: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Whether tensors lie one after the other from the beginning of another."""
    ends = itertools.accumulate((one.numel() * one.element_size() for one in parts), initial=whole.data_ptr())
    return all(one.data_ptr() == place for one, place in zip(parts, ends))


def _constants(device: str, model: torch.nn.Module) -> SimpleNamespace:
    """Read what was computed once from no parameter, onto the model's device."""
    path = Path(__file__).parent / "constants.pt"
    found = torch.load(path, weights_only=True, map_location="cpu") if path.exists() else {}
    own = next((one.device for one in (*model.parameters(), *model.buffers())), torch.device(device))
    return SimpleNamespace(**{name: value.to(own) for name, value in found.items()})


@torch.no_grad()
def _join(model: torch.nn.Module) -> None:
    """Lay parameters that one product reads one after the other, and keep a view of all of them as a buffer."""
    for name, (rows, *sources) in JOINED.items():
        tensors = [model.get_parameter(source) for source in sources]
        whole = _view(tensors, rows)
        if whole is None:
            first = tensors[0].detach()
            more = first.new_zeros((rows - sum(map(len, tensors)), *first.shape[1:]))
            whole = torch.cat([*(tensor.detach() for tensor in tensors), more])
            start = 0
            for tensor in tensors:
                tensor.data = whole[start : start + tensor.shape[0]]
                start += tensor.shape[0]
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent).register_buffer(leaf, whole, persistent=False)


def _view(tensors: list[torch.Tensor], rows: int) -> torch.Tensor | None:
    """View tensors that lie one after the other as one of so many rows; None where they do not."""
    first, place = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.data_ptr() != place or not tensor.is_contiguous():
            return None
        place += tensor.numel() * tensor.element_size()
    if sum(map(len, tensors)) < rows:  # what lies after them may be anybody's
        return None
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
