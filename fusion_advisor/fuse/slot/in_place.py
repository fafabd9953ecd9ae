"""A model whose call is replaced, until it is given back exactly: inference and training differ only in what they run instead.

Only this instance is touched: the slot that ``nn.Module.compile`` uses, and a ``__call__`` that calls as before and that traces
look at. No class, no parameter, no buffer, no state_dict key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

import torch

from fusion_advisor.errors import CannotCopy, CannotExport
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.slot.counters import Fallbacks, LaunchCounter
from fusion_advisor.records import Fusion, GraphRewrite, Report, Status
from fusion_advisor.runtime.torch_internals import dynamo, module_call

TRANSFORMED = "the call is under a transform of torch.func (vmap, grad, jvp) or under forward-mode differentiation"
"""Why such a call runs the original ops."""

_STOPPED = (
    "fusion-advisor runs its own graphs here, so the trace ends in front of the model; "
    "compile without fullgraph=True, or call revert() on what fa.apply returned"
)


class InPlace:
    """A live model with fusions in place.

    Call it like the model (or call the model itself: it is the same object). ``revert()`` puts the original call back exactly,
    and so does leaving a ``with`` block. Everything else (``generate``, ``config`` …) is the model's own.

    Attributes:
        model: the user's module.
        report: what was done; None until a run has set it.
        is_applied: whether the model's call is replaced now.
        graphs: replay CUDA graphs; None where every call is launched kernel by kernel.
        exporter: writes what was kept; None where nothing can.
    """

    def __init__(self, model: torch.nn.Module, graphs: Graphs | None = None) -> None:
        self.model = model
        self.report: Report | None = None
        self.exporter: Callable[..., tuple[str, ...]] | None = None
        self.graphs = graphs
        self.is_applied = False
        self._fallbacks = Fallbacks()
        self._launches = LaunchCounter(graphs)
        self._original = module_call.original_call(model)
        self._before: Callable[..., Any] | None = None

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Run what stands for the model's call."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what is of no use while the model runs its own ops."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    @property
    def started(self) -> str:
        """How a saved plan was put in place: without a trace, or why the model was traced; empty where none was."""
        return ""

    @property
    def fallbacks(self) -> dict[str, int]:
        """Why calls ran the original ops, and how often."""
        return self._fallbacks.counts

    @property
    def launches(self) -> int:
        """Generated kernels launched since :meth:`apply` put this model in place, those that CUDA graphs replay among them.

        Each fused call counts as one, in any backend; ATen's and cuBLAS's kernels do not count. A replay that was launched ahead
        of dynamo's guards and thrown away counts: its kernels ran.
        """
        return self._launches.count

    def __repr__(self) -> str:
        """Return the model's class, what was kept, and whether it is in place."""
        where = "in place" if self.is_applied else "not in place"
        lines = [f"<{type(self).__name__} of {type(self.model).__name__}, {where}"]
        if self.report is not None:
            tried: list[Fusion | GraphRewrite] = [*self.report.rewrites, *self.report.fusions]
            kept = [row.id for row in tried if row.status is Status.KEPT]
            lines.append(f"kept: {', '.join(kept) or 'nothing'}")
        lines += [f"{count} of its calls ran the original ops" for count in (sum(self.fallbacks.values()),) if count]
        return "; ".join(lines) + ">"

    def _repr_html_(self) -> str | None:
        """What Jupyter shows: the report's own view, and how things stand now; None leaves it to ``repr``."""
        show = getattr(self.report, "_repr_html_", None)
        if show is None:
            return None
        lines = ["What was kept is in place." if self.is_applied else "Nothing is in place: the model runs its own ops."]
        lines += [] if self.graphs is None or not self.graphs.has_news else [self.graphs.summary]
        lines += [self.started] if self.started else []
        lines += [f"{count} of its calls ran the original ops: {reason}." for reason, count in self.fallbacks.items()]
        shown: str = show(*lines)
        return shown

    # ------------------------------------------------------------------ applying and reverting

    def apply(self) -> Self:
        """Put the fusions in place and revert those of another fused model of the module; does nothing the second time."""
        if not self.is_applied:
            take_out(self.model)
            # Under somebody else's torch.compile (transformers compiles decode steps by itself, people their training step)
            # dynamo would look through this call and run the model's own ops: it must stop here instead.
            stop = dynamo.stopping_traces(self.dispatch, _STOPPED)
            self._before = module_call.set_compiled_call(self.model, stop)
            module_call.show_compiled_call(self.model)
            self.is_applied = True
            self._launches.restart()
        return self

    def revert(self) -> torch.nn.Module:
        """Take the fusions out again and return the model, which then is as it was before."""
        if self.is_applied:
            module_call.set_compiled_call(self.model, self._before)
            module_call.hide_compiled_call(self.model)
            self.is_applied = False
            self.forget()
            if self.graphs is not None:
                self.graphs.forget()
        return self.model

    def __enter__(self) -> Self:
        return self.apply()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.revert()

    def export(
        self,
        path: str | Path,
        *,
        format: str = "package",
        force: bool = False,
        with_cache: bool = False,
        within_s: float | None = None,
        progress: Progress | None = None,
    ) -> tuple[str, ...]:
        """Write what was kept for a program that has torch and not fusion_advisor.

        The model is captured once more for it, so it takes as long as putting in a saved plan; afterwards all is as before.

        Args:
            path: folder of the export; a package is named after it.
            format: ``package``, ``kernels`` (for Hugging Face's library), ``pt2`` (AOTInductor) or ``patch`` (of the model's
                own source).
            force: replace a folder that is there.
            with_cache: ship a package's compiled kernels too: a machine like this one compiles nothing.
            within_s: seconds that it may take; none: as long as it takes.
            progress: is told the stages.

        Returns:
            Sentences about kept rewrites that the export does not have.

        Raises:
            UsageError: the format is not known, or has no place for compiled kernels.
            CannotExport: the format cannot hold the model or what was kept, or the time was up.
            NothingToExport: no kernel was kept.
            ExportExists: the folder is there, and ``force`` was not given.
        """
        if self.exporter is None:
            raise CannotExport(detail="it is a training step, or was not made by fa.apply")
        was_applied = self.is_applied
        self.revert()
        try:
            options = {"force": force, "with_cache": with_cache, "within_s": within_s, "progress": progress}
            return self.exporter(Path(path), form=format, **options)
        finally:
            if was_applied:
                self.apply()

    # ------------------------------------------------------------------ copies

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse what ``copy`` and ``pickle`` ask for. The model itself can be copied and pickled: torch leaves the call out.

        Raises:
            CannotCopy: always.
        """
        raise CannotCopy

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse, lest a ``__deepcopy__`` of the model's own answers.

        Raises:
            CannotCopy: always.
        """
        raise CannotCopy

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)


def take_out(model: torch.nn.Module) -> None:
    """Revert what an earlier ``apply`` put into a model: two of them, reverted in the wrong order, would leave one in it."""
    call = module_call.compiled_call_of(model)
    earlier = None if call is None else getattr(inspect.unwrap(call), "__self__", None)
    if isinstance(earlier, InPlace):
        earlier.revert()
