"""Compiles kernels in other processes before they are asked for, so that a run waits for none of them.

A compiler takes 0.2 to 0.9 s for a kernel and one core. A candidate has up to six launch shapes, a step twenty candidates: built
one after another they were 59 of 76 s of a PoolFormer's trials on an H200 and 17 of 24 s of an EfficientNet's.

The processes leave machine code in the compilers' caches on disk; whoever binds a kernel finds it there. A kernel that cannot be
compiled is built once more where it is used, and fails there with its reason. Figures: ``docs/measurements/compile_ahead.md``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from types import TracebackType

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.gemm.problem import GemvConfig, GemvProblem
from fusion_advisor.ir.program import Program

_MOST_PROCESSES = 16
_LIMIT_S = 60.0
"""A compiler that takes longer hangs; the kernel is then built where it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel with one launch shape.

    Attributes:
        program: what it computes.
        header: as it is rendered.
        backend: its language.
        tuning: its launch shape.
        fast_math: whether it approximates.
        elsewhere: the sizes that its source is to serve as well: it is rendered for the first of these with the others beside it,
            and compiled for ``program``. Empty: it is rendered for ``program``.
    """

    program: Program
    header: Header
    backend: str
    tuning: Tuning
    fast_math: bool
    elsewhere: tuple[Program, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearJob:
    """A kernel of a linear layer in CUDA C++.

    Attributes:
        problem: what it computes.
        header: as it is rendered.
        config: its launch parameters.
    """

    problem: GemvProblem
    header: Header
    config: GemvConfig


class BuildAhead:
    """Processes that compile for one GPU; a context that ends them.

    They take seconds to load their compilers. So a command starts them before it loads torch, and names the GPU later.

    Args:
        arch: compute capability, such as 90; 0 where it is not known yet: :meth:`serve` is called before anything is submitted.
        processes: that compile at a time; None: one for each core but one.
        warn: gets a sentence if they end early; kernels are then built one by one.
    """

    def __init__(self, arch: int = 0, *, processes: int | None = None, warn: Callable[[str], None] = lambda _: None) -> None:
        count = processes or max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))
        self._ours, theirs = Pipe()
        self._arch = arch
        self._warn = warn
        self._done: dict[Job | LinearJob, threading.Event] = {}
        self._numbers: dict[int, Job | LinearJob] = {}
        self._is_over = False
        command = [sys.executable, "-m", "fusion_advisor.autotune.build_worker", str(theirs.fileno()), str(count)]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._listener = threading.Thread(target=self._listen, args=(self._ours,), name="fusion-advisor-builds", daemon=True)
        self._listener.start()

    @property
    def is_over(self) -> bool:
        """Whether nothing is compiled any more."""
        return self._is_over

    def __enter__(self) -> BuildAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def serve(self, arch: int, warn: Callable[[str], None]) -> None:
        """Say what is compiled for; processes that have ended by now are said at once.

        Args:
            arch: as for the class.
            warn: as for the class.
        """
        self._arch, self._warn = arch, warn
        if self._is_over:
            self._say_end()

    def submit(self, jobs: Iterable[Job | LinearJob]) -> None:
        """Ask for kernels, in this order; one that was asked for before is left out.

        Args:
            jobs: the kernels.
        """
        for job in jobs:
            if job in self._done or self._is_over:
                continue
            self._done[job] = threading.Event()
            number = len(self._numbers)
            self._numbers[number] = job
            try:
                self._ours.send((number, self._arch, job))
            except OSError:  # the listener sees the same end, and says it
                return

    def wait(self, jobs: Iterable[Job | LinearJob]) -> None:
        """Return when these kernels are compiled or cannot be.

        Args:
            jobs: that were submitted; others are not waited for.
        """
        for job in jobs:
            if (event := self._done.get(job)) is not None and not self._is_over:
                event.wait(_LIMIT_S)

    def close(self) -> None:
        """End the processes, whatever they are at; a second time does nothing."""
        self._is_over = True
        if self._process.returncode is not None:  # the number may be another process's by now
            return
        with contextlib.suppress(ProcessLookupError):  # they have ended by themselves
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()  # it reads until the other end is gone
        self._ours.close()

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._done[self._numbers[connection.recv()]].set()
        except (EOFError, OSError):  # the other end is gone
            if not self._is_over:
                self._is_over = True
                self._say_end()
            for event in list(self._done.values()):
                event.set()

    def _say_end(self) -> None:
        self._warn("the processes that compile kernels ahead have ended: kernels are built one by one")
