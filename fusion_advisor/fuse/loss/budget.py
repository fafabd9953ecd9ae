"""A budget for what the forward pass keeps for the backward pass: what does not fit is computed again there.

Torch's partitioner chooses what (``activation_memory_budget``), the cheapest first. The user asks for it, and trades time for
memory. So no time decides whether it stays; the gradients do.
"""

from __future__ import annotations

from fusion_advisor import units
from fusion_advisor.fuse.rewrite.record import StepRewrite
from fusion_advisor.records import GraphRewrite, Status

MEMORY_BUDGET = StepRewrite(id="memory-budget", title="activations computed again")


def row_of_budget(budget: float, before_bytes: int, after_bytes: int) -> GraphRewrite:
    """Return the report's row: the peak of a step before and after, by the lifetimes of the tensors in both passes.

    Args:
        budget: share of the activations that may be kept.
        before_bytes: of the step at its peak, with all that torch keeps by default.
        after_bytes: with the budget.
    """
    peaks = f"{units.size(before_bytes)} to {units.size(after_bytes)}"
    if after_bytes >= before_bytes:
        status, reason = Status.NOT_REPLACED, f"--memory-budget {budget:g} does not lower the step's peak ({peaks})"
    else:
        status = Status.KEPT
        reason = f"--memory-budget {budget:g}: the step's peak falls from {peaks}, by the lifetimes of its tensors"
    return GraphRewrite(
        id=MEMORY_BUDGET.id, name=MEMORY_BUDGET.title, stage=MEMORY_BUDGET.stage, status=status, reason=reason, sites=1,
        saved_bytes=max(0, before_bytes - after_bytes),
    )  # fmt: skip
