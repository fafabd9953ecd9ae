"""Runs steps in a thread of their own, where no other step has left anything that they would use.

torch keeps the plans of cuDNN's attention by thread. It finds the plan of a backward pass by the layouts of queries, keys and
values, and not by the layout of its output's gradient, which the plan was made for too. So a backward pass whose gradient has
another layout than that of an earlier one in the same thread reads it wrongly: with torch 2.11 and cuDNN 9.19 on an H200 the
three gradients had a relative error of 1.4, in either order (``tests/runtime/test_own_thread.py``). Autograd runs all backward
passes on a GPU in one thread, so a trial there would leave its plans to the caller's model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")


def in_own_thread(call: Callable[[], _T]) -> _T:
    """Return what a call returns; its forward and backward passes run in a new thread, which ends with it.

    The thread has the caller's gradient mode, GPU and stream. Dispatch modes of the caller's do not reach into it.

    Args:
        call: of any number of steps.

    Raises:
        BaseException: what the call raises.
    """
    with_grad = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def run() -> _T:
        place = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.set_grad_enabled(with_grad), torch.autograd.set_multithreading_enabled(False), place:
            return call()

    with ThreadPoolExecutor(1, "own-steps") as threads:
        return threads.submit(run).result()
