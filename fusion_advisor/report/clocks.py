"""The device's clocks while steps were timed, in words: values, throttling, differences between steps."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor import units
from fusion_advisor.records import OURS, Clocks, Report
from fusion_advisor.report import baseline_rows as others
from fusion_advisor.report.escape import plural, visible

MOST_DIFFERENCE = 0.03
"""Share by which two sides' SM clocks may differ before their times are doubted."""

_THROTTLES = {
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware slowdown",
    "sw_thermal_slowdown": "temperature (driver)",
    "hw_thermal_slowdown": "temperature (hardware)",
    "hw_power_brake_slowdown": "external power brake",
}
"""Reasons for a clock below the device's maximum: NVML's name and ours."""


def rows(report: Report) -> list[tuple[bool, str]]:
    """Sentences for data quality: (whether it weakens the figures, sentence)."""
    found = [(name, timing.clocks) for name, timing in others.timed(report)]
    first = found[0][1] if found else None
    if report.environment.device_kind == "cpu":
        return [(False, "Clocks: none are read on a CPU.")]
    if first is None:
        return [(False, "Clocks: this report holds none, so nothing tells whether the device was throttled.")]
    if not first.samples:
        return [(False, f"Clocks: not read ({visible(first.missing, 200)}), so nothing tells whether the device was throttled.")]
    seen = [(name, clocks) for name, clocks in found if clocks is not None and clocks.samples]
    said = [(False, f"Clocks between timed runs: {'; '.join(f'{name} {state(clocks)}' for name, clocks in seen[:2])}.")]
    return said + [(True, sentence) for sentence in (*_throttled(seen), *_different(seen))]


def environment_rows(report: Report) -> list[tuple[str, str]]:
    """Clocks and power limit as (name, value), by side."""
    seen = [
        (name, timing.clocks) for name, timing in others.timed(report)[:2] if timing.clocks is not None and timing.clocks.samples
    ]
    if not seen:
        sentence = rows(report)[0][1]
        return [("Clocks while timed", sentence.removeprefix("Clocks: ").rstrip("."))]
    return [(f"Clocks while {name} was timed", state(clocks)) for name, clocks in seen]


def state(clocks: Clocks) -> str:
    """One side's samples: ranges of clocks, temperature and power, and how many there are."""
    every = clocks.samples
    readings = (
        ("SM ", _range([one.sm_mhz for one in every]), " MHz"),
        ("memory ", _range([one.memory_mhz for one in every]), " MHz"),
        ("", _range([one.temperature_c for one in every]), " °C"),
        ("", _range([one.power_mw for one in every], 1000), " W"),
        ("power limit ", _range([one.power_limit_mw for one in every], 1000), " W"),
    )
    words = ", ".join(f"{name}{values}{unit}" for name, values, unit in readings if values)
    return f"{words or 'NVML returned nothing'} ({plural(len(every), 'reading')})"


def difference(one_name: str, one: Clocks | None, other_name: str, other: Clocks | None) -> str:
    """Say that two sides' SM clocks differ by more than :data:`MOST_DIFFERENCE`; empty where not, or where one is unknown."""
    a, b = (clocks.sm_mhz if clocks is not None else None for clocks in (one, other))
    if not a or not b or abs(a - b) <= MOST_DIFFERENCE * max(a, b):
        return ""
    share = units.share(abs(a - b) / max(a, b))
    return (
        f"The SM clock differed by {share} between {one_name} ({a:,} MHz) and {other_name} ({b:,} MHz): this "
        "explains part of the difference in time."
    )


def _throttled(seen: Sequence[tuple[str, Clocks]]) -> list[str]:
    sentences = []
    for reason, words in _THROTTLES.items():
        counts = [
            (name, sum(reason in (one.reasons or ()) for one in clocks.samples), len(clocks.samples)) for name, clocks in seen
        ]
        hit = [(name, count, total) for name, count, total in counts if count]
        if not hit:
            continue
        if len(hit) == len(counts) > 1:
            least, most = min(count for _, count, _ in hit), max(count for _, count, _ in hit)
            of = max(total for _, _, total in hit)
            span = f"{least}" if least == most else f"{least} to {most}"
            where = f"every way to run the step, in {span} of {plural(of, 'reading')}"
        else:
            where = ", ".join(f"{name} in {count} of {plural(total, 'reading')}" for name, count, total in hit)
        sentences.append(f"The clock was throttled while steps were timed, by its {words}: {where}.")
    return sentences


def _different(seen: Sequence[tuple[str, Clocks]]) -> list[str]:
    """Compare each side with ours, or with eager where nothing was applied; one sentence names all."""
    base_name, base = next(((name, clocks) for name, clocks in seen if name == OURS), seen[0])
    others = [(name, clocks, text) for name, clocks in seen if (text := difference(base_name, base, name, clocks))]
    if len(others) < 2:
        return [text for _, _, text in others]
    differing = ", ".join(f"{name} {units.relative_change(base.sm_mhz or 0, clocks.sm_mhz or 0)}" for name, clocks, _ in others)
    return [f"The SM clock differed from {base_name} ({base.sm_mhz:,} MHz), which explains part of the times: {differing}."]


def _range(values: Sequence[int | None], scale: int = 1) -> str:
    """Lowest to highest; empty where none is known."""
    known = [round(value / scale) for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
