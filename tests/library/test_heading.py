"""The head comment: no text in it can be read as anything but a comment."""

from __future__ import annotations

import ast

import pytest

from fusion_advisor.library.heading import comment


@pytest.mark.parametrize(
    "text", ["for the rows of decoding: the weight", "coding=latin-7", "coding: utf-9", "vim: fileencoding=no"]
)
def test_words_that_would_name_an_encoding_stay_words(text):
    for lines in ([text], ["title", text], ["a title that is wrapped " * 5 + text]):
        source = "".join(f"# {line}\n" for line in comment(lines)) + "value = 1\n"
        assert compile(source.encode(), "kernel.py", "exec", ast.PyCF_ONLY_AST)


def test_words_elsewhere_stay_as_they_are():
    assert comment(["one", "two", "decoding: three"])[2] == "decoding: three"
