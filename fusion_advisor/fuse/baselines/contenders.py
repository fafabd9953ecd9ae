"""What else the step could be run with: eager in a CUDA graph, torch.compile's modes, Liger."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.fuse.baselines.attempt import Attempt
from fusion_advisor.fuse.baselines.inductor_hybrid import Compiler, compile_rest
from fusion_advisor.fuse.baselines.liger import NotAvailable, with_liger
from fusion_advisor.fuse.decide.session import Bench, Variant
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.records import COMPILED, OURS_COMPILED, StepProfile
from fusion_advisor.runtime.torch_internals import aten_ops, cuda_state, dynamo, inductor
from fusion_advisor.timing import interleaving
from fusion_advisor.workload.load import LoadedWorkload

_IN_GRAPH = "inputs are copied in, results stay in the graph's memory"

AUTOTUNED_TRAINING = "max-autotune-no-cudagraphs"
LIMITS_S = {"default": 300.0, "reduce-overhead": 300.0, "max-autotune": 900.0, AUTOTUNED_TRAINING: 900.0}
"""By torch.compile's mode, where the run names no limit. Of 34 models on H100s reduce-overhead took 42 s at most. A loop of
Python over 1,024 steps took the default mode 297 s on an H200; another had not ended after 180 (``docs/measurements/zoo.md``)."""

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the step.

    Attributes:
        name: as in the table.
        make: makes the call ready; with the call's first run it is what is timed as the first call.
        make_on_ranks: the same where several ranks run the step together; None: as for one.
        step: its kernels, where they are known; traced otherwise.
        held_bytes: what it holds between calls beyond what making it ready here takes.
        is_compiled: whether compilers' caches are emptied for it.
        is_required: whether the run ends if it cannot be run.
        limit_s: seconds after which it is given up; 0: some times what the slowest compiler took so far. None: it is waited for.
        note: what its figures hold for.
    """

    name: str
    make: Callable[[], Call]
    make_on_ranks: Callable[[Attempt], Call] | None = None
    step: StepProfile | None = None
    held_bytes: int = 0
    is_compiled: bool = False
    is_required: bool = False
    limit_s: float | None = None
    note: str = ""


def peers(
    loaded: LoadedWorkload,
    eager: Call,
    *,
    on_cuda: bool,
    max_autotune: bool,
    rewind: Callable[[], object],
    limit_s: float | None = None,
) -> list[Contender]:
    """Return the other ways to run the step, eager left out.

    Args:
        loaded: the model and its inputs.
        eager: the original call.
        on_cuda: whether there are CUDA graphs, and Liger's kernels.
        max_autotune: torch.compile's slowest mode too.
        rewind: puts back what a step moves on.
        limit_s: for each mode of torch.compile; None: those of :data:`LIMITS_S`.
    """

    def compiled(mode: str, attempt: Attempt | None = None) -> Call:
        if mode == "reduce-overhead" and not on_cuda:
            raise NotAvailable("it is the default mode in CUDA graphs, and a CPU has none")
        if attempt is None:
            call = dynamo.compiled_call(loaded.model, "inductor", mode=mode)
        else:
            call = dynamo.compiled_call(loaded.model, attempt.compiling(inductor.compiler_of(mode)))
        return lambda: call(*loaded.args, **loaded.kwargs)

    def graphed() -> Call:
        if not on_cuda:
            raise NotAvailable("a CPU has no CUDA graphs")
        return in_graph(eager, loaded, rewind)

    def liger() -> Call:
        if not on_cuda:
            raise NotAvailable("Liger's kernels run on CUDA only")
        return with_liger(loaded)

    modes = ["default", "reduce-overhead", *(["max-autotune"] if max_autotune else [])]
    return [
        Contender(name="eager + CUDA graph", make=graphed, note=_IN_GRAPH),
        *(
            Contender(
                name=f"{COMPILED}{mode}",
                make=functools.partial(compiled, mode),
                make_on_ranks=functools.partial(compiled, mode),
                is_compiled=on_cuda or mode != "reduce-overhead",
                limit_s=LIMITS_S[mode] if limit_s is None else limit_s,
                note="first call with empty caches",
            )
            for mode in modes
        ),
        Contender(
            name="Liger",
            make=liger,
            note="its rotary embedding left out: kernels bench saw it end in an illegal memory access",
        ),
    ]


def ours_compiled(
    loaded: LoadedWorkload, bench: Bench, variant: Variant, *, is_graphed: bool, compiler: Compiler = inductor.compile_graph
) -> Contender:
    """Return ours with torch.compile for the rest.

    Args:
        loaded: the model and its inputs.
        bench: over the graphs that ``variant`` was built of.
        variant: what is kept.
        is_graphed: run it in a CUDA graph, as ours is.
        compiler: of the rest.
    """

    def make() -> Call:
        modules = compile_rest(bench.live.regions, variant.modules, compiler)
        model = FusedModel(loaded.model, bench.live.regions, modules, loaded.args, loaded.kwargs)

        def call() -> Any:
            result = model.dispatch(*loaded.args, **loaded.kwargs)
            if model.fallbacks:
                raise NotAvailable(f"it ran the original ops: {next(iter(model.fallbacks))}")
            return result

        if not is_graphed:
            return call
        call()
        return in_graph(call, loaded, bench.live.written.rewind)

    return Contender(name=OURS_COMPILED, make=make, is_compiled=True, limit_s=0.0, note=_IN_GRAPH if is_graphed else "")


def in_graph(call: Call, loaded: LoadedWorkload, rewind: Callable[[], object]) -> Call:
    """Record a call as ``torch.cuda.graph`` does it; the tensors that it passes are copied in before each replay.

    Raises:
        CannotRecord: with the driver's sentence.
    """
    static = [value for value in (*loaded.args, *loaded.kwargs.values()) if isinstance(value, torch.Tensor) and value.is_cuda]
    fresh = [value.clone() for value in static]
    replay = interleaving.recorded(call, before=rewind, around=cuda_state.own_gemm_workspace)
    return _InGraph(call, static, fresh, replay)


@dataclass(frozen=True, slots=True)
class _InGraph:
    """A recorded call; the call itself holds what the graph reads (constants of a compiled model, say)."""

    call: Call
    static: list[torch.Tensor]
    fresh: list[torch.Tensor]
    replay: Call

    def __call__(self) -> None:
        if self.static:
            aten_ops.copy_all(self.static, self.fresh)
        self.replay()
