"""Makes a way to run the step ready on all ranks of a run, or on none.

A split model's step waits in its collectives for the other ranks. A rank that cannot compile it must not leave them there. So
each rank tells the others when it has made the call and when it has compiled a graph, and goes on once all have done the same.
What fails on one rank is given up on all, with that rank's reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fusion_advisor.fuse.baselines.liger import NotAvailable
from fusion_advisor.timing.deadline import deadline

Exchange = Callable[[str, Any], Sequence[Any]]
"""Given what is exchanged and this rank's value, returns the values of all ranks."""


class Attempt:
    """One way to run the step, while it is made ready.

    Attributes:
        problem: why it was given up, the same on all ranks; empty as long as it was not.
        is_shared: whether other ranks make it ready too.

    Args:
        name: of the way, as in the table.
        exchange: with the other ranks; None: there are none.
        limit_s: seconds that making the call, and compiling a graph, may take on ranks; None: they are waited for.
    """

    def __init__(self, name: str, exchange: Exchange | None, limit_s: float | None = None) -> None:
        self.problem = ""
        self.is_shared = exchange is not None
        self._name = name
        self._exchange = exchange
        self._limit_s = limit_s
        self._lost: BaseException | None = None

    def passed(self, stage: str) -> None:
        """Go on where all ranks have come to a stage.

        Args:
            stage: what this rank has done.

        Raises:
            NotAvailable: another rank has failed, or has come to another stage.
        """
        self._tell(stage, "")
        if self.problem:
            raise NotAvailable(self.problem)

    def failed(self, reason: str) -> str:
        """Give it up on all ranks, unless that was agreed already; returns why.

        Args:
            reason: of this rank.

        Raises:
            RankFailed: another rank failed meanwhile, and the reason follows from that.
        """
        if self._lost is not None:
            raise self._lost
        if not self.problem:
            self._tell("failed", reason)
        return self.problem or reason

    def limited(self) -> AbstractContextManager[None]:
        """Leave what is inside after the limit, on ranks; it holds no collective, so that no other rank is left in one.

        Raises:
            TimeIsUp: from within.
        """
        return deadline(self._limit_s) if self.is_shared and self._limit_s is not None else nullcontext()

    def compiling(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backend of torch.compile that hands a graph out when all ranks have compiled theirs.

        Args:
            compiler: of this rank: takes a graph and example inputs, and returns a callable.
        """

        def backend(graph: Any, inputs: Any) -> Any:
            with self.limited():
                compiled = compiler(graph, inputs)
            self.passed("compiled a graph")
            return compiled

        return backend

    def _tell(self, stage: str, reason: str) -> None:
        if self._exchange is None:
            return
        try:
            told = self._exchange(f"making {self._name} ready", (stage, reason))
        except BaseException as error:
            self._lost = error
            raise
        stages, reasons = [one for one, _ in told], [why for _, why in told]
        if all(reasons) and len(set(reasons)) == 1:
            self.problem = reasons[0]
        elif any(reasons):
            self.problem = next(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)
        elif len(set(stages)) > 1:
            self.problem = "the ranks do not compile the same graphs"
