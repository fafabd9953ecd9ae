"""Choose launch parameters by trying a few: at most six, the backend's own choice first, in well under two seconds.

The backends' own choice is good for most shapes, so another one must beat it by more than timing noise to replace it. What was
chosen is kept on disk by kernel, layout, dtype, shape bucket, backend, GPU and version. A bucket holds sizes up to the next power
of two; the width of reduced rows is not bucketed: what is best for 3072 columns wastes a quarter of the threads at 4096.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.codegen.common.arguments import column_passes, next_power, parts_of
from fusion_advisor.codegen.common.horizontal_fusion import calls_of, largest
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Tuning
from fusion_advisor.codegen.common.online_softmax import online_sums
from fusion_advisor.codegen.cuda.nvrtc import device_shared_memory
from fusion_advisor.codegen.cuda.shared_memory import SharedMemory
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.content import content_dir
from fusion_advisor.ir.program import ITEM_BYTES, Program, Store, Value, layout_key, nests
from fusion_advisor.library.spec import KernelSpec
from fusion_advisor.timing.kernel_timer import Clock, cache_bytes, free_bytes, interleaved, make_clock, plan_rotation

MOST_TRIALS = 6
MUST_GAIN = 0.02
"""A choice that is faster by less than this may be so by chance; the backend's own then stays, and runs stay alike."""
_BUDGET_S = 1.4
"""No further configuration is built after this; the last one may take another 0.3 s."""
_TIMING_S = 0.2
_MOST_SETS = 64
_GUESSED_BYTES_PER_NS = 2000.0
_NO_SHARED_MEMORY = SharedMemory()
_CLUSTERS = (Tuning(cluster=4, packs=6), Tuning(cluster=8, packs=6), Tuning(cluster=4, packs=8), Tuning(cluster=8))
"""On an H200 the fastest of sixteen: group norm of 1,024 groups of 40,960 elements 43.2 µs (8 blocks of 4 packs 48.5), 64 groups
6.3 µs (7.2), log-softmax of 2,048 x 50,257 119.9 µs (124.2), of 128,256 251.6 µs. Two blocks never were, nor were blocks that
stay and fetch the next row meanwhile (cp.async.bulk: 57.6, 128.2 and 337 µs), nor plain stores between cluster barriers."""
_CLUSTERS_OF_FEW_ROWS = (Tuning(cluster=8), Tuning(cluster=8, packs=1), Tuning(cluster=4), Tuning(cluster=4, packs=8))
"""Where there are fewer rows than a GPU runs blocks at once, as many threads as a row can use."""
_FEW_ROWS = 512
_TINY_ELEMENTS = 2**16
"""Up to so many, a pointwise kernel takes as long as one thread of it: what counts is how little that has to do.

One row of 4,096 (SwiGLU, bfloat16, H200) took 1.20 µs with 8 elements a thread, torch.compile's kernel of 2 a thread 1.14 µs.
"""

Build = Callable[[Tuning], Launcher]
Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A choice and how it was made."""

    tuning: Tuning
    source: str
    """``default`` (nothing to choose or nothing could be tried), ``stored`` or ``measured``."""
    tried: tuple[tuple[str, int], ...] = ()
    """(launch shape, nanoseconds of one call) of every configuration that was timed, the backend's own first."""
    tune_ns: int = 0

    @property
    def text(self) -> str:
        """What a report adds to the launch shape: ``measured, best of 5``."""
        return f"measured, best of {len(self.tried)}" if self.source == "measured" else self.source


