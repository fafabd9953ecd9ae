"""Starts the processes that compile kernels, and this process's own compiler, before anything waits for them.

Loading takes them some seconds: torch, Triton and the digest of Triton's library. A command starts them first of all, so that
they are ready when the model is loaded and profiled. This module loads no torch: it is asked while torch is not there yet.
Figures: ``docs/measurements/compile_ahead.md``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.codegen.triton.digest import digest_in_background


@contextlib.contextmanager
def started_early(device: str, *, driver: Path = Path("/dev/nvidiactl")) -> Iterator[BuildAhead | None]:
    """Start the processes ahead of torch's import; yields None where no GPU is wanted or seen.

    Args:
        device: that was asked for: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        driver: the file by which programs reach NVIDIA's driver.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if device == "cpu" or is_hidden or not sys.executable or not driver.exists():
        yield None
        return
    with BuildAhead() as ahead:
        yield ahead


def building_ahead(
    device: str,
    warn: Callable[[str], None],
    started: BuildAhead | None = None,
    *,
    arch_of: Callable[[str], int] | None = None,
) -> AbstractContextManager[BuildAhead | None]:
    """Return the processes that compile kernels for a device, and have this process load its own compiler meanwhile.

    Args:
        device: of the workload: ``cpu`` or ``cuda:N``.
        warn: gets a sentence where the processes end early.
        started: processes that were started earlier; others are started where these are not there any more.
        arch_of: returns a device's compute capability, such as 90; CUDA is asked by default.
    """
    if device == "cpu":
        return nullcontext()
    digest_in_background()
    arch = (arch_of or _arch_of)(device)
    if started is None or started.is_over:
        return BuildAhead(arch, warn=warn)
    started.serve(arch, warn)
    return started


def _arch_of(device: str) -> int:
    import torch

    major, minor = torch.cuda.get_device_capability(torch.device(device))
    return 10 * major + minor
