"""Reducers for tests of the engines, in a module that imports no torch: each worker process imports it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.errors import CannotWrite
from fusion_advisor.fleet.task import Reduced, Task


def mark(task: Task) -> Reduced:
    """Leave a file for each trace, and count how often it was read."""
    name = task.source.url.replace("/", "_")
    with (task.parts / name).open("a") as file:
        file.write("x")
    return Reduced(source=task.source, digest=name)


@dataclass(frozen=True)
class KillsWorker:
    """Its worker dies on one trace, as often as it may."""

    url: str
    marks: Path
    times: int

    def __call__(self, task: Task) -> Reduced:
        """Die or mark."""
        if task.source.url == self.url and (died := len(list(self.marks.iterdir()))) < self.times:
            (self.marks / str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return mark(task)


@dataclass(frozen=True)
class FillsDisk:
    """The disk is full after some traces."""

    most: int

    def __call__(self, task: Task) -> Reduced:
        """Mark or refuse."""
        if len(list(task.parts.iterdir())) >= self.most:
            raise CannotWrite(path=task.parts, detail="No space left on device")
        return mark(task)
