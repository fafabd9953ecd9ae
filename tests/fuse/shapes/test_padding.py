"""Calls rounded up to a capacity: which sizes may be, what the results look like, and which calls share a graph."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.shapes.padding import capacity, rounded_up
from fusion_advisor.records import SizeRange
from tests.fuse.shapes.test_graphs_of_ranges import Mlp, is_right, ranged

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++"
)  # fmt: skip


class Normed(Mlp):
    """Each row reads all rows: padding of the batch changes every result."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Tokens(torch.nn.Module):
    """Attention over a few tokens, causal or not; hands out heads first, as a cache of keys is."""

    def __init__(self, *, is_causal):
        super().__init__()
        torch.manual_seed(0)
        self.is_causal = is_causal
        self.words = torch.nn.Embedding(50, 32)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, input_ids):
        x = self.words(input_ids)
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(x).split(32, 2))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        hidden = torch.nn.functional.gelu(self.out(mixed.transpose(1, 2).flatten(2)) * 1.5, approximate="tanh") + x
        return hidden, (k * 2.0)


class Causal(Tokens):
    def __init__(self):
        super().__init__(is_causal=True)


class Bidirectional(Tokens):
    def __init__(self):
        super().__init__(is_causal=False)


@pytest.mark.parametrize(("name", "sizes"), [("batch", (3, 8, 9, 17, 33)), ("seq", (1, 8, 9, 33, 65, 100))])
def test_a_capacity_is_at_least_the_size_and_at_most_a_quarter_more_or_one_step(name, sizes):
    for size in sizes:
        found = capacity(name, size)
        assert size <= found <= max(size * 1.25 + 1, size + 7)
        assert capacity(name, found) == found


def test_a_size_is_rounded_up_no_further_than_its_piece():
    box = (SizeRange(name="batch", least=2, most=18), SizeRange(name="seq", least=2, most=64))
    assert rounded_up({"batch": 17, "seq": 9}, ("batch", "seq"), box) == {"batch": 18, "seq": 16}
    assert rounded_up({"batch": 17, "seq": 9}, ("seq",), box) == {"batch": 17, "seq": 16}


@needs_compiler
def test_shapes_that_round_up_to_one_capacity_share_its_graph():
    with torch.no_grad():
        fused, recorder = ranged()
        (row,) = [piece for piece in fused.shapes[0].pieces if piece.padding is not None]
        assert row.padding.names == ("batch",)
        assert is_right(fused, 33) and recorder.recorded == 0
        assert is_right(fused, 34) and (recorder.recorded, recorder.replayed) == (1, 1)  # recorded at 40 rows
        for rows in (35, 36, 37, 39):
            assert is_right(fused, rows)
        assert (recorder.recorded, recorder.replayed, fused.graphs.padded) == (1, 5, 5)
        assert is_right(fused, 40) and recorder.recorded == 1  # the capacity itself is not padded
        assert is_right(fused, 35) and recorder.recorded == 2  # and a shape that comes again gets its own
        assert fused.graphs.padded == 5 and fused.fallbacks == {} and fused.graphs.refusals == {}
        assert "5 calls ran in a graph of larger sizes" in fused.graphs.summary


@needs_compiler
def test_a_result_of_a_padded_call_is_the_callers_own():
    with torch.no_grad():
        fused, _ = ranged()
        results = [(x := torch.randn(rows, 32), fused(x), fused._original(x)) for rows in (33, 34, 35, 36)]
        for _, found, expected in results:  # a later call has overwritten none
            assert found.stride() == expected.stride() and found.shape == expected.shape
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_model_whose_rows_read_each_other_is_not_padded_and_says_why():
    with torch.no_grad():
        fused, recorder = ranged(Normed)
        assert all(piece.padding is None for piece in fused.shapes[0].pieces)
        assert is_right(fused, 33) and is_right(fused, 34) and is_right(fused, 35)
        assert recorder.recorded == 0 and fused.graphs.padded == 0


def tokens(maker):
    args = (torch.randint(0, 50, (3, 7)),)
    return ranged(maker, shapes="batch=2..16,seq=2..64", args=args)


@needs_compiler
def test_causal_tails_and_batch_rows_pad_together_and_results_are_laid_out_as_eagers():
    with torch.no_grad():
        fused, recorder = tokens(Causal)
        assert {name for piece in fused.shapes[0].pieces if piece.padding for name in piece.padding.names} == {"batch", "seq"}
        for batch, seq in ((9, 33), (10, 34), (9, 37), (10, 39), (9, 40)):
            ids = torch.randint(0, 50, (batch, seq))
            for found, expected in zip(fused(ids), fused._original(ids), strict=True):
                assert (found.shape, found.stride()) == (expected.shape, expected.stride())
                assert found.is_contiguous() == expected.is_contiguous()
                assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert recorder.recorded == 1 and fused.graphs.padded == 4 and fused.fallbacks == {}


@needs_compiler
def test_tokens_that_look_ahead_are_not_padded_but_rows_are():
    with torch.no_grad():
        fused, _ = tokens(Bidirectional)
        rows = fused.found.pieces
        assert {name for row in rows for name in row.padded} == {"batch"}
        reasons = {reason for row in rows for name, reason in row.not_padded if name == "seq"}
        assert reasons and all("what the padding holds changes results at" in reason for reason in reasons)


@needs_compiler
def test_no_padding_where_calls_are_no_graphs():
    with torch.no_grad():
        fused, _ = ranged(has_graphs=False)
        assert all(piece.padding is None for piece in fused.shapes[0].pieces)
        assert is_right(fused, 33) and is_right(fused, 34)
