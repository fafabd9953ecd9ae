"""Run a model and write down what happened: eager for the truth, the captured graph node by node for who spent the time.

Captured is not eager (a traced causal mask is built where eager skips it, and attention pays for it), so both are measured and
:func:`reconcile` says in one sentence what makes the difference. Speedups refer to the eager step; shares of ops to the captured
one. Every wall time comes from runs without a profiler.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nvtx
import torch

from fusion_advisor.capture.graph import fx_nodes, op_records, tracer
from fusion_advisor.capture.layout_trial import SecondLook, settle_layouts
from fusion_advisor.capture.loops.one_op import fold_loops
from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import OP_RANGE, Step, median_step
from fusion_advisor.capture.unchanged_step import Measurement, UnchangedStep
from fusion_advisor.records import Bandwidth, Capture, DataQuality, Environment, OpClass, OpNode, Workload
from fusion_advisor.runtime.external_profiler import NVTX_DOMAIN
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing import wall_timer
from fusion_advisor.timing.host_timer import HostTimer, step_timer


class NodeRunner(torch.fx.Interpreter):
    """Runs a graph op by op, each op inside a profiler range that carries its index (and an NVTX range with its module)."""

    def __init__(self, region: tracer.Region, index_of: Mapping[torch.fx.Node, int], *, with_nvtx: bool = False) -> None:
        super().__init__(region.graph)
        self._index_of = index_of
        self._with_nvtx = with_nvtx

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run one node inside its range."""
        if node.op != "call_function":
            return super().run_node(node)
        with torch.profiler.record_function(f"{OP_RANGE}{self._index_of[node]}"):
            if not self._with_nvtx:
                return super().run_node(node)
            with nvtx.annotate(f"{fx_nodes.module_path(node) or 'model'} {node.name}", domain=NVTX_DOMAIN):
                return super().run_node(node)


def profile_model(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    workload: Workload,
    environment: Environment,
    bandwidth: Bandwidth,
    how: Measurement,
    note: Callable[[str], None] = lambda _: None,
    timer: HostTimer | None = None,
    second_look: SecondLook | None = None,
) -> tuple[Capture, tracer.LiveCapture]:
    """Profile one step of a model.

    Args:
        model: called as ``model(*args, **kwargs)`` under ``no_grad``; its own ops, whatever ``apply`` has put in their place.
        workload: what the inputs are; goes into the record.
        environment: where this runs; goes into the record.
        bandwidth: ceilings measured on this device.
        how: how the eager step is timed, and both steps are traced.
        note: called with one sentence per finished part.
        timer: times the eager step; left out, the one of the device.
        second_look: at a change of layouts that makes the unfused step slower.

    Returns:
        The record, and the live graphs.

    Raises:
        CannotCapture: dynamo captured nothing.
        ProfilerAttached: nsys or ncu watches; the eager step was timed for it.
        MissingKernels: the profiler saw launches and no kernel.
    """
    on_cuda = environment.device_kind == "cuda"
    timer = timer or step_timer(on_cuda=on_cuda)
    own_call = functools.partial(module_call.original_call(model), *args, **kwargs)
    with torch.no_grad():
        live = tracer.capture_regions(model, args, kwargs, model_id=workload.model_id)
        fold_loops(live, note=note)
        step = UnchangedStep(title="eager step", call=own_call, model=model, on_cuda=on_cuda, rewind=live.written.rewind)
        timed = step.time(how, timer)
        note(f"eager step {timed.timing.median_ns / 1e6:.2f} ms over {timed.runs} runs")
        timed.refuse_profiler()
        _, eager = step.trace(how)
        note(f"{len(eager.launches)} kernels, {eager.calls} launches")
        live.layouts = settle_layouts(live, how.layouts, on_cuda=on_cuda, timer=timer, note=note, second_look=second_look)
    ops, captured = _trace_regions(live, on_cuda=on_cuda, with_nvtx=how.with_nvtx, traced_steps=how.traced_steps)
    note(f"{len(ops)} ops in {len(live.regions)} graph(s), {len(captured.launches)} kernels")
    return Capture(
        workload=workload,
        environment=environment,
        ops=tuple(ops),
        launches=captured.launches,
        eager_launches=eager.launches,
        eager_step=timed.timing,
        bandwidth=bandwidth,
        quality=_quality(eager, captured, ops, live),
        region_runs=live.runs_of_regions(),
    ), live


