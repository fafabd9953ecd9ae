"""With ``--exact``: take back a rewrite that changed a bit of the step's results.

Rewrites that compute no chain (merged or padded GEMMs, epilogues, kernels of linears) are judged by what they do to the results
on the captured inputs, not by what they are: a merged GEMM that sums in the same order stays.
"""

from __future__ import annotations

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
            if self._worst("" if has_same_bits(found, self._expected) else _OTHER_BITS):
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
    expected = results_of(bench, bench.build((), ()))

    def differs(name: str) -> bool:
        found = results_of(bench, bench.build((), (name,)))
        return bool(worst("" if has_same_bits(found, expected) else _OTHER_BITS))

    return frozenset(filter(differs, names))


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


def has_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal bit for bit; a NaN answers any NaN."""
    return len(found) == len(expected) and all(
        one.shape == other.shape and one.dtype == other.dtype and count_bit_equal(one, other) == one.numel()
        for one, other in zip(found, expected, strict=True)
    )
