"""C++ kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: ``python -m tools.sanitize cpp``.

Every manifest's cases are rendered as ``apply`` renders them and compiled, many at once, into a program without Python. It calls
each kernel through its C entry point, on buffers that hold exactly the bytes of the tensors, with four threads from the first
element on. Hand-made programs (strided, guarded, beside one another, dropout) and chains of integer ops on the extremes of their
types are called too. Faults are planted first, one for each kind: a sanitizer that does not see them has seen nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.codegen.common.interface import Header, Rendered, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend, CppKernel, find_compiler
from fusion_advisor.evaluate.check_inputs import make_inputs, planned_layouts
from fusion_advisor.evaluate.kinds import header_of, named_program
from fusion_advisor.ir.program import Program
from fusion_advisor.library.discover import list_kernels, load_kernel
from fusion_advisor.library.patterns import kernel_patterns, lower_graph, trace_reference
from fusion_advisor.lowering.rules.tables import CannotLower

DRIVER = Path(__file__).with_name("sanitize_driver.cpp")
SANITIZERS = {
    "address": ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-fopenmp"),
    "thread": ("-fsanitize=thread", "-fopenmp", "-DFA_TEAM"),
}
"""Flags by name. The second has its own OpenMP runtime: see the driver."""
_KEPT_FLAGS = ("-std=c++17", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=0",
    "TSAN_OPTIONS": "halt_on_error=1",
}
THREADS = 4
BATCH = 24
"""Kernels of one program: enough to read the headers seldom, few enough that two compilers work at once."""
MOST_ELEMENTS = 2**18
"""Larger cases walk the same loops for longer."""
_INCLUDE = re.compile(r"^#include .*\n", re.MULTILINE)
_FOUND = re.compile(r"^.*(?:runtime error:|ERROR: AddressSanitizer|WARNING: ThreadSanitizer).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a kernel.

    Attributes:
        label: kernel, reference, sizes, dtype and kind of input.
        entry: of the kernel.
        buffers: what each operand holds before the call, inputs then outputs.
        shifts_bytes: how far into its allocation each operand begins.
        integers: sizes, strides and offsets.
    """

    label: str
    entry: str
    buffers: tuple[bytes, ...]
    shifts_bytes: tuple[int, ...]
    integers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a sanitizer found in a call."""

    label: str
    detail: str


class _Recorder:
    """Stands for a loaded library: keeps the arguments of a call in place of making it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def function(*arguments: Any) -> None:
            self.calls.append(arguments)

        return function


def call_of(
    label: str, rendered: Rendered, program: Program, tensors: Sequence[torch.Tensor], *, is_shifted: bool
) -> Call | None:
    """Bind a kernel as ``apply`` does, and keep what it would be called with; None where no call is made (nothing to compute).

    Args:
        label: of the call.
        rendered: the kernel.
        program: that it was rendered from.
        tensors: its operands, inputs then outputs.
        is_shifted: whether each tensor begins one element into its allocation.
    """
    recorder: Any = _Recorder()
    kernel = CppKernel(entry=rendered.entry, library=Path(), build_ns=0, tuning="", handle=recorder)
    launch = kernel.bind(program)
    launch(*tensors)
    if not recorder.calls:
        return None
    ((*arguments, _),) = recorder.calls
    rest = arguments[len(tensors) :]
    places = [bytes(ctypes.sizeof(argument)) for argument in rest if isinstance(argument, ctypes.Array)]
    return Call(
        label=label, entry=rendered.entry, buffers=(*map(_bytes_of, tensors), *places),
        shifts_bytes=(*(tensor.itemsize * is_shifted for tensor in tensors), *(0 for _ in places)),
        integers=tuple(argument.value for argument in rest if isinstance(argument, ctypes.c_int64)),
    )  # fmt: skip


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return ctypes.string_at(tensor.data_ptr(), reach * tensor.itemsize)


