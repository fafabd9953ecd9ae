"""The workbench: build any subset of rewrites of a captured model, run it, and time subsets against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.codegen.common.interface import BuiltKernel, Header, Rendered
from fusion_advisor.codegen.gemm.problem import GemvConfig, GemvProblem
from fusion_advisor.fuse.cuda_graph.capturable import has_host_seeds
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.rewrite.collective_kernels import GroupCall
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite, fused_call, rewrite_region
from fusion_advisor.fuse.scans.sites import ScanSite
from fusion_advisor.records import OpClass, OpNode, RenderedKernel
from fusion_advisor.timing.host_timer import HostTimer, step_timer
from fusion_advisor.timing.interleaving import Record, recorded
from fusion_advisor.verify.subgraph_oracle import Observer, OriginalChain, original_chain


@dataclass(slots=True)
class BuiltFusion:
    """A planned fusion with its compiled kernel and the calls that go into the graph."""

    planned: PlannedFusion
    kernel: RenderedKernel
    sites: tuple[SiteRewrite, ...]
    refusals: tuple[str, ...]
    """One sentence per site that cannot be replaced."""
    built: BuiltKernel
    """Binds the kernel to other sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSource:
    """What the kernel of a linear was rendered from."""

    problem: GemvProblem
    config: GemvConfig
    header: Header


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSource:
    """What the kernel of a recurrence was rendered from, and its source; all its sites are alike."""

    site: ScanSite
    rendered: Rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltLinear:
    """Calls that compute linear layers with the ops around them, or recurrences; see the modules of ``fuse.stages``."""

    id: str
    sites: tuple[SiteRewrite, ...]
    source: LinearSource | None = None
    """Of its kernel; None where it calls an op of torch's."""
    scan: ScanSource | None = None
    """Of its kernel, where that walks a recurrence."""

    @property
    def meets_ranks(self) -> bool:
        """Whether its kernel waits for other ranks."""
        return any(isinstance(site.call, GroupCall) for site in self.sites)


def members_of(linears: Iterable[BuiltLinear]) -> set[int]:
    """Return the ops that calls have taken in.

    Args:
        linears: the calls.
    """
    return {index for linear in linears for site in linear.sites for index in site.members}


@dataclass(slots=True)
class Variant:
    """The model's regions with some rewrites in place."""

    modules: list[GraphModule]
    changed: dict[str, int] = field(default_factory=dict)
    """Sites changed per graph pass."""


