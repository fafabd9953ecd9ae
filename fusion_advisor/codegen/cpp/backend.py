"""C++/OpenMP kernels: rendered from the kernel IR, compiled by the system's C++ compiler, called through ctypes.

The entry point is plain C: one pointer per operand, then the sizes, strides and offsets as int64, then where the kernel leaves
positions out of range (if it reads or writes where a tensor says), then the number of threads. So no kernel needs torch's
headers, and one compiles in about half a second.

The threads are those of the OpenMP runtime that torch has loaded (both ask the loader for ``libgomp.so.1``): two runtimes would
keep two pools of threads, spinning against each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fusion_advisor.codegen.common.header_comment import dropout_notes, wrap
from fusion_advisor.codegen.common.interface import (
    CompileAhead,
    Header,
    KernelBuildFailed,
    Launcher,
    Rendered,
    Tuning,
    body_of,
    entry_name,
    entry_names,
    environment,
)
from fusion_advisor.codegen.common.position_checks import checks_of, error_of
from fusion_advisor.codegen.cpp.arguments import Layout
from fusion_advisor.codegen.cpp.body import Kernel
from fusion_advisor.codegen.cpp.first_run import Call, run_first
from fusion_advisor.codegen.cpp.names import Names
from fusion_advisor.codegen.cpp.ops import C_TYPES, computed_in
from fusion_advisor.files.kept_code import KeptCode
from fusion_advisor.files.private_folder import cache_folder
from fusion_advisor.ir.program import Program, layout_key, nests

# No -ffast-math: NaN and Inf must come out as torch's do. The two that are here only drop errno and exception flags, without
# which floor, sqrt and selects do not vectorise. GCC contracts across statements if left to itself: x·c − max(x·c) is then not 0
# at the maximum, because only one of the products is rounded.
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
    "-shared",
)  # fmt: skip
# Named one by one: -ffast-math itself would also assume that no NaN exists, and links code that flushes subnormals to zero in the
# whole process.
_FAST_FLAGS = ("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros")
_FAST_NOTE = "Fast math: sums may be reordered and quotients become products; NaN and Inf still propagate, signs of zero may not."
_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True, kw_only=True)
class CppKernel:
    """A compiled kernel, loaded into the process."""

    entry: str
    library: Path
    build_ns: int
    tuning: str
    handle: ctypes.CDLL

    def bind(self, program: Program) -> Launcher:
        """Fix sizes, strides and offsets; the launcher takes the tensors, inputs then outputs, and must not be given overlaps.

        The launcher raises what eager raises where a position is out of range (``codegen.common.position_checks``).

        Raises:
            ValueError: ``program`` has another layout than the one that was rendered.
        """
        import torch

        parts = self._parts(program)
        if not parts:
            return _nothing
        function = getattr(self.handle, self.entry)
        fixed = [ctypes.c_int64(value) for value in _integers(parts)]
        checked = [part for part in parts if checks_of(part)]
        wrong_type = ctypes.c_int64 * (2 * len(checked))
        own = [ctypes.POINTER(ctypes.c_int64)] if checked else []
        function.argtypes = [ctypes.c_void_p] * len(program.operands) + [ctypes.c_int64] * len(fixed) + own + [ctypes.c_int]
        function.restype = None
        data_ptr, threads = torch.Tensor.data_ptr, torch.get_num_threads

        def launch(*tensors: torch.Tensor) -> None:
            function(*map(data_ptr, tensors), *fixed, threads())

        def launch_checked(*tensors: torch.Tensor) -> None:
            wrong = wrong_type()
            function(*map(data_ptr, tensors), *fixed, wrong, threads())
            for place, part in enumerate(checked):
                if wrong[2 * place]:
                    raise error_of(part, wrong[2 * place], wrong[2 * place + 1])

        return launch_checked if checked else launch

    def bind_in_child(self, program: Program) -> Launcher:
        """As :meth:`bind`; the launcher runs the kernel in a child process and changes no tensor (see ``first_run``).

        Raises:
            ValueError: ``program`` has another layout than the one that was rendered.
        """
        import torch

        parts = self._parts(program)
        if not parts:
            return _nothing
        call = Call(
            library=self.library, entry=self.entry, integers=tuple(_integers(parts)),
            wrong=2 * sum(bool(checks_of(part)) for part in parts), threads=torch.get_num_threads(),
        )  # fmt: skip
        return lambda *tensors: run_first(call, tensors)

    def compile_for(self, programs: Iterable[Program], ahead: CompileAhead | None = None) -> int:
        """Return 1: the library serves all sizes."""
        del programs, ahead
        return 1

    def _parts(self, program: Program) -> list[Program]:
        """The loop nests of a program that has the layout that was rendered; none where it has no elements."""
        title = self.entry.removeprefix("fa_").rpartition("_")[0]
        if self.entry not in entry_names(program, title, ("", "fast_math")):
            raise ValueError(f"{self.entry} was rendered for another layout")
        parts = [part.program for part in nests(program)]
        is_empty = all(0 in part.dims[:-1] or (0 in part.dims and not part.is_reduced) for part in parts)
        return [] if is_empty else parts


class CppBackend:
    """Renders and builds kernels for the CPU."""

    name: ClassVar[str] = "cpp"

    def render(
        self, program: Program, header: Header, *, tuning: Tuning, fast_math: bool, elsewhere: Sequence[Program] = ()
    ) -> Rendered:
        """Print the program as readable C++.

        ``tuning`` is for tile kernels and changes nothing here, and nor does ``elsewhere``: all sizes are arguments.
        """
        del tuning, elsewhere
        parts = nests(program)
        entry = entry_name(program, header.title, "fast_math" if fast_math else "")
        flags = (*_FLAGS, *_FAST_FLAGS) if fast_math else _FLAGS
        start = f'extern "C" void {entry}('
        if len(parts) > 1:
            source = _beside(program, [*_header(program, header, fast_math), f"Build: c++ {' '.join(flags)}"], start)
            return Rendered(backend=self.name, entry=entry, source=source, suffix=".cpp", flags=flags)
        kernel = Kernel(program)
        source = (
            environment()
            .get_template(_template(program))
            .render(
                **_context(kernel),
                header=[*_header(program, header, fast_math), f"Build: c++ {' '.join(flags)}"],
                includes=includes_of(kernel),
                prelude=kernel.prelude.names,
                signature=filled(start, kernel.layout.signature),
            )
        )
        return Rendered(backend=self.name, entry=entry, source=source, suffix=".cpp", flags=flags)

    def build(self, rendered: Rendered, path: Path) -> CppKernel:
        """Write the source to ``path``, compile it unless the cache has it, and load it.

        Raises:
            KernelBuildFailed: there is no compiler, or it refused the source.
        """
        started = time.perf_counter_ns()
        compiler = find_compiler()
        if compiler is None:
            raise KernelBuildFailed(
                kernel=rendered.entry, target="cpp", cause="no C++ compiler found; install g++ or clang++, or set CXX"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, rendered.file_text.encode())
        flags = rendered.flags or _FLAGS
        code = "\n".join(line for line in rendered.source.splitlines() if not line.startswith("//"))
        key = hashlib.sha256("\0".join((code, compiler_identity(compiler), *flags)).encode()).hexdigest()[:32]
        library, handle = load_library(rendered.entry, f"{rendered.entry}_{key}", (*compiler, *flags), path)
        tuning = "fast math" if set(_FAST_FLAGS) <= set(flags) else ""
        return CppKernel(
            entry=rendered.entry, library=library, build_ns=time.perf_counter_ns() - started, tuning=tuning, handle=handle
        )


def _template(program: Program) -> str:
    skeleton = "rowwise" if program.is_reduced else "nested" if len(program.dims) > 1 else "pointwise"
    return f"cpp/{skeleton}.cpp.jinja"


def _context(kernel: Kernel) -> dict[str, Any]:
    values = kernel.program.values
    return {
        "kernel": kernel,
        "buffers": [(C_TYPES[computed_in(values[i].dtype)], name) for i, name in kernel.caches.items()],
        "compares_indices": kernel.compares_indices,
        "total": " * ".join(kernel.layout.sizes),
        "grain": kernel.grain,
    }


def _beside(program: Program, header: list[str], start: str) -> str:
    """Several loop nests: each a function that the entry point calls; nests of one layout share theirs."""
    functions: dict[str, dict[str, Any]] = {}
    names = Names()
    pointers = [names.take(operand.name) for operand in program.operands]
    integers: list[str] = []
    calls, checked = [], 0
    for number, part in enumerate(nests(program), start=1):
        kernel, key = Kernel(part.program), layout_key(part.program)
        if key not in functions:
            name, context = f"part{len(functions) + 1}", _context(kernel)
            functions[key] = {
                **context, "name": name, "signature": filled(f"static void {name}(", kernel.layout.signature),
                "text": body_of(_template(part.program), **context),
            }  # fmt: skip
        own = [f"{parameter.name}_of_{number}" for parameter in kernel.layout.parameters]
        integers += own
        wrong = [f"wrong + {2 * checked}" if checked else "wrong"] if kernel.layout.checks else []
        checked += bool(kernel.layout.checks)
        given = [*(pointers[operand] for operand in part.operands), *own, *wrong, "threads"]
        calls.append(f"{functions[key]['name']}({', '.join(given)})")
    kernels = [function["kernel"] for function in functions.values()]
    tensors = [
        f"{'' if operand.is_output else 'const '}{C_TYPES[operand.dtype]} *__restrict {name}"
        for operand, name in zip(program.operands, pointers, strict=True)
    ]
    return environment().get_template("cpp/siblings.cpp.jinja").render(
        header=header, includes=list(dict.fromkeys(name for kernel in kernels for name in includes_of(kernel))),
        prelude=set().union(*(kernel.prelude.names for kernel in kernels)), kernel=kernels[0],
        compares_indices=any(kernel.compares_indices for kernel in kernels),
        grain=min(kernel.grain for kernel in kernels), functions=list(functions.values()), calls=calls,
        signature=filled(start, [*tensors, *(f"int64_t {name}" for name in integers), *(["int64_t *wrong"] * bool(checked)),
                                "int threads"]),
    )  # fmt: skip


def _integers(parts: list[Program]) -> list[int]:
    return [parameter.value for part in parts for parameter in Layout(part).parameters]


def _nothing(*_tensors: object) -> None:
    """Launch nothing: the program has no elements."""


def _header(program: Program, header: Header, fast_math: bool) -> list[str]:
    shape = " x ".join(map(str, program.dims))
    moved = f"Moves {program.moved_bytes:,} bytes at {shape}: every input is read once and every output written once."
    lines = [f"{header.title}: {header.summary}", moved, *dropout_notes(program), f"Origin: {header.origin}"]
    lines += [f"Source: {header.source}"] if header.source else []
    lines += [_FAST_NOTE] if fast_math else []
    # A trailing backslash would continue the comment over the next line.
    return [part for line in lines for part in wrap(" ".join(line.replace("\\", "/").split()))]


def includes_of(kernel: Kernel) -> list[str]:
    """Return the headers that a kernel's text needs."""
    wanted = {"cmath": True, "cstdint": True, "cstring": "fa_bits" in kernel.prelude.names}
    wanted["limits"] = any("numeric_limits" in line for s in kernel.sections if s.loop for line in s.loop.starts)
    wanted["memory"] = bool(kernel.caches)
    wanted["type_traits"] = "fa_remainder" in kernel.prelude.names
    return [name for name, is_wanted in wanted.items() if is_wanted]


