"""Sentences and markdown of a plan that was made from a capture; the terminal view shares the sentences."""

from __future__ import annotations

from fusion_advisor import units
from fusion_advisor.records import ChainPlan, Match, PlanPreview
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.report.markdown import code_span, escape

BOUND = "Saves is an upper bound; bounds of different chains do not add up."


def context(plan: PlanPreview) -> str:
    """Return model, device, dtype, phase and shapes in one line."""
    work = plan.workload
    size = f"batch {work.batch}" + (f" × {work.seq_len}" if work.seq_len else "")
    size += f", {work.context} cached" if work.context else ""
    parts = (visible(work.model_id, 80), visible(plan.environment.device_name, 60), work.dtype, work.phase, size)
    return " · ".join(part for part in parts if part)


def kernel(row: ChainPlan) -> str:
    """Return the kernel's name and origin, or the code and the reason against a kernel."""
    answer = row.answer
    if isinstance(answer, Match):
        origin = f"library{', ' + answer.variant if answer.variant else ''}" if answer.is_library else "generated"
        return f"{visible(answer.kernel, 60)} ({visible(origin, 40)})"
    return f"none: {visible(answer.reason, 200)} ({answer.code})"


def saving(row: ChainPlan) -> str:
    """Return the most that a chain's kernel saves."""
    return f"≤{units.duration(row.saving_ns)}" if row.fusion else "–"


def summary(plan: PlanPreview) -> str:
    """Return the one line that ``-q`` leaves."""
    tried = [row for row in plan.chains if row.fusion]
    share = sum(row.chain.share for row in tried)
    device = "device" if plan.environment.device_kind == "cuda" else "CPU"
    return (
        f"apply would try {plural(len(tried), 'kernel')} for {units.share(share)} of {device} time, and look at "
        f"{plural(len(plan.candidates), 'other rewrite')}."
    )


def limits(plan: PlanPreview) -> str:
    """Return the lower bounds of the step; empty on a CPU, where nothing is known of launches."""
    found = plan.launch_verdict
    if found is None:
        return ""
    return (
        f"Eager step {units.duration(found.wall_ns)}. Lower bounds: CUDA graph {units.duration(found.graph_floor_ns)}, fusion "
        f"{units.duration(found.fusion_floor_ns)}, both {units.duration(found.both_floor_ns)}."
    )


def warnings(plan: PlanPreview) -> list[str]:
    """Return one sentence for each pattern that fits no kernel."""
    return [f"`{visible(name, 60)}` of --only or --skip fits no kernel found for a chain and no rewrite" for name in plan.unused]


def render_plan_markdown(plan: PlanPreview) -> str:
    """Return the plan as GitHub-flavoured markdown."""
    lines = [f"### Plan for {escape(context(plan), 300)}", "", escape(summary(plan)), ""]
    if plan.chains:
        lines += ["| | Chain | Sites | Kernels | Share | Saves | Kernel |", "|:--|:--|--:|--:|--:|--:|:--|"]
        lines += [_markdown_row(row) for row in plan.chains]
        lines += ["", BOUND, ""]
    if plan.candidates:
        lines += ["| Rewrite without a kernel of the library | Sites, at most |", "|:--|--:|"]
        lines += [f"| {escape(row.title)} | {units.number(row.sites)} |" for row in plan.candidates]
        lines.append("")
    lines += [sentence for sentence in (limits(plan), *warnings(plan)) if sentence]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(row: ChainPlan) -> str:
    chain = row.chain
    cells = (
        row.fusion or "–",
        code_span(" → ".join(chain.ops), 120),
        units.number(len(chain.sites)),
        f"{units.number(chain.launches)} → {units.number(row.launches_after)}",
        units.share(chain.share),
        saving(row),
        escape(kernel(row), 300),
    )
    return f"| {' | '.join(cells)} |"