_RECENT = 2
"""Steps that a bench remembers: what a rewrite is compared with, and the same with the rewrite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """What a step was built with."""

    fusions: tuple[BuiltFusion, ...]
    passes: tuple[str, ...]
    linears: tuple[BuiltLinear, ...]

    def is_as(self, other: _Stack) -> bool:
        """Whether both are the same kernels, not equal ones, with the same passes."""
        mine, theirs = (*self.fusions, None, *self.linears), (*other.fusions, None, *other.linears)
        return self.passes == other.passes and [*map(id, mine)] == [*map(id, theirs)]


class Bench:
    """Holds a live capture and what was observed of it; makes variants.

    Attributes:
        rest: idle time ahead of each timed run of a step, as a multiple of the run before it; None until a step was looked at.
        record: records a step into a CUDA graph to time it, on all ranks together; None: this process by itself.
    """

    def __init__(
        self,
        live: LiveCapture,
        *,
        on_cuda: bool,
        timer: HostTimer | None = None,
        rest: float | None = None,
        record: Record | None = None,
    ) -> None:
        self.live = live
        self.on_cuda = on_cuda
        self.timer = timer or step_timer(on_cuda=on_cuda)
        self.rest = rest
        self.record = record
        self.ops: list[OpNode] = []
        self.index_of: list[dict[Node, int]] = []
        for region in live.regions:
            described, index_of = describe(region, first_index=len(self.ops))
            self.ops += described
            self.index_of.append(index_of)
        self.values: dict[int, torch.Tensor] = {}
        self.surprises: dict[int, str] = {}
        self._with_passes: dict[tuple[str, ...], Variant] = {}
        self._steps: list[tuple[_Stack, Variant]] = []

    @property
    def device(self) -> torch.device:
        """Where the ops run: on a GPU, some inputs may be on the host all the same."""
        kind = "cuda" if self.on_cuda else "cpu"
        values = (value for region in self.live.regions for value in region.example_args)
        return next(value.device for value in values if isinstance(value, torch.Tensor) and value.device.type == kind)

    @property
    def is_alone(self) -> bool:
        """Whether no op of the step is between processes."""
        return all(op.op_class is not OpClass.COLLECTIVE for op in self.ops)

    @property
    def recorder(self) -> Record | None:
        """What records the step to time it; None where no graph can hold it.

        It meets other processes that do not record it with this one, or it is a backward pass and its forward pass was launched.
        """
        if any(has_host_seeds(self.live.regions[run.place].graph, run.args) for run in self.live.in_order()):
            return None
        return self.record or (recorded if self.is_alone else None)

    def observe(self, fusions: Sequence[PlannedFusion], also: Collection[int] = ()) -> Any:
        """Run the model once, op by op: keep the inputs of each fusion's first site and check the layouts of all sites.

        Args:
            fusions: of the captured graphs.
            also: further ops whose results are kept.

        Returns:
            What the last graph returns.
        """
        keep = {index for fusion in fusions for index in fusion.sites[0].given} | set(also)
        check = {index for fusion in fusions for site in fusion.sites for index in (*site.given, *site.outputs)}
        return self.observe_values(keep, check)

    def observe_values(self, keep: set[int], check: set[int]) -> Any:
        """Run the model once, op by op.

        Args:
            keep: ops whose results are kept.
            check: ops whose results' layouts are compared with the traced ones.

        Returns:
            What the last graph returns.
        """
        results = None
        self.live.written.rewind()
        with torch.no_grad():
            for run in self.live.in_order():
                region, index_of = self.live.regions[run.place], self.index_of[run.place]
                observer = Observer(region, index_of, self.ops, keep=keep, check=check)
                results = observer.run(*run.args)
                self.values.update(observer.values)
                self.surprises.update(observer.surprises)
        return results

    def first_site(self, fusion: PlannedFusion) -> tuple[OriginalChain, list[torch.Tensor]]:
        """Return the original ops of a fusion's first site and that site's own input tensors."""
        members = fusion.chain.sites[0].op_indices
        region = self.ops[members[0]].region
        lowered = fusion.sites[0]
        chain = original_chain(self.ops, self.index_of[region], members, lowered.given, lowered.outputs)
        return chain, [self.values[index] for index in lowered.given]

    def install(self, fusion: PlannedFusion, kernel: RenderedKernel, built: BuiltKernel) -> BuiltFusion:
        """Bind a compiled kernel to a fusion's sites."""
        launch = built.bind(fusion.program)
        sites, refusals = [], []
        for site, lowered in zip(fusion.chain.sites, fusion.sites, strict=True):
            # A result in the traced strides would not be the model's own, and an op that follows them would go another way.
            ends = (*lowered.given, *lowered.outputs)
            surprise = next((self.surprises[index] for index in ends if index in self.surprises), None)
            if surprise is not None:
                refusals.append(f"{site.module_path or 'model'}: {surprise}")
                continue
            inputs = [self.ops[index].outputs[0] for index in lowered.given]
            outputs = [self.ops[index].outputs[0] for index in lowered.outputs]
            in_place = [position for position, index in enumerate(lowered.outputs) if self.ops[index].mutates]
            call = fused_call(kernel.name, launch, inputs, outputs, in_place=in_place)
            sites.append(
                SiteRewrite(
                    fusion_id=fusion.id, members=site.op_indices, inputs=lowered.given, outputs=lowered.outputs, call=call
                )
            )
        return BuiltFusion(planned=fusion, kernel=kernel, sites=tuple(sites), refusals=tuple(refusals), built=built)

    def build(
        self,
        fusions: Sequence[BuiltFusion],
        passes: Sequence[str],
        linears: Sequence[BuiltLinear] = (),
        *,
        is_lazy: bool = False,
    ) -> Variant:
        """Return the model's regions with these rewrites; the captured graphs stay as they are.

        A linear's call takes in the chains around it: a fusion's site that shares an op with such a call is left out.

        Args:
            fusions: kernels with their sites.
            passes: ids of graph passes, in any order.
            linears: calls that compute linear layers with the ops around them.
            is_lazy: generate code when a region is first called: for a variant that is called through its modules alone.
        """
        variant = Variant(modules=[])
        taken = members_of(linears)
        sites = [site for linear in linears for site in linear.sites]
        sites += [site for fusion in fusions for site in fusion.sites if taken.isdisjoint(site.members)]
        names = [name for name in PASSES if name in passes]
        for region, index_of in zip(self.live.regions, self.index_of, strict=True):
            mine = [site for site in sites if self.ops[site.members[0]].region == region.index]
            module, changed = rewrite_region(region, index_of, mine, [PASSES[name].apply for name in names], is_lazy=is_lazy)
            variant.modules.append(module)
            for name, count in zip(names, changed, strict=True):
                variant.changed[name] = variant.changed.get(name, 0) + count
        return variant

    def with_passes(self, passes: Sequence[str]) -> Variant:
        """As :meth:`build` without kernels. A set of passes is applied once, until :meth:`forget_passes`.

        Args:
            passes: ids of graph passes, in any order. What may hold copies of weights (``--freeze``) is made anew each time.
        """
        names = tuple(name for name in PASSES if name in passes)
        if any(PASSES[name].needs_freeze for name in names):
            return self.build((), names, is_lazy=True)
        if names not in self._with_passes:
            self._with_passes[names] = self.build((), names, is_lazy=True)
        return self._with_passes[names]

    def step(self, fusions: Sequence[BuiltFusion], passes: Sequence[str], linears: Sequence[BuiltLinear] = ()) -> Variant:
        """As :meth:`build`, for a step that is timed or looked at. What was asked for last, or before that, is not built again.

        A rewrite is tried on top of a step that was timed a moment ago: that of the rewrite before it, with or without.
        """
        names = tuple(name for name in PASSES if name in passes)
        stack = _Stack(fusions=tuple(fusions), passes=names, linears=tuple(linears))
        found = next((variant for known, variant in self._steps if known.is_as(stack)), None)
        variant = found or self.build(fusions, names, linears, is_lazy=True)
        if not any(PASSES[name].needs_freeze for name in names):
            others = [one for one in self._steps if one[1] is not variant]
            self._steps = [*others, (stack, variant)][-_RECENT:]
        return variant

    def forget_passes(self) -> None:
        """Give up the variants of :meth:`with_passes` and :meth:`step`, and the constants that they hold."""
        self._with_passes.clear()
        self._steps.clear()

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def run(self, variant: Variant) -> Any:
        """Run all regions of a variant, as often as the call does and on its tensors; what that moves on is not put back."""
        result = None
        with torch.no_grad():
            for run in self.live.in_order():
                result = variant.modules[run.place](*run.args)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A variant and the bench over whose graphs it is written."""

    bench: Bench
    variant: Variant

    def run(self) -> Any:
        """Run it, launched op by op."""
        return self.bench.run(self.variant)


def step_of(bench: Bench, built: Sequence[BuiltFusion], passes: Sequence[str], linears: Sequence[BuiltLinear] = ()) -> Step:
    """Return the step with these rewrites."""
    return Step(bench=bench, variant=bench.step(built, passes, linears))


def replaced_sites(variant: Variant) -> Mapping[str, int]:
    """Return how many sites of each fusion stand in a variant's graphs, by fusion id."""
    counts: Counter[str] = Counter()
    for (fusion_id, _), number in calls_in_step(variant, [1] * len(variant.modules)).items():
        counts[fusion_id] += number
    return counts


def calls_in_step(variant: Variant, runs: Sequence[int]) -> Mapping[tuple[str, str], int]:
    """Return how often a step calls each fusion's kernels, by fusion id and a kernel's entry point.

    A fusion whose sites came to differ in layout has several kernels; fusions that differ only in sizes share one.

    Args:
        variant: with the fusions in place.
        runs: how often a step runs each region.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for module, often in zip(variant.modules, runs, strict=True):
        for node in module.graph.nodes:
            if "fusion_id" in node.meta:
                counts[node.meta["fusion_id"], node.target.__name__] += often
    return counts