def profile_as_it_is(live: tracer.LiveCapture, bandwidth: Bandwidth, device: torch.device, *, traced_steps: int = 3) -> Capture:
    """Profile captured graphs with whatever copies of layouts are in them: there is no eager step to compare with.

    The graphs stay as they are, so that the indices of ops that somebody holds stay right.

    Args:
        live: regions with the tensors of a call.
        bandwidth: ceilings of the device.
        device: where the tensors are.
        traced_steps: of which the median one is taken.
    """
    ops, traced = _trace_regions(live, on_cuda=device.type == "cuda", with_nvtx=False, traced_steps=traced_steps)
    nothing = wall_timer.as_timing([traced.device_ns], "traced")
    return Capture(
        workload=Workload(
            model_id="graph", phase="forward", dtype="", device=device.type, batch=0, seq_len=0, seed=0, weights="user"
        ),
        environment=Environment(device_name=device.type, device_kind=device.type),
        ops=tuple(ops),
        launches=traced.launches,
        eager_launches=(),
        eager_step=nothing,
        bandwidth=bandwidth,
        quality=_quality(traced, traced, ops, live),
        region_runs=live.runs_of_regions(),
    )


def _trace_regions(
    live: tracer.LiveCapture, *, on_cuda: bool, with_nvtx: bool, traced_steps: int = 3
) -> tuple[list[OpNode], Step]:
    ops, runners = describe_all(live, with_nvtx=with_nvtx)

    def captured() -> None:
        for run in live.in_order():
            runners[run.place].run(*run.args)

    with torch.no_grad():
        live.written.rewind()
        captured()
        trace = profiler.record(captured, steps=traced_steps, on_cuda=on_cuda, before=live.written.rewind)
    return ops, median_step(trace, on_cuda=on_cuda)


def describe_all(live: tracer.LiveCapture, *, with_nvtx: bool = False) -> tuple[list[OpNode], list[NodeRunner]]:
    """Return the records of all regions, numbered through, and one runner per region."""
    ops: list[OpNode] = []
    runners: list[NodeRunner] = []
    for region in live.regions:
        described, index_of = op_records.describe(region, first_index=len(ops))
        ops += described
        runners.append(NodeRunner(region, index_of, with_nvtx=with_nvtx))
    return ops, runners


def _quality(eager: Step, captured: Step, ops: list[OpNode], live: tracer.LiveCapture) -> DataQuality:
    joined = sum(
        launch.duration_ns
        for launch in captured.launches
        if launch.op_index is not None and ops[launch.op_index].source_line > 0 and ops[launch.op_index].role == "op"
    )
    warnings = []
    if eager.calls != len(eager.launches):
        warnings.append(
            f"the eager trace has {len(eager.launches)} kernels for {eager.calls} launches: the profiler dropped some"
        )
    if captured.calls != len(captured.launches):
        warnings.append(f"the captured trace has {len(captured.launches)} kernels for {captured.calls} launches")
    return DataQuality(
        launches=eager.calls,
        kernels=len(eager.launches),
        joined_share=joined / max(captured.device_ns, 1),
        eager_device_ns=eager.device_ns,
        captured_device_ns=captured.device_ns,
        reconciliation=reconcile(eager, captured, ops),
        graph_breaks=tuple(live.breaks),
        warnings=tuple(warnings),
    )


def reconcile(eager: Step, captured: Step, ops: list[OpNode]) -> str:
    """Say what makes the captured step's device time differ from eager's, by category, and which source lines are new."""
    delta_ns = captured.device_ns - eager.device_ns
    share = delta_ns / max(eager.device_ns, 1)
    head = (
        f"captured {captured.device_ns / 1e6:.3f} ms against eager {eager.device_ns / 1e6:.3f} ms of device time ({share:+.1%})"
    )
    by_category: Counter[str] = Counter()
    for launch in captured.launches:
        by_category[launch.category] += launch.duration_ns
    for launch in eager.launches:
        by_category[launch.category] -= launch.duration_ns
    changed = [(name, ns) for name, ns in by_category.most_common() if abs(ns) > 0.002 * max(eager.device_ns, 1)]
    parts = [f"{name} {ns / 1e3:+.0f} µs" for name, ns in sorted(changed, key=lambda item: -abs(item[1]))[:4]]
    masks = {op.source_file for op in ops if "mask" in Path(op.source_file).name and op.op_class is not OpClass.VIEW}
    if masks:
        parts.append(f"the traced model builds its attention mask ({', '.join(sorted(masks))}), which eager may skip")
    return f"{head}: {'; '.join(parts)}" if parts else head
