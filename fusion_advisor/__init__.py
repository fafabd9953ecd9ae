"""Profile a PyTorch model, fuse its pointwise and reduction chains into readable kernels, keep only what measurably pays.

Importing this module imports no torch; the work is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fusion_advisor.fuse.model import FusedModel
    from fusion_advisor.fuse.plan import Plan
    from fusion_advisor.records import Report

__all__ = ["apply", "load_plan", "profile"]


def profile(model: torch.nn.Module, inputs: Any, **options: Any) -> Report:
    """Profile a live model; nothing about it is changed.

    Args:
        model: any module, on its device, in the mode you run it in.
        inputs: one example call: a tensor, a tuple of positional or a dict of keyword arguments.
        **options: fields of :class:`fusion_advisor.fuse.options.ProfileOptions`.

    Returns:
        The report: where device time goes, the chains, and the kernel each would get.

    Raises:
        CannotCapture: dynamo captured no graph of the model.
        OutOfMemory: with what to try instead.
    """
    from fusion_advisor.fuse.options import ProfileOptions
    from fusion_advisor.fuse.pipeline import profile_workload
    from fusion_advisor.workload.load import describe_live

    report, _ = profile_workload(describe_live(model, *_call(inputs)), ProfileOptions(**options))
    return report


def apply(model: torch.nn.Module, inputs: Any, **options: Any) -> FusedModel:
    """Fuse a live model and keep what pays.

    Args:
        model: any module in ``eval()`` mode; this instance is fused in place, until ``revert()``.
        inputs: one example call, as for :func:`profile`. Calls that differ from it run the original ops.
        **options: fields of :class:`fusion_advisor.fuse.options.ApplyOptions`.

    Returns:
        The fused model: call it like the model; ``.report`` says what was done, ``.revert()`` (or leaving a ``with`` block)
        undoes it.

    Raises:
        CannotCapture: dynamo captured no graph of the model.
        OutOfMemory: with what to try instead.
    """
    from fusion_advisor.fuse.options import ApplyOptions
    from fusion_advisor.fuse.pipeline import apply_workload
    from fusion_advisor.workload.load import describe_live

    return apply_workload(describe_live(model, *_call(inputs)), ApplyOptions(**options)).fused


def load_plan(run_dir: str | Path) -> Plan:
    """Read the plan of an earlier run: its ranked chains, what each gets, and the programs of their kernels. Needs no GPU.

    Args:
        run_dir: a run directory with ``capture.json.gz`` in it.

    Raises:
        UnreadableReport: the capture is truncated or not one of ours.
    """
    from pathlib import Path

    from fusion_advisor.fuse.plan import make_plan
    from fusion_advisor.library.patterns import library_patterns
    from fusion_advisor.serialize import read_capture

    patterns, sources = library_patterns()
    return make_plan(read_capture(Path(run_dir) / "capture.json.gz"), patterns, sources=sources)


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):  # a tokenizer's BatchEncoding is one, and no dict
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
