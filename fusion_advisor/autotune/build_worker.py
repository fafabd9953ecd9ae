"""The program that compiles kernels for another process: ``python -m fusion_advisor.autotune.build_worker FILE COUNT``.

FILE is the descriptor of a connection. Each job that comes over it has a number and a compute capability. The program answers
with the number once the job is done, and ends with the connection.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import Connection

from fusion_advisor.autotune.build_ahead import Job, LinearJob
from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.gemm.cuda import GemvCuda
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.codegen.triton.ahead import build_driver, load_compiler

_log = logging.getLogger(__name__)
_NICE = 5
"""The process that times kernels goes first."""


def compile_job(job: Job | LinearJob, arch: int) -> None:
    """Render a kernel and compile it into the compilers' caches.

    Args:
        job: the kernel.
        arch: compute capability.
    """
    try:
        if isinstance(job, LinearJob):
            maker = GemvCuda()
            maker.compile_for(job.problem, maker.render(job.problem, job.header, config=job.config), arch)
            return
        language = descriptor(job.backend)
        first, *others = job.elsewhere or (job.program,)
        rendered = language.maker().render(first, job.header, tuning=job.tuning, fast_math=job.fast_math, elsewhere=others)
        language.compile_ahead(job.program, rendered, arch)
    except KernelBuildFailed as failure:  # said where the kernel is used
        _log.debug("%s", failure)


def main(arguments: Sequence[str]) -> None:
    """Serve jobs until the connection ends.

    Args:
        arguments: file descriptor, number of processes.
    """
    number, count = map(int, arguments)
    os.nice(_NICE)
    load_compiler()  # once, ahead of the forks
    gc.freeze()  # a collection would write to, and so copy, all that was loaded
    connection, lock = Connection(number), threading.Lock()
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(build_driver)  # and this forks the processes
        with contextlib.suppress(EOFError, OSError):
            while True:
                job_number, arch, job = connection.recv()

                def answer(_: Future[None], job_number: int = job_number) -> None:
                    with lock, contextlib.suppress(OSError):
                        connection.send(job_number)

                pool.submit(compile_job, job, arch).add_done_callback(answer)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # nobody waits for what is still compiled


if __name__ == "__main__":
    main(sys.argv[1:])
