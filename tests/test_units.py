from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_advisor import units


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 µs"),
        (412, "0.412 µs"),
        (3_100, "3.10 µs"),
        (9_996, "10.0 µs"),
        (92_400, "92.4 µs"),
        (412_345, "412 µs"),
        (999_400, "999 µs"),
        (999_500, "1.00 ms"),
        (18_420_000, "18.42 ms"),
        (12_345_678_901, "12,345.68 ms"),
        (-40_000, "−40.0 µs"),
    ],
)
def test_duration(ns: int, text: str) -> None:
    assert units.duration(ns) == text


def test_a_difference_always_has_a_sign() -> None:
    assert units.delta(-1_480_000) == "−1.48 ms"
    assert units.delta(3_100) == "+3.10 µs"
    assert units.delta(0) == units.delta(1.0) == units.delta(-0.4) == "±0 µs"
    assert units.delta(7.0) == "+0.00700 µs"
    assert units.delta_interval(-1_530_000, -1_440_000) == "[−1.53, −1.44] ms"
    assert units.delta_interval(-110_000, 30_000) == "[−110, +30.0] µs"
    assert units.duration_interval(18_360_000, 18_480_000) == "[18.36, 18.48] ms"


def test_the_rest() -> None:
    assert units.bandwidth(3_982_000_000_000) == "3,982 GB/s"
    assert units.bandwidth(12_340_000_000) == "12.3 GB/s"
    assert units.speedup(1.187) == "1.19×"
    assert units.speedup(0.97) == "0.970×"
    assert units.speedup(1.0041) == "1.004×"
    assert units.speedup(12.34) == "12.3×"
    assert units.share(0.131) == "13.1%"
    assert units.relative_change(18.42, 15.52) == "−15.7%"
    assert units.relative_change(0, 5) == "–"
    assert units.relative_change(5, 5) == "±0.0%"
    assert units.size(9_810_000_000) == "9.81 GB"
    assert units.size(512) == "512 B"
    assert units.size(999_999) == "1.00 MB"
    assert units.number(1204) == "1,204"
    assert units.error(0.0078) == "7.8e-3"
    assert units.error(math.nan) == "nan"
    assert units.error(math.inf) == "inf"
    assert units.error(0.0) == "0"
    assert units.ratio(0.9999984) == "0.999998"
    assert units.seconds(6.12) == "6.1 s"
    assert units.seconds(125) == "2 min 05 s"
    assert units.milliseconds(18_420_000) == "18.42"
    assert units.milliseconds(90_000) == "0.090"


def test_ascii() -> None:
    assert units.ascii_only("−1.48 ms → 1.19× ≤ 3 µs ✓") == "-1.48 ms -> 1.19x <= 3 us +"
    assert units.ascii_only("模型").isascii()


@given(st.integers(-(10**15), 10**15))
def test_any_duration_has_three_digits_or_more_and_a_unit(ns: int) -> None:
    text = units.duration(ns)
    assert text.endswith((" ms", " µs"))
    assert "e" not in text
    value = float(text[:-3].replace(",", "").replace("−", "-"))
    scale = 1e6 if text.endswith("ms") else 1e3
    assert value == pytest.approx(ns / scale, rel=0.006, abs=1e-12)
    assert not text.startswith(("1000 µs", "1,000 µs"))
