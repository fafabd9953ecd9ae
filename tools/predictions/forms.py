"""Ways to predict a chain's saving that were compared, each from the same four figures of a record.

``python -m tools.predictions FOLDER … --forms`` prints their errors, and the error of choosing anew for each run by all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from fusion_advisor.fuse.prediction.saving import OF_ALONE
from fusion_advisor.records import Report
from tools.predictions.observations import PRECISE
from tools.predictions.table import percentile

LOOSE = 0.3
"""A second threshold for measurements: more of them, with more noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A chain at all its sites, in nanoseconds.

    Attributes:
        run: name of its folder.
        traced: its ops in the step.
        before: its ops alone.
        after: its kernel alone.
        launches: what its launches cost the step besides their kernels.
        kernel_launches: the same of its kernel's launches.
        measured: saving in the step.
        noise: half the width of the measured interval.
        earlier: the saving that was predicted before the forms were compared.
    """

    run: str
    traced: int
    before: int
    after: int
    launches: int
    kernel_launches: int
    measured: int
    noise: float

    @property
    def earlier(self) -> int:
        return self.traced + self.launches - self.after

    def scale(self, low: float, high: float) -> float:
        """Return traced over alone, within bounds."""
        return min(high, max(low, self.traced / self.before))


Form = Callable[[Figures], float]


def _scaled(low: float, high: float) -> Form:
    return lambda it: it.traced + it.launches - it.after * it.scale(low, high)


def _with_launches(share: float) -> Form:
    return lambda it: it.traced + share * it.launches - it.after


FORMS: Mapping[str, Form] = {
    "traced + launches − kernel (before)": lambda it: it.earlier,
    "kernel scaled 1 to 1.3": _scaled(1, 1.3),
    "kernel scaled 1 to 1.5": _scaled(1, 1.5),
    "kernel scaled 0.9 to 1.3": _scaled(0.9, 1.3),
    "kernel scaled 0.8 to 1.25": _scaled(1 / OF_ALONE, OF_ALONE),
    "no launches": _with_launches(0),
    "half the launches": _with_launches(0.5),
    "0.8 of the launches": _with_launches(0.8),
    "launches that go away": lambda it: it.earlier - it.kernel_launches,
    "launches that go away, kernel scaled 1 to 1.3": lambda it: _scaled(1, 1.3)(it) - it.kernel_launches,
    "launches that go away, kernel scaled 0.8 to 1.25 (chosen)": lambda it: (
        _scaled(1 / OF_ALONE, OF_ALONE)(it) - it.kernel_launches
    ),
    "alone": lambda it: it.before - it.after,
    "alone + launches": lambda it: it.before - it.after + it.launches,
    "alone + 0.75 of the launches": lambda it: it.before - it.after + 0.75 * it.launches,
    "alone, scaled, + launches": lambda it: (it.before - it.after) * it.traced / it.before + it.launches,
    "alone, scaled, + launches that go away": lambda it: (
        (it.before - it.after) * it.traced / it.before + it.launches - it.kernel_launches
    ),
    "larger of traced and alone − kernel": lambda it: max(it.traced + it.launches, it.before) - it.after,
    "larger of traced and alone − kernel scaled 1 to 1.3": lambda it: (
        max(it.traced + it.launches, it.before) - it.after * it.scale(1, 1.3)
    ),
}


def figures(reports: Mapping[str, Report], threshold: float) -> list[Figures]:
    """Return the chains whose saving was measured narrowly enough.

    Args:
        reports: of the runs, by name.
        threshold: half the measured interval, at most, as a share of the larger of the measured and the earlier predicted saving.
    """
    found = []
    for run, report in reports.items():
        chains = {chain.id: chain for chain in report.chains}
        for row in report.fusions:
            chain, ends = chains.get(row.chain_id), row.step_delta_ci_ns
            if chain is None or ends is None or not row.step_delta_ns or row.chain_before is None or row.chain_after is None:
                continue
            one = Figures(
                run=run,
                traced=chain.device_ns,
                before=row.chain_before.median_ns * chain.runs,
                after=row.chain_after.median_ns * chain.runs,
                launches=chain.launches * report.launch_cost_ns,
                kernel_launches=chain.runs * report.launch_cost_ns,
                measured=-row.step_delta_ns,
                noise=(ends[1] - ends[0]) / 2,
            )
            if one.noise <= threshold * max(abs(one.measured), abs(one.earlier)):
                found.append(one)
    return found


def _error(form: Form, one: Figures) -> float:
    return abs(form(one) - one.measured) / abs(one.measured)


def chosen_by_others(found: list[Figures]) -> list[float]:
    """Return each chain's error in the form that has the least median error over all other runs.

    Args:
        found: of two runs or more.
    """
    errors = []
    for run in dict.fromkeys(one.run for one in found):
        others = [one for one in found if one.run != run]
        best = min(FORMS.values(), key=lambda form: median(_error(form, one) for one in others))
        errors += [_error(best, one) for one in found if one.run == run]
    return errors


def markdown(reports: Mapping[str, Report]) -> str:
    """Return the table of forms.

    Args:
        reports: of two runs or more, by name.
    """
    both = [figures(reports, threshold) for threshold in (PRECISE, LOOSE)]
    if not all(len({one.run for one in found}) > 1 for found in both):
        return "Too few chains were measured.\n"
    lines = [
        f"| A chain's saving | Median, {len(both[0])} within ±{PRECISE:.0%} | 90th percentile "
        f"| Median, {len(both[1])} within ±{LOOSE:.0%} | 90th percentile |",
        "|---|--:|--:|--:|--:|",
    ]
    every = {name: [[_error(form, one) for one in found] for found in both] for name, form in FORMS.items()}
    every["chosen anew for each run, by all others"] = [chosen_by_others(found) for found in both]
    for name, errors in every.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{percentile(one, share):.1%}" for one in errors for share in (0.5, 0.9)) + " |"
        )
    return "\n".join(lines) + "\n"
