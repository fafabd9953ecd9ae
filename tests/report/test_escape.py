from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from fusion_advisor.report.escape import plural, shortened, visible, visible_lines


@given(st.text())
def test_nothing_unseen_remains(text: str) -> None:
    shown = visible(text)
    assert len(text) > 400 or all(unicodedata.category(char)[0] != "C" for char in shown)
    assert not {"\n", "\r", "\x1b", "\u202e", "\u2028", "\u2066"} & set(shown)


def test_long_text_is_cut_with_a_sign() -> None:
    assert visible("x" * 500, 10) == "x" * 9 + "…"
    assert visible("\x1b[0m", 10) == "\\x1b[0m"
    lines, left = visible_lines("a\nb\tc\nd\n", 2)
    assert lines == ("a", "b   c")
    assert left == 1


def test_plural() -> None:
    assert plural(1, "site") == "1 site"
    assert plural(1204, "launch", "launches") == "1,204 launches"


def test_a_long_name_keeps_both_its_ends() -> None:
    assert shortened("F4 bias_gelu", 12) == "F4 bias_gelu"
    assert shortened("0123456789", 9) == "0123…6789"
    assert shortened("0123456789", 8) == "0123…789"
    assert shortened("0123456789", 1) == "…"