def manifest_calls(
    names: Sequence[str],
    dtypes: Sequence[str] | None = None,
    most_elements: int = MOST_ELEMENTS,
    most_references: int | None = None,
) -> Iterator[tuple[Rendered, Call]]:
    """Yield the calls of manifests: all references, cases and sets of outputs.

    Args:
        names: of kernels.
        dtypes: only these; all by default.
        most_elements: leave larger cases out.
        most_references: so many spellings of each manifest, the first ones; all by default.
    """
    for name in names:
        kernel = load_kernel(name)
        own = kernel_patterns(kernel.spec)
        for case in kernel.spec.check:
            for dtype in case.dtypes:
                if dtypes is not None and dtype not in dtypes:
                    continue
                for variant, function in kernel.references[:most_references]:
                    spec = kernel.spec.laid_out(case)
                    graph = trace_reference(spec, function, dict(case.sizes), dtype=getattr(torch, dtype))
                    for lowered in lower_graph(graph, tuple(tensor.name for tensor in spec.inputs)):
                        program = named_program(lowered.program, own)
                        if math.prod(program.dims) > most_elements:
                            continue
                        rendered = CppBackend().render(program, header_of(spec, variant), tuning=Tuning(), fast_math=False)
                        for kind, is_shifted in (("normal", False), ("NaN and Inf", True)):
                            given = make_inputs(spec, case, dtype, kind)
                            tensors = [given[index] for index in lowered.inputs]
                            tensors += _outputs(graph, len(lowered.outputs), [given[index] for index in lowered.written])
                            label = f"{name} {variant} {case} {dtype}, {kind}"
                            call = call_of(label, rendered, program, tensors, is_shifted=is_shifted)
                            if call is not None:
                                yield rendered, call


def _outputs(graph: torch.fx.GraphModule, count: int, written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    planned = planned_layouts(graph)[-count:]
    before = [None] * (count - len(written)) + [*written]
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).fill_(3) for t in planned]
    return [tensor if given is None else tensor.copy_(given) for tensor, given in zip(made, before, strict=True)]


def program_calls() -> Iterator[tuple[Rendered, Call]]:
    """Yield the calls of the programs that the tests of all backends share."""
    from tests.kernel_cases.cases import cases, inputs
    from tests.kernel_cases.evaluate import allocate

    header = Header(title="chain", summary="A test.", origin="written by hand")
    for name, program in cases().items():
        rendered = CppBackend().render(program, header, tuning=Tuning(), fast_math=False)
        call = call_of(name, rendered, program, [*inputs(name, program), *allocate(program)], is_shifted=True)
        if call is not None:
            yield rendered, call


INTEGER_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "negate": lambda x, y: -x + 0 * y, "abs": lambda x, y: x.abs() + 0 * y,
    "maximum": torch.maximum, "minimum": torch.minimum, "remainder": lambda x, y: torch.remainder(x, torch.where(y == 0, 3, y)),
    "square": lambda x, y: x * x + y, "sign": lambda x, y: torch.sign(x) + y, "clamp": lambda x, y: x.clamp(-5, 5) * y,
    "and": torch.bitwise_and, "xor": torch.bitwise_xor, "not": lambda x, y: torch.bitwise_not(x) + y,
    "scale and shift": lambda x, y: x * 3 + 7 - y, "to float": lambda x, y: x.float() * y.float(),
    "sum of rows": lambda x, y: (x + y).sum(-1, keepdim=True), "where": lambda x, y: torch.where(x > y, x - y, y - x),
    "floor division": lambda x, y: x // torch.where(y == 0, 3, y), "to byte": lambda x, y: (x + y).to(torch.uint8),
}  # fmt: skip
FLOAT_TO_INTEGER: dict[str, Callable[..., torch.Tensor]] = {
    "float to int64": lambda x, y: (x * y).to(torch.int64), "float to int32": lambda x, y: (x * y).to(torch.int32),
    "float to int8": lambda x, y: (x * y).to(torch.int8), "float to uint8": lambda x, y: (x * y).to(torch.uint8),
    "float to bool": lambda x, y: (x * y).to(torch.bool),
}  # fmt: skip


def integer_calls() -> Iterator[tuple[Rendered, Call]]:
    """Yield the calls of chains over integers, at the extremes of their types, and of floats that become integers."""
    extremes: list[torch.Tensor] = []
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        values = torch.tensor([info.min, info.max, 0, 1, info.max - 1, info.min + 1, 2, 5], dtype=dtype)
        extremes.append(values)
    header = Header(title="chain", summary="A test.", origin="written by hand")
    floats = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e19, -1.5, 300.0])
    for table, kinds in ((INTEGER_OPS, extremes), (FLOAT_TO_INTEGER, [floats])):
        for name, function in table.items():
            for values in kinds:
                count = len(values)
                pair = (values.repeat_interleave(count).view(count, count), values.repeat(count).view(count, count))
                label = f"{name} of {str(values.dtype).removeprefix('torch.')}"
                yield from _chain_calls(label, header, function, pair)


