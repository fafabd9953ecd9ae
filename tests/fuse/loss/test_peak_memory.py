"""A step's peak by the lifetimes of its tensors: what a loss's kernel never writes does not count."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.loss.peak_memory import step_peak_bytes
from fusion_advisor.fuse.train.passes.kept_values import keep_less
from tests.runtime.torch_internals.test_autograd_graphs import halves_of

ROWS, WIDTH, WORDS = 64, 4, 512


@pytest.mark.parametrize("returns_log_softmax", [False, True])
def test_a_16_bit_loss_peaks_at_its_logits_and_their_gradient(returns_log_softmax):
    torch.manual_seed(0)
    rows, weight = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((ROWS, WIDTH), (WIDTH, WORDS)))

    def loss(rows, weight, labels):
        logs = torch.log_softmax((rows @ weight).float(), -1)
        found = torch.nn.functional.nll_loss(logs, labels)
        return (found, logs) if returns_log_softmax else found

    _, (forward, backward) = halves_of(loss, rows, weight, torch.arange(ROWS), prepare=keep_less)
    logits_bytes, rest = 2 * ROWS * WORDS, 4 * (ROWS + WORDS) * (WIDTH + 8)
    peak = step_peak_bytes(forward, backward)
    if returns_log_softmax:  # it is written, and so is what its own gradient adds to the loss's
        assert peak >= 3 * 2 * logits_bytes
    else:
        assert 2 * logits_bytes <= peak <= 2 * logits_bytes + rest