def best_tuning(
    program: Program,
    spec: KernelSpec | None,
    backend: str,
    device: torch.device | str,
    *,
    header: Header,
    fast_math: bool = False,
    store: TuningStore | None = None,
    budget_s: float = _BUDGET_S,
    clock: Clock | None = None,
    build: Build | None = None,
) -> Tuned:
    """Return the launch parameters for a kernel at one shape: from the store, or measured now.

    Args:
        program: what will be bound.
        spec: its manifest, whose tunables are tried first; None for a generated kernel.
        backend: ``triton`` or ``cuda``; ``cpp`` has nothing to choose.
        device: where it will run; without CUDA nothing is tried.
        header: as it will be rendered, so that the compilers' own caches serve the final build.
        fast_math: as it will be rendered.
        store: the user's file by default.
        budget_s: seconds after which no further configuration is built.
        clock: of the device by default.
        build: makes a launcher for a tuning; renders and compiles by default.
    """
    started = time.perf_counter_ns()
    device = torch.device(device)
    if backend == "cpp" or device.type != "cuda" or 0 in program.dims:
        return Tuned(tuning=Tuning(), source="default")
    store = TuningStore() if store is None else store
    key = tuning_key(program, header.title, backend, torch.cuda.get_device_name(device), fast_math=fast_math)
    stored = store.get(key)
    if stored is not None:
        return Tuned(tuning=stored, source="stored")
    choices = candidates(program, backend, spec.tunables if spec is not None else (), shared=_shared_memory(backend, device))
    if len(choices) < 2:
        return Tuned(tuning=Tuning(), source="default")
    with tempfile.TemporaryDirectory() as folder:
        make = build or _builder(program, header, backend, fast_math, Path(folder))
        built: list[tuple[Tuning, str, Launcher]] = []
        for tuning, text in choices:
            if built and time.perf_counter_ns() - started > budget_s * 1e9:
                break
            try:
                built.append((tuning, text, make(tuning)))
            except Exception:  # noqa: BLE001 - compilers and drivers raise what they like; another configuration will do
                continue
        timed = _times(program, built, device, clock or make_clock(device))
    if not timed:
        return Tuned(tuning=Tuning(), source="default", tune_ns=time.perf_counter_ns() - started)
    chosen, median_ns, default_ns = _choose([(tuning, ns) for tuning, _, ns in timed])
    store.put(key, chosen, median_ns=median_ns, default_ns=default_ns)
    return Tuned(
        tuning=chosen,
        source="measured",
        tried=tuple((text, ns) for _, text, ns in timed),
        tune_ns=time.perf_counter_ns() - started,
    )


def tuning_key(program: Program, title: str, backend: str, device_name: str, *, fast_math: bool) -> str:
    """Name what a tuning holds for; a template that changed asks again."""
    buckets = []
    for part in nests(program):
        sizes = [str(1 << max(0, size - 1).bit_length()) for size in part.program.dims]
        if program.is_reduced:
            sizes[-1] = str(program.dims[-1])
        buckets.append("x".join(sizes))
    bucket = "+".join(buckets)
    dtype = next((o.dtype for o in program.operands if o.is_output), "")
    digest = hashlib.sha256(layout_key(program).encode())
    for path in sorted((content_dir("templates") / backend).glob("*.jinja")):
        digest.update(path.read_bytes())
    parts = (
        title,
        digest.hexdigest()[:8],
        dtype,
        bucket,
        backend,
        device_name,
        version(),
        *(["fast_math"] if fast_math else []),
    )
    return "|".join(parts)


def is_faster_in_cuda(program: Program) -> bool:
    """Whether a Program is of a kind that CUDA C++ was faster at than Triton, so that it is worth building in both.

    These are rows too wide for Triton's registers and walked more than once, which the blocks of a cluster share in CUDA, and
    rows that channels divide, for whose number CUDA's kernels are compiled. On an H200 group norm takes Triton 1.3 to 1.6 times
    as long from 2 to 168 MB, one row of 25,088 elements 4.0 times, log-softmax of 2,048 x 128,256 1.6 times. A tanh
    that is no part of a GELU, which is lowered to a sigmoid, takes 1.07 to 1.10 times as long from 8 MB on.
    """
    from fusion_advisor.codegen.triton.body import walks
    from fusion_advisor.codegen.triton.tiling import walks_columns

    plans = [call.plan for call in calls_of(program, flatten_rows=False)]
    rereads = any(walks_columns(plan, Tuning()) and len(walks(plan)[1]) > 1 for plan in plans)
    has_tanh = any(value.op == "tanh" for plan in plans for value in plan.program.values)
    return rereads or has_tanh or any(plan.kind == "rows" and parts_of(plan) for plan in plans)


