"""A plan that was found to pay once, read from its run directory; ``restore_plan`` puts it in again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_advisor.errors import AdvisorError, NoPlan, UnreadableReport
from fusion_advisor.fuse.decide.session import BuiltFusion
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.passes.registry import REWRITES, kept_ids
from fusion_advisor.fuse.plan.plan import PlannedFusion, recall
from fusion_advisor.fuse.rewrite.collective_kernels import TITLES as SUM_TITLES
from fusion_advisor.fuse.rewrite.scan_kernels import TITLE
from fusion_advisor.fuse.start.record import read_start
from fusion_advisor.records import Capture, Fusion, GraphRewrite, Match, OpClass, OpNode, Report, Status, Tolerance
from fusion_advisor.records.serialize import read_capture, read_report
from fusion_advisor.records.soundness import Unsound, check_plan
from fusion_advisor.runtime.gc_pause import collector_paused

FEW_ROWS = 16
"""A GEMM of up to so many rows reads its weights and hardly computes: another regime, which has a plan of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusablePlan:
    """What ``apply`` kept, as far as another shape can use it."""

    fusions: tuple[BuiltFusion, ...]
    rewrites: tuple[str, ...]
    """Ids of the kept rewrites. Kernels of linears are made for one number of rows, so other calls keep the library's GEMMs."""
    rows: int
    """GEMM rows of the call that the plan was made for."""
    on_cuda: bool
    tolerance: Tolerance | None = None
    """The user's limit on errors, if there was one."""
    fast_math: bool = False
    """Whether one GELU may be taken for the other in a GEMM's epilogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialised:
    """The kernels that one more call got."""

    sites: dict[str, int]
    """Sites replaced, by kernel."""
    passes: dict[str, int]
    """Sites changed, by graph pass."""
    seconds: float


def gemm_rows(ops: Sequence[OpNode]) -> int:
    """Return how many rows the first GEMM computes, tokens times batch in a transformer; 0 where there is none."""
    first = next((op.outputs[0] for op in ops if op.op_class is OpClass.GEMM and op.outputs), None)
    return 0 if first is None else math.prod(first.shape[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """The rewrites that a run kept."""

    run_dir: Path
    capture: Capture
    report: Report
    fusions: tuple[PlannedFusion, ...]
    """Kept chain fusions, with their programs and sites."""
    start: Mapping[str, Any] | str = "the plan was not read from a run"
    """What it needs to start without a trace, or why that cannot be."""

    @property
    def rewrites(self) -> Mapping[str, GraphRewrite]:
        """Rows of the kept rewrites, by id."""
        return {row.id: row for row in self.report.rewrites if row.status is Status.KEPT}

    @property
    def linears(self) -> tuple[Fusion, ...]:
        """Rows of the kept kernels of linears."""
        return tuple(row for row in self._without_chain if row.kernel not in (TITLE, *SUM_TITLES))

    @property
    def scans(self) -> tuple[Fusion, ...]:
        """Rows of the kept kernels of recurrences."""
        return tuple(row for row in self._without_chain if row.kernel == TITLE)

    @property
    def sums(self) -> tuple[Fusion, ...]:
        """Rows of the kept kernels in which ranks sum together."""
        return tuple(row for row in self._without_chain if row.kernel in SUM_TITLES)

    @property
    def _without_chain(self) -> tuple[Fusion, ...]:
        return tuple(row for row in self.report.fusions if row.status is Status.KEPT and not row.chain_id)


def load_plan(run_dir: str | Path) -> SavedPlan:
    """Read what a run kept; needs no GPU.

    The plan is complete: names of kernels from the run's ``--kernels`` directories, ``--fast-math`` and launch parameters are in
    it, so none of them is given again, and a directory that is gone is not missed.

    Args:
        run_dir: a run directory of ``apply``, with its ``report.json`` and ``capture.json.gz``.

    Raises:
        NoPlan: it is no run directory, or one without a plan.
        UnreadableReport: a file is truncated or not one of ours.
    """
    # In the process that captured, the collector would walk all objects that dynamo keeps.
    with collector_paused():
        return _load(Path(run_dir))


def _load(folder: Path) -> SavedPlan:
    if not (folder / "capture.json.gz").exists():  # what is there and no file is refused by whoever reads it
        raise NoPlan(folder=folder)
    capture, report = read_capture(folder / "capture.json.gz"), read_report(folder / "report.json")
    if report.training is not None:
        detail = 'it is of a training step, which is rewritten in the process that trains: fa.apply(model, inputs, phase="train")'
        raise UnreadableReport(name=folder / "report.json", detail=detail)
    try:
        check_plan(capture, report)
    except Unsound as error:
        raise UnreadableReport(name=folder / "report.json", detail=str(error)) from error
    kept_rewrites = kept_ids(report.rewrites)
    unknown = [name for name in kept_rewrites if name not in {rewrite.id for rewrite in REWRITES}]
    if unknown:
        detail = f"it kept a rewrite that this version does not have: {', '.join(unknown)}"
        raise UnreadableReport(name=folder / "report.json", detail=detail)
    # What a GEMM took in is found by its chain, and other lengths need the kernels of what it or a sum took in. In plans of few
    # rows GEMVs took nearly all in, which every start would build for batches that may never come: those have what was kept.
    has_sums = any(row.kernel in SUM_TITLES and row.status is Status.KEPT for row in report.fusions)
    is_absorbed_needed = has_sums or GEMM_EPILOGUE.id in kept_rewrites or gemm_rows(capture.ops) > FEW_ROWS
    needed = (Status.KEPT, Status.ABSORBED) if is_absorbed_needed else (Status.KEPT,)
    kept = {row.chain_id for row in report.fusions if row.chain_id and row.status in needed}
    answers = {answer.chain_id: answer for answer in report.answers if isinstance(answer, Match)}
    try:
        fusions = tuple(
            recall(capture, [chain for chain in report.chains if chain.id in kept], answers, is_exact=report.is_exact)
        )
    except AdvisorError:
        raise
    except Exception as error:  # lowering trusts a graph that we captured; this one was changed since
        detail = f"its chains cannot be made of the ops in capture.json.gz ({type(error).__name__}: {error})"
        raise UnreadableReport(name=folder / "report.json", detail=detail) from error
    return SavedPlan(run_dir=folder, capture=capture, report=report, fusions=fusions, start=read_start(folder))
