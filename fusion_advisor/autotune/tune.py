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
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fusion_advisor.autotune.build_ahead import BuildAhead, Job
from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Tuning
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.content import content_dir
from fusion_advisor.ir.program import ITEM_BYTES, Program, Store, Value, is_tiny, layout_key, nests
from fusion_advisor.timing.kernel_timer import Clock, cache_bytes, free_bytes, interleaved, make_clock, plan_rotation

MOST_TRIALS = 6
MUST_GAIN = 0.02
"""A choice that is faster by less than this may be so by chance; the backend's own then stays, and runs make the same choice."""
_BUDGET_S = 1.4
"""No further configuration is built after this; the last one may take another 0.3 s."""
_TIMING_S = 0.2
_FIRST_ROUNDS = 4
_FAR = 0.1
"""A configuration that is slower than the fastest by more than this, by the median of the first rounds, is not timed further."""
_MOST_SETS = 64
_GUESSED_BYTES_PER_NS = 2000.0
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


class Gpu:
    """What tuning asks of a device.

    Attributes:
        device: where operands are and kernels run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def name(self) -> str:
        """Return the GPU's name, for which a choice holds."""
        return torch.cuda.get_device_name(self.device)

    def cache_bytes(self) -> int:
        """Return the size of the last cache."""
        return cache_bytes(self.device)

    def free_bytes(self) -> int:
        """Return how much memory is free now."""
        return free_bytes(self.device)


def best_tuning(
    program: Program,
    declared: Sequence[Tuning],
    backend: str,
    device: torch.device | str,
    *,
    header: Header,
    fast_math: bool = False,
    store: TuningStore | None = None,
    budget_s: float = _BUDGET_S,
    clock: Clock | None = None,
    build: Build | None = None,
    gpu: Gpu | None = None,
    ahead: BuildAhead | None = None,
) -> Tuned:
    """Return the launch parameters for a kernel at one shape: from the store, or measured now.

    Args:
        program: what will be bound.
        declared: tunables of its manifest, tried first; none for a generated kernel.
        backend: its language; without tile parameters there is nothing to choose.
        device: where it will run; nothing is tried where kernels of this backend do not run.
        header: as it will be rendered, so that the compilers' own caches serve the final build.
        fast_math: as it will be rendered.
        store: the user's file by default.
        budget_s: seconds after which no further configuration is built.
        clock: of the device by default.
        build: makes a launcher for a tuning; renders and compiles by default.
        gpu: that of the device by default.
        ahead: is waited for where it compiles this kernel.
    """
    device = torch.device(device)
    store = TuningStore() if store is None else store
    gpu = gpu or Gpu(device)
    key, source, choices = _choices(program, declared, backend, gpu, device, title=header.title, fast_math=fast_math, store=store)
    if ahead is not None:
        ahead.wait(_jobs(program, header, backend, choices, fast_math=fast_math))
    if source:
        return Tuned(tuning=choices[0][0], source=source)
    started = time.perf_counter_ns()
    with tempfile.TemporaryDirectory() as folder:
        make = build or _builder(program, header, backend, fast_math, Path(folder))
        built = _built(choices, make, started_ns=started, budget_s=budget_s)
        timed = _times(program, built, gpu, clock or make_clock(device))
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


def jobs_of(
    program: Program,
    declared: Sequence[Tuning],
    backend: str,
    device: torch.device,
    *,
    header: Header,
    fast_math: bool,
    store: TuningStore | None = None,
    gpu: Gpu | None = None,
) -> tuple[Job, ...]:
    """Return what :func:`best_tuning` will build, so that it can be compiled ahead.

    Args:
        program: as it will be given there.
        declared: the same.
        backend: the same.
        device: the same.
        header: the same.
        fast_math: the same.
        store: the user's file by default.
        gpu: that of the device by default.
    """
    gpu, store = gpu or Gpu(device), TuningStore() if store is None else store
    _, _, choices = _choices(program, declared, backend, gpu, device, title=header.title, fast_math=fast_math, store=store)
    return _jobs(program, header, backend, choices, fast_math=fast_math)


def _jobs(
    program: Program, header: Header, backend: str, choices: Sequence[tuple[Tuning, str]], *, fast_math: bool
) -> tuple[Job, ...]:
    return tuple(
        Job(program=program, header=header, backend=backend, tuning=tuning, fast_math=fast_math) for tuning, _ in choices
    )


def _choices(
    program: Program, declared: Sequence[Tuning], backend: str, gpu: Gpu, device: torch.device,
    *, title: str, fast_math: bool, store: TuningStore,
) -> tuple[str, str, list[tuple[Tuning, str]]]:  # fmt: skip
    """A tuning's key, where the tuning comes from if nothing is to be measured, and what there is to choose from."""
    language = descriptor(backend)
    own = [(Tuning(), "")]
    if not language.tile_parameters or device.type not in language.device_kinds or 0 in program.dims:
        return "", "default", own
    key = tuning_key(program, title, backend, gpu.name(), fast_math=fast_math, declared=declared)
    stored = store.get(key)
    if stored is not None:
        return key, "stored", [(stored, "")]
    choices = candidates(program, backend, declared, limits=language.limits(device))
    return (key, "", choices) if len(choices) > 1 else (key, "default", own)


