"""The fused model: the user's own module, with rewritten graphs for the calls that were verified and its own ops for all others.

Only this instance is touched, and only the slot that ``nn.Module.compile`` uses: no class, no parameter, no buffer, no state_dict
key. Dynamo guards every assumption that the captured graph makes about the module; what it cannot know (shapes and strides of the
inputs, gradients, train mode, autocast) is compared with what was verified before each call, and a call that differs runs the
original ops and says so once.

Several calls may be verified: one plan per signature, each added by :meth:`FusedModel.specialize` or :meth:`FusedModel.include`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.capture.graph.tracer import LiveCapture, Region, writes_to_inputs
from fusion_advisor.errors import AdvisorError, HalfWritten
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.direct.direct_call import ChangesAlways, Shortcut
from fusion_advisor.fuse.live.call_difference import CONTINUOUS_BATCHING, describe_difference, is_continuous_batching, why_never
from fusion_advisor.fuse.live.call_signature import Seen, device_of, holds_object, parts_of, sharing, signature
from fusion_advisor.fuse.live.graph_table import GraphTable
from fusion_advisor.fuse.live.module_guard import TRAINING, ModuleGuard
from fusion_advisor.fuse.live.saved_plan import ReusablePlan, Specialised
from fusion_advisor.fuse.rewrite.collective_kernels import group_kernels_in
from fusion_advisor.fuse.rewrite.frozen_values import held_calls
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.fuse.shapes.call_form import laid_out
from fusion_advisor.fuse.shapes.serve import MOST_CALLS, ShapeTable, VerifiedCall
from fusion_advisor.fuse.slot.in_place import TRANSFORMED, InPlace
from fusion_advisor.fuse.start.untraced_call import UntracedCall
from fusion_advisor.report.escape import visible
from fusion_advisor.runtime.torch_internals import cuda_state, dispatcher, dynamo


class FusedModel(InPlace):
    """A live model with fusions in place.

    Call it like the model (or call the model itself: it is the same object). ``revert()`` puts the original call back exactly,
    and so does leaving a ``with`` block. Everything else (``generate``, ``config`` …) is the model's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        regions: Sequence[Region],
        modules: Sequence[GraphModule],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        graphs: Graphs | None = None,
        plan: ReusablePlan | None = None,
        on_first_use: int = 0,
        live: LiveCapture | None = None,
    ) -> None:
        """Prepare the model; :meth:`apply` puts it in place.

        Args:
            model: the live model.
            regions: as captured for the call below.
            modules: what runs in their place.
            args: of the call that was verified.
            kwargs: of the same call.
            graphs: replay CUDA graphs; None runs every call launch by launch.
            plan: what :meth:`specialize` builds other shapes from.
            on_first_use: specialize up to so many unseen signatures by itself, each when it is first called.
            live: the capture that the regions are of: what dynamo compiled for it is used again, in place of a second trace.
        """
        super().__init__(model, graphs)
        self.specialised: list[Specialised] = []
        """What :meth:`specialize` built, with the seconds it took."""
        self._plan = plan
        self._on_first_use = on_first_use
        self._rewritten = GraphTable(graphs, self._fallbacks)
        self._verified: dict[Any, VerifiedCall] = {}  # by signature
        self._known: dict[Any, VerifiedCall] = {}
        """Calls that were looked up, those that ranges serve among them: one lookup finds a call again."""
        self._unlearnable: set[Any] = set()
        self._generate: Callable[..., Any] | None = None
        self.shapes: tuple[ShapeTable, ...] = ()
        """Ranges of sizes that are served: one table for each way to call the model."""
        self._objects: dict[int, Seen] = {}
        self._default_dtype = torch.get_default_dtype()
        self._guard = ModuleGuard(model)
        self.traced_because = ""
        """Why a saved plan's model was traced again; empty where it was not."""
        self._captured = None if live is None else live.compiled
        self._untraced: UntracedCall | None = None if live is None else live.untraced
        self._compiled = self._call_to_graphs(model, regions, modules)
        self._is_broken = False
        self._add(regions, modules, args, kwargs)
        if self._untraced is not None:
            (call,) = self._verified.values()
            self._untraced.otherwise, self._traced_call = self._trace_again, replace(call)
            call.shortcut, call.is_in_place = self._untraced, True

    def _call_to_graphs(
        self, model: torch.nn.Module, regions: Sequence[Region], modules: Sequence[GraphModule]
    ) -> Callable[..., Any]:  # fmt: skip
        """Return the call through dynamo: the one that the capture has, or a new one that traces the model when it is called."""
        captured = self._captured
        if self._untraced is None and (captured is None or captured.later is not None):
            return dynamo.compiled_call(model, self._rewritten.backend)
        self._rewritten.redirect(regions, modules)
        if self._untraced is not None or captured is None:
            return self._compiled_when_called
        captured.later = self._rewritten.backend
        return captured.call

    def _add(
        self, regions: Sequence[Region], modules: Sequence[GraphModule], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._rewritten.add(regions, modules)
        self._launches.include(modules)
        leaves: list[torch.Tensor] = []
        key = signature(args, kwargs, leaves)
        self._verified[key] = VerifiedCall(sharing(leaves) if any(map(writes_to_inputs, regions)) else None)
        self._known.clear()
        self._guard.watch(code for region in regions for code in region.code)

    def give_back(self) -> None:
        """Leave what dynamo compiled for the capture to another fused model: this one is called no more."""
        if self._captured is not None:
            self._captured.later = None

    # ------------------------------------------------------------------ the call

    def _compiled_when_called(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call through dynamo, which a model that started without a trace has not needed yet."""
        self._compiled = dynamo.compiled_call(self.model, self._rewritten.backend)
        return self._compiled(*args, **kwargs)

    @property
    def started(self) -> str:
        """How a saved plan was put in place: without a trace, or why the model was traced; empty where none was."""
        if self.traced_because:
            return f"The model was traced again: {visible(self.traced_because)}."
        return "" if self._untraced is None else "The plan started without a trace."

    @property
    def exact_call(self) -> Callable[..., Any]:
        """The call through dynamo's guards to the graphs of exactly the verified sizes; nothing else is compared."""
        return self._compiled

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten graphs if this call was verified, the original ops if not.

        Raises:
            HalfWritten: a value inside a model that writes to its cache was laid out differently than when it was verified (later
                calls run the original ops), or the original ops ran after a CUDA graph had been launched ahead of them.
        """
        unread = _why_unread(kwargs)
        if unread:
            self._fallbacks.add(unread)
            return self._original(*args, **kwargs)
        leaves: list[torch.Tensor] = []
        objects: list[Seen] = []
        key = signature(args, kwargs, leaves, self._objects, objects)
        verified, why_not = self._known.get(key), ""
        if verified is None:
            verified, why_not = self._look_up(key, args, kwargs, leaves, objects)
        device = -1 if verified is None else device_of(leaves)
        if device >= 0 and cuda_state.current_device_number() != device:
            with torch.cuda.device(device):  # as every op of torch does: streams and CUDA graphs belong to it
                return self.dispatch(*args, **kwargs)
        refusal = self._refusal_at_once(verified, leaves, why_not)
        if refusal is None:
            assert verified is not None  # any other is refused
            call = verified
            if call.lays_out:
                return self.dispatch(*laid_out(args), **laid_out(kwargs))

            def run() -> Any:
                later = self._guard.change()
                if later is not None:
                    raise _Refused(later)
                return self._run_compiled(call, args, kwargs, leaves, objects)

            try:
                is_cut = call.piece is not None and call.piece.cutter is not None
                graphs = self.graphs if call.may_record or is_cut else None
                return run() if graphs is None else graphs.run(call, leaves, run, objects)
            except (_Refused, ChangesAlways, dynamo.OpRaised) as refused:
                refusal = str(refused).splitlines()[0]
            except LayoutChanged as change:
                self._is_broken = True
                refusal = f"a value inside the model was laid out differently than when it was verified ({change})"
                if call.sharing is not None:
                    raise HalfWritten(detail=refusal) from change
        if refusal is _UNSEEN and self._may_learn(key):
            result = self._original(*args, **kwargs)
            try:
                self.specialize(*args, **kwargs)
            except AdvisorError as error:
                self._unlearnable.add(key)
                self._fallbacks.add(str(error))
            return result
        refusal = (refusal is _UNSEEN and why_never(key)) or refusal
        is_new = refusal is _UNSEEN and _UNSEEN not in self.fallbacks
        self._fallbacks.add(refusal, describe_difference(key, self._verified) if is_new else "")
        return self._original(*args, **kwargs)

    def _look_up(
        self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: list[torch.Tensor], objects: Sequence[Seen]
    ) -> tuple[VerifiedCall | None, str]:
        """Return what serves a call; None with a reason, or without one where no range is of calls like it."""
        found, why_not = self._verified.get(key), ""
        parts = functools.cache(functools.partial(parts_of, key, leaves, objects))
        for table in self.shapes if found is None else ():
            ranged = table.look_up(key, args, kwargs, parts)
            if not isinstance(ranged, str):
                found = ranged
                break
            why_not = why_not or ranged
        if found is not None and found.may_record:  # a cache that grows has another signature at each step
            if len(self._known) >= MOST_CALLS:
                self._known.clear()
            self._known[key] = found
        return found, why_not

    def _run_compiled(
        self,
        verified: VerifiedCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Sequence[torch.Tensor],
        objects: Sequence[Seen],
    ) -> Any:
        if verified.piece is not None:
            return verified.piece.call_with(args, kwargs, leaves, objects)
        if verified.is_in_place:
            if verified.shortcut is None:
                table = self._rewritten
                verified.shortcut = Shortcut(self.model, self._compiled, table.runners, table.compiled)
            return verified.shortcut(args, kwargs, leaves, objects)
        # Every fused model adds graphs to the class's code object; at dynamo's default limit it would silently run eager.
        before = self._rewritten.handed_over
        takes_recurrent = self._captured is None or self._captured.takes_recurrent
        with dynamo.raise_recompile_limit(1024), dynamo.recurrent_layers_in_graphs(is_on=takes_recurrent):
            result = self._compiled(*args, **kwargs)
        verified.is_in_place = self._rewritten.handed_over > before
        if not verified.is_in_place:
            self._fallbacks.add("dynamo did not hand over the graphs that were verified")
        return result

    def _trace_again(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[torch.Tensor], objects: Sequence[Seen]
    ) -> Any:
        """Make a call that is no longer as the one that was traced: dynamo traces the model as it is now."""
        assert self._untraced is not None
        self.traced_because = self._untraced.why
        return self._run_compiled(self._traced_call, args, kwargs, leaves, objects)

    def _refusal_at_once(self, verified: VerifiedCall | None, leaves: Sequence[torch.Tensor], why_not: str) -> str | None:
        """Say why nothing may be launched for a call, or None; what a launch in vain would not hurt is asked after it."""
        if self._is_broken:
            return "a value inside the model was laid out differently than when it was verified"
        if torch.is_grad_enabled():
            return "gradients are enabled; wrap the call in torch.no_grad()"
        if self.model.training:
            return TRAINING
        if dispatcher.is_autocast_on():
            return "autocast is on"
        if torch.get_default_dtype() is not self._default_dtype:  # dynamo's graph is the same text, and its ops make others
            return "torch's default dtype is another one than when the model was verified"
        for leaf in leaves:
            if type(leaf) is not torch.Tensor and dispatcher.sees_its_ops(type(leaf)):
                return _OWN_OPS
        if verified is None:
            return self._guard.change() or why_not or _UNSEEN
        if verified.sharing is not None and sharing(leaves) != verified.sharing:
            return "its inputs share memory in another way than those that were verified, and the model writes to them"
        return None

    # ------------------------------------------------------------------ other shapes

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens as the model does; where ranges of its steps are served, on static caches that are used again."""
        model: Any = self.model
        return (model.generate if self._generate is None or not self.is_applied else self._generate)(*args, **kwargs)

    def serve(self, tables: Sequence[ShapeTable], generate: Callable[..., Any] | None = None) -> None:
        """Serve ranges of sizes from now on, one table for each way to call the model; ``generate`` stands for its own."""
        self.shapes, self._generate = tuple(tables), generate
        self._known.clear()
        on_trace = functools.partial(setattr, self, "traced_because")
        for table in tables:
            if table.writes:
                leaves: list[torch.Tensor] = []
                args, kwargs = table.example
                signature(args, kwargs, leaves)
                table.sharing = sharing(leaves)
            self._launches.include(table.modules)
            wrap = table.regions_in(self.graphs)
            for piece in table.pieces:
                piece.start(self.model, wrap, self._rewritten.other, on_trace, self.graphs)
                self._guard.watch(piece.code)

    def specialize(self, *args: Any, **kwargs: Any) -> Specialised | None:
        """Make the kept kernels serve another call too: captured, bound to its sizes and checked, not tuned or timed again.

        Args:
            *args: of an example call, as the model takes them.
            **kwargs: likewise.

        Returns:
            What was built and the seconds it took; None when this call was verified before.

        Raises:
            CannotSpecialize: there are no kernels to bind, the call is of another regime (one row instead of many, where other
                things pay: that takes a plan of its own), or a kernel's numbers do not pass.
            CannotCapture: dynamo captured nothing.
        """
        if signature(args, kwargs) in self._verified:
            return None
        from fusion_advisor.fuse.live.specialize import specialise  # 0.1 s: few models are asked

        with kept_as_it_is(self.model, args, kwargs):
            regions, modules, made = specialise(self.model, args, kwargs, self._plan)
        self._add(regions, modules, args, kwargs)
        self.specialised.append(made)
        return made

    def include(self, other: FusedModel) -> FusedModel:
        """Take over the calls that another ``apply`` on this model verified (decode after prefill, say); returns this model.

        Making the other model reverted this one: apply this one again afterwards.

        Raises:
            ValueError: the other model was made from another module.
        """
        if other.model is not self.model:
            raise ValueError("both must have been made from one model")
        other.revert()
        self._rewritten.include(other._rewritten)
        self._launches.include(other._rewritten.modules)
        self._guard.include(other._guard)
        self._verified = {**{key: VerifiedCall(call.sharing) for key, call in other._verified.items()}, **self._verified}
        self._known.clear()
        return self

    def refresh(self) -> None:
        """Compute again what was made of weights and buffers under ``--freeze``: folded values and merged copies of weights.

        Call it after a write that torch does not count (through ``.data``, numpy, dlpack or the storage). Recorded CUDA graphs
        stay: the values are written into the memory that they read. Without ``--freeze`` there is nothing to do.
        """
        for module in self._rewritten.modules:
            for call in held_calls(module):
                call.refresh()

    def _may_learn(self, key: Any) -> bool:
        if self._plan is None or key in self._unlearnable or holds_object(key):
            return False  # a cache that grows is another call at every step
        return len(self.specialised) < self._on_first_use

    def apply(self) -> Self:
        """Put the fusions in place; with kernels in which ranks meet, all ranks come here, and make their buffers first."""
        if not self.is_applied:
            for kernels in group_kernels_in(self._rewritten.modules):
                kernels.acquire()
        return super().apply()

    def forget(self) -> None:
        """Drop what dynamo's traces keep of the tensors that were traced, and free buffers between ranks."""
        for kernels in group_kernels_in(self._rewritten.modules):
            kernels.release()
        self._rewritten.forget_real_tensors()
        for seen in self._objects.values():
            seen.followed.clear()
            seen.kept.clear()
        for call in self._verified.values():
            if call.shortcut is not None:
                call.shortcut.forget()
        for piece in (piece for table in self.shapes for piece in table.pieces):
            piece.forget()


def _why_unread(kwargs: Mapping[str, Any]) -> str:
    """Say why a call runs the original ops without a look at what it passes; empty for any other call."""
    if dispatcher.is_mode_active():  # it would see what is read of the tensors
        return _MODE
    if dispatcher.is_transformed():
        return TRANSFORMED
    return CONTINUOUS_BATCHING if is_continuous_batching(kwargs) else ""


class _Refused(Exception):
    """A call that must run the original ops, found out after its graph was launched; the text says why."""


_MODE = "a TorchFunctionMode or TorchDispatchMode is active, and it is to see the model's own ops"
_OWN_OPS = "an input is of a tensor class that handles its ops by itself (__torch_function__ or __torch_dispatch__)"
_UNSEEN = "these inputs (names, shapes, dtypes or strides) were not verified"
