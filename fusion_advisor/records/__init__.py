"""The records that flow between stages: frozen, keyword-only, units in every numeric name.

One direction only: ``capture`` makes a :class:`Capture`, ``chains`` turns it into :class:`Chain` rows, ``library`` answers each
row with a :class:`Match` or a :class:`NoMatch`, ``fuse`` turns those into :class:`Fusion` rows with an outcome, ``report``
shows a :class:`Report`. Nothing here imports torch or anything else of ours, so every record can be read on a laptop.

Units: ``_ns`` is an integer number of nanoseconds, ``_bytes`` an integer number of bytes, ``share`` a fraction from 0 to 1,
``speedup`` before divided by after.
"""

from __future__ import annotations

from fusion_advisor.records.capture import Capture
from fusion_advisor.records.chain import Chain, Match, NoMatch, Site
from fusion_advisor.records.graph import Arg, Launch, OpClass, OpNode, Ref, TensorMeta
from fusion_advisor.records.plan import ChainPlan, PlanPreview, RewriteCandidate
from fusion_advisor.records.report import Report
from fusion_advisor.records.rewrite import (
    ULP_ENDS,
    Finding,
    FrozenValue,
    Fusion,
    GraphRewrite,
    Numerics,
    Receipt,
    RenderedKernel,
    RewriteStage,
    Status,
    Tolerance,
    Tuning,
)
from fusion_advisor.records.run import (
    Bandwidth,
    Clocks,
    ClockSample,
    DataQuality,
    Environment,
    GraphBreak,
    MachineLoad,
    RankRun,
    RankTime,
    Timing,
    TooBusy,
    Workload,
)
from fusion_advisor.records.shapes import ShapeFusion, ShapePiece, ShapePoint, ShapeRanges, SizeRange
from fusion_advisor.records.step import (
    COMPILED,
    EAGER,
    GRADIENT,
    OURS,
    OURS_COMPILED,
    Baseline,
    Gate,
    GenerationCheck,
    HeldMemory,
    LaunchVerdict,
    ModelCheck,
    ModuleTime,
    OptimizerTime,
    StepMemory,
    StepParts,
    StepProfile,
    Timeline,
    Training,
    WarmUp,
)
from fusion_advisor.records.trace import TraceChain, TraceKernel, TraceRank, TraceReport

__all__ = [
    "COMPILED",
    "EAGER",
    "GRADIENT",
    "OURS",
    "OURS_COMPILED",
    "ULP_ENDS",
    "Arg",
    "Bandwidth",
    "Baseline",
    "Capture",
    "Chain",
    "ChainPlan",
    "ClockSample",
    "Clocks",
    "DataQuality",
    "Environment",
    "Finding",
    "FrozenValue",
    "Fusion",
    "Gate",
    "GenerationCheck",
    "GraphBreak",
    "GraphRewrite",
    "HeldMemory",
    "Launch",
    "LaunchVerdict",
    "MachineLoad",
    "Match",
    "ModelCheck",
    "ModuleTime",
    "NoMatch",
    "Numerics",
    "OpClass",
    "OpNode",
    "OptimizerTime",
    "PlanPreview",
    "RankRun",
    "RankTime",
    "Receipt",
    "Ref",
    "RenderedKernel",
    "Report",
    "RewriteCandidate",
    "RewriteStage",
    "ShapeFusion",
    "ShapePiece",
    "ShapePoint",
    "ShapeRanges",
    "Site",
    "SizeRange",
    "Status",
    "StepMemory",
    "StepParts",
    "StepProfile",
    "TensorMeta",
    "Timeline",
    "Timing",
    "Tolerance",
    "TooBusy",
    "TraceChain",
    "TraceKernel",
    "TraceRank",
    "TraceReport",
    "Training",
    "Tuning",
    "WarmUp",
    "Workload",
]
