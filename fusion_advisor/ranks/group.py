"""The ranks of a run: how they find each other, agree on values, and end together.

What ranks tell each other goes through the process group's store. Unlike a collective, waiting for a key there can be broken off
in time, and mixes with no collective of the model.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fusion_advisor.errors import AdvisorError, NotUnderTorchrun, RankFailed, RanksDiffer
from fusion_advisor.ranks.watchdog import DEAD_S, STUCK_S, Failure, Watchdog

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NOTHING = "nothing"
_MOST_SHOWN = 200
"""Characters of a text that ranks exchange, and that a message shows."""
_ABANDONED_S = 2.0
"""Less than the watchdog leaves a main thread to end by itself."""
_LEFT_S = 10.0
TAKING_APART = "fusion-advisor takes ranks apart"
"""Name of a thread; a process that still has it when all is done ends without it."""
_SLICE = timedelta(seconds=1)
"""Of waiting, between two looks at what the watchdog found."""
_COLLECTIVE = timedelta(seconds=25)
"""A collective of the model that takes longer has lost a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank's end of the run.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        local_rank: of this process on its machine; the number of its GPU.
        store: for what ranks tell each other.
        watchdog: watches the other ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    store: Any
    watchdog: Watchdog
    _told: list[str]
    _held: list[Callable[[], object]] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the report."""
        return self.rank == 0

    @property
    def group_name(self) -> str:
        """Name of the model's process group, which its collectives take."""
        group: Any = dist.group.WORLD
        return str(group.group_name)

    def gather(self, what: str, value: object, *, patience_s: float = STUCK_S) -> list[Any]:
        """Return a value of each rank, on all ranks.

        Args:
            what: is exchanged; the same on all ranks at this place.
            value: this rank's own.
            patience_s: seconds after which a rank that others wait for here, and that comes to no new place, hangs.

        Raises:
            RankFailed: a rank failed, hung or died meanwhile.
            RanksDiffer: another rank exchanges something else, so the ranks no longer do the same.
        """
        number = len(self._told)
        own = f"told/{number}/{self.rank}"
        self.store.set(own, pickle.dumps((what, value)))
        self._told.append(own)
        self.watchdog.reached(what)
        found = []
        for rank in range(self.world_size):
            key = f"told/{number}/{rank}"
            theirs, their_value = (what, value) if rank == self.rank else pickle.loads(self._wait_for(key, patience_s))
            if theirs != what:
                raise RanksDiffer(rank=rank, what="what it does", detail=f"`{theirs}` while rank {self.rank} does `{what}`")
            found.append(their_value)
        if number:  # whoever told this has read all that was told before
            self.store.delete_key(self._told[number - 1])
        return found

    def first(self, what: str, value: Any) -> Any:
        """Return rank 0's value on all ranks; arguments and errors as for :meth:`gather`."""
        return self.gather(what, value if self.is_first else None)[0]

    def agree(self, what: str, value: str) -> None:
        """Go on only where a text is equal on all ranks.

        Args:
            what: the text describes, for the message.
            value: is compared whole; a digest of it is exchanged where it is long.

        Raises:
            RanksDiffer: with the first rank that has another text.
        """
        self.agree_entries(what, {"": value})

    def agree_entries(self, what: str, entries: Mapping[str, str]) -> None:
        """Go on only where all ranks have equal texts under equal names.

        Args:
            what: the entries make up, for the message.
            entries: by name; long ones are exchanged as digests.

        Raises:
            RanksDiffer: with the first entry in which a rank differs from rank 0.
        """
        told = self.gather(what, {name: _short(text) for name, text in entries.items()})
        first = told[0]
        for rank, theirs in enumerate(told):
            for name in (*first, *(name for name in theirs if name not in first)):
                found, expected = theirs.get(name, _NOTHING), first.get(name, _NOTHING)
                if found != expected:
                    where = f"{name}: " if name else ""
                    raise RanksDiffer(rank=rank, what=what, detail=f"{where}`{found}`, not `{expected}`")

    def _wait_for(self, key: str, patience_s: float) -> bytes:
        self.watchdog.waits(is_waiting=True, patience_s=patience_s)
        try:
            while True:
                with contextlib.suppress(dist.DistStoreError):
                    found: bytes = self.store.get(key)
                    return found
                if self.watchdog.failure is not None:
                    raise failed(self.watchdog.failure)
        finally:
            self.watchdog.waits(is_waiting=False)

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Tell the other ranks of an error of this one, and turn a broken collective into what broke it.

        Raises:
            RankFailed: another rank failed, and this rank's error is a consequence.
        """
        try:
            with self._told_when_terminated():
                yield
        except RankFailed:
            raise
        except AdvisorError as error:
            first = self.watchdog.fail(f"{type(error).__name__}: {error}")
            if first.rank != self.rank and is_consequence(error):
                raise failed(first) from error
            raise
        except RuntimeError as error:
            found = self._cause() if is_broken_collective(error) else None
            if found is None:
                found = self.watchdog.fail(_sentence(error))
            if found.rank != self.rank:
                raise failed(found) from error
            raise
        except BaseException as error:
            first = self.watchdog.fail(_sentence(error))
            if first.rank != self.rank and is_consequence(error):
                raise failed(first) from error
            raise

    @contextlib.contextmanager
    def _told_when_terminated(self) -> Iterator[None]:
        """Name the rank that ended the run where the launcher terminates the others, as it does at once when one ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def terminated(*_: object) -> None:
            found = self._cause()
            if found is None or found.rank == self.rank:
                raise SystemExit(128 + signal.SIGTERM)
            raise failed(found)

        before = signal.signal(signal.SIGTERM, terminated)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _cause(self) -> Failure | None:
        """Wait until the watchdog knows which rank failed; None where none did."""
        for _ in range(round(2 * DEAD_S) + 4):
            with contextlib.suppress(RuntimeError):  # the store is gone, which the watchdog's own thread says in a moment
                self.watchdog.look()
            found = self.watchdog.failure
            if found is not None:
                return found
            self.watchdog.pause()
        return None

    def holds(self, release: Callable[[], object]) -> None:
        """Note what must be gone when the group is taken apart: NCCL waits for each CUDA graph that holds its kernels.

        A program that ends by an error takes nothing apart itself, so that this goes when the interpreter ends at the latest.

        Args:
            release: lets go of it.
        """
        if not self._held:
            atexit.register(self.release)
        self._held.append(release)

    def release(self) -> None:
        """Let go of what was noted."""
        while self._held:
            self._held.pop()()
        atexit.unregister(self.release)

    def leave(self, destroy: Callable[[], object] = dist.destroy_process_group, limit_s: float = _LEFT_S) -> None:
        """Wait for all ranks, and take the group apart.

        NCCL's communicators end after the CUDA graphs that hold their kernels: ours are let go of, and torch.compile's forgotten.

        Args:
            destroy: takes it apart.
            limit_s: how long that is waited for; a graph that somebody else holds would keep it for ever.
        """
        self.gather("end", None)
        self.release()
        self.watchdog.stop()
        torch.compiler.reset()
        gc.collect()
        self.abandon(destroy, limit_s)

    def abandon(self, destroy: Callable[[], object] = dist.destroy_process_group, limit_s: float = _ABANDONED_S) -> None:
        """Take the group apart after an error; the others know of it by then.

        NCCL waits for what is under way, whose other end may be gone: it is given a moment, and the process ends without it then.

        Args:
            destroy: takes it apart.
            limit_s: how long that is waited for.
        """
        taking = threading.Thread(target=self._quietly, args=(destroy,), name=TAKING_APART, daemon=True)
        taking.start()
        taking.join(limit_s)

    def _quietly(self, destroy: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):  # the error that is on its way says what went wrong
            self.release()  # here: a graph whose other end is gone may be waited for
            destroy()


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else hashlib.sha256(text.encode()).hexdigest()[:12]