def compile_flags() -> tuple[str, ...]:
    """Return what the compiler is called with where nothing may be approximated."""
    return _FLAGS


def filled(start: str, parameters: list[str]) -> str:
    """Break a parameter list between parameters, at 110 columns."""
    lines = [start]
    for parameter, end in zip(parameters, (*[","] * (len(parameters) - 1), ")"), strict=True):
        if len(lines[-1]) + len(parameter) > 108:
            lines.append("       ")
        lines[-1] += f"{'' if lines[-1].endswith('(') else ' '}{parameter}{end}"
    return "\n".join(lines)


def find_compiler() -> tuple[str, ...] | None:
    """The C++ compiler's command: CXX, or the first that is on PATH."""
    wanted = os.environ.get("CXX", "").split()
    if wanted:
        found = shutil.which(wanted[0])
        return (found, *wanted[1:]) if found else None
    return next(((found,) for name in _COMPILERS if (found := shutil.which(name))), None)


@functools.cache
def compiler_identity(compiler: tuple[str, ...]) -> str:
    """The compiler, its version, and the CPU that -march=native stands for: a shared home may serve several machines."""
    try:
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        cpu += "".join(
            next((line for line in lines if line.startswith(field)), "") for field in ("model name", "flags", "Features")
        )
    return " ".join((*compiler, version.partition("\n")[0], platform.machine(), cpu))


