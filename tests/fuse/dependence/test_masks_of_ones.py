"""What masks say where a call's own mask holds ones alone: as their numbers say at sizes of the range."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion_advisor.fuse.dependence.masks_of_ones import meanings_with_ones
from fusion_advisor.fuse.passes.attention import masked_calls, meaning_of
from tests.fuse.points.test_choose_layouts import work_on


class Masked(torch.nn.Module):
    """Attention whose mask is made of the length and of what the input's first column holds."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, hidden_states):
        batch, tokens, _ = hidden_states.shape
        x = (hidden_states * 1.5).view(batch, tokens, 2, 16).transpose(1, 2)
        mask = self.make(hidden_states[..., 0] > 0, tokens)
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).transpose(1, 2).reshape(hidden_states.shape)


def causal(tokens):
    return torch.arange(tokens)[None] <= torch.arange(tokens)[:, None]


def rows(tokens):
    return torch.arange(tokens)[:, None], torch.arange(tokens)[None]


MASKS = {
    "padding": (lambda own, n: own[:, None, None], "all true"),
    "padding, expanded": (lambda own, n: own[:, None, None].expand(-1, 1, n, n), "all true"),
    "causal and padding": (lambda own, n: own[:, None, None] & causal(n), "causal"),
    "causal, the other way round": (lambda own, n: (rows(n)[0] >= rows(n)[1]) & own[:, None, None], "causal"),
    "less than the next": (lambda own, n: (rows(n)[1] < rows(n)[0] + 1) & own[:, None, None], "causal"),
    "twice": (lambda own, n: causal(n) & causal(n) & own[:, None, None], "causal"),
    "of numbers": (lambda own, n: torch.where(own[:, None, None], 0.0, -1e9), "all true"),
    "one less": (lambda own, n: ((1.0 - own.float()) * -1e9)[:, None, None], "all true"),
    "filled": (lambda own, n: torch.zeros(n, n).masked_fill(~own[:, None, None], -1e9), "all true"),
    "bounds that hold": (lambda own, n: (rows(n)[0] >= 0) & (rows(n)[1] < n) & own[:, None, None], "all true"),
    "indexed": (lambda own, n: own[torch.arange(own.shape[0])[:, None, None], rows(n)[1]][:, None] & causal(n), "causal"),
    "future": (lambda own, n: (rows(n)[1] >= rows(n)[0]) & own[:, None, None], None),
    "strictly past": (lambda own, n: (rows(n)[1] < rows(n)[0]) & own[:, None, None], None),
    "window": (lambda own, n: causal(n) & (rows(n)[1] > rows(n)[0] - 8) & own[:, None, None], None),
    "padding turned round": (lambda own, n: ~own[:, None, None], None),
    "one key less": (lambda own, n: (rows(n)[1] < n - 1) & own[:, None, None], None),
    "transposed": (lambda own, n: causal(n).mT & own[:, None, None], None),
    "another start": (lambda own, n: (rows(n)[1] <= rows(n)[0] + 1) & own[:, None, None], None),
    "steps of two": (lambda own, n: (torch.arange(0, 2 * n, 2)[None] <= torch.arange(n)[:, None]) & own[:, None, None], None),
    "reversed": (lambda own, n: causal(n).flip(-1) & own[:, None, None], None),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_proof_agrees_with_the_numbers(name):
    make, expected = MASKS[name]
    work = work_on(maker=lambda: Masked(make))
    opened = work.ranged.finder(work.capture).next().opened
    graph = opened.region.graph.graph
    ones = [node for node in graph.nodes if node.target is torch.ops.aten.gt.Scalar]
    assert len(ones) == 1
    found = meanings_with_ones(masked_calls(graph), ones, opened.dims_of_symbols())
    assert list(found.values()) == ([] if expected is None else [expected])
    assert meanings_with_ones(masked_calls(graph), [], opened.dims_of_symbols()) == {}
    (call,) = masked_calls(graph)
    assert not found or set(found) == {call}
    for tokens in (2, 9, 16):
        mask = make(torch.ones(3, tokens, dtype=torch.bool), tokens)
        said = meaning_of(mask)
        assert said == expected or (expected is None and tokens == 2), (tokens, said)


@pytest.mark.parametrize(
    ("rows_of", "expected"),
    [
        (lambda n: slice(-1, None), "all true"),
        (lambda n: slice(n - 1, n), "all true"),
        (lambda n: slice(0, 1), None),
    ],
)
def test_the_last_query_of_a_triangle_sees_all_keys_and_no_other_does(rows_of, expected):
    class Rows(torch.nn.Module):
        def forward(self, hidden_states):
            batch, tokens, _ = hidden_states.shape
            x = (hidden_states * 1.5).view(batch, tokens, 2, 16).transpose(1, 2)
            taken = rows_of(tokens)
            mask = (causal(tokens) & (hidden_states[..., 0] > 0)[:, None, None])[:, :, taken]
            return functional.scaled_dot_product_attention(x[:, :, taken], x, x, attn_mask=mask)

    work = work_on(maker=Rows)
    opened = work.ranged.finder(work.capture).next().opened
    graph = opened.region.graph.graph
    ones = [node for node in graph.nodes if node.target is torch.ops.aten.gt.Scalar]
    found = meanings_with_ones(masked_calls(graph), ones, opened.dims_of_symbols())
    assert len(masked_calls(graph)) == 1 and list(found.values()) == ([] if expected is None else [expected])
    for tokens in (3, 9):
        said = meaning_of(causal(tokens)[rows_of(tokens)][None, None])
        assert said == expected, (tokens, said)
