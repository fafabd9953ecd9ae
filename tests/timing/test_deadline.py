"""Code that never ends is left, also where it catches what it can; what is in time is not."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from fusion_advisor.timing.deadline import TimeIsUp, deadline


def endless():
    while True:
        with contextlib.suppress(Exception):  # as compilers do
            time.sleep(0.001)


def test_what_never_ends_is_left():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeIsUp), deadline(0.02):
        endless()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_what_is_in_time_is_not():
    with deadline(0.02):
        pass
    time.sleep(0.04)


def test_another_thread_is_not_watched():
    seen = []

    def run():
        with deadline(0.01):
            time.sleep(0.03)
            seen.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen
