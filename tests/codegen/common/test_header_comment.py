"""The comment at the top of a rendered kernel cannot be left, whatever a manifest or a model says."""

from __future__ import annotations

import io
import tokenize

import pytest
import torch
from torch.nn import functional

from fusion_advisor.codegen.common.arguments import schedule
from fusion_advisor.codegen.common.header_comment import comment, heading, moved_sentence
from fusion_advisor.codegen.common.interface import Header
from tests.kernel_cases.lowered import lower_function


@pytest.mark.parametrize("text", ["for decoding: the weight", "coding=latin-1", "a\nimport os", "*/ int x; /\\", "naïve \x07"])
def test_a_comment_stays_a_comment(text):
    lines = comment([text])
    source = "".join(f"# {line}\n" for line in lines).encode()
    assert tokenize.detect_encoding(io.BytesIO(source).readline)[0] == "utf-8"
    kinds = {token.type for token in tokenize.tokenize(io.BytesIO(source).readline)}
    assert kinds <= {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
    assert all(line.isascii() and line.isprintable() for line in lines)


def moved(function, *inputs):
    return moved_sentence([schedule(lower_function(function, *inputs)[0].program, flatten_rows=False)])


def test_what_is_shared_by_rows_is_said():
    x, cos = torch.zeros(2, 5, 3, 8).transpose(1, 2), torch.zeros(5, 8)
    assert (
        moved(lambda x, cos: x * cos, x, cos[None, None])
        == "x 4 B/element; x2 4 B/element, the same for every i0 and row; out 4 B/element"
    )
    assert moved(lambda x, bias: x + bias, torch.zeros(4, 6), torch.zeros(6)) == "x 4 B/element, x2 4 B/column, out 4 B/element"


def test_each_row_reads_its_own_row_of_a_table():
    inputs = torch.zeros(4, dtype=torch.int64), torch.zeros(10, 6), torch.zeros(6)
    found = moved(lambda ids, table, bias: functional.embedding(ids, table) + bias, *inputs)
    assert found == "x 8 B/row, x2 4 B/element, x3 4 B/column, out 4 B/element"


def test_each_channel_of_a_group_has_a_weight():
    inputs = torch.zeros(2, 6, 4, 4), torch.zeros(6), torch.zeros(6)
    found = moved(lambda x, weight, bias: functional.group_norm(x, 3, weight, bias), *inputs)
    assert "x2 4 B/part of a row, the same for every i0" in found


def test_a_model_that_rounds_before_the_store_is_said_to():
    def norm(x, weight):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)

    def maths(function, *inputs):
        plan = schedule(lower_function(function, *inputs)[0].program, flatten_rows=False)
        lines = heading([plan], Header(title="case", summary="a test", origin="a test"), fast_math=False)
        return next(line for line in lines if line.startswith("Maths"))

    inputs = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    assert maths(norm, *inputs) == "Maths in float32, rounded at the store, and before it where the model rounds."
    assert maths(lambda x, weight: x * weight, *inputs) == "Maths in float32, rounded once, at the store."
