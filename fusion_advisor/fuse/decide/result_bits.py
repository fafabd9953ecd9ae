"""Bits of a step's results: with ``--exact`` a rewrite that computes no chain stays only where it changes none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.fuse.decide.session import Bench, Variant
from fusion_advisor.verify.accuracy import count_bit_equal


def inexact_passes(bench: Bench, names: Sequence[str]) -> frozenset[str]:
    """Return the graph passes each of which alone changes a bit of the step's results.

    Args:
        bench: the live capture.
        names: of passes.
    """
    expected = results_of(bench, bench.build((), ()))
    return frozenset(name for name in names if not has_same_bits(results_of(bench, bench.build((), (name,))), expected))


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
