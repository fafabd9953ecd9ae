"""The fused model: the user's own module, with rewritten graphs for the calls that were verified and its own ops for all others.

Only this instance is touched, and only the slot that ``nn.Module.compile`` uses: no class, no parameter, no buffer, no state_dict
key. Dynamo guards every assumption that the captured graph makes about the module; what it cannot know (shapes and strides of the
inputs, gradients, train mode, autocast) is compared with what was verified before each call, and a call that differs runs the
original ops and says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from fusion_advisor.capture import torch_internals
from fusion_advisor.capture.arguments import signature
from fusion_advisor.capture.graph import Region, writes_to_inputs
from fusion_advisor.fuse.rewrite import LayoutChanged
from fusion_advisor.records import Report


@dataclass(slots=True, kw_only=True)
class Entry:
    """What was verified for calls of one signature.

    Attributes:
        modules_by_code: the rewritten graph for each of dynamo's graphs, keyed by dynamo's own code and its inputs' layouts.
        compiled: the model's call as dynamo runs it for this signature alone.
        graphs_in_place: how often dynamo handed over a graph that was verified.
        writes: whether the graphs write to what they are given (a KV cache): such a call cannot be run again from its start.
        is_broken: a value inside the model was laid out differently than when it was verified; the entry is not used again.
    """

    modules_by_code: dict[tuple[Any, ...], torch.fx.GraphModule]
    compiled: Callable[..., Any]
    writes: bool = False
    graphs_in_place: int = 0
    is_broken: bool = False


class HalfWritten(RuntimeError):
    """A fused call stopped after it may have written to its cache; the cache is not what either call would have left."""


class FusedModel:
    """A live model with fusions in place.

    Call it like the model (or call the model itself: it is the same object). ``revert()`` puts the original call back exactly,
    and so does leaving a ``with`` block. Everything else (``generate``, ``config`` …) is the model's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        regions: list[Region],
        modules: list[torch.fx.GraphModule],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.report: Report | None = None
        self.fallbacks: dict[str, int] = {}
        """Why calls ran the original ops, and how often."""
        self.entries: dict[tuple[Any, ...], Entry] = {}
        """What was verified, by the signature of the call; every other call runs the original ops."""
        self._live_dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
        self._original = torch_internals.original_call(model)
        self._before: Callable[..., Any] | None = None
        self.is_applied = False
        self.add(regions, modules, args, kwargs)

    def add(
        self, regions: list[Region], modules: list[torch.fx.GraphModule], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Let calls like this one run rewritten graphs too.

        Args:
            regions: what dynamo captured of the call, in order.
            modules: the rewritten graph of each region.
            args: the call that was captured and verified …
            kwargs: … whose signature the others are compared with.
        """
        by_code = {
            (region.original.code, _input_layouts(region.example_args)): module
            for region, module in zip(regions, modules, strict=True)
        }
        key = signature(args, kwargs)
        writes = any(map(writes_to_inputs, regions))
        self.entries[key] = Entry(modules_by_code=by_code, compiled=self._compile(key), writes=writes)

    def take_over(self, other: FusedModel) -> None:
        """Let calls that another fused model of the same model was verified for run their rewritten graphs here too."""
        for key, entry in other.entries.items():
            self.entries[key] = replace(entry, compiled=self._compile(key), graphs_in_place=0)

    def _compile(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        return torch_internals.compiled_call(self.model, lambda graph, inputs: self._choose(self.entries[key], graph, inputs))

    # ------------------------------------------------------------------ the call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten graphs if this call was verified, the original ops if not.

        Raises:
            HalfWritten: a value inside a model that writes to its cache was laid out differently than when it was verified. Later
                calls run the original ops.
        """
        found = self._verified(args, kwargs)
        if isinstance(found, Entry):
            try:
                return self._run_compiled(found, args, kwargs)
            except LayoutChanged as change:
                found.is_broken = True
                if found.writes:
                    raise HalfWritten(
                        f"{change}; the call had begun to write to its cache: reset the cache and repeat"
                    ) from change
                found = f"a value inside the model was laid out differently than when it was verified ({change})"
        self._say(found)
        return self._original(*args, **kwargs)

    def _run_compiled(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if entry.graphs_in_place:
            return entry.compiled(*args, **kwargs)
        # Every fused model adds graphs to the class's code object; at dynamo's default limit it would silently run eager.
        with torch_internals.raise_recompile_limit(1024):
            result = entry.compiled(*args, **kwargs)
        if not entry.graphs_in_place:
            self._say("dynamo did not hand over the graphs that were verified")
        return result

    def _verified(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry | str:
        """Return what was verified for this call, or why nothing was."""
        if torch.is_grad_enabled():
            return "gradients are enabled; wrap the call in torch.no_grad()"
        if self.model.training or any(module.training for module in self._live_dropouts):
            return "the model is in train() mode"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        entry = self.entries.get(signature(args, kwargs))
        if entry is None:
            return "these inputs (names, shapes, dtypes or strides) were not verified"
        if entry.is_broken:
            return "a value inside the model was laid out differently than when it was verified"
        return entry

    def _say(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if self.fallbacks[reason] == 1:
            warnings.warn(f"fusion-advisor runs the original ops: {reason}", stacklevel=3)

    def _choose(self, entry: Entry, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Dynamo's backend: the rewritten graph for a graph that was verified, dynamo's own graph for any other."""
        module = entry.modules_by_code.get((graph_module.code, _input_layouts(example_inputs)))
        if module is None:
            self._say("dynamo captured a graph that was not verified (something in the model changed)")
            return graph_module.forward
        entry.graphs_in_place += 1
        return module.forward

    # ------------------------------------------------------------------ applying and reverting

    def apply(self) -> FusedModel:
        """Put the fusions in place; does nothing when they are."""
        if not self.is_applied:
            # Under somebody else's torch.compile (transformers compiles decode steps by itself) dynamo would look through this
            # call and run the model's own ops: it must stop here instead.
            stop = torch.compiler.disable(self.dispatch, reason="fusion-advisor runs its own graphs here")
            self._before = torch_internals.set_compiled_call(self.model, stop)
            self.is_applied = True
        return self

    def revert(self) -> torch.nn.Module:
        """Take the fusions out again and return the model, which then is as it was before."""
        if self.is_applied:
            torch_internals.set_compiled_call(self.model, self._before)
            self.is_applied = False
        return self.model

    def __enter__(self) -> FusedModel:
        return self.apply()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.revert()

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)


def _input_layouts(values: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for value in values
    )
