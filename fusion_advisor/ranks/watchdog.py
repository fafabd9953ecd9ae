"""Ends a run on all ranks when one of them fails, hangs or dies.

A thread of each rank writes a sign of life into the store twice a second and reads the others'. It notices a rank whose process
is gone, and a rank whose main thread stands still while others wait for it. A main thread that is stuck in a collective then is
ended with its process: no Python exception reaches it there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEAD_S = 6.0
"""A process without a sign of life for so long is gone; a busy machine delays the thread by less."""
STUCK_S = 20.0
"""A rank that others wait for, and that comes to no new place for so long, hangs."""
GRACE_S = 5.0
"""A main thread has so long to end by itself once a failure is known."""
_BEAT_S = 0.5
_FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run ends."""

    rank: int
    reason: str


@dataclass(slots=True)
class _Peer:
    """What was last seen of another rank."""

    beat: str = ""
    place: str = ""
    beat_s: float = 0.0
    place_s: float = 0.0


class Watchdog:
    """Watches the other ranks from a thread of its own.

    Attributes:
        failure: the first failure of any rank; None as long as there is none.

    Args:
        store: a client of the store that no other thread uses.
        rank: of this process.
        world_size: number of ranks.
        end: ends this process.
        seconds: the clock.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        end: Callable[[int], object] = os._exit,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: Failure | None = None
        self._store = store
        self._rank = rank
        self._end = end
        self._seconds = seconds
        self._place = (0, "start")
        self._waiting_since: float | None = None
        self._patience_s = STUCK_S
        self._beats = 0
        self._failed_s = 0.0
        self._peers = {other: _Peer(beat_s=seconds(), place_s=seconds()) for other in range(world_size) if other != rank}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusion-advisor-ranks", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _BEAT_S)

    def reached(self, place: str) -> None:
        """Note that the main thread goes on.

        Args:
            place: what it does now, for a message.
        """
        self._place = (self._place[0] + 1, place)

    def waits(self, *, is_waiting: bool, patience_s: float = STUCK_S) -> None:
        """Note that the main thread waits for other ranks, or no longer does.

        Args:
            is_waiting: whether it does.
            patience_s: a rank that it waits for, and that comes to no new place for so long, hangs.
        """
        self._patience_s = patience_s
        self._waiting_since = self._seconds() if is_waiting else None

    def fail(self, reason: str) -> Failure:
        """Say that this rank failed, unless another one was first; returns the first failure."""
        return self._publish(Failure(rank=self._rank, reason=reason))

    def look(self) -> Failure | None:
        """Write a sign of life, read the others', and return the first failure."""
        with self._lock:
            self._beats += 1
            self._store.set(f"beat/{self._rank}", f"{self._beats}|{self._place[0]}|{self._place[1]}")
            if self.failure is None and self._store.check([_FAILED]):
                self._known(self._store.get(_FAILED).decode())
            for other, peer in self._peers.items():
                self._look_at(other, peer)
        return self.failure

    def pause(self) -> None:
        """Wait until the next sign of life is due."""
        time.sleep(_BEAT_S)

    def _look_at(self, other: int, peer: _Peer) -> None:
        now, key = self._seconds(), f"beat/{other}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        beat, _, place = text.partition("|")
        if beat != peer.beat:
            peer.beat, peer.beat_s = beat, now
        if place != peer.place:
            peer.place, peer.place_s = place, now
        doing = place.partition("|")[2] or "start"
        if self.failure is not None:
            return
        if now - peer.beat_s > DEAD_S:
            self._write(Failure(rank=other, reason=f"its process is gone; it was last seen in `{doing}`"))
        elif self._waiting_since is not None and now - max(peer.place_s, self._waiting_since) > self._patience_s:
            stood_s = self._patience_s
            self._write(Failure(rank=other, reason=f"it did not go on for {stood_s:.0f} s in `{doing}`, and others wait for it"))

    def _publish(self, failure: Failure) -> Failure:
        with self._lock:
            self._write(failure)
        return self.failure or failure

    def _write(self, failure: Failure) -> None:
        """Make a failure known to all, unless another one is known."""
        try:
            first = self._store.compare_set(_FAILED, "", f"{failure.rank}|{failure.reason}").decode()
        except RuntimeError:  # the store is gone, and this rank's own error says more than that
            first = f"{failure.rank}|{failure.reason}"
        self._known(first)

    def _known(self, text: str) -> None:
        rank, _, reason = text.partition("|")
        self.failure, self._failed_s = Failure(rank=int(rank), reason=reason), self._seconds()

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            try:
                self.look()
            except RuntimeError as error:  # the store lives with the launcher or with rank 0: without it the run is over
                if self.failure is None:
                    self.failure, self._failed_s = Failure(rank=0, reason=f"the store is gone ({error})"), self._seconds()
            self.end_if_stuck()

    def end_if_stuck(self) -> None:
        """End the process where a failure is known and the main thread did not end by itself in time."""
        if self.failure is None or self._seconds() - self._failed_s < GRACE_S or self._stopped.is_set():
            return
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"error[FA804]: rank {self.failure.rank} ended the run: {self.failure.reason}\n")
            sys.stderr.flush()
        self._end(3)
