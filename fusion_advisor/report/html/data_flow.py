"""A fusion's small picture: the site's ops with the tensors between them and their bytes, then one kernel with its own."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import Chain, Fusion, Match, Report
from fusion_advisor.report import shared_rows
from fusion_advisor.report.escape import visible
from fusion_advisor.report.html.charts import LABEL_SIZE, WIDTH
from fusion_advisor.report.html.text_width import fitted, text_width

_BOX, _ROW, _ARROW, _LEFT = 28, 46, 26, 92
_MOST_OPS = 40


@dataclass(frozen=True, slots=True)
class Node:
    """One box."""

    x: float
    y: float
    width: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """From one box to the next."""

    path: str


@dataclass(frozen=True, slots=True)
class DataFlow:
    """The picture."""

    height: int
    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]
    kernel: Node
    before_y: float
    after_y: float
    bytes_before: float
    """Width of the bar of bytes before; the bar after is on the same scale."""
    bytes_after: float
    before: str
    after: str
    before_bar_y: float
    after_bar_y: float
    tensor: str
    """The tensor that passes from op to op."""


def data_flow(report: Report, fusion: Fusion) -> DataFlow | None:
    """Draw one site of a fusion; None where its chain is not in the report."""
    chain = next((chain for chain in report.chains if chain.id == fusion.chain_id and chain.sites), None)
    if chain is None:
        return None
    nodes, arrows = _ops(chain)
    bottom = max(node.y for node in nodes) + _BOX
    moved, floor = chain.moved_bytes / chain.runs, chain.floor_bytes / chain.runs
    before = f"{_launches(chain)}, {units.size(moved)} read and written{_time(fusion, is_after=False)}"
    after = f"1 launch, {units.size(floor)} read and written{_time(fusion, is_after=True)}"
    room = WIDTH - _LEFT - 30 - max(text_width(text, LABEL_SIZE, is_bold=True) for text in (before, after))
    most = max(moved, floor, 1)
    kernel_y = bottom + 54
    operands = _operands(report, chain)
    name = fitted(f"{visible(fusion.kernel, 80)}{operands}", WIDTH - _LEFT - 30, LABEL_SIZE)
    kernel = Node(_LEFT, kernel_y, round(text_width(name, LABEL_SIZE) + 20, 1), name, f"{visible(fusion.kernel, 200)}{operands}")
    return DataFlow(
        height=round(kernel_y + _BOX + 34),
        nodes=nodes,
        arrows=arrows,
        kernel=kernel,
        before_y=nodes[0].y + 18,
        after_y=kernel_y + 18,
        bytes_before=round(max(1, moved / most * room), 1),
        bytes_after=round(max(1, floor / most * room), 1),
        before=before,
        after=after,
        before_bar_y=bottom + 12,
        after_bar_y=kernel_y + _BOX + 12,
        tensor=f"{visible(chain.dtype, 24)} {' × '.join(map(str, chain.shape))}",
    )


def _ops(chain: Chain) -> tuple[tuple[Node, ...], tuple[Arrow, ...]]:
    """Place the ops in rows from left to right, each box as wide as its name."""
    names = [visible(op, 24) for op in chain.ops[:_MOST_OPS]]
    if len(chain.ops) > _MOST_OPS:
        names.append(f"and {len(chain.ops) - _MOST_OPS} more")
    nodes: list[Node] = []
    arrows: list[Arrow] = []
    x, y = float(_LEFT), 6.0
    for name in names:
        width = round(text_width(name, LABEL_SIZE) + 18, 1)
        if nodes and x + width > WIDTH - 6:
            x, y = float(_LEFT), y + _ROW
        elif nodes:
            arrows.append(Arrow(f"M{round(x - _ARROW, 1)} {y + _BOX / 2}H{round(x - 4, 1)}"))
        nodes.append(Node(round(x, 1), y, width, name, name))
        x += width + _ARROW
    return tuple(nodes), tuple(arrows)


def _launches(chain: Chain) -> str:
    count = chain.launches / max(chain.runs, 1)
    return "1 launch" if count == 1 else f"{count:g} launches" if count == int(count) else f"{count:.1f} launches"


def _operands(report: Report, chain: Chain) -> str:
    answer = shared_rows.answers(report).get(chain.id)
    names = answer.operands if isinstance(answer, Match) else ()
    return f" ({', '.join(visible(name, 24) for name in names)})" if names else ""


def _time(fusion: Fusion, *, is_after: bool) -> str:
    timing = fusion.chain_after if is_after else fusion.chain_before
    return f", {units.duration(timing.median_ns)}" if timing is not None else ""
