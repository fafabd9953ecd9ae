"""Replays a CUDA graph for every verified call, instead of hundreds of launches from Python.

A graph repeats kernels on recorded addresses, so every assumption is checked at each call:

- Dynamo's guards and the addresses of parameters and buffers are checked after the launch, while the device works: the checks
  take longer than the launch. A replay that fails them is thrown away, and a moved tensor has the step recorded again.
- The signature, freed memory and the addresses of tensors that the step writes to are checked before the launch.
- A step that writes to memory that outlives it is launched first only if its small writes can be put back; else after the
  guards. Ranks that launched a step with collectives in vain meet before they go on: one that alone did ends the run.
- Call arguments are copied into static tensors. Version counts guard values folded under ``--freeze``, and the record holds
  the flags by which kernels were chosen (SDPA backends, cuDNN, TF32).

Results are copied out, so that no later call overwrites them. Logits that one GEMM makes last are computed after the graph,
straight into the caller's memory. ``outputs="static"`` hands out the graph's memory, valid until the next call. The first
call of a signature runs launch by launch, the second is recorded and replayed. Figures: ``docs/measurements/cuda_graph.md``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor import units
from fusion_advisor.errors import HalfWritten
from fusion_advisor.fuse.cuda_graph.bound import Bound
from fusion_advisor.fuse.cuda_graph.graph_bytes import GraphBytes, TooLarge
from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion
from fusion_advisor.fuse.cuda_graph.recording import Outputs, Recorder, Recording
from fusion_advisor.fuse.cuda_graph.segmented_region import SegmentedRecording
from fusion_advisor.fuse.rewrite.launch_count import total
from fusion_advisor.runtime.fallback_warning import warn_caller
from fusion_advisor.timing.interleaving import CannotRecord

MOST_RECORDINGS = 32
"""Recordings kept per model; the one that was replayed longest ago goes first. They share the memory of what lies in between."""
MOST_BYTES = 1_000_000_000
"""Of device memory that the recordings of ranges of sizes hold. The graph of a large call holds its activations, and saves
nothing where the device is the limit."""
_MOST_MOVES = 3
"""A step whose inputs' addresses changed this often in a row is not recorded again: recording costs more than it saves."""


@dataclass(slots=True)
class _Call:
    """The call under way.

    Attributes:
        launched: what was launched in front of the guards, ``fresh`` the memory that its results were handed out in.
    """

    thread: int
    key: Any
    leaves: Sequence[torch.Tensor]
    objects: Sequence[Any]
    launched: Recording | None = None
    fresh: Sequence[torch.Tensor] = ()

    def undo(self) -> None:
        """Take back what was launched ahead, if anything was; ranks that met in it do so together."""
        launched = self.put_back()
        if launched is not None and launched.meet is not None:
            launched.meet()

    def put_back(self) -> Recording | None:
        """Put back what was written ahead, and return what was launched."""
        launched, self.launched, self.fresh = self.launched, None, ()
        if launched is not None:
            launched.undo()
        return launched