def version() -> str:
    """This package's version; empty in a bare checkout."""
    try:
        return importlib.metadata.version("fusion-advisor")
    except importlib.metadata.PackageNotFoundError:
        return ""


def candidates(
    program: Program, backend: str, declared: Sequence[Tuning] = (), *, shared: SharedMemory = _NO_SHARED_MEMORY
) -> list[tuple[Tuning, str]]:
    """Return up to six tunings whose launches differ, each with its launch shape in words; the backend's own choice first.

    Args:
        program: what will be bound.
        backend: ``triton`` or ``cuda``.
        declared: what is tried after the backend's own choice.
        shared: the GPU's, on which the launches of CUDA kernels depend.
    """
    shape_of, derived = _triton(program) if backend == "triton" else _cuda(program, shared)
    # What a manifest declares is for large tensors, and for rows that one block reads.
    shares_rows = any(tuning.cluster for tuning in derived)
    ordered = (*derived, *declared) if shares_rows or _is_tiny(program) else (*declared, *derived)
    found: dict[str, Tuning] = {}
    for tuning in (Tuning(), *ordered):
        try:
            text = shape_of(tuning)
        except KernelBuildFailed:
            continue
        found.setdefault(text, tuning)
    return [(tuning, text) for text, tuning in found.items()][:MOST_TRIALS]


def _is_tiny(program: Program) -> bool:
    return not program.is_reduced and sum(prod(part.program.dims) for part in nests(program)) <= _TINY_ELEMENTS


