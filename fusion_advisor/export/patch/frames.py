"""The calls that an op was made in, outermost first, and the one function that makes all ops of a site."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>\S+)$', re.MULTILINE)


class NotExpressed(Exception):
    """A site that cannot be expressed in the model's source; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: the line that it had come to."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class SharedCall:
    """The innermost call that all ops of a site were made in.

    Attributes:
        outer: the calls around it.
        file: of the function.
        function: its name.
        lines: of the function, that the ops come from.
    """

    outer: tuple[Frame, ...]
    file: str
    function: str
    lines: frozenset[int]

    def line_of(self, frames: Sequence[Frame]) -> int:
        """Return the line of this call that an op comes from; 0 where the op was made elsewhere.

        Args:
            frames: of the op.
        """
        depth = len(self.outer)
        if len(frames) <= depth or tuple(frames[:depth]) != self.outer:
            return 0
        own = frames[depth]
        return own.line if (own.file, own.function) == (self.file, self.function) else 0


def frames_of(node: Node) -> tuple[Frame, ...]:
    """Return the calls of a node of a graph that was captured with its source lines; empty where they are unknown.

    Args:
        node: an op.
    """
    text = str(node.meta.get("stack_trace") or "")
    return tuple(Frame(found["file"], int(found["line"]), found["function"]) for found in _FRAME.finditer(text))


def shared_call(calls: Sequence[tuple[Frame, ...]]) -> SharedCall:
    """Return the innermost function that some ops have in common.

    Args:
        calls: the frames of each op.

    Raises:
        NotExpressed: the ops have no function in common.
    """
    if not all(calls):
        raise NotExpressed("the source lines of its ops are unknown")
    depth = 0
    while all(len(frames) > depth and frames[depth] == calls[0][depth] for frames in calls):
        depth += 1
    owns = {(frames[depth].file, frames[depth].function) for frames in calls if len(frames) > depth}
    if len(owns) != 1 or any(len(frames) <= depth for frames in calls):
        depth -= 1
    if depth < 0:
        raise NotExpressed("its ops come from functions that have no caller in common")
    own = calls[0][depth]
    return SharedCall(calls[0][:depth], own.file, own.function, frozenset(frames[depth].line for frames in calls))