class Graphs:
    """All recordings of one fused model: one pool, bounded in number and bytes, one replay at a time.

    Attributes:
        is_on: calls are replayed; off, every call runs launch by launch.
        refusals: why calls ran launch by launch, and how often.
        launches: generated kernels that replays launched, less those that were counted while a graph was
            recorded: none runs then.
        padded: calls that ran in a graph of larger sizes.
        ahead: replays that were launched ahead of the guards.
        meet: waits until all ranks took back what they had launched in vain. It is given where all ranks record together, so that
            a graph may hold what NCCL does.
    """

    def __init__(
        self, recorder: Recorder, *, limit: int = MOST_RECORDINGS, most_bytes: int = MOST_BYTES, outputs: Outputs = "clone",
        meet: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.is_on = True
        self.meet = meet
        self.launches = 0
        self.padded = 0
        self.ahead = 0
        self._outputs = outputs
        self.refusals: dict[str, int] = {}
        self._recorder = recorder
        self._limit = limit
        self._bound = Bound(recorder, most_bytes)
        self._recordings: OrderedDict[GraphedRegion, Recording | SegmentedRecording] = OrderedDict()
        self._latest: dict[Any, GraphedRegion] = {}
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._may_run_ahead = True

    @property
    def outputs(self) -> Outputs:
        """``clone`` copies results out, ``static`` hands out the graph's own memory until the next call."""
        return self._outputs

    @outputs.setter
    def outputs(self, outputs: Outputs) -> None:
        if outputs != self._outputs:
            self.forget()  # which ops run after the graph depends on this
        self._outputs = outputs

    @property
    def recordings(self) -> tuple[Recording | SegmentedRecording, ...]:
        """The recordings, the one replayed longest ago first; all segments of a region are one."""
        return tuple(self._recordings.values())

    @property
    def has_news(self) -> bool:
        """Whether there is anything to say of them."""
        return bool(self._recordings or self._bound.sentence)

    @property
    def summary(self) -> str:
        """How many are recorded, how many may be, and what memory they hold."""
        held = units.size(self.pool_bytes())
        padded = f" {self.padded} calls ran in a graph of larger sizes." if self.padded else ""
        refused = self._bound.sentence
        return f"{len(self._recordings)} of at most {self._limit} CUDA graphs are recorded and hold {held}.{padded}{refused}"

    @property
    def too_large(self) -> str:
        """Why the largest graph that would not fit is not recorded; empty where all fit."""
        return self._bound.too_large

    def pool_bytes(self) -> int:
        """Device memory that the graphs hold, static inputs included."""
        return self._recorder.pool_bytes() + sum(recording.input_bytes for recording in self.recordings)

    def forget(self) -> None:
        """Drop every recording; the next call of each signature records anew."""
        self._recordings.clear()
        self._latest.clear()
        self._bound.restart()

    def run(self, key: Any, leaves: Sequence[torch.Tensor], call: Callable[[], Any], objects: Sequence[Any] = ()) -> Any:
        """Run one call of the model.

        Args:
            key: stands for its signature: equal, and quickly hashed, for calls of one signature.
            leaves: the tensors that it passes, in the signature's order.
            call: runs it through dynamo, which calls the region below if the guards hold.
            objects: what was read of the objects that it passes; the same ones as long as they hold the same.

        Raises:
            HalfWritten: the graph was launched ahead, and dynamo then ran the original ops without asking.
        """
        if not self.is_on:
            return call()
        if not self._lock.acquire(blocking=False):
            self._say("another thread is running it")
            return call()
        try:
            refusal = self._recorder.refusal()
            if refusal is not None:
                self._say(refusal)
                return call()
            latest = self._latest.get(key)
            recording = None if latest is None else self._recordings.get(latest)
            under_way = self._call = _Call(threading.get_ident(), key, leaves, objects)
            # Segments are not in `_latest`: ahead of the guards the ops in between would run on inputs that nobody has checked.
            if (
                self._may_run_ahead
                and isinstance(recording, Recording)
                and recording.may_be_undone(objects)
                and recording.is_in_place()
            ):
                recording.replay(leaves)
                self.launches += recording.launches
                self.ahead += 1
                under_way.launched = recording
            try:
                if under_way.launched is not None:
                    under_way.fresh = under_way.launched.hand_out(under_way.launched.known_inputs(), self.outputs)
                result = call()
            except BaseException:
                under_way.put_back()  # a rank that fails ends the run, so that it does not wait for the others here
                raise
            if under_way.launched is not None and not under_way.launched.is_pure:
                self._may_run_ahead = False
                raise HalfWritten(detail="the model's original ops ran after its CUDA graph had written to the cache")
            under_way.undo()
            return result
        finally:
            self._call = None
            self._lock.release()

    def leaves_now(self) -> Sequence[torch.Tensor] | None:
        """Return the tensors of the call under way; None where none is, or it is another thread's."""
        call = self._call
        return None if call is None or call.thread != threading.get_ident() else call.leaves

    def is_recorded(self, region: GraphedRegion) -> bool:
        """Whether a region has its graph."""
        return region in self._recordings

    def region(self, region: GraphedRegion, args: Sequence[Any], padded: Sequence[torch.Tensor] | None = None) -> Any:
        """Run a region whose guards held: by its graph where it has one or may have one now.

        ``padded`` stands for the call's tensors where the region is of larger sizes: such a graph is never launched ahead.
        """
        call = self._call
        if call is None or call.thread != threading.get_ident():
            return region.plain(*args)
        leaves = call.leaves if padded is None else padded
        recording, is_new = self._recordings.get(region), False
        if call.launched is not recording:
            call.undo()
        if region.refusal is not None or region.is_too_large:
            if region.refusal is not None:
                self._say(region.refusal)
            return region.plain(*args)
        if recording is not None and not recording.fits(args, leaves):
            call.undo()
            del self._recordings[region]
            region.copy_moved(recording.moved(args), args, call.objects)
            # Values whose sources were written to or exchanged are computed again by a plain call, outside any graph.
            region.waits = int(bool(recording.folded_from))
            recording = None
            region.moves += 1
            if region.moves > _MOST_MOVES:
                region.refusal = f"the addresses of its inputs changed {region.moves} times"
                return region.plain(*args)
        if recording is None:
            if region.waits:
                region.waits -= 1
                return region.awaited(*args)
            is_new = True
            recording = self._record(region, args, leaves, call.objects)
            if recording is None:
                return region.plain(*args)
            self._recordings[region] = recording
            while len(self._recordings) > self._limit:
                self._recordings.popitem(last=False)[0].wait_longer()
        else:
            region.moves = 0
        self._recordings.move_to_end(region)
        self.padded += int(padded is not None)
        if padded is None and isinstance(recording, Recording):
            self._latest[call.key] = region
        while len(self._latest) > 4 * self._limit:
            del self._latest[next(iter(self._latest))]
        if call.launched is not recording:
            self.launches += recording.launches
            call.fresh = recording.run(args, leaves, self.outputs)
        call.launched = None
        result = recording.give(args, call.fresh)
        if is_new:
            del recording  # the pool keeps its memory as long as anything holds a graph of it
            self._keep_to_bound(region)
        return result

    def _record(
        self, region: GraphedRegion, args: Sequence[Any], leaves: Sequence[torch.Tensor], objects: Sequence[Any]
    ) -> Recording | SegmentedRecording | None:  # fmt: skip
        """Record a region; None where that is not possible, or its graph would be too large."""
        if not self._recordings:
            self._bound.restart()
        before = total(region.tallies)
        try:
            return region.record(self._recorder, args, leaves, objects, outputs=self.outputs)
        except TooLarge as error:
            self._bound.refuse(region, error.nbytes)
        except CannotRecord as error:
            if not self._make_room(error):
                region.refusal = str(error)
                self._say(region.refusal)
        finally:
            self.launches -= total(region.tallies) - before
        return None

    def admit(self, region: GraphedRegion, needed: GraphBytes) -> None:
        """Make room for a graph of sizes of a range: drop those that were replayed longest ago, or all where that is not enough.

        Args:
            region: that is to be recorded.
            needed: what its graph will hold.

        Raises:
            TooLarge: it does not fit by itself.
        """
        self._bound.require_room(needed)
        region.held = needed
        if not self._bound.has_room((), needed):
            self._empty_pool()
        while not self._bound.has_room(self._recordings, needed):
            oldest = next(one for one in self._recordings if one.held is not None)
            del self._recordings[oldest]
            oldest.wait_longer()

    def _keep_to_bound(self, latest: GraphedRegion) -> None:
        """Drop all recordings where they hold more than was counted."""
        held = self._bound.overflow(latest, self._recordings)
        if held and all(one is latest or one.held is None for one in self._recordings):
            self._bound.refuse(latest, held)
        if held:
            self._empty_pool()

    def _empty_pool(self) -> None:
        """Drop all recordings and give their memory back: a pool gives nothing back before its last graph is gone."""
        for one in self._recordings:
            if one.held is not None:
                one.wait_longer()
        self.forget()
        self._recorder.give_back()

    def _make_room(self, error: CannotRecord) -> bool:
        """Drop half of the recordings for good where memory ran out; False where it did not, or where there is none to drop."""
        if "out of memory" not in str(error) or not self._recordings:
            return False
        self._limit = len(self._recordings) // 2 + 1  # one is recorded next
        while len(self._recordings) >= self._limit:
            self._recordings.popitem(last=False)
        self._say(f"no memory for another one; {self._limit} are kept from now on")
        return True

    def other(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a graph that is never recorded, which first takes back what was launched ahead in its place."""

        def run(*args: Any) -> Any:
            if self._call is not None and self._call.thread == threading.get_ident():
                self._call.undo()
            return forward(*args)

        return run

    def _say(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if self.refusals[reason] == 1:
            warn_caller(f"fusion-advisor runs this call without its CUDA graph: {reason}")