def load_library(entry: str, key: str, command: tuple[str, ...], source: Path) -> tuple[Path, ctypes.CDLL]:
    """Load the library that was kept under ``key``, or compile it; a library that does not load is compiled once more."""
    try:
        kept = KeptCode(folder=cache_folder("cpp"), suffix=".so")
        for is_last in (False, True):
            library = kept.find(key) or _compile(entry, command, source, kept, key)
            try:
                handle = ctypes.CDLL(str(library))
                getattr(handle, entry)
            except (OSError, AttributeError) as error:
                if is_last:
                    raise
                kept.drop(library, str(error).splitlines()[-1])
            else:
                return library, handle
    except (OSError, AttributeError) as error:
        raise KernelBuildFailed(kernel=entry, target="cpp", cause=str(error).splitlines()[-1]) from error
    raise AssertionError("the second try returns or raises")


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that another process sees the old one or the new one, never half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _compile(entry: str, command: tuple[str, ...], source: Path, kept: KeptCode, key: str) -> Path:
    built = kept.temporary()
    try:
        done = subprocess.run(
            [*command, str(source), "-o", str(built)], capture_output=True, text=True, errors="replace", check=False, timeout=120
        )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
            raise KernelBuildFailed(kernel=entry, target="cpp", cause=errors[0].removeprefix(f"{source}:").strip())
        return kept.keep(key, built)
    except subprocess.TimeoutExpired as error:
        raise KernelBuildFailed(kernel=entry, target="cpp", cause=str(error)) from error
    finally:
        built.unlink(missing_ok=True)
