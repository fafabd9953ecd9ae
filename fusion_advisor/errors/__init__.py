"""One class per user mistake: the code, the sentence, the hint and the exit code live on the class.

A code's first digit is the subject, and each subject has a module. Raise sites give only the facts
(``raise UnknownModel(model_id=..., near=...)``); the CLI catches :class:`AdvisorError` once and prints it in rustc's shape.
Exit codes: 2 usage, 3 environment, 4 model, 5 memory or disk, 6 measurement unusable, 7 numerics with --strict,
8 compile with --strict, 9 bad input file, 10 gate failed, 130 interrupted.
"""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError
from fusion_advisor.errors.files import (
    BadWeights,
    CannotSpecialize,
    EngineLost,
    MachineTooBusy,
    MissingKernels,
    NoCapture,
    NoSuchState,
    NoTraces,
    PlanMismatch,
    ProfilerAttached,
    RunExists,
    TraceTooLarge,
    UnknownRun,
    UnknownSchema,
    UnreadableReport,
    UnreadableTrace,
    UnsafeName,
)
from fusion_advisor.errors.gates import GateFailed, GateNotJudged
from fusion_advisor.errors.kernels import (
    CompileFailed,
    HalfWritten,
    KernelCheckFailed,
    KernelFaulted,
    NothingReplaced,
    NumericsFailed,
)
from fusion_advisor.errors.machine import MissingExtra, NoCompiler, NoCudaDevice
from fusion_advisor.errors.model import (
    BrokenModelDirectory,
    GatedModel,
    MissingWeights,
    NoExampleInputs,
    RemoteCodeRefused,
    UnknownArchitecture,
    UnknownModel,
)
from fusion_advisor.errors.ranks import NotUnderTorchrun, RankFailed, RanksDiffer, UnsupportedPlan
from fusion_advisor.errors.step import (
    BadFactory,
    BadInputFunction,
    CannotCapture,
    CannotCopy,
    CannotWrite,
    FactoryFailed,
    ModelFailed,
    ModelInTraining,
    NoStaticCache,
    NoTensorOutput,
    NotRepeatable,
    NotTrainable,
    OutOfMemory,
    SequenceTooLong,
    SizeRejected,
)
from fusion_advisor.errors.usage import BadConfig, UnknownCode, UsageError

__all__ = [
    "AdvisorError",
    "BadConfig",
    "BadFactory",
    "BadInputFunction",
    "BadWeights",
    "BrokenModelDirectory",
    "CannotCapture",
    "CannotCopy",
    "CannotSpecialize",
    "CannotWrite",
    "CompileFailed",
    "EngineLost",
    "FactoryFailed",
    "GateFailed",
    "GateNotJudged",
    "GatedModel",
    "HalfWritten",
    "KernelCheckFailed",
    "KernelFaulted",
    "MachineTooBusy",
    "MissingExtra",
    "MissingKernels",
    "MissingWeights",
    "ModelFailed",
    "ModelInTraining",
    "NoCapture",
    "NoCompiler",
    "NoCudaDevice",
    "NoExampleInputs",
    "NoStaticCache",
    "NoSuchState",
    "NoTensorOutput",
    "NoTraces",
    "NotRepeatable",
    "NotTrainable",
    "NotUnderTorchrun",
    "NothingReplaced",
    "NumericsFailed",
    "OutOfMemory",
    "PlanMismatch",
    "ProfilerAttached",
    "RankFailed",
    "RanksDiffer",
    "RemoteCodeRefused",
    "RunExists",
    "SequenceTooLong",
    "SizeRejected",
    "TraceTooLarge",
    "UnknownArchitecture",
    "UnknownCode",
    "UnknownModel",
    "UnknownRun",
    "UnknownSchema",
    "UnreadableReport",
    "UnreadableTrace",
    "UnsafeName",
    "UnsupportedPlan",
    "UsageError",
]
