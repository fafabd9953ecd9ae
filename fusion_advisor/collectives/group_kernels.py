"""The all-reduce kernel of one process group: whether its ranks can use it, the buffers that they share, launches.

The ranks of a group make buffers together, so all of them come to :func:`join_group`, to :meth:`GroupKernels.acquire` and to each
launch in the same order. No CUDA graph is recorded before the buffers are there: a launch that finds none is an error.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fusion_advisor.codegen.common.interface import Launcher, Rendered
from fusion_advisor.codegen.cuda.nvrtc import compile_loaded
from fusion_advisor.collectives.all_reduce_norm import AllReduceNorm, render
from fusion_advisor.collectives.launch_shape import BUFFER_BYTES, MOST_RANKS, Norm, Way, launch_shape, why_unserved
from fusion_advisor.runtime.torch_internals.symmetric_memory import SharedBuffer, shared_buffer

_TWO_SHOT_FROM = 512
"""Rows. Below it two-shot took 1.1 to 1.7 times as long as one-shot on two H200s, and no time is spent on it."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Exchange = Callable[[str, Any], Sequence[Any]]
"""Given what is exchanged and a value, returns the values of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCall:
    """A call: ``[rows, cols]`` of one dtype, and what follows the sum.

    Attributes:
        rows: of the call.
        cols: numbers in a row.
        dtype: of all tensors.
        eps: of the norm.
        norm: which one.
        has_offset: whether the bias of a linear is added once to the sum.
    """

    rows: int
    cols: int
    dtype: torch.dtype
    eps: float
    norm: Norm = "rms"
    has_offset: bool = False

    @property
    def vectors(self) -> int:
        """Tensors of one row's size that it reads: the weight, a LayerNorm's shift, the offset."""
        return 1 + (self.norm == "layer") + self.has_offset


class GroupKernels(Protocol):
    """Kernels in which the ranks of one group sum and normalise together.

    Attributes:
        rank: of this process in the group.
        world_size: number of its ranks.
        held_bytes: memory that each rank's buffer takes.
    """

    rank: int
    world_size: int
    held_bytes: int

    def why_not(self, call: NormCall) -> str:
        """Say why no kernel computes a call; empty where one does."""

    def ways(self, call: NormCall) -> tuple[Way, ...]:
        """Return the ways that are worth a trial, the one that needs least first."""

    def rendered(self, call: NormCall) -> Rendered:
        """Return the source of the kernel of a call, equal on all ranks."""

    def words(self, call: NormCall) -> str:
        """Return how a call is launched, in words that are equal on all ranks."""

    def launcher(self, call: NormCall, way: Way) -> Launcher:
        """Return what launches a call with ``x``, ``residual``, ``weight``, its ``shift`` and ``offset``, ``total``, ``out``."""

    def acquire(self) -> None:
        """Make the buffers, where they are not there; all ranks come here."""

    def release(self) -> None:
        """Free this rank's buffer."""


def moved_bytes(call: NormCall, way: Way, world_size: int) -> int:
    """Return the bytes that one rank reads and writes in a call, in its own memory and in the others'.

    Args:
        call: its sizes.
        way: to sum.
        world_size: number of ranks.
    """
    row_bytes = call.cols * call.dtype.itemsize
    others = world_size - 1
    # x is read, and read again to be summed; what others send is read, what they get is written; the two results are written.
    one_shot = call.rows * (2 + 2 * others + 1 + 2)
    # All rows are read once and written once. A rank's share is read and summed, its sums go to the others, and theirs come.
    two_shot = call.rows * 2 + call.rows * (4 + 5 * others) // world_size
    return (one_shot if way == "one-shot" else two_shot) * row_bytes + call.vectors * row_bytes


def join_group(group_name: str, device: torch.device, exchange: Exchange) -> GroupKernels | str:
    """Return the kernels of a process group, with buffers, or why it gets none; equal on all ranks, which come here together.

    Args:
        group_name: of the group, as its collectives name it.
        device: of this rank.
        exchange: with all ranks of the run.
    """
    problem = _why_alone(group_name, device)
    if found := _first(exchange("kernels between ranks", problem)):
        return found
    hosts = set(exchange("hosts of the ranks", _host()))
    if len(hosts) > 1:
        return f"the group spans {len(hosts)} hosts: its GPUs do not reach each other's memory"
    torch.cuda.empty_cache()  # symmetric memory comes from the driver, not from what torch keeps
    if found := why_no_buffers(exchange("memory of the GPUs", torch.cuda.mem_get_info(device)[0])):
        return found
    properties = torch.cuda.get_device_properties(device)
    multiprocessors = min(exchange("multiprocessors of the ranks", properties.multi_processor_count))
    kernels = SymmetricKernels(group_name, device, dist.get_rank(), dist.get_world_size(), multiprocessors=multiprocessors)
    problem = ""
    try:
        kernels.acquire()
    except RuntimeError as error:
        problem = f"no symmetric memory: {str(error).strip().splitlines()[0]}"
    if found := _first(exchange("symmetric memory", problem)):
        kernels.release()
        return found
    return kernels


def why_no_buffers(free_bytes: Sequence[int]) -> str:
    """Say which rank has no memory for its buffer. It would fail alone, and the others would wait for its part of the exchange.

    Args:
        free_bytes: of the GPU of each rank.
    """
    least = min(free_bytes)
    if least >= BUFFER_BYTES:
        return ""
    return f"rank {free_bytes.index(least)}: {least:,} bytes are free, and a buffer takes {BUFFER_BYTES:,}"