def _built(
    choices: Sequence[tuple[Tuning, str]], make: Build, *, started_ns: int, budget_s: float
) -> list[tuple[Tuning, str, Launcher]]:
    """The launchers of as many choices as the budget allows, at least one."""
    built: list[tuple[Tuning, str, Launcher]] = []
    for tuning, text in choices:
        if built and time.perf_counter_ns() - started_ns > budget_s * 1e9:
            break
        try:
            built.append((tuning, text, make(tuning)))
        except Exception:  # noqa: BLE001 - compilers and drivers raise what they like; another configuration will do
            continue
    return built


def tuning_key(
    program: Program, title: str, backend: str, device_name: str, *, fast_math: bool, declared: Sequence[Tuning] = ()
) -> str:
    """Name what a tuning holds for; a template that changed asks again, and so does another manifest.

    The declared candidates are part of the name; the other ones follow from the rest of it. Without them a kernel that was tuned
    before its manifest declared some would never get these.
    """
    buckets = []
    for part in nests(program):
        sizes = [str(1 << max(0, size - 1).bit_length()) for size in part.program.dims]
        if program.is_reduced:
            sizes[-1] = str(program.dims[-1])
        buckets.append("x".join(sizes))
    bucket = "+".join(buckets)
    dtype = next((o.dtype for o in program.operands if o.is_output), "")
    digest = hashlib.sha256(layout_key(program).encode())
    digest.update(repr([astuple(tuning) for tuning in declared]).encode())
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


def version() -> str:
    """This package's version; empty in a bare checkout."""
    try:
        return importlib.metadata.version("fusion-advisor")
    except importlib.metadata.PackageNotFoundError:
        return ""


def candidates(
    program: Program, backend: str, declared: Sequence[Tuning] = (), *, limits: object | None = None
) -> list[tuple[Tuning, str]]:
    """Return up to six tunings whose launches differ, each with its launch shape in words; the backend's own choice first.

    Args:
        program: what will be bound.
        backend: one with tile parameters.
        declared: what is tried after the backend's own choice.
        limits: of the GPU, where launches depend on it.
    """
    found_there = descriptor(backend).search(program, limits)
    shape_of, derived = found_there.shape_of, found_there.tunings
    # What a manifest declares is for large tensors, and for rows that one block reads.
    shares_rows = any(tuning.cluster for tuning in derived)
    ordered = (*derived, *declared) if shares_rows or is_tiny(program) else (*declared, *derived)
    found: dict[str, Tuning] = {}
    for tuning in (Tuning(), *ordered):
        try:
            text = shape_of(tuning)
        except KernelBuildFailed:
            continue
        found.setdefault(text, tuning)
    return [(tuning, text) for text, tuning in found.items()][:MOST_TRIALS]


def _builder(program: Program, header: Header, backend: str, fast_math: bool, folder: Path) -> Build:
    maker = backend_named(backend)

    def build(tuning: Tuning) -> Launcher:
        rendered = maker.render(program, header, tuning=tuning, fast_math=fast_math)
        return maker.build(rendered, folder / f"{rendered.entry}{rendered.suffix}").bind(program)

    return build


def _times(
    program: Program, built: Sequence[tuple[Tuning, str, Launcher]], gpu: Gpu, clock: Clock
) -> list[tuple[Tuning, str, int]]:
    inputs = sum(ITEM_BYTES[o.dtype] * o.element_count for o in program.operands if not o.is_output)
    outputs = program.moved_bytes - inputs
    return time_launchers(built, lambda seed: list(allocate(program, gpu.device, seed=seed)), inputs, outputs, gpu, clock)


def time_launchers(
    built: Sequence[tuple[Choice, str, Launcher]],
    make_set: Callable[[int], list[torch.Tensor]],
    input_bytes: int,
    output_bytes: int,
    gpu: Gpu,
    clock: Clock,
) -> list[tuple[Choice, str, int]]:
    """Median nanoseconds of one call over sets of operands larger than the cache; what cannot be launched is left out.

    Args:
        built: (choice, its name, launcher).
        make_set: makes the operands of the set with this number.
        input_bytes: of one set.
        output_bytes: of one set.
        gpu: where they are.
        clock: of the device.
    """
    least_ns = max((input_bytes + output_bytes) / _GUESSED_BYTES_PER_NS, 1000.0)
    rotation = plan_rotation(input_bytes, output_bytes, gpu.cache_bytes(), least_ns, gpu.free_bytes() // 4, most_sets=_MOST_SETS)
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
    times = interleaved(
        clock, repetitions, rotation.calls, rounds=15, budget_s=_TIMING_S, least=_FIRST_ROUNDS + 1, still_open=_near_the_fastest
    )
    return [(tuning, text, round(statistics.median(series))) for (tuning, text), series in zip(kept, times, strict=True)]


def _near_the_fastest(times: Sequence[Sequence[int]]) -> list[int]:
    """Return, by number, the configurations that go on."""
    medians = [statistics.median(series) for series in times]
    most = max(map(len, times))
    going = [number for number, series in enumerate(times) if len(series) == most]
    if most < _FIRST_ROUNDS:
        return going
    return [number for number in going if medians[number] <= (1 + _FAR) * min(medians)]


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
