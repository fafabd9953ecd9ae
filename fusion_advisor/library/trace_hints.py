"""Which library kernel a sequence of op names looks like: a hint for where no data flow is known.

The names come from running every reference on small CPU tensors under the profiler and reading that trace as any other, so both
sides give an op the same name. References run once in fp32 and once in bf16, where models cast up and back. Where users run
something else than the reference (torch's own dropout), a trace shows that op, so the baseline runs as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.kernels import device_work
from fusion_advisor.library.discover import BadReference, list_kernels, load_references
from fusion_advisor.library.patterns import example_inputs
from fusion_advisor.library.spec import CHAIN

_CPU_DROPOUT, _GPU_DROPOUT = ("bernoulli", "div", "mul"), ("dropout",)
"""torch's dropout, which is one op on a GPU alone."""
_LEAST_SHUFFLED = 4
"""From this length equal names in another order still look like the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resemblance:
    """A library kernel and whether it would be the whole sequence."""

    kernel: str
    is_whole: bool


def library_sequences(kernel_dirs: Sequence[Path] = ()) -> dict[tuple[str, ...], str]:
    """Return the op names of every reference, in order, and its kernel; with dropout as on a CPU and as on a GPU.

    Args:
        kernel_dirs: folders of a user's own kernels, searched in addition to the shipped ones.

    Raises:
        BadReference: a reference does not import or does not run.
    """
    calls = []
    for spec in list_kernels(kernel_dirs):
        if spec.kind != CHAIN:
            continue
        kernel = load_references(spec)
        for function in (dict(kernel.references) | dict(kernel.baselines)).values():
            for dtype in (torch.float32, torch.bfloat16):
                inputs, constants = example_inputs(spec, function, dtype)
                calls.append((spec, function.__name__, functools.partial(function, *inputs, **constants)))
    waiting = iter(calls)

    def run_next() -> None:
        spec, name, call = next(waiting)
        try:
            call()
        except Exception as error:  # the reference is the user's code: it may raise anything
            detail = f"{name} cannot be run: {type(error).__name__}: {error}"
            raise BadReference(file=spec.folder / "reference.py", detail=detail) from error

    with torch.no_grad():
        trace = profiler.record(run_next, steps=len(calls), on_cuda=False)
    sequences: dict[tuple[str, ...], str] = {}
    for step, works in itertools.groupby(device_work(trace), key=lambda item: item.step):
        names = tuple(item.label for item in works if item.is_fusible)
        for seen in (names, _as_on_gpu(names)) if names else ():
            sequences.setdefault(seen, calls[step][0].name)
    return sequences


def _as_on_gpu(names: tuple[str, ...]) -> tuple[str, ...]:
    length = len(_CPU_DROPOUT)
    places = (at for at in range(len(names)) if names[at : at + length] == _CPU_DROPOUT)
    at = next(places, None)
    return names if at is None else (*names[:at], *_GPU_DROPOUT, *names[at + length :])


def resemblance(names: Sequence[str], sequences: Mapping[tuple[str, ...], str]) -> Resemblance | None:
    """Return what a sequence looks like: the whole of it first, else the longest part of at least two ops."""
    whole = tuple(names)
    if whole in sequences:
        return Resemblance(kernel=sequences[whole], is_whole=True)
    by_length = sorted(sequences.items(), key=lambda entry: -len(entry[0]))
    if len(whole) >= _LEAST_SHUFFLED:
        for known, kernel in by_length:
            if sorted(known) == sorted(whole):
                return Resemblance(kernel=kernel, is_whole=True)
    for known, kernel in by_length:
        places = range(len(whole) - len(known) + 1)
        if len(known) > 1 and any(whole[at : at + len(known)] == known for at in places):
            return Resemblance(kernel=kernel, is_whole=False)
    return None
