"""The fused model: the user's own module, with rewritten graphs for the calls that were verified and its own ops for all others.

Only this instance is touched, and only the slot that ``nn.Module.compile`` uses: no class, no parameter, no buffer, no state_dict
key. Dynamo guards every assumption that the captured graph makes about the module; what it cannot know (shapes and strides of the
inputs, gradients, train mode, autocast) is compared with what was verified before each call, and a call that differs runs the
original ops and says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.capture import torch_internals
from fusion_advisor.capture.graph import Region
from fusion_advisor.fuse.rewrite import LayoutChanged
from fusion_advisor.records import Report


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
        self._modules_by_code = {
            (region.original.code, _input_layouts(region.example_args)): module
            for region, module in zip(regions, modules, strict=True)
        }
        self._signature = signature(args, kwargs)
        self._live_dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
        self._original = torch_internals.original_call(model)
        self._compiled = torch_internals.compiled_call(model, self._choose)
        self._before: Callable[..., Any] | None = None
        self._is_applied = False
        self._is_broken = False
        self._graphs_in_place = 0

    # ------------------------------------------------------------------ the call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten graphs if this call was verified, the original ops if not."""
        refusal = self._refusal(args, kwargs)
        if refusal is None:
            try:
                return self._run_compiled(args, kwargs)
            except LayoutChanged as change:
                self._is_broken = True
                refusal = f"a value inside the model was laid out differently than when it was verified ({change})"
        self._say(refusal)
        return self._original(*args, **kwargs)

    def _run_compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._graphs_in_place:
            return self._compiled(*args, **kwargs)
        # Every fused model adds graphs to the class's code object; at dynamo's default limit it would silently run eager.
        with torch_internals.raise_recompile_limit(1024):
            result = self._compiled(*args, **kwargs)
        if not self._graphs_in_place:
            self._say("dynamo did not hand over the graphs that were verified")
        return result

    def _refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        if self._is_broken:
            return "a value inside the model was laid out differently than when it was verified"
        if torch.is_grad_enabled():
            return "gradients are enabled; wrap the call in torch.no_grad()"
        if self.model.training or any(module.training for module in self._live_dropouts):
            return "the model is in train() mode"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if signature(args, kwargs) != self._signature:
            return "these inputs (names, shapes, dtypes or strides) were not verified"
        return None

    def _say(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if self.fallbacks[reason] == 1:
            warnings.warn(f"fusion-advisor runs the original ops: {reason}", stacklevel=3)

    def _choose(self, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Dynamo's backend: the rewritten graph for a graph that was verified, dynamo's own graph for any other."""
        module = self._modules_by_code.get((graph_module.code, _input_layouts(example_inputs)))
        if module is None:
            self._say("dynamo captured a graph that was not verified (something in the model changed)")
            return graph_module.forward
        self._graphs_in_place += 1
        return module.forward

    # ------------------------------------------------------------------ applying and reverting

    def apply(self) -> FusedModel:
        """Put the fusions in place; does nothing when they are."""
        if not self._is_applied:
            self._before = torch_internals.set_compiled_call(self.model, self.dispatch)
            self._is_applied = True
        return self

    def revert(self) -> torch.nn.Module:
        """Take the fusions out again and return the model, which then is as it was before."""
        if self._is_applied:
            torch_internals.set_compiled_call(self.model, self._before)
            self._is_applied = False
        return self.model

    def __enter__(self) -> FusedModel:
        return self.apply()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.revert()

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what must be equal for a call to be one that was verified."""
    leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
    return (structure, *(_leaf(leaf) for leaf in leaves))


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.device, leaf.stride())
    # Anything but plain data (a KV cache object, say) carries state that was not verified: it never equals another.
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else object()


def _input_layouts(values: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for value in values
    )
