"""The interval of a predicted saving: the uncertainty of its parts, times a factor that measured savings gave.

The parts are added as independent errors: their squares, then the root. The factor of each kind of rewrite is the one with which
nine of ten measured savings lie within their intervals (:data:`CALIBRATION`). ``python -m tools.predictions --calibrate`` derives
it again. Parts, factors and coverage: ``docs/measurements/predictions.md``.

Where the power limit throttles a step, time is energy over the limit. Memory-bound kernels draw less than the limit, so while one
runs the device saves what lets the GEMMs run faster: removing it saves less time than it took. Rests between runs lift the limit,
but a run that is long or a device that is warm may meet it again. So there the interval reaches down to what is left of a saving
at the limit.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fusion_advisor.fuse.prediction.saving import is_scaled, kernel_ns
from fusion_advisor.records import Chain, Fusion, GraphRewrite, Report, RewriteStage, Timing
from fusion_advisor.timing.host_timer import CPU_TIME


class Kind(enum.StrEnum):
    """How a saving is predicted."""

    CHAIN = "fusion chain"
    """From the trace and from ops and kernel alone."""
    LINEAR = "linear layer's kernel"
    """From the ops in which two steps differ, alone."""
    NORM_LINEAR = "linear layer's kernel with its norm"
    """Likewise. Its errors are larger."""
    ALONE = "GEMMs merged, narrowed, with epilogue"
    """From the ops in which two steps differ, alone."""
    PASS = "graph pass"
    """From the traced time of the launches that go away."""
    OTHER_GEMM = "graph pass with other GEMMs"
    """Likewise, less what GEMMs and copies in their place would take at the rates of the step's others."""
    CUDA_GRAPH = "CUDA graph"
    """From the step launch by launch and the device's time of the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What measured savings taught.

    Attributes:
        factors: of each kind: its intervals' half widths over the uncertainty of their parts.
        graph_call_ns: what a call through its CUDA graph takes beyond the device's time: Python, the launch, waiting for the end.
    """

    factors: Mapping[Kind, float]
    graph_call_ns: int


CALIBRATION = Calibration(
    factors={
        Kind.CHAIN: 2.82,
        Kind.LINEAR: 5.26,
        Kind.NORM_LINEAR: 8.68,
        Kind.ALONE: 2.87,
        Kind.PASS: 2.66,
        Kind.OTHER_GEMM: 2.87,
        Kind.CUDA_GRAPH: 1.31,
    },
    graph_call_ns=158_000,
)
"""Factors of fourteen runs on H200s and the zoo's on H100s; the call's cost is that of the fourteen."""

_TRACE = 0.03
"""Of a traced time: two traces of one step differ by so much."""
_IN_PLACE = 0.5
"""Of the difference that a kernel's time is scaled by: the kernel reads other bytes than its ops."""
_BY_ITSELF = 0.4
"""Of what ops that ran on a CPU took longer or less long in the trace than alone, by CPU time: the trace counts other programs
too. Savings that steps showed lay between those by the two times, and times the factor of chains the interval holds both."""
_LAUNCHES = 0.25
"""Of the launches' cost: all launches of a step share one mean."""
_SITE = 1 / 3
"""Of a smallest kernel, at each site of a rewrite that was timed alone: launches overlap in another way there."""
_ALONE, _PASS, _WALL, _OTHER_GEMM = 0.04, 0.05, 0.02, 0.15
"""Of a saving that was timed alone, read off the trace, taken from wall times, or left when other GEMMs are counted in."""
_OTHER_GEMMS = frozenset({"pad-gemm", "odd-width-gemm", "patch-gemm", "window-gemm"})
_AT_LIMIT = 0.55
"""Of a memory-bound kernel's time: what the step gets shorter at least without it, where the power limit throttles the step. On
H200s 0.58, 0.61 and 0.62 were measured. It is the power that the kernel draws over the limit."""
_MEMORY_BOUND = frozenset({Kind.CHAIN, Kind.PASS})
_CALL = 0.4
"""Of what a call through a CUDA graph takes beyond the device's time."""


def kind_of(row: Fusion | GraphRewrite) -> Kind:
    """Return how a rewrite's saving is predicted.

    Args:
        row: of a report.
    """
    if isinstance(row, Fusion):
        if row.chain_id:
            return Kind.CHAIN
        return Kind.NORM_LINEAR if "norm" in row.kernel else Kind.LINEAR
    if row.stage is RewriteStage.CALL:
        return Kind.CUDA_GRAPH
    if row.id in _OTHER_GEMMS:
        return Kind.OTHER_GEMM
    return Kind.ALONE if row.stage is RewriteStage.ON_TOP else Kind.PASS


