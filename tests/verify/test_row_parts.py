"""Very large chains are compared part by part: the same ops on some rows, every row once, and only where rows are independent."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion_advisor.verify import row_parts, special_inputs
from fusion_advisor.verify.check_chain import check_chain, random_like
from fusion_advisor.verify.subgraph_oracle import OriginalChain
from tests.tiny import region_of

_ATEN = torch.ops.aten
BATCH, LENGTH, WORDS = 6, 5, 48


def chain_of(function, *inputs, large=256):
    """The ops of a function as a chain that is very large from a few hundred elements on."""
    _, ops, index_of = region_of(function, *inputs)
    at = {index: node for node, index in index_of.items()}
    members = [op.index for op in ops if op.role == "op"]
    outer = tuple((at[op.index], op.index, op.outputs[0], op.outputs[0]) for op in ops if op.role == "input")
    return OriginalChain(
        nodes=tuple(at[m] for m in members), outer=outer, outputs=(at[members[-1]],),
        large=large, most=2 * LENGTH * WORDS,
    )  # fmt: skip


def gradient_of_loss(logits, labels, count, of_loss):
    """As AOTAutograd writes it: fp32 inside, rows of a batch viewed as rows of a matrix, and back."""
    logs = _ATEN._log_softmax(logits.to(torch.float32).view(-1, WORDS), 1, False)
    of_logs = _ATEN.nll_loss_backward(of_loss, logs, labels, None, 1, -100, count)
    of_logits = _ATEN._log_softmax_backward_data(of_logs, logs, 1, torch.float32)
    return of_logits.view(BATCH, LENGTH, WORDS).to(torch.bfloat16)


def loss_inputs():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, WORDS, (BATCH * LENGTH,), generator=generator)
    labels[::4] = -100
    logits = torch.randn(BATCH, LENGTH, WORDS, generator=generator).bfloat16()
    return logits, labels, torch.tensor(22.0), torch.tensor(1.0)


def joined(chain, inputs, **how):
    return torch.cat([chain.run(inputs, part=part, **how)[0] for part in chain.parts()])


@pytest.mark.parametrize("as_float64", [False, True])
def test_parts_together_are_the_whole_chain(as_float64):
    inputs = loss_inputs()
    chain = chain_of(gradient_of_loss, *inputs)
    parts = chain.parts()
    assert [(part.first, part.last) for part in parts] == [(0, 2), (2, 4), (4, 6)] and parts[0].blocks == BATCH
    assert torch.equal(joined(chain, inputs, as_float64=as_float64), chain.run(inputs, as_float64=as_float64)[0])


def test_a_chain_that_is_not_very_large_is_compared_at_once():
    assert chain_of(gradient_of_loss, *loss_inputs(), large=row_parts.LARGE).parts() == ()


KEPT_APART = {
    "bias as long as there are rows": lambda x: x + torch.ones(WORDS)[None] * x[:, :1],
    "softmax": lambda x: torch.softmax(x, -1),
    "sum of a row": lambda x: x * x.sum(-1, keepdim=True),
    "pad": lambda x: _ATEN.constant_pad_nd(x * 2, [0, 3], 0.0),
    "columns": lambda x: x[:, 3:] + 1,
    "expand": lambda x: x.amax(1).unsqueeze(1).expand(WORDS, 7) + 1,
}
MIXED = {
    "softmax of columns": lambda x: torch.softmax(x, 0),
    "sum of columns": lambda x: x - x.sum(0, keepdim=True),
    "sum of all": lambda x: x / x.sum(),
    "turned": lambda x: x + x.t(),
    "rows left out": lambda x: x[3:] * 2,
    "rows added": lambda x: _ATEN.constant_pad_nd(x * 2, [0, 0, 0, 3], 0.0),
    "turned about": lambda x: x + x.flip(0),
    "added up": lambda x: x.cumsum(0) * 2,
    "drawn": lambda x: functional.dropout(x, 0.5) * 2,
    "rows numbered": lambda x: x * torch.arange(WORDS)[:, None],
    "one row for all": lambda x: x - x[0],
}


@pytest.mark.parametrize("name", KEPT_APART)
def test_ops_that_keep_rows_apart(name):
    x = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1))
    chain = chain_of(KEPT_APART[name], x)
    if name != "bias as long as there are rows":  # the constant is no input of the chain
        assert len(chain.parts()) > 1
    for part in chain.parts():
        assert torch.equal(part.cut(chain.outputs[0], chain.run([x])[0]), chain.run([x], part=part)[0])


@pytest.mark.parametrize("name", MIXED)
def test_ops_that_mix_rows_are_compared_at_once(name):
    assert chain_of(MIXED[name], torch.randn(WORDS, WORDS)).parts() == ()


def test_a_bias_as_long_as_there_are_rows_is_no_column_of_rows():
    x, bias = torch.randn(WORDS, WORDS), torch.randn(WORDS)
    chain = chain_of(lambda x, bias: x * 2 + bias, x, bias)
    assert len(chain.parts()) > 1 and torch.equal(joined(chain, [x, bias]), chain.run([x, bias])[0])
    assert chain_of(lambda x, bias: x * bias + bias[:, None], x, bias).parts() == ()  # both at once


def test_a_large_root_is_drawn_and_filled_in_parts():
    root = torch.empty(40, WORDS, dtype=torch.bfloat16)
    (drawn,), ((_, (rows,)), *_) = random_like([root], 3, 1.0), special_inputs.special_inputs([root], 3, is_in_place=False)
    (_, (parts,)), *_ = special_inputs.special_inputs([root], 3, is_in_place=False, most=16 * WORDS)
    assert drawn.isfinite().all() and 0.8 < drawn.float().std() < 1.2
    kinds = [(one.isnan().sum(1), one.isinf().sum(1), (one == 0).sum(1)) for one in (rows, parts)]
    assert all(torch.equal(one, other) for one, other in zip(*kinds, strict=True))


def kernel_of(chain, fault=None):
    def call(*roots):
        (found,) = chain.run(roots, as_float64=True)
        found = found.to(torch.bfloat16)
        if fault is not None:
            fault(found.view(-1, WORDS))
        return found

    return call


def test_a_right_kernel_passes_and_every_element_is_compared():
    inputs = loss_inputs()
    chain = chain_of(gradient_of_loss, *inputs)
    assert len(chain.parts()) == 3
    found = check_chain(chain, kernel_of(chain), inputs, seed=0)
    assert found.is_passed, found
    assert found.elements == 5 * BATCH * LENGTH * WORDS  # in each of the five calls


FAULTS = {
    "last row missing": lambda rows: rows[-1].zero_(),
    "last element": lambda rows: rows[-1, -1:].add_(0.02),
    "last rows of another": lambda rows: rows[-4:].copy_(rows[:4].clone()),
    "NaN in the last row": lambda rows: rows[-1, 3:4].fill_(float("nan")),
    "first row of the second part": lambda rows: rows[2 * LENGTH + 1].mul_(1.1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_last_rows_is_caught(fault):
    inputs = loss_inputs()
    chain = chain_of(gradient_of_loss, *inputs)
    assert not check_chain(chain, kernel_of(chain, FAULTS[fault]), inputs, seed=0).is_passed