def worst_problem(ranks: Ranks, own: str) -> str:
    """Return the first problem that any rank has with a kernel; empty where none has one.

    Args:
        ranks: of the run.
        own: this rank's; empty where it has none.
    """
    for rank, problem in enumerate(ranks.gather("a kernel's check", own)):
        if problem:
            return problem if rank == ranks.rank else f"rank {rank}: {problem}"
    return ""


def failed(failure: Failure) -> RankFailed:
    """Return a failure as an error."""
    return RankFailed(rank=failure.rank, reason=failure.reason)


def is_consequence(error: BaseException) -> bool:
    """Whether an error was made of another rank's failure: a signal that arrives in dynamo comes out as a capture that failed."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        if isinstance(one, RankFailed):
            return True
        seen.append(one)
        waiting += [one.__cause__, one.__context__]
    return False


def is_broken_collective(error: RuntimeError) -> bool:
    """Whether an error is what a collective raises whose other end is gone or late."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "connection", "timed out"))


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def join(environ: Mapping[str, str] = os.environ, *, watchdog: type[Watchdog] = Watchdog) -> Ranks:
    """Join the process group that torchrun describes.

    Args:
        environ: of the process.
        watchdog: watches the others.

    Raises:
        NotUnderTorchrun: the environment describes no group.
    """
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise NotUnderTorchrun(detail=f"the environment has no {missing[0]}")
    rank, world_size, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=_COLLECTIVE)
    stores = [_client(environ, use) for use in ("told", "watched")]
    ranks = Ranks(
        rank=rank, world_size=world_size, local_rank=local_rank, store=stores[0],
        watchdog=watchdog(stores[1], rank, world_size), _told=[],
    )  # fmt: skip
    ranks.watchdog.start()
    return ranks


def _client(environ: Mapping[str, str], use: str) -> Any:
    """Connect to the store by a connection of its own: a thread that waits on one holds it."""
    c10d: Any = dist  # its annotations leave the stores out
    store = c10d.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=20))
    store.set_timeout(_SLICE)
    return c10d.PrefixStore(f"fusion_advisor/{use}", store)
