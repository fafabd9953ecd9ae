"""The plan of ``apply`` for a captured step, made from the capture alone."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records.chain import Chain, Match, NoMatch
from fusion_advisor.records.run import Environment, Workload
from fusion_advisor.records.step import LaunchVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """A ranked chain with its kernel, or the reason against a kernel."""

    chain: Chain
    answer: Match | NoMatch
    fusion: str
    """``F1`` … as ``apply`` numbers its fusions; empty where no kernel is tried."""
    saving_ns: int
    """Upper bound of the device time that the kernel saves in one step; 0 where none is tried."""
    launches_after: int
    """Kernels of the chain in one step once it is fused; equal to ``chain.launches`` where no kernel is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteCandidate:
    """A rewrite without a kernel of the library whose ops occur in the capture."""

    id: str
    title: str
    sites: int
    """Places with the right ops. ``apply`` checks values and layouts there, so it may change fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPreview:
    """Fusions and rewrites that ``apply`` would try on a captured step. Nothing was built or timed."""

    source: str
    """The capture's file, as it was named."""
    workload: Workload
    environment: Environment
    """Of the machine that captured the step."""
    step_ns: int
    """The eager step's wall time in that run."""
    device_ns: int
    """Of the captured step's kernels; shares refer to it."""
    launches: int
    """Of the captured step."""
    chains: tuple[ChainPlan, ...]
    candidates: tuple[RewriteCandidate, ...]
    unused: tuple[str, ...] = ()
    """Patterns of ``--only`` and ``--skip`` that fit no kernel."""
    launch_verdict: LaunchVerdict | None = None
    """Lower bounds of the step; None on a CPU."""
