"""A clock that other programs do not move: it counts the work of the threads, wherever it is done, and no waiting."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from fusion_advisor.timing.host_timer import CPU_TIME, BusiestThreadTimer, WallTimer, step_timer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads' clocks are read from Linux's /proc")


def spin(cpu_ms):
    """Work for so much CPU time, however long that takes."""
    end_ns = time.thread_time_ns() + cpu_ms * 1_000_000
    while time.thread_time_ns() < end_ns:
        pass


def test_the_time_that_others_have_the_core_is_not_counted():
    """A sleep stands for the scheduler's slice: the thread has no core meanwhile."""

    def disturbed():
        spin(10)
        time.sleep(0.2)

    assert 10e6 <= BusiestThreadTimer().time_ns(disturbed) < 100e6
    assert WallTimer().time_ns(disturbed) > 200e6


def test_work_in_another_thread_is_counted():
    start, stop = threading.Event(), threading.Event()

    def work():
        start.wait()
        spin(60)
        stop.set()
        time.sleep(0.2)  # the thread lives on, as OpenMP's do

    worker = threading.Thread(target=work)
    worker.start()

    def step():
        start.set()
        stop.wait()

    assert BusiestThreadTimer().time_ns(step) >= 55e6
    worker.join()


def test_work_of_two_threads_is_not_added_up():
    def step():
        spin(40)

    def both():
        worker = threading.Thread(target=spin, args=(20,))
        worker.start()
        step()
        worker.join()

    assert 40e6 <= BusiestThreadTimer().time_ns(both) < 59e6


def test_a_gpu_is_timed_by_the_wall_clock_and_a_cpu_by_its_threads():
    assert (step_timer(on_cuda=True).method, step_timer(on_cuda=False).method) == ("wall", CPU_TIME)
