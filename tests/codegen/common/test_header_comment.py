"""The comment at the top of a rendered kernel cannot be left, whatever a manifest or a model says."""

from __future__ import annotations

import io
import tokenize

import pytest

from fusion_advisor.codegen.common.header_comment import comment


@pytest.mark.parametrize("text", ["for decoding: the weight", "coding=latin-1", "a\nimport os", "*/ int x; /\\", "naïve \x07"])
def test_a_comment_stays_a_comment(text):
    lines = comment([text])
    source = "".join(f"# {line}\n" for line in lines).encode()
    assert tokenize.detect_encoding(io.BytesIO(source).readline)[0] == "utf-8"
    kinds = {token.type for token in tokenize.tokenize(io.BytesIO(source).readline)}
    assert kinds <= {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
    assert all(line.isascii() and line.isprintable() for line in lines)
