"""``torch.compile(model, backend="fusion_advisor")``: the same loop, one dynamo graph at a time, at the graph's first call.

Dynamo keeps what it is good at (guards, graph breaks, recompiles); each graph that it hands over is retraced, its chains are
found, checked and timed on the tensors of its first call, and what pays stays, if the graph's results as a whole keep to the
limit of a model's. Graphs that do not, or that write to their inputs (timing would repeat the write), run as dynamo captured
them, and the reason is said once per reason. Of a graph that asks for gradients both passes are rewritten (``fuse.train``).

Inside torch.compile the guards are dynamo's alone: a method that is replaced in a class later is not seen, as with every backend.
``fa.apply`` sees it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import NotTraced, retrace
from fusion_advisor.capture.graph.side_effects import Numbers
from fusion_advisor.capture.graph.tracer import OWN_GRADIENTS, LiveCapture, Region
from fusion_advisor.capture.layout_trial import drop_layouts
from fusion_advisor.capture.profile import profile_as_it_is
from fusion_advisor.capture.sizes.open_capture import OneSizeOnly, opened_by_dynamo
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.decide.choose import choose
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.try_fusions import try_all
from fusion_advisor.fuse.dynamo_dynamic import NothingServes, optimise_open
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.loss.record import LEAST_BYTES, LINEAR_CROSS_ENTROPY, LossPlan, plan_losses
from fusion_advisor.fuse.loss.unrolled import unroll_losses
from fusion_advisor.fuse.padding.pad_trial import PadTrial, try_padded_products
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.fuse.train.flag_trial import try_flags
from fusion_advisor.fuse.train.journal import Journal
from fusion_advisor.fuse.train.passes.columns_last import sink_column_sums
from fusion_advisor.fuse.train.passes.freed_arguments import FreeingCall
from fusion_advisor.fuse.train.passes.gradient_parts import lay_gradients_as_in_eager, split_norm_gradients
from fusion_advisor.fuse.train.passes.row_losses import split_losses
from fusion_advisor.fuse.train.passes.weights_last import sink_weight_gradients
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from fusion_advisor.library.patterns import library_on_demand
from fusion_advisor.records import ModelCheck, OpNode
from fusion_advisor.runtime.environment import measure_bandwidth
from fusion_advisor.runtime.external_profiler import attached_profiler
from fusion_advisor.runtime.fallback_warning import warn_caller
from fusion_advisor.runtime.torch_internals import autograd_graphs, dynamo, fx_trace
from fusion_advisor.runtime.torch_internals.autocast import NotFollowed

_BUDGET_S = 3.0
_PARAMETER = re.compile(r"_(parameters|buffers)_(\w+?)_?$")

Call = Callable[..., Any]


def _unfused(graph_module: torch.fx.GraphModule, reason: str) -> Call:
    warn_caller(f"fusion-advisor runs the original ops: {reason}")
    return autograd_graphs.own_call(graph_module)


def optimise(
    region: Region,
    options: ApplyOptions,
    *,
    check: Callable[[Region, Call], ModelCheck] | None = check_region,
    instruments: Instruments = MEASURED,
    progress: Progress | None = None,
    journal: Journal | None = None,
    ahead: BuildAhead | None = None,
    pad: Callable[..., PadTrial] = try_padded_products,
) -> Call:
    """Find, check, time and install what pays in one graph.

    Args:
        region: named, with the tensors of a call.
        options: the keep rule's thresholds, whether weights and buffers are frozen, and whether kernels round as eager does.
        check: compares the graph's results with a more precise run; None where whoever calls does so.
        instruments: measure, and decide what stays.
        progress: is given each result.
        journal: gets what was found, tried and kept.
        ahead: compiles all kernels of the graph from the start.
        pad: pads the products of a pass that trains, where that pays.

    Returns:
        The rewritten graph, or the original one when nothing pays, its inputs are written to, nsys or ncu watches, or the results
        as a whole are further from the truth than a model's may be.
    """
    instruments = instruments.with_effort(options.effort)
    device = next(value.device for value in region.example_args if isinstance(value, torch.Tensor))
    live = LiveCapture(regions=[region])
    drop_layouts(live)  # nobody times what they change
    bench = Bench(live, on_cuda=device.type == "cuda", timer=instruments.timer)
    written = _written_input(bench.ops)
    if written is not None:
        return _unfused(region.original, f"the graph writes to its input `{written}`")
    tool = attached_profiler(os.environ)
    if tool and bench.on_cuda:
        return _unfused(region.original, f"{tool} is attached, and torch.profiler, which tells what pays, would get no kernel")
    padded = pad(region, options, on_cuda=bench.on_cuda)
    if padded.is_kept:
        bench = Bench(LiveCapture(regions=[padded.region]), on_cuda=bench.on_cuda, timer=instruments.timer)
    progress, journal = progress or Progress(), journal or Journal()
    capture = profile_as_it_is(bench.live, options.bandwidth or measure_bandwidth(device), device)
    patterns, sources = library_on_demand(options.kernel_dirs)
    plan = make_plan(
        capture, patterns, min_share=options.min_share, top=options.top, only=options.only_kernels, skip=options.skipped_kernels,
        sources=sources, is_exact=options.exact, is_timed=options.is_timed,
    )  # fmt: skip
    entry = journal.begin(region.original, region.training_pass, capture, plan)
    tried, built = try_all(bench, entry.plan, options, progress, lambda _: None, instruments, ahead)
    entry.fusions = tuple(tried)
    if options.dry_run:
        return region.original.forward
    _, rewrites, chosen, kept = choose(bench, tried, built, options, progress, budget_s=_BUDGET_S, instruments=instruments)
    entry.rewrites = rewrites if padded.row is None else (padded.row, *rewrites)
    entry.fusions, passes = tuple(chosen), kept_passes(rewrites)
    if not kept and not passes and not padded.is_kept:
        return region.original.forward
    entry.variant = bench.build(kept, passes)
    return _checked(region, entry.variant.modules[0].forward, check)


def _checked(region: Region, forward: Call, check: Callable[[Region, Call], ModelCheck] | None) -> Call:
    """Return the rewritten graph's call, or the original one's where the results as a whole are too far from the truth."""
    found = None if check is None else check(region, forward)
    if found is None or found.is_passed:
        return forward
    return _unfused(
        region.original,
        f"the graph's results as a whole are too far from {found.oracle}: relative error {found.fused_rel_l2:.2e}, "
        f"eager's own {found.eager_rel_l2:.2e}; the limit is: {found.limit}",
    )


def optimise_for_any_size(region: Region, options: ApplyOptions) -> Call:
    """Find, check, time and install what pays in one graph whose sizes are open; the original one where nothing serves them.

    Args:
        region: named, with the tensors of a call.
        options: of the run.
    """
    try:
        opened = opened_by_dynamo(region)
        written = _written_input(describe(region, symbols=opened.symbols_now())[0])
        if written is not None:
            return _unfused(region.original, f"the graph writes to its input `{written}`")
        return optimise_open(opened, options)
    except (NothingServes, OneSizeOnly) as error:
        return _unfused(region.original, str(error))


def _written_input(ops: list[OpNode]) -> str | None:
    inputs = {op.index: op.target for op in ops if op.role != "op"}
    return next((inputs[index] for op in ops for index in op.mutates if index in inputs), None)


def _names(graph_module: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names, roles = [], []
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, args, strict=True):
        found = _PARAMETER.search(str(node.target))
        names.append(found.group(2) if found else str(node.target))
        is_buffer = found is not None and found.group(1) == "buffers"
        roles.append("parameter" if isinstance(value, torch.nn.Parameter) else "buffer" if is_buffer else "input")
    return tuple(names), tuple(roles)


def _input_names(graph_module: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[str, ...]:
    return _names(graph_module, args)[0]


def _given_names(graph_module: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the inputs of a pass; weights are inputs like others, for every step of an optimizer changes them."""
    names = tuple(str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder")
    return names, ("input",) * len(args)


def _pass_copy(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a pass that may be changed, in ops of which each sums along one side, weights' gradients last; losses row by row.

    A loss in chunks is its chunks' ops.
    """
    copied = unroll_losses(lay_gradients_as_in_eager(fx_trace.copied_graph(graph_module)))
    return sink_weight_gradients(sink_column_sums(split_norm_gradients(split_losses(copied))))


def _differentiable(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """Return the graph in ATen ops as the model calls them; None where it holds an op of graphs (a checkpoint)."""
    return None if _holds_graphs(graph_module) else retrace(graph_module)


def _holds_graphs(graph_module: torch.fx.GraphModule) -> bool:
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph_module.graph.nodes)


def _loss_plan(graph_module: torch.fx.GraphModule, options: ApplyOptions) -> LossPlan | None:
    """Find the losses that can be computed in chunks; with ``keep="verified"``, which tests numbers, however small they are."""
    if not options.wants(LINEAR_CROSS_ENTROPY.id) or options.dry_run:
        return None
    least_bytes = LEAST_BYTES if options.is_timed else 0
    return plan_losses(graph_module, drops_logits=options.drop_logits, least_bytes=least_bytes)


class _FirstCall:
    """Optimises a graph with the tensors of its first call, then stands for the result.

    Attributes:
        instead: where it is set, what runs in its place: the ops as they were traced, say.
        around: where it is set, what AOTAutograd calls with the list of arguments: replays of a CUDA graph, say.
    """

    instead: Call | None = None
    around: Callable[[list[Any]], Any] | None = None

    def __init__(
        self, graph_module: torch.fx.GraphModule, options: ApplyOptions, optimiser: Callable[[Region, ApplyOptions], Call],
        trace: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = retrace,
        names: Callable[[torch.fx.GraphModule, tuple[Any, ...]], tuple[tuple[str, ...], tuple[str, ...]]] | None = None,
        training_pass: str = "",
    ) -> None:  # fmt: skip
        self._original = graph_module
        self._optimiser = optimiser
        self._options = options
        self._region = Region(index=0, graph=trace(graph_module), original=graph_module, training_pass=training_pass)
        self._names = names or _names
        self._call: Call | None = None
        self._freeing: FreeingCall | None = None

    def optimise(self, args: tuple[Any, ...]) -> Call:
        """Return what runs from now on, by the tensors of a call."""
        self._region.example_args = args
        self._region.names, self._region.roles = self._names(self._original, args)
        numbers = Numbers.now()  # the step itself draws what it would have drawn without the runs that are timed
        try:
            has_tensors = any(isinstance(arg, torch.Tensor) for arg in args)
            self._call = self._optimiser(self._region, self._options) if has_tensors else self._original.forward
        finally:
            numbers.restore()
        self._region.example_args = ()  # nothing of the call is kept alive
        if self._region.training_pass == "backward":
            self._freeing = FreeingCall.of(self._call, args)
        return self._call

    @property
    def graph(self) -> torch.fx.GraphModule:
        """As it was traced."""
        return self._original

    @property
    def is_changed(self) -> bool:
        """Whether something was rewritten at the first call."""
        return self._call is not None and self._call != self._original.forward

    def __call__(self, *args: Any) -> Any:
        if self.instead is not None:
            return self.instead(*args)
        if self._call is None:
            self._call = self.optimise(args)
        try:
            return self._call(*args)
        except LayoutChanged as change:
            self._freeing = None
            self._call = _unfused(
                self._original, f"a value inside the model was laid out differently than when it was verified ({change})"
            )
            return self._call(*args)

    @property
    def module(self) -> torch.fx.GraphModule:
        """As it runs."""
        module = getattr(self._call, "__self__", None)
        return module if isinstance(module, torch.fx.GraphModule) else self._original

    def take(self, args: list[Any]) -> Any:
        """Run it on arguments that nobody else needs, by its CUDA graph where it has one."""
        return self.run(args) if self.instead is not None or self.around is None else self.around(args)

    def run(self, args: list[Any]) -> Any:
        """Run it launch by launch: a backward pass frees each of the arguments after its last use."""
        if self.instead is None and self._freeing is not None and self._freeing.serves(args):
            return self._freeing(args)
        return self(*args)


def fusion_advisor(
    graph_module: torch.fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None
) -> Call:
    """Dynamo's entry: return what runs in place of ``graph_module``.

    Args:
        graph_module: dynamo's graph.
        example_inputs: its inputs; only whether they ask for gradients is read here.
        options: of ``torch.compile``. ``{"exact": True}`` rounds each op's result as eager does. ``{"freeze": True}`` folds what
            depends on weights and buffers alone. They must then not be written in a way that torch does not count (``.data``,
            numpy), or ``torch.compiler.reset()`` is called after the write. ``{"drop_logits": True}`` lets a step that trains
            return None for its logits, so that its loss need not hold them.

    Raises:
        UsageError: an option is not known.
    """
    return fuse_graph(graph_module, example_inputs, chosen_options(options or {}))


def chosen_options(options: Mapping[str, Any]) -> ApplyOptions:
    """Return the options of a run for those of ``torch.compile``.

    Raises:
        UsageError: one is not known.
    """
    unknown = sorted(set(options) - {"freeze", "exact", "drop_logits"})
    if unknown:
        raise UsageError(
            detail=f"the backend has no option {', '.join(unknown)}",
            help="its options are 'freeze', 'exact' and 'drop_logits', True or False",
        )
    return ApplyOptions(
        freeze=bool(options.get("freeze", False)), exact=bool(options.get("exact", False)),
        drop_logits=bool(options.get("drop_logits", False)), graph=False,
    )  # fmt: skip


def fuse_graph(
    graph_module: torch.fx.GraphModule,
    example_inputs: list[Any],
    options: ApplyOptions,
    optimiser: Callable[..., Call] = optimise,
    names: Callable[[torch.fx.GraphModule, tuple[Any, ...]], Sequence[str]] | None = None,
    trained: Callable[..., Call] = TrainedGraph,
) -> Call:
    """Return what runs in place of a graph: the backend for whoever has all the options of a run.

    Args:
        graph_module: dynamo's graph.
        example_inputs: its inputs; only whether they ask for gradients is read here.
        options: of the run.
        optimiser: rewrites the graph at its first call.
        names: of the inputs of a graph that asks for gradients, by its first call; None: from the graph alone.
        trained: makes the call of a graph that asks for gradients.
    """
    dynamo.name_self(graph_module)
    if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs):
        if dynamo.has_dynamic_shapes(graph_module):
            return _unfused(graph_module, "gradients are enabled, and its sizes are open; compile it with dynamic=False")
        given = names or _input_names

        def half(traced: torch.fx.GraphModule, training_pass: str) -> _FirstCall:
            return _FirstCall(
                traced, options=replace(options, freeze=False, effort="quick"), trace=_pass_copy,
                optimiser=functools.partial(optimiser, check=None), names=_given_names, training_pass=training_pass,
            )  # fmt: skip

        traced = _differentiable(graph_module)
        flagged = try_flags(graph_module, traced, options)
        return trained(
            graph_module, example_inputs, traced=traced, options=options, half=half,
            names=functools.partial(given, graph_module), unfused=functools.partial(_unfused, graph_module),
            losses=_loss_plan(flagged.module, options), flagged=flagged,
        )  # fmt: skip
    if dynamo.gives_gradients(graph_module):
        return _unfused(graph_module, OWN_GRADIENTS)
    if dynamo.has_dynamic_shapes(graph_module):
        try:
            return _FirstCall(graph_module, options, optimise_for_any_size)
        except RuntimeError as error:
            why = dynamo.why_untraceable(error)
            if why is None:
                raise
            return _unfused(graph_module, why)
    try:
        return _FirstCall(graph_module, options, optimiser)
    except (NotTraced, NotFollowed) as error:
        return _unfused(graph_module, str(error))
    except RuntimeError:
        if not _holds_graphs(graph_module):
            raise
        return _unfused(graph_module, "it holds an op of graphs, a checkpoint, say, which tracing does not follow")