def _chain_calls(
    label: str, header: Header, function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> Iterator[tuple[Rendered, Call]]:
    from fusion_advisor.capture.graph.retrace import trace

    graph = trace(function, inputs)
    try:
        (lowered,) = lower_graph(graph, tuple(f"x{number}" for number in range(len(inputs))))
    except CannotLower:
        return  # such a chain gets no kernel
    rendered = CppBackend().render(lowered.program, header, tuning=Tuning(), fast_math=False)
    tensors = [inputs[index] for index in lowered.inputs] + _outputs(graph, len(lowered.outputs), ())
    call = call_of(label, rendered, lowered.program, tensors, is_shifted=True)
    if call is not None:
        yield rendered, call


# ---------------------------------------------------------------------- building and running


def run(found: Sequence[tuple[Rendered, Call]], sanitizer: str, folder: Path, jobs: int = 1) -> list[Fault]:
    """Make calls under a sanitizer.

    Args:
        found: kernels and calls.
        sanitizer: a key of ``SANITIZERS``.
        folder: where to build.
        jobs: compilers at a time.

    Returns:
        What was found, one fault a call at most.
    """
    kernels = list({rendered.entry: rendered for rendered, _ in found}.values())
    batches = [kernels[first : first + BATCH] for first in range(0, len(kernels), BATCH)]
    calls = [call for _, call in found]

    def one(number: int) -> list[Fault]:
        entries = {kernel.entry for kernel in batches[number]}
        mine = [call for call in calls if call.entry in entries]
        return _run_batch(batches[number], mine, sanitizer, folder / f"{sanitizer}{number}")

    with ThreadPoolExecutor(jobs) as pool:
        return [fault for faults in pool.map(one, range(len(batches))) for fault in faults]


def _run_batch(kernels: Sequence[Rendered], calls: Sequence[Call], sanitizer: str, folder: Path) -> list[Fault]:
    folder.mkdir(parents=True)
    program = build(kernels, sanitizer, folder)
    numbers = {kernel.entry: number for number, kernel in enumerate(kernels)}
    (folder / "calls").write_bytes(b"".join([struct.pack("<q", len(calls)), *(_packed(call, numbers) for call in calls)]))
    faults: list[Fault] = []
    first = 0
    while first < len(calls):
        environment = {**os.environ, **_ENVIRONMENT}
        command = [str(program), str(folder / "calls"), str(first)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
        lines = done.stdout.split("\n")
        if done.returncode == 0 and "finished" in lines:
            break
        started = [line for line in lines if line.startswith("call ")]
        if not started:
            raise RuntimeError(f"{program} stopped before its first call: {done.stderr[-2000:]}")
        last = int(started[-1].split()[1])
        said = _FOUND.search(done.stderr)
        detail = said[0].strip() if said else f"exit code {done.returncode}: {done.stderr[-300:]}"
        faults.append(Fault(label=calls[last].label, detail=detail.replace(f"{folder}/", "")))
        first = last + 1
    return faults


def build(kernels: Sequence[Rendered], sanitizer: str, folder: Path) -> Path:
    """Compile kernels and the driver into one program; return its path.

    Raises:
        RuntimeError: there is no compiler, or it refused the source.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found; install g++ or clang++, or set CXX")
    includes = dict.fromkeys(line for kernel in kernels for line in _INCLUDE.findall(kernel.source))
    bodies = []
    for kernel in kernels:
        source = _INCLUDE.sub("", kernel.source)
        source = re.sub(r"(kParallelFrom =) \d+;", r"\1 1;", source)  # threads from the first element on
        bodies.append(f'namespace {kernel.entry}_file {{\n#line 1 "{kernel.entry}.cpp"\n{source}}}\n')
    table = ", ".join(f"Spread<&{kernel.entry}_file::{kernel.entry}>::call" for kernel in kernels)
    driver = DRIVER.read_text().replace("KERNELS}", f"{table}}}")
    (folder / "all.cpp").write_text(f'{"".join(includes)}{"".join(bodies)}#line 1 "driver.cpp"\n{driver}')
    flags = SANITIZERS[sanitizer]
    compiled = [*compiler, *_KEPT_FLAGS, "-O1", *flags, "-c", str(folder / "all.cpp"), "-o", str(folder / "all.o")]
    linked = [flag for flag in flags if flag != "-fopenmp" or sanitizer != "thread"]  # its OpenMP runtime is the driver's
    for command in (compiled, [*compiler, *linked, str(folder / "all.o"), "-o", str(folder / "all"), "-lpthread"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return folder / "all"


def _packed(call: Call, numbers: dict[str, int]) -> bytes:
    parts = [struct.pack("<qqq", numbers[call.entry], THREADS, len(call.buffers))]
    for content, shift_bytes in zip(call.buffers, call.shifts_bytes, strict=True):
        parts += [struct.pack("<qq", shift_bytes, len(content)), content]
    parts.append(struct.pack(f"<q{len(call.integers)}q", len(call.integers), *call.integers))
    return b"".join(parts)


# ---------------------------------------------------------------------- planted faults

PLANTED = {
    "a read past the end": ("address", "out[0] = x[n];", "heap-buffer-overflow"),
    "a write before the start": ("address", "out[-1] = x[0];", "heap-buffer-overflow"),
    "a signed overflow": ("address", "out[0] = x[0] + static_cast<int32_t>(n) * 1000000000;", "signed integer overflow"),
    "a misaligned read": ("address", "out[0] = *(const int32_t *)((const char *)x + 1);", "misaligned address"),
    "a float out of range": ("address", "out[0] = static_cast<int32_t>(static_cast<float>(n) * 1e18f);", "outside the range"),
    "a race": ("thread", "#pragma omp parallel for num_threads(4)\nfor (int64_t i = 0; i < n; ++i) out[0] += x[i];", "data race"),
}  # fmt: skip
"""Name → sanitizer, body of a kernel over n = 8 elements, and what the sanitizer must say."""


def planted(folder: Path, sanitizer: str) -> dict[str, bool]:
    """Return, for each planted fault of a sanitizer, whether it was found as what it is."""
    found = {}
    for number, (name, (owner, body, wanted)) in enumerate(PLANTED.items()):
        if owner != sanitizer:
            continue
        entry = f"fa_planted_{number}"
        declared = f'extern "C" void {entry}(const int32_t *x, int32_t *out, int64_t n, int threads) {{\n(void)threads;\n'
        rendered = Rendered(backend="cpp", entry=entry, source=f"#include <cstdint>\n{declared}{body}\n}}\n", suffix=".cpp")
        call = Call(
            label=name, entry=entry, buffers=(struct.pack("<8i", *range(3, 11)), bytes(32)), shifts_bytes=(0, 0), integers=(8,)
        )
        faults = run([(rendered, call)], sanitizer, folder / f"planted{number}")
        found[name] = len(faults) == 1 and wanted in faults[0].detail
    return found


def cpp_kernel_names() -> list[str]:
    """Names of the manifests that have a C++ kernel."""
    return [spec.name for spec in list_kernels() if "cpp" in spec.backends and spec.gemv is None]


def distinct(found: Iterable[tuple[Rendered, Call]], sanitizer: str) -> list[tuple[Rendered, Call]]:
    """Keep what a sanitizer can learn from: for threads, one call of a kernel and its sizes is as good as two."""
    kept: dict[Any, tuple[Rendered, Call]] = {}
    for rendered, call in found:
        kept.setdefault((call.entry, call.integers, "" if sanitizer == "thread" else call.label), (rendered, call))
    return list(kept.values())


GROUPS = ("manifests", "programs", "integers")


def record(names: Sequence[str], groups: Sequence[str], jobs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run everything; return a flat record.

    Args:
        names: of manifests; all by default.
        groups: of ``GROUPS``; all by default, and only the first where there are names.
        jobs: compilers at a time.
        say: takes a line of progress.
    """
    started = time.perf_counter()
    makers: dict[str, Callable[[], Iterator[tuple[Rendered, Call]]]] = {
        "manifests": lambda: manifest_calls(names or cpp_kernel_names()), "programs": program_calls, "integers": integer_calls,
    }  # fmt: skip
    chosen = tuple(groups) or (GROUPS[:1] if names else GROUPS)
    part = "" if set(chosen) == set(GROUPS) and not names else f": {', '.join([*chosen, *names])}"
    failed: list[str] = []
    kernels: set[str] = set()
    tried = 0
    with tempfile.TemporaryDirectory() as made:
        seen = {s: planted(Path(made) / s, s) for s in SANITIZERS}
        for group in chosen:
            every = list(makers[group]())
            kernels |= {call.entry for _, call in every}
            for sanitizer in SANITIZERS:
                calls = distinct(every, sanitizer)
                found = run(calls, sanitizer, Path(made) / sanitizer / group, jobs)
                failed += [f"{sanitizer}: {fault.label}: {fault.detail}" for fault in found]
                tried += len(calls)
                say(f"{group}, {sanitizer}: {len(calls)} calls, {len(found)} faults, {time.perf_counter() - started:.0f} s")
    failed += [f"planted and not seen: {name}" for faults in seen.values() for name, is_seen in faults.items() if not is_seen]
    return {
        "name": f"C++ kernels under ASan, UBSan and TSan{part}", "tried": tried, "kernels": len(kernels),
        "planted": sum(map(len, seen.values())), "failed": len(failed), "seconds": round(time.perf_counter() - started, 1),
        "details": failed,
    }  # fmt: skip