def _triton(program: Program) -> tuple[Callable[[Tuning], str], list[Tuning]]:
    from fusion_advisor.codegen.triton.body import rows_stay_cached
    from fusion_advisor.codegen.triton.tiling import choose_shape, walks_columns

    plan = largest(calls_of(program, flatten_rows=False))
    is_looped = walks_columns(plan, Tuning())

    def shape_of(tuning: Tuning) -> str:
        return choose_shape(plan, tuning, is_looped=walks_columns(plan, tuning)).text

    own = choose_shape(plan, Tuning(), is_looped=is_looped)
    warps, rows, cols = own.num_warps, own.constants.get("BLOCK_ROWS", 1), own.constants["BLOCK_COLS"]
    if is_looped:
        # Of rows that the L1 cache is to hold from walk to walk only a few may be under way: those of 80 kB two at a time.
        few = ((4096, 32), (4096, 16), (8192, 32), (2048, 8), (4096, 4))
        many = ((4096, 16), (2048, 8), (8192, 16), (2048, 4), (4096, 4))
        return shape_of, [Tuning(block_cols=c, num_warps=w) for c, w in (few if rows_stay_cached([plan]) else many)]
    if plan.kind == "flat":
        blocks = ((2048, 4), (1024, 2), (4096, 8), (512, 4), (512, 2))
        tiny = ((256, 4), (128, 1), (128, 4), (512, 4), (256, 1))
        return shape_of, [Tuning(block_cols=c, num_warps=w) for c, w in (tiny if _is_tiny(program) else blocks)]
    if plan.kind == "tiled" and _is_tiny(program):
        heights = ((256, 4), (128, 2), (128, 4), (64, 1), (512, 4))
        return shape_of, [Tuning(block_rows=max(1, n // cols), num_warps=w) for n, w in heights]
    if plan.kind == "tiled":
        taller = [
            Tuning(block_rows=r, num_warps=w) for r, w in ((rows * 2, warps), (rows * 2, warps * 2), (rows * 4, 8)) if r <= 1024
        ]
        # The best tile of rope on an H200: 8 rows of 64 took 34.5 and 10.14 µs on two shapes, the own choice 34.8 and 10.45 µs.
        small = Tuning(block_rows=max(1, 512 // (cols * (2 if plan.has_pairs else 1))), num_warps=4)
        return shape_of, [small, *taller, Tuning(block_rows=max(1, rows // 2), num_warps=warps)]
    around = [Tuning(num_warps=w) for w in (warps * 2, warps // 2, warps * 4) if 1 <= w <= 32]
    if prod(program.dims) <= _TINY_ELEMENTS and cols <= 128:
        around[:0] = [Tuning(block_rows=4, num_warps=4), Tuning(block_rows=2, num_warps=1)]
    narrow = [Tuning(block_rows=r, num_warps=w) for r, w in ((rows * 2, warps), (rows * 4, warps * 2)) if cols * r <= 8192]
    # One plain reduction over a row of 16 kB or more: LayerNorm's and softmax's first walks compute too much to be worth another.
    sums = column_passes(plan)[1]
    is_plain = len(sums) == 2 and len(sums[0].reductions) == 1 and not online_sums(plan.program)
    is_wide = is_plain and program.dims[-1] > 4096 and plan.row_count >= _FEW_ROWS
    walked = [Tuning(block_cols=4096, num_warps=16)] if is_wide else []
    return shape_of, [*walked, *narrow[:1], *around, *narrow[1:]]


def _shared_memory(backend: str, device: torch.device) -> SharedMemory:
    if backend != "cuda":
        return _NO_SHARED_MEMORY
    with torch.cuda.device(device):
        return device_shared_memory()


def _cuda(program: Program, shared: SharedMemory) -> tuple[Callable[[Tuning], str], list[Tuning]]:
    from fusion_advisor.codegen.cuda.ops import vector_width
    from fusion_advisor.codegen.cuda.tiling import fits_cluster, form_for, launch_shape, pack_width

    calls = calls_of(program, flatten_rows=True)
    plans = [call.plan for call in calls]
    plan, form = largest(calls), form_for(plans)

    def shape_of(tuning: Tuning) -> str:
        macros, _ = launch_shape(plan, tuning, form=form_for(plans, tuning), shared=shared)
        return " ".join(f"{name}={value}" for name, value in macros.items())

    if plan.kind != "rows" and _is_tiny(program):
        narrow = ((2, 4), (4, 2), (8, 1), (2, 8), (1, 4))
        return shape_of, [Tuning(packs=1, block_cols=c, num_warps=w) for c, w in narrow]
    if plan.kind == "flat":
        return shape_of, [Tuning(packs=n, num_warps=w) for n, w in ((1, 4), (4, 4), (2, 2), (1, 8), (8, 4))]
    if plan.kind == "tiled":
        return shape_of, [Tuning(packs=n, num_warps=w) for n, w in ((1, 4), (2, 2), (2, 8), (4, 4), (2, 4))]
    if form.is_looped:
        around = [Tuning(num_warps=16, block_rows=2), *(Tuning(packs=n, num_warps=w) for n, w in ((4, 16), (4, 32), (2, 32)))]
        clusters = _CLUSTERS_OF_FEW_ROWS if plan.row_count < _FEW_ROWS else _CLUSTERS
        shared_rows = [tuning for tuning in clusters if shared.is_distributed and fits_cluster(plan, tuning)]
        # The search may run out of time: what gains most comes first.
        return shape_of, [*shared_rows, *around, Tuning(packs=2, num_warps=16)]
    packs = -(-program.dims[-1] // pack_width(plan, form)[0])
    if packs <= 16:  # rows that share a warp
        heights = {lanes: max(1, lanes // next_power(packs)) for lanes in (32, 64, 256)}
        few = [Tuning(packs=2), Tuning(packs=2, block_rows=2 * heights[64])] if packs > 1 else []
        return shape_of, [*(Tuning(block_rows=rows) for rows in heights.values()), *few]
    # Packs, not threads: fewer threads wait for each other, more loads are under way, at any width.
    several = [Tuning(num_warps=1, block_rows=r) for r in (2, 8)] if -(-program.dims[-1] // vector_width(plan)) <= 256 else []
    return shape_of, [*(Tuning(packs=n) for n in (2, 8)), *several, Tuning(packs=1), Tuning(packs=3)]


def _builder(program: Program, header: Header, backend: str, fast_math: bool, folder: Path) -> Build:
    maker = backend_named(backend)

    def build(tuning: Tuning) -> Launcher:
        rendered = maker.render(program, header, tuning=tuning, fast_math=fast_math)
        return maker.build(rendered, folder / f"{rendered.entry}{rendered.suffix}").bind(program)

    return build


def _times(
    program: Program, built: Sequence[tuple[Tuning, str, Launcher]], device: torch.device, clock: Clock
) -> list[tuple[Tuning, str, int]]:
    inputs = sum(ITEM_BYTES[o.dtype] * o.element_count for o in program.operands if not o.is_output)
    outputs = program.moved_bytes - inputs
    return time_launchers(built, lambda seed: list(allocate(program, device, seed=seed)), inputs, outputs, device, clock)


def time_launchers(
    built: Sequence[tuple[Choice, str, Launcher]],
    make_set: Callable[[int], list[torch.Tensor]],
    input_bytes: int,
    output_bytes: int,
    device: torch.device,
    clock: Clock,
) -> list[tuple[Choice, str, int]]:
    """Median nanoseconds of one call over sets of operands larger than the cache; what cannot be launched is left out.

    Args:
        built: (choice, its name, launcher).
        make_set: makes the operands of the set with this number.
        input_bytes: of one set.
        output_bytes: of one set.
        device: where they are.
        clock: of the device.
    """
    least_ns = max((input_bytes + output_bytes) / _GUESSED_BYTES_PER_NS, 1000.0)
    rotation = plan_rotation(
        input_bytes, output_bytes, cache_bytes(device), least_ns, free_bytes(device) // 4, most_sets=_MOST_SETS
    )
    sets = [make_set(number) for number in range(rotation.sets)]

    def call_of(launch: Launcher) -> Callable[[int], Any]:
        return lambda number: launch(*sets[number])

    kept, repetitions = [], []
    for tuning, text, launch in built:
        try:
            repetitions.append(clock.prepare(call_of(launch), rotation))
        except Exception:  # noqa: BLE001 - more registers or shared memory than a block may have: each backend says it its own way
            continue
        kept.append((tuning, text))
    times = interleaved(clock, repetitions, rotation.calls, rounds=15, budget_s=_TIMING_S, least=5)
    return [(tuning, text, round(statistics.median(series))) for (tuning, text), series in zip(kept, times, strict=True)]


def _choose(timed: Sequence[tuple[Tuning, int]]) -> tuple[Tuning, int, int]:
    """Return the choice, its time and the time of the backend's own choice."""
    own_ns = next((ns for tuning, ns in timed if tuning == Tuning()), 0)
    best, best_ns = min(timed, key=lambda item: item[1])
    if own_ns and best_ns > own_ns * (1 - MUST_GAIN):
        return Tuning(), own_ns, own_ns
    return best, best_ns, own_ns


def allocate(program: Program, device: torch.device, *, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield flat tensors for a Program's operands, as large as every address reaches; integers are 0: they index safely."""
    reach = [0] * len(program.operands)
    for part in nests(program):
        own = part.program
        places: list[Value | Store] = [v for v in own.values if v.op == "load" and v.guard is None]
        places += own.stores
        reached = {place.operand for place in places}
        places += [v for v in own.values if v.op == "load" and v.operand not in reached]
        for place in places:
            along = [(size - 1) * stride for size, stride in zip(own.dims, place.strides, strict=True) if stride > 0]
            moved = [_largest(own, number) * step for number, step in zip(place.args, place.steps, strict=True) if step > 0]
            last = place.offset + sum(along) + sum(moved)
            at = part.operands[place.operand]
            reach[at] = max(reach[at], last + 1)
    generator = torch.Generator(device=device).manual_seed(seed)
    for operand, size in zip(program.operands, reach, strict=True):
        made = torch.zeros(size, dtype=getattr(torch, operand.dtype), device=device)
        yield made.normal_(generator=generator) if made.is_floating_point() and not operand.is_output else made


def _largest(own: Program, number: int) -> int:
    """Return the largest value that a number in an address takes, where every integer that is read is 0."""
    value = own.values[number]
    if value.op in ("index", "size"):
        return own.dims[value.dim] - (value.op == "index")
    if value.op in ("const", "extent"):
        return int(value.constant or 0)
    if value.op == "load":
        return 0
    parts = [_largest(own, part) for part in value.args]
    if value.op == "quotient":
        return parts[0] // max(parts[1], 1)
    if value.op == "mul":
        return math.prod(parts)
    return sum(parts) if value.op == "add" else max(parts)