def spread_ns(row: Fusion | GraphRewrite, chain: Chain | None, *, launch_ns: int, cost_ns: int, call_ns: int) -> float:
    """Return the uncertainty of a predicted saving, before any factor.

    Args:
        row: with its prediction.
        chain: that a fusion stands for.
        launch_ns: what the smallest kernel takes.
        cost_ns: what a launch costs the step besides its kernel.
        call_ns: what a call through a CUDA graph takes beyond the device's time.
    """
    saving_ns = abs(row.predicted_saving_ns or 0)
    kind = kind_of(row)
    if isinstance(row, Fusion) and kind is Kind.CHAIN:
        assert chain is not None
        return _chain_spread_ns(row, chain, launch_ns, cost_ns)
    if kind is Kind.CUDA_GRAPH:
        return math.hypot(_CALL * call_ns, _WALL * saving_ns)
    if kind is Kind.PASS:
        return math.hypot(2 * launch_ns, _PASS * saving_ns)
    if kind is Kind.OTHER_GEMM:
        assert isinstance(row, GraphRewrite)
        return math.hypot(2 * launch_ns * row.sites, _OTHER_GEMM * saving_ns)
    sites = row.receipt.sites_found if isinstance(row, Fusion) else row.sites
    return math.hypot(_SITE * launch_ns * sites, _ALONE * saving_ns)


def _chain_spread_ns(fusion: Fusion, chain: Chain, launch_ns: int, cost_ns: int) -> float:
    assert fusion.chain_after is not None
    alone_ns = fusion.chain_after.median_ns * chain.runs
    timed = [timing for timing in (fusion.chain_before, fusion.chain_after) if timing is not None]
    in_place = by_itself = 0.0
    if fusion.chain_before is not None and fusion.chain_before.method == CPU_TIME:
        by_itself = chain.device_ns - fusion.chain_before.median_ns * chain.runs
    if fusion.chain_before is not None and is_scaled(fusion):
        in_place = alone_ns * abs(chain.device_ns / (fusion.chain_before.median_ns * max(chain.runs, 1)) - 1)
    return math.hypot(
        launch_ns,
        kernel_ns(fusion, chain) * math.hypot(*map(_half_share, timed)),
        _IN_PLACE * in_place,
        _BY_ITSELF * by_itself,
        _TRACE * chain.device_ns,
        _LAUNCHES * max(0, chain.launches - chain.runs) * cost_ns,
    )


def _half_share(timing: Timing) -> float:
    """Half the width of a timing's interval, over its median."""
    return (timing.ci_high_ns - timing.ci_low_ns) / 2 / max(timing.median_ns, 1)


Row = TypeVar("Row", Fusion, GraphRewrite)


def with_intervals(report: Report, calibration: Calibration = CALIBRATION) -> Report:
    """Return the report, each prediction with its interval; rewrites without a prediction stay as they are.

    Args:
        report: with a bandwidth and the cost of a launch; that it was timed after rests says that the power limit throttles it.
        calibration: whose factors are taken.
    """
    chains = {chain.id: chain for chain in report.chains}
    return replace(
        report,
        fusions=_each(report.fusions, chains, report, calibration),
        rewrites=_each(report.rewrites, chains, report, calibration),
    )


def _each(rows: Sequence[Row], chains: Mapping[str, Chain], report: Report, calibration: Calibration) -> tuple[Row, ...]:
    return tuple(_with_interval(row, chains, report, calibration) if is_predicted(row, chains) else row for row in rows)


def is_predicted(row: Fusion | GraphRewrite, chains: Mapping[str, Chain]) -> bool:
    """Whether a row's figure is a prediction. Of a linear's kernel 0 is none: older reports wrote it for no figure.

    Args:
        row: of a report.
        chains: of the report, by id.
    """
    if row.predicted_saving_ns is None:
        return False
    if isinstance(row, Fusion):
        is_known = row.chain_id in chains if row.chain_id else row.predicted_saving_ns != 0
        return row.chain_after is not None and is_known
    return True


def _with_interval(row: Row, chains: Mapping[str, Chain], report: Report, calibration: Calibration) -> Row:
    chain = chains.get(row.chain_id) if isinstance(row, Fusion) else None
    half_ns = calibration.factors[kind_of(row)] * spread_ns(
        row,
        chain,
        launch_ns=report.bandwidth.launch_ns,
        cost_ns=report.launch_cost_ns,
        call_ns=calibration.graph_call_ns,
    )
    middle_ns = row.predicted_saving_ns or 0
    low_ns = middle_ns - half_ns
    is_throttled = report.step_before is not None and report.step_before.rest > 0
    if is_throttled and kind_of(row) in _MEMORY_BOUND:
        low_ns = min(low_ns, _AT_LIMIT * middle_ns)
    return replace(row, predicted_low_ns=math.floor(low_ns), predicted_high_ns=math.ceil(middle_ns + half_ns))