def gathered(what: str, value: Any) -> list[Any]:
    """Return the values of all ranks through the process group itself: what a process does that no run of ours watches.

    Args:
        what: is exchanged; the same on all ranks at this place.
        value: this rank's.

    Raises:
        RuntimeError: another rank exchanges something else, so the ranks no longer do the same.
    """
    if not dist.is_initialized():
        return [value]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (what, value))
    if any(theirs != what for theirs, _ in told):
        found = ", ".join(sorted({theirs for theirs, _ in told}))
        raise RuntimeError(f"the ranks are at different places: {found}")
    return [theirs for _, theirs in told]


def _why_alone(group_name: str, device: torch.device) -> str:
    """Say what this rank alone knows against it."""
    if device.type != "cuda":
        return "no symmetric memory: the ranks run on CPUs"
    if not dist.is_initialized():
        return "no process group was joined"
    world: Any = dist.group.WORLD
    if str(world.group_name) != group_name:
        return "its group is not that of all ranks"
    size = dist.get_world_size()
    return f"a group of {size} ranks: the kernel serves 2 to {MOST_RANKS}" if not 2 <= size <= MOST_RANKS else ""


def _first(problems: Sequence[str]) -> str:
    return next((f"rank {rank}: {one}" if len(set(problems)) > 1 else one for rank, one in enumerate(problems) if one), "")


def _host() -> str:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {boot}"


class SymmetricKernels:
    """The kernel on symmetric memory: one buffer of each GPU that all GPUs of the host map.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        held_bytes: of the buffer.

    Args:
        group_name: of the process group.
        device: of this rank.
        rank: see above.
        world_size: see above.
        multiprocessors: of the smallest GPU.
        shared: makes the buffers, on all ranks together.
        compiled: compiles a source with macros.
    """

    def __init__(
        self,
        group_name: str,
        device: torch.device,
        rank: int,
        world_size: int,
        *,
        multiprocessors: int,
        shared: Callable[[int, torch.device, str], SharedBuffer] = shared_buffer,
        compiled: Callable[[Rendered, dict[str, int]], Any] = compile_loaded,
    ) -> None:
        self.rank, self.world_size, self.held_bytes = rank, world_size, BUFFER_BYTES
        self._group_name, self._device, self._multiprocessors = group_name, device, multiprocessors
        self._shared, self._compile = shared, compiled
        self._compiled: dict[tuple[int, ...], Any] = {}
        self._buffer: SharedBuffer | None = None
        self._bound: dict[tuple[NormCall, Way], Launcher] = {}

    def why_not(self, call: NormCall) -> str:
        """Say why no kernel computes a call; empty where one does."""
        if call.dtype not in (torch.bfloat16, torch.float16):
            return f"{str(call.dtype).removeprefix('torch.')}: the kernel serves bfloat16 and float16"
        return why_unserved(call.cols, call.dtype.itemsize, self.world_size)

    def ways(self, call: NormCall) -> tuple[Way, ...]:
        """Return the ways that are worth a trial, the one that needs least first."""
        return ("one-shot", "two-shot") if call.rows >= _TWO_SHOT_FROM else ("one-shot",)

    def rendered(self, call: NormCall) -> Rendered:
        """Return the source of the kernel of a call, equal on all ranks."""
        return render(call.norm)

    def words(self, call: NormCall) -> str:
        """Return how a call is launched, in words that are equal on all ranks."""
        shape = launch_shape(call.rows, call.cols, self.world_size, self._multiprocessors)
        rounds = f"{shape.rounds} rounds of {shape.rows_per_round} rows a block"
        return f"{shape.blocks} blocks of {shape.threads} threads, {rounds}"

    def launcher(self, call: NormCall, way: Way) -> Launcher:
        """Return what launches a call with ``x``, ``residual``, ``weight``, its ``shift`` and ``offset``, ``total`` and ``out``.

        Args:
            call: its sizes.
            way: to sum.

        Raises:
            KernelBuildFailed: NVRTC refuses it.
            RuntimeError: the buffers are gone, here or at a launch.
        """
        self._bind(call, way)

        def launch(*tensors: torch.Tensor) -> None:
            # New buffers have other addresses, and a launch takes them as arguments.
            (self._bound.get((call, way)) or self._bind(call, way))(*tensors)

        return launch

    def _bind(self, call: NormCall, way: Way) -> Launcher:
        if self._buffer is None:
            raise RuntimeError("the buffers between the ranks were freed; apply() makes them again, on all ranks")
        fused = AllReduceNorm(
            self._buffer.addresses, self.rank, multiprocessors=self._multiprocessors, compiled=self._compiled_once
        )
        bound = fused.launcher(
            call.rows, call.cols, call.dtype, eps=call.eps, way=way, norm=call.norm, has_offset=call.has_offset
        )
        self._bound[call, way] = bound
        return bound

    def _compiled_once(self, rendered: Rendered, macros: dict[str, int]) -> Any:
        key = tuple(macros.values())
        if key not in self._compiled:
            self._compiled[key] = self._compile(rendered, macros)
        return self._compiled[key]

    def acquire(self) -> None:
        """Make the buffers, where they are not there; all ranks come here.

        Raises:
            RuntimeError: the GPUs do not reach each other's memory.
        """
        if self._buffer is None:
            self._buffer = self._shared(BUFFER_BYTES, self._device, self._group_name)

    def release(self) -> None:
        """Free this rank's buffer. Its own calls are over by then, so no other rank still writes into it."""
        if self._buffer is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._buffer = None
        self._bound.clear()
