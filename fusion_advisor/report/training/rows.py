"""A training step in words: what it is, which pass holds the chains, how near its gradients are; and its modules as rows."""

from __future__ import annotations

from fusion_advisor import units
from fusion_advisor.records import GRADIENT, ModelCheck, Report
from fusion_advisor.timing.host_timer import CPU_TIME

PASSES = ("forward", "backward")


def is_profile(report: Report) -> bool:
    """Whether a report is of a training step that was only profiled: then modules stand in the place of chains."""
    return report.training is not None and report.status == "profiled"


def lines(report: Report) -> tuple[str, ...]:
    """What the step is, and what its two passes hold; empty for other phases."""
    if report.training is None:
        return ()
    what = f"Training step: forward, loss ({report.training.loss}) and backward in train() mode, without an optimizer."
    if is_profile(report):
        return (what, "A profile of this phase looks for no chain; `apply` does, in both passes.")
    return (what, *((share,) if (share := shares(report)) else ()))


def shares(report: Report) -> str:
    """How much of both passes' kernel time is in chains, by pass; empty where there are none."""
    if not report.chains:
        return ""
    held = {name: sum(chain.share for chain in report.chains if chain.training_pass == name) for name in PASSES}
    counts = {name: sum(chain.training_pass == name for chain in report.chains) for name in PASSES}
    parts = [f"{units.share(held[name])} in the {counts[name]} of the {name} pass" for name in PASSES]
    return f"Share of kernel time in chains: {', '.join(parts)}; all are ranked together."


def gradient_line(check: ModelCheck) -> str:
    """How many gradients were compared, and the worst of them with eager's own error; empty where none were.

    As a headline's points it ends in no full stop.
    """
    if not check.gradients:
        return ""
    what = f"gradient of `{check.worst.removeprefix(GRADIENT)}`" if check.worst.startswith(GRADIENT) else f"`{check.worst}`"
    ratio = check.fused_rel_l2 / check.eager_rel_l2 if check.eager_rel_l2 > 0 else None
    times = "" if ratio is None else f", {ratio:.2g} × eager's own"
    errors = f"relative L2 {units.error(check.fused_rel_l2)}, eager {units.error(check.eager_rel_l2)}"
    verdict = "all within the limit" if check.is_passed else "not within the limit"
    number = f"{check.gradients} gradient{'' if check.gradients == 1 else 's'}"
    return f"{number} compared with {check.oracle}, {verdict}. Nearest to its limit: {what}{times} ({errors})"


def profile_sentence(report: Report) -> str:
    """The headline of a profile: how long a step takes, and its kernels by pass; empty for other phases."""
    training, wall = report.training, report.before.wall
    if training is None:
        return ""
    kernels = (
        f"kernels of the forward pass {units.duration(training.forward_ns)}, of the backward pass "
        f"{units.duration(training.backward_ns)}"
    )
    if wall is None:
        return f"{kernels[:1].upper()}{kernels[1:]}."
    clock = "CPU time" if wall.method == CPU_TIME else "wall time"
    return f"A training step takes {units.duration(wall.median_ns)} ({clock}): {kernels}."


def step_word(report: Report) -> str:
    """What a headline calls the step."""
    return "step" if report.training is None else "training step (forward, loss, backward)"


def module_rows(report: Report, limit: int) -> tuple[tuple[str, str, str, str, str, str], ...]:
    """Modules of a training step, largest first: (path, modules, launches, forward, backward, share); empty for other phases."""
    if report.training is None:
        return ()
    whole = max(report.training.forward_ns + report.training.backward_ns, 1)
    return tuple(
        (
            row.path or "outside every submodule",
            str(row.modules),
            units.number(row.launches),
            units.duration(row.forward_ns),
            units.duration(row.backward_ns),
            units.share((row.forward_ns + row.backward_ns) / whole),
        )
        for row in report.training.modules[:limit]
    )
