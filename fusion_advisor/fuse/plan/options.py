"""What a run is asked to do: plain values, no torch, so that the command line can build them before anything heavy loads."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.size_ranges import ShapeRequest
from fusion_advisor.records import Bandwidth, Tolerance

BASELINES = ("eager", "compile", "both")
"""What the headline may compare with."""
KEEP = ("paying", "verified")
"""What may stay: what measurably pays, or everything whose numbers pass."""
Effort = Literal["quick", "usual", "thorough"]
MIN_SHARE = 0.001
"""A chain's share is of the captured step, and what it saves is of the step that is left: on an H200, GPT-2's (bf16, 8 × 512)
shrinks from 6.8 to 2.3 ms, and two chains of 0.4 and 0.2 % of the first, its embeddings and its last norm, can save 1.3 % of the
second. Small gains that pay only together are judged together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Seconds that a run spends on timing.

    Attributes:
        wall_s: On each wall-time comparison.
        decide_s: On rounds of the step with each set of rewrites; steps of up to some milliseconds have their 200 rounds sooner.
            None: 20 on a GPU, 9 on a CPU.
        ranges_s: On all of ``--shapes``; near points that are not decided by then the original ops run. None: with ``--quick``
            240 on a GPU and 300 on a CPU, else as long as it takes.
        recompute_s: With ``--quick``, on trials of what the backward pass of a training step computes again. None begins that
            would not be done by then, where it takes as long as the step without it did.
    """

    wall_s: float = 3.0
    decide_s: float | None = None
    ranges_s: float | None = None
    recompute_s: float = 60.0

    def decide_on(self, device_kind: str) -> float:
        """Return the seconds for the step with each set of rewrites.

        Args:
            device_kind: ``cuda`` or ``cpu``.
        """
        return _DECIDE_S[device_kind] if self.decide_s is None else self.decide_s


_DECIDE_S = {"cuda": 20.0, "cpu": 9.0}
_QUICK_RANGES_S = {"cuda": 240.0, "cpu": 300.0}
_THOROUGH = 3.0
"""How many times longer rewrites are timed with ``--thorough``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How to measure, and which chains to advise on.

    Attributes:
        warmup: Steps before any is timed.
        runs: Timed steps; fewer where they would take more than a few seconds.
        min_time_s: Where steps are counted by ``runs``, time them for at least so many seconds, however many runs that takes.
        steps: Traced steps; the median one is shown.
        min_share: Chains below this share of the captured step's device time get no kernel.
        top: At most so many chains.
        only: Patterns of kernels and of rewrites' ids, which have a hyphen (``merge-gemms``): nothing else of the same kind is
            tried.
        skip: Patterns likewise: what fits one is not tried.
        kernel_dirs: More folders of kernels; code is run from them.
        backend: ``triton``, ``cuda``, ``cpp``, or ``fastest`` to try each kernel in both languages of a GPU; None lets the
            device and the kernel decide: on a GPU Triton, and also CUDA C++ where Triton is known to be slower.
        fast_math: Whether kernels may use approximate instructions, and a GEMM in 16 bits GELU by tanh for the one with erf.
        exact: Whether kernels round each op's result as eager does, so that those without a reordered sum give eager's bits;
            other rewrites stay only where their results are eager's bit for bit.
        nvtx: Whether NVTX ranges are opened in timed runs.
        budgets: Seconds of timing.
        bandwidth: Of the device, where it was measured before; None measures it.
        command: The command line that repeats this run.
        run_dir: Where to write while the run goes on; None writes nothing.
        run_id: Name of the run.
        config_hash: Equal for runs of the same model, shapes, options and version.
    """

    warmup: int = 10
    runs: int = 50
    min_time_s: float = 0.0
    steps: int = 3
    min_share: float = MIN_SHARE
    top: int = 20
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    kernel_dirs: tuple[Path, ...] = ()
    backend: str | None = None
    fast_math: bool = False
    exact: bool = False
    nvtx: bool = False
    budgets: Budgets = Budgets()
    bandwidth: Bandwidth | None = None
    command: str = ""
    run_dir: Path | None = None
    run_id: str = ""
    config_hash: str = ""

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("runs", 1), ("min_time_s", 0), ("steps", 1), ("top", 1)):
            if not least <= getattr(self, name) < math.inf:
                raise UsageError(detail=f"{name} is {getattr(self, name)}", help=f"the least is {least}")
        if not 0 <= self.min_share <= 1:
            raise UsageError(detail=f"min_share {self.min_share:g} is no share", help="0.01 is 1 % of the step")

    @property
    def only_kernels(self) -> tuple[str, ...]:
        """Patterns of ``only`` that name kernels."""
        return tuple(pattern for pattern in self.only if not names_rewrites(pattern))

    @property
    def skipped_kernels(self) -> tuple[str, ...]:
        """Patterns of ``skip`` that name kernels."""
        return tuple(pattern for pattern in self.skip if not names_rewrites(pattern))

    def wants(self, rewrite: str) -> bool:
        """Whether a rewrite is tried.

        Args:
            rewrite: its id.
        """
        only = [pattern for pattern in self.only if names_rewrites(pattern)]
        return (not only or fits(rewrite, only)) and not fits(rewrite, filter(names_rewrites, self.skip))

    def unused_patterns(self, rewrites: Iterable[str]) -> tuple[str, ...]:
        """Return patterns that are written like rewrites' ids and fit none.

        Args:
            rewrites: all ids.
        """
        known = list(rewrites)
        return tuple(one for one in (*self.only, *self.skip) if names_rewrites(one) and not fnmatch.filter(known, one))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions(ProfileOptions):
    """How to measure, and how to decide what stays.

    Attributes:
        min_gain: A rewrite must save at least this share of the step.
        confidence: Of the interval that must lie past the threshold as a whole.
        rtol: With ``atol``, how far each element of a floating-point result may be from the oracle, ``atol + rtol × |oracle|``,
            in place of the limit that eager's own error sets. One of the two alone makes the other 0.
        atol: See ``rtol``.
        strict: Whether wrong numbers, a failed build or a rewrite that replaced nothing end the run with an error.
        dry_run: Render, build and check kernels; the step is not timed, and the model is left as it is.
        baseline: What the headline compares with: ``eager``, ``compile`` (torch.compile's fastest mode) or ``both``. The last two
            measure torch.compile, on a CPU too.
        compile: Measure the other ways too: eager in a CUDA graph, torch.compile's modes, Liger, and torch.compile
            for the rest of ours. None: on a GPU; from the command line on a CPU
            torch.compile's default mode too, for no longer than the run took so far.
        compile_limit_s: Measure them, and give each mode of torch.compile up that is not ready after so many seconds. None: five
            minutes for a mode on a GPU, fifteen for max-autotune.
        max_autotune: torch.compile's max-autotune mode too, which takes minutes.
        freeze: Fold values that depend on weights and buffers, and let a merged GEMM hold a copy of weights that do not lie side
            by side. The contract: weights and buffers are not written while the fusion is in place, or ``fused.refresh()`` is
            called after the write.
        graph: Whether a CUDA graph around the step is tried; it stays where it saves wall time.
        graph_outputs: ``clone`` copies results out of the graph's memory, or computes them after it (large logits); ``static``
            hands out that memory, which the next call overwrites.
        graphs: The most CUDA graphs that are kept at once, one for each exact shape that comes again; the one that was replayed
            longest ago goes first. Where memory runs out there are fewer.
        graph_bytes: Of device memory that those of ``shapes`` may hold together. To fit, the one that was replayed longest ago
            goes first. A size whose graph alone would hold more has none. The graph of the example call is not counted.
        keep: ``paying``: a rewrite stays if it measurably pays. ``verified``: it stays if its numbers pass, whatever its time; no
            timing decides anything, and a step that is slower than eager is not reverted. For tests of numbers, not for speed.
        dynamic: ``off``: a call of an unseen shape runs the original ops. ``on_first_use``: it does once, and the kept kernels
            are bound to its sizes for the calls after it (up to eight such shapes; ``specialize`` adds any number).
        shapes: Ranges of sizes that the fused model serves, from :func:`fusion_advisor.fuse.plan.size_ranges.read_shapes`;
            None: calls of the example's shapes alone.
        shape_points: Sizes at which rewrites of the ranges are decided, in the order of the ranges; empty: chosen for each piece.
        effort: ``quick``: rewrites are chosen by their own times, and the step is timed for a moment, with all of them against
            none and without A/A. ``thorough``: each is timed in the step by itself, whatever its own times say, for longer.
        drop_logits: Of training steps: nobody reads the logits that a step returns with its loss. They are None then, and the
            loss is computed without them.
        memory_budget: Of training steps: the share of activations that may be kept for the backward pass. The others are computed
            again there, whatever time it takes. 1: what torch keeps by default.
        remembers: Put in what an earlier run on this machine kept for the same model, call, options and versions: its kernels are
            built and checked again, its verdicts are not timed again. What this run decides is remembered for the next.
    """

    top: int = 40
    """Of a MobileNetV2 step of 0.79 ms on an H200, 17 chains past the first 20 took 0.14 ms."""
    min_gain: float = 0.005
    confidence: float = 0.95
    rtol: float | None = None
    atol: float | None = None
    strict: bool = False
    dry_run: bool = False
    baseline: Literal["eager", "compile", "both"] = "eager"
    compile: bool | None = None
    compile_limit_s: float | None = None
    max_autotune: bool = False
    freeze: bool = False
    graph: bool = True
    graph_outputs: Literal["clone", "static"] = "clone"
    graphs: int = 32
    graph_bytes: int = 1_000_000_000
    dynamic: Literal["off", "on_first_use"] = "off"
    shapes: ShapeRequest | None = None
    shape_points: tuple[tuple[int, ...], ...] = ()
    keep: Literal["paying", "verified"] = "paying"
    effort: Effort = "usual"
    drop_logits: bool = False
    memory_budget: float = 1.0
    remembers: bool = False

    def __post_init__(self) -> None:
        ProfileOptions.__post_init__(self)
        if self.exact and self.fast_math:
            raise UsageError(detail="--exact and --fast-math contradict each other", help="leave one of them out")
        for option, value in (("--rtol", self.rtol), ("--atol", self.atol)):
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(detail=f"{option} {value} is no limit", help=f"pass {option} 0 or more, or leave it out")
        if self.graphs < 1:
            raise UsageError(detail=f"graphs={self.graphs} keeps no CUDA graph", help="graph=False tries none")
        if self.graph_bytes < 1:
            raise UsageError(detail=f"graph_bytes={self.graph_bytes} keeps no CUDA graph", help="graph=False tries none")
        if not self.min_gain < 1:  # below 0: what is slower by less stays too
            raise UsageError(detail=f"min_gain {self.min_gain:g} is no share", help="0.01 is 1 % of the step")
        if not 0 <= self.memory_budget <= 1:
            raise UsageError(detail=f"--memory-budget {self.memory_budget:g} is no share", help="pass 0 to 1, or leave it out")
        if not 0.5 < self.confidence < 1:
            raise UsageError(
                detail=f"--confidence must be above 0.5 and below 1, not `{self.confidence:g}`", help="0.95 is usual"
            )
        if self.keep not in KEEP:
            raise UsageError(detail=f"--keep {self.keep} is not known", help=f"use {' or '.join(KEEP)}")
        if self.baseline not in BASELINES:
            raise UsageError(detail=f"--baseline {self.baseline} is not known", help=f"use {', '.join(BASELINES)}")
        if self.compile_limit_s is not None and not self.compile_limit_s > 0:
            raise UsageError(
                detail=f"--compile-limit {self.compile_limit_s:g} leaves torch.compile no time",
                help="--no-compile leaves it out; --compile-limit 60 gives each of its modes a minute",
            )
        if self.compile_limit_s is not None and self.compile is False:
            raise UsageError(detail="--compile-limit and --no-compile contradict each other", help="leave one of them out")
        if self.baseline != "eager" and self.compile is False:
            raise UsageError(
                detail=f"--baseline {self.baseline} and --no-compile contradict each other",
                help="torch.compile has to be measured to be compared with: leave one of them out",
            )

    @property
    def is_timed(self) -> bool:
        """Whether times decide what stays."""
        return self.keep == "paying"

    @property
    def measures_compile(self) -> bool | None:
        """Whether torch.compile and its like are measured; None leaves it to the device."""
        if self.baseline != "eager" or self.max_autotune or self.compile_limit_s is not None:
            return True
        return False if self.compile is None and self.effort == "quick" else self.compile

    def decide_s(self, device_kind: str) -> float:
        """Return the seconds for the step with each set of rewrites.

        Args:
            device_kind: ``cuda`` or ``cpu``.
        """
        return self.budgets.decide_on(device_kind) * (_THOROUGH if self.effort == "thorough" else 1.0)

    def ranges_limit_s(self, device_kind: str) -> float:
        """Return the seconds that all ranges of sizes may take.

        Args:
            device_kind: ``cuda`` or ``cpu``.
        """
        if self.budgets.ranges_s is not None:
            return self.budgets.ranges_s
        return _QUICK_RANGES_S[device_kind] if self.effort == "quick" else math.inf

    @property
    def is_peer_asked_for(self) -> bool:
        """Whether the user asked for other ways to run the step, rather than a default."""
        return self.measures_compile is True

    @property
    def tolerance(self) -> Tolerance | None:
        """The user's limit on errors; None where there is none."""
        if self.rtol is None and self.atol is None:
            return None
        return Tolerance(rtol=self.rtol or 0.0, atol=self.atol or 0.0)


def names_rewrites(pattern: str) -> bool:
    """Whether a pattern of ``--only`` or ``--skip`` is for rewrites: their ids have a hyphen, names of kernels have none."""
    return "-" in re.sub(r"\[[^]]*\]", "", pattern)


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of several shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
