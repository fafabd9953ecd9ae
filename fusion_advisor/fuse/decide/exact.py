"""With ``--exact``: take back a rewrite that changed a bit of the step's results.

Rewrites that compute no chain (merged or padded GEMMs, epilogues, kernels of linears) are judged by what they do to the results
on the captured inputs, not by what they are: a merged GEMM that sums in the same order stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion_advisor.fuse.decide.rebind import Kept
from fusion_advisor.fuse.decide.result_bits import has_same_bits, results_of
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.rewrite.record import Rewrite


class BitJudge:
    """Takes a rewrite back where it changed a bit of the step's results.

    Args:
        kept: the step before the first of them.
        is_on: whether bits are compared at all.
        note: is called with a sentence for each rewrite that was taken back.
    """

    def __init__(self, kept: Kept, *, is_on: bool, note: Callable[[str], None]) -> None:
        self._kept = kept
        self._is_on = is_on
        self._note = note
        self._expected: list[torch.Tensor] | None = None

    def after(self, rewrite: Rewrite, kept: Kept) -> Kept:
        """Return what stays after a rewrite: ``kept``, or the step before it where its results have other bits.

        Args:
            rewrite: that was tried.
            kept: the step after it.
        """
        if self._is_on and kept is not self._kept:
            if self._expected is None:
                self._expected = _results(self._kept)
            found = _results(kept)
            if not has_same_bits(found, self._expected):
                self._note(f"--exact: {rewrite.id} is left out, because the step's results have other bits with it")
                return self._kept
        self._kept = kept
        return kept


def _results(kept: Kept) -> list[torch.Tensor]:
    return results_of(kept.bench, kept.bench.build(kept.built, kept_passes(kept.rewrites), kept.linears))
