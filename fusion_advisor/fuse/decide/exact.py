"""With ``--exact``: take back a rewrite that changed a bit of the step's results.

Rewrites that compute no chain (merged or padded GEMMs, epilogues, kernels of linears) are judged by what they do to the results
on the captured inputs, not by what they are: a merged GEMM that sums in the same order stays. A result whose bits differ from run
to run of the same step (sums by atomics, ``scatter_add`` on a GPU) has no bits to compare, and is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.fuse.decide.rebind import Kept
from fusion_advisor.fuse.decide.session import Bench, Variant
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.rewrite.record import Rewrite
from fusion_advisor.verify.accuracy import count_bit_equal

_OTHER_BITS = "the step's results have other bits"
_RUNS_AGAIN = 4
"""Runs of the step that stays, where another has other bits: in one or two a sum of few numbers may come out equal by chance."""


class BitJudge:
    """Takes a rewrite back where it changed a bit of the step's results.

    Args:
        kept: the step before the first of them.
        is_on: whether bits are compared at all.
        note: is called with a sentence for each rewrite that was taken back.
        results: runs the step that stays and returns copies of its results.
        worst: given that bits differ, or an empty text, returns what counts.
    """

    def __init__(
        self,
        kept: Kept,
        *,
        is_on: bool,
        note: Callable[[str], None],
        results: Callable[[Kept], list[torch.Tensor]] | None = None,
        worst: Callable[[str], str] = str,
    ) -> None:
        self._kept = kept
        self._results = results or _results
        self._is_on = is_on
        self._note = note
        self._worst = worst
        self._expected: list[torch.Tensor] | None = None

    def after(self, rewrite: Rewrite, kept: Kept) -> Kept:
        """Return what stays after a rewrite: ``kept``, or the step before it where its results have other bits.

        Args:
            rewrite: that was tried.
            kept: the step after it.
        """
        if self._is_on and kept is not self._kept:
            if self._expected is None:
                self._expected = self._results(self._kept)
            found = self._results(kept)
            if has_other_bits(found, self._expected, lambda: self._results(self._kept), self._worst):
                self._note(f"--exact: {rewrite.id} is left out, because the step's results have other bits with it")
                return self._kept
        self._kept = kept
        return kept


def _results(kept: Kept) -> list[torch.Tensor]:
    return results_of(kept.bench, kept.bench.build(kept.built, kept_passes(kept.rewrites), kept.linears))


def inexact_passes(bench: Bench, names: Sequence[str], worst: Callable[[str], str] = str) -> frozenset[str]:
    """Return the graph passes each of which alone changes a bit of the step's results.

    Args:
        bench: the live capture.
        names: of passes.
        worst: given that bits differ, or an empty text, returns what counts.
    """

    def original() -> list[torch.Tensor]:
        return results_of(bench, bench.build((), ()))

    expected = original()
    return frozenset(
        name for name in names if has_other_bits(results_of(bench, bench.build((), (name,))), expected, original, worst)
    )


def has_other_bits(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    again: Callable[[], Sequence[torch.Tensor]],
    worst: Callable[[str], str] = str,
) -> bool:
    """Whether a step's results have other bits, where another step's have the same ones at each run.

    Args:
        found: results of one step.
        expected: of the other.
        again: runs the other once more.
        worst: given that bits differ, or an empty text, returns what counts. Of several ranks all run a step again, or none.
    """
    differing = [place for place, pair in enumerate(itertools.zip_longest(found, expected)) if not _is_same(*pair)]
    for _ in range(_RUNS_AGAIN):
        if not worst(_OTHER_BITS if differing else ""):
            return False
        results = again()
        differing = [place for place in differing if place >= len(results) or _is_same(results[place], expected[place])]
    return bool(worst(_OTHER_BITS if differing else ""))


def results_of(bench: Bench, variant: Variant) -> list[torch.Tensor]:
    """Run every region of a variant on the tensors of the capture and return copies of all tensors that they return."""
    bench.live.written.rewind()
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for run in bench.live.in_order():
            result: Any = variant.modules[run.place](*run.args)
            found += [leaf.clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    bench.wait()
    bench.live.written.rewind()
    return found


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit; a NaN answers any NaN."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and count_bit_equal(one, other) == one.numel()
