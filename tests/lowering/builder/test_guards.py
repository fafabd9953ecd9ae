"""Rows that a ``cat`` takes from several tensors: a row of one lies outside the others, and is read nowhere else."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.kernel_cases.lowered import check
from tests.lowering.rules.test_tables import rand

TEXT, IMAGE, WEIGHT = rand(2, 3, 8), rand(2, 5, 8, seed=1), rand(8, seed=2)


def _guards(program):
    return {program.operands[value.operand].name: value.guard for value in program.values if value.op == "load"}


def test_a_reduction_reads_the_rows_of_its_own_tensor_alone():
    """Without a guard the first rows of the image's norm were read ahead of its memory: the kernel crashed."""
    program = check(
        lambda t, i, w: torch.cat([functional.rms_norm(t, (8,), w), functional.rms_norm(i, (8,))], 1) * 2,
        TEXT, IMAGE, WEIGHT, rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    guards = _guards(program)
    assert sum(guard is not None for guard in guards.values()) == 2
    assert len({value.args for value in program.values if value.op.startswith("reduce_")}) == 2


def test_one_normed_piece_and_one_plain():
    program = check(lambda t, i: torch.cat([t, i.softmax(-1)], 1) + 1, TEXT, IMAGE, rtol=1e-10)
    assert None not in _guards(program).values()


def test_three_pieces_are_guarded_from_both_sides():
    program = check(lambda t, i: torch.cat([t, i.softmax(-1), t.softmax(-1)], 1) + 1, TEXT, IMAGE, rtol=1e-10)
    assert all(value.guard is not None for value in program.values if value.op == "load")


def test_every_column_of_a_row_counts_whichever_the_reader_wants():
    """The halves of the rotated row are chosen by column; their norm is of the whole row."""

    def rotated(x):
        normed = functional.rms_norm(x, (8,))
        return torch.cat([-normed[..., 4:], normed[..., :4]], -1) * 2

    program = check(rotated, TEXT, rtol=1e-6, atol=1e-6)
    read = [value for value in program.values if value.op.startswith("reduce_")]
    assert len(read) == 1


def test_rows_of_a_pad_inside_a_cat():
    check(
        lambda t, i: torch.cat([functional.pad(t, (0, 0, 1, 1), value=0.5).softmax(-1), i.softmax(-1)], 1) + 1,
        TEXT, IMAGE, rtol=1e-10,
    )  # fmt: skip
