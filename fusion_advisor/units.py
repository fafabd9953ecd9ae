"""The only place that turns a number into text for people.

Times show milliseconds with two decimals from 1 ms up and three significant digits of microseconds below; a difference always
carries its sign; a share has one decimal; a speedup three significant digits. The signs are the typographic ones (``−``, ``×``,
``µ``); a terminal that cannot show them goes through :func:`ascii_only`.
"""

from __future__ import annotations

import math

_NS_PER_US = 1_000
_NS_PER_MS = 1_000_000
_MS_FROM_NS = 999_500
"""From here microseconds would round to 1000."""

_ASCII = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "—": "-",
        "×": "x",
        "µ": "u",
        "≤": "<=",
        "≥": ">=",
        "±": "+/-",
        "→": "->",
        "…": "..",
        "·": "-",
        "✓": "+",
        "✗": "x",
        "∞": "inf",
        "²": "2",
        "‖": "|",
    }
)


def duration(ns: float) -> str:
    """``18.42 ms``, ``412 µs``, ``3.10 µs``."""
    if abs(ns) >= _MS_FROM_NS:
        return f"{ns / _NS_PER_MS:,.2f} ms".replace("-", "−")
    return f"{_significant(ns / _NS_PER_US)} µs".replace("-", "−")


def milliseconds(ns: float) -> str:
    """``18.42`` under a heading that says ms, with a third decimal below 0.1."""
    value = ns / _NS_PER_MS
    return f"{value:,.2f}" if abs(value) >= 0.0995 or value == 0 else f"{value:.3f}"


_CLOCK_NS = 2.0


def delta(ns: float) -> str:
    """``−1.48 ms``, ``+3.10 µs``, ``±0 µs``: no clock of ours tells a nanosecond."""
    return "±0 µs" if abs(ns) < _CLOCK_NS else ("−" if ns < 0 else "+") + duration(abs(ns))


def delta_interval(low_ns: float, high_ns: float) -> str:
    """``[−1.53, −1.44] ms``: both ends in one unit."""
    in_ms = max(abs(low_ns), abs(high_ns)) >= _MS_FROM_NS
    scale, unit = (_NS_PER_MS, "ms") if in_ms else (_NS_PER_US, "µs")
    return f"[{_signed(low_ns / scale, in_ms)}, {_signed(high_ns / scale, in_ms)}] {unit}"


def duration_interval(low_ns: float, high_ns: float) -> str:
    """``[18.36, 18.48] ms``: both ends in one unit."""
    in_ms = max(abs(low_ns), abs(high_ns)) >= _MS_FROM_NS
    scale, unit = (_NS_PER_MS, "ms") if in_ms else (_NS_PER_US, "µs")
    ends = [f"{end / scale:,.2f}" if in_ms else _significant(end / scale) for end in (low_ns, high_ns)]
    return f"[{ends[0]}, {ends[1]}] {unit}"


def bandwidth(bytes_per_s: float) -> str:
    """``3,982 GB/s``; decimal gigabytes, as datasheets count."""
    value = bytes_per_s / 1e9
    return f"{value:,.0f} GB/s" if value >= 99.95 else f"{_significant(value)} GB/s"


def speedup(ratio: float) -> str:
    """``1.19×``: before divided by after; near 1, where the verdict turns, ``1.004×``."""
    return f"{ratio:.3f}×" if 0.95 <= ratio <= 1.05 else f"{_significant(ratio)}×"


def speedup_interval(low: float, high: float) -> str:
    """``[1.18×, 1.20×]``."""
    return f"[{speedup(low)}, {speedup(high)}]"


def share(fraction: float) -> str:
    """``13.1%``."""
    return f"{fraction * 100:.1f}%".replace("-", "−")


def relative_change(before: float, after: float) -> str:
    """``−15.7%``; a dash where there is nothing to compare with."""
    if before <= 0:
        return "–"
    text = f"{(after - before) / before * 100:+.1f}%"
    return "±0.0%" if text in ("+0.0%", "-0.0%") else text.replace("-", "−")


def size(count: float) -> str:
    """``9.81 GB``, ``12.6 MB``, ``512 B``; decimal, as bandwidths are."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= scale * 0.9995:
            return f"{_significant(count / scale)} {unit}"
    return f"{count:.0f} B"


def number(value: int) -> str:
    """``1,204``."""
    return f"{value:,}"


def error(value: float) -> str:
    """``7.8e-3`` for an error, ``0``, ``nan`` or ``inf`` as they are."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return repr(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def ratio(value: float) -> str:
    """``0.999998``: a cosine or an agreement that matters in its last digits."""
    return f"{value:.6f}".replace("-", "−") if math.isfinite(value) else repr(value)


def seconds(value: float) -> str:
    """``6.1 s``, ``2 min 05 s``."""
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole // 60} min {whole % 60:02d} s"


def ascii_only(text: str) -> str:
    """Return text with the typographic signs spelled in ASCII, and anything else foreign as ``?``."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def _signed(value: float, is_fixed: bool) -> str:
    magnitude = f"{abs(value):,.2f}" if is_fixed else _significant(abs(value))
    return magnitude if value == 0 else ("−" if value < 0 else "+") + magnitude


def _significant(value: float) -> str:
    """Three significant digits, never in exponent form, never fewer than the digits before the point."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "∞" if value > 0 else repr(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, digits)
    if rounded != 0 and math.floor(math.log10(abs(rounded))) > math.floor(math.log10(abs(value))):
        digits = max(0, digits - 1)  # 9.996 is 10.0, not 10.00
    return f"{value:,.{digits}f}"
