"""``kernels check``: hold a kernel to its contract, on whatever this machine can run.

Every declared case is lowered from every reference, rendered, built and run by each declared backend, and compared with the same
ops in fp64 next to eager's own error: the rule of ``verify.accuracy``. First the references themselves: each must be found by
the library's patterns as this kernel and no other, with its constants bound.

Without a CUDA device Triton's interpreter does Triton's arithmetic (a process of its own: it must be switched on before Triton is
imported), and CUDA C++ is compiled but not run; the rows say so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fusion_advisor.codegen.common.descriptor import COMPILE, INTERPRET, RUN, Backend
from fusion_advisor.codegen.common.interface import KernelBuildFailed, Launcher
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.evaluate.check_inputs import KINDS, eager, make_inputs, oracle, planned_layouts
from fusion_advisor.evaluate.kinds import Subject, kind_of
from fusion_advisor.ir.program import Program
from fusion_advisor.library.discover import BadReference, Kernel, list_kernels, load_kernel
from fusion_advisor.library.match import Pattern, find_match
from fusion_advisor.library.patterns import kernel_patterns, lower_reference, sentinels, trace_reference
from fusion_advisor.library.spec import CHAIN, Case, KernelSpec
from fusion_advisor.lowering.rules.tables import CannotLower
from fusion_advisor.verify.accuracy import Error, error_of, is_within

_ARCH = 90
_INTERPRETED_ELEMENTS = 2**19
"""The interpreter takes milliseconds for a tile; larger cases are compiled only."""


class Progress(Protocol):
    """What a check says while it works."""

    def step(self, done: int, total: int, text: str) -> None:
        """How far it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One case of one backend and dtype, over all references and kinds of input."""

    case: str
    backend: str
    dtype: str
    result: str
    """``passed``, ``failed`` or ``skipped``."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A reference at one case and dtype; once with all its outputs, once with the last alone."""

    variant: str
    graph: torch.fx.GraphModule
    subject: Subject


def check_kernel(
    name: str, progress: Progress, *, kernel_dirs: Sequence[Path] = (), backends: Sequence[str] | None = None
) -> list[CheckRow]:
    """Check one kernel.

    Args:
        name: the kernel's name.
        progress: gets a step for every case.
        kernel_dirs: folders of a user's own kernels. Their ``reference.py`` is run.
        backends: only these; all that the manifest names by default.

    Raises:
        UnknownKernel, BadReference: see ``load_kernel``.
    """
    checker = _Checker(load_kernel(name, kernel_dirs), tuple(kernel_dirs), progress)
    return checker.run([b for b in checker.spec.backends if backends is None or b in backends])


class _Checker:
    def __init__(self, kernel: Kernel, kernel_dirs: tuple[Path, ...], progress: Progress) -> None:
        self.kernel, self.spec, self.dirs, self.progress = kernel, kernel.spec, kernel_dirs, progress
        self.own = _readable_patterns([self.spec])
        self._built: dict[tuple[str, str], Any] = {}
        self._compiled: set[str] = set()
        self.folder = Path()

    def run(self, backends: Sequence[str], *, with_patterns: bool = True) -> list[CheckRow]:
        has_patterns = with_patterns and self.spec.kind == CHAIN
        rows = [self._pattern_row(variant) for variant, _ in self.kernel.references] if has_patterns else []
        modes = {backend: _mode(backend) for backend in backends}
        interpreted: dict[str, dict[tuple[str, str], CheckRow]] = {}
        for name in (name for name, mode in modes.items() if mode == INTERPRET):
            self.progress.step(0, len(self.spec.check), f"{descriptor(name).title}'s interpreter")
            interpreted[name] = self._interpret(name)
        cases = [(case, dtype) for case in self.spec.check for dtype in case.dtypes]
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            for number, (case, dtype) in enumerate(cases):
                label = str(case)
                self.progress.step(number, len(cases), f"{label} {dtype}")
                try:
                    jobs = list(self._jobs(case, dtype))
                except CannotLower as error:
                    rows += [_row(label, backend, dtype, "failed", f"{error.code}: {error.reason}") for backend in backends]
                    continue
                for backend in backends:
                    other = interpreted.get(backend, {}).get((label, dtype))
                    result, detail = self._one(backend, modes[backend], jobs, case, dtype, other)
                    rows.append(_row(label, backend, dtype, result, detail))
        return rows

    # ------------------------------------------------------------------ the references

    def _pattern_row(self, variant: str) -> CheckRow:
        """A reference is found as this kernel and as no other, with its constants bound."""
        function = dict(self.kernel.references)[variant]
        case = max(self.spec.check, key=lambda case: min(size for _, size in case.sizes))
        result, detail = "passed", ""
        try:
            for lowered in lower_reference(self.spec, function, dict(case.sizes), constants=sentinels(self.spec)):
                problem = self._match_problem(lowered.program)
                result, detail = ("failed", problem) if problem else (result, detail)
        except CannotLower as error:
            result, detail = "failed", f"{error.code}: {error.reason}"
        return _row(f"reference {variant}", "any", "any", result, detail or "found as this kernel alone; constants bind")

    def _match_problem(self, program: Program) -> str:
        found = find_match(program, self.own)
        if found is None:
            return "no pattern of this kernel fits its own reference"
        for other in list_kernels(self.dirs):
            if other.name != self.spec.name and find_match(program, _readable_patterns([other])) is not None:
                return f"the kernel `{other.name}` computes the same: which one is found would be chance"
        bound = dict(found.constants)
        for name, given in sentinels(self.spec).items():
            if name in bound and not math.isclose(bound[name], given, rel_tol=1e-6):
                return f"the constant {name} was bound to {bound[name]:g}, not to the {given:g} that it was given"
            if name not in bound:
                return f"the constant {name} of the manifest occurs nowhere in what the reference computes"
        return ""

    def _jobs(self, case: Case, dtype: str) -> Iterator[_Job]:
        kind, spec = getattr(torch, dtype), self.spec.laid_out(case)
        for variant, function in self.kernel.references:
            graph = trace_reference(spec, function, dict(case.sizes), dtype=kind)
            for subject in kind_of(self.spec).subjects(spec, variant, function, case, dtype, self.own):
                yield _Job(variant=variant, graph=graph, subject=subject)

    # ------------------------------------------------------------------ one case of one backend

    def _one(
        self, backend: str, mode: str, jobs: list[_Job], case: Case, dtype: str, interpreted: CheckRow | None
    ) -> tuple[str, str]:
        try:
            reasons = [job.subject.why_unserved(backend, is_here=mode == RUN) for job in jobs]
            if all(reasons):
                return "skipped", reasons[0]
            if mode == RUN:
                return self._run_case(backend, jobs, case, dtype)
            if mode not in (INTERPRET, COMPILE):
                return "skipped", mode
            compiled = self._compile_case(backend, jobs)
        except KernelBuildFailed as error:
            return "failed", str(error)
        if interpreted is None:
            return "skipped", f"{compiled}; not run: this machine has no CUDA device"
        return interpreted.result, f"{interpreted.detail}; {compiled}"

    def _run_case(self, backend: str, jobs: list[_Job], case: Case, dtype: str) -> tuple[str, str]:
        language = descriptor(backend)
        device = _device_of(language) or "cpu"
        is_interpreted = bool(language.interpreter_variable) and device == "cpu"
        elements = max(job.subject.elements for job in jobs)
        if is_interpreted and elements > _INTERPRETED_ELEMENTS:
            return "skipped", f"{elements:,} elements are too many for {language.title}'s interpreter"
        worst, failures = (-1.0, ""), []
        launchers = [(job, launch) for job in jobs for launch in self._launchers(backend, job)]
        for kind in KINDS:
            inputs = make_inputs(self.spec.laid_out(case), case, dtype, kind, device)
            for job, launch in launchers:
                for ours, theirs, kept in _errors(job, launch, inputs, is_interpreted=is_interpreted):
                    shown = f"{ours.rel_l2:.1e} (eager {theirs.rel_l2:.1e})"
                    if not kept:
                        wrong = f", {ours.nonfinite} NaN or Inf out of place" if ours.nonfinite > theirs.nonfinite else ""
                        failures.append(f"{job.variant}, {kind} inputs: relative error {shown}{wrong}")
                    worst = max(worst, (ours.rel_l2 / max(theirs.rel_l2, 1e-9), shown))
        if failures:
            return "failed", failures[0] + (f", and {len(failures) - 1} more" if len(failures) > 1 else "")
        where = f" in {language.title}'s interpreter" if is_interpreted else ""
        return "passed", f"relative error {worst[1]}{where}"

    def _launchers(self, backend: str, job: _Job) -> Iterator[Launcher]:
        """Launchers of every version of a kernel."""
        for version in job.subject.versions(backend):
            rendered = version.rendered
            key = (backend, rendered.entry)
            if key not in self._built:
                self._built[key] = version.build(self.folder / f"{rendered.entry}{rendered.suffix}")
            yield version.bind(self._built[key])

    def _compile_case(self, backend: str, jobs: list[_Job]) -> str:
        for job in jobs:
            for version in job.subject.versions(backend):
                if version.rendered.entry not in self._compiled:
                    version.compile_for(_ARCH)
                    self._compiled.add(version.rendered.entry)
        return f"compiles for sm_{_ARCH}"

    def _interpret(self, backend: str) -> dict[tuple[str, str], CheckRow]:
        """The rows of a backend from another process, in which its interpreter is on."""
        language = descriptor(backend)
        command = [sys.executable, "-m", "fusion_advisor.evaluate.check", backend, self.spec.name, *map(str, self.dirs)]
        environment = {**os.environ, language.interpreter_variable: "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
        if done.returncode:
            cause = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
            failed = [_row(str(case), backend, dtype, "failed", f"{language.title}'s interpreter stopped: {cause}")
                      for case in self.spec.check for dtype in case.dtypes]  # fmt: skip
            return {(row.case, row.dtype): row for row in failed}
        rows = [CheckRow(**row) for row in json.loads(done.stdout.splitlines()[-1])]
        return {(row.case, row.dtype): row for row in rows}


def _readable_patterns(specs: Sequence[KernelSpec]) -> tuple[Pattern, ...]:
    """Patterns of those kernels that have some; what is wrong with this one's own its rows say, and another's is not asked."""
    found: list[Pattern] = []
    for spec in specs:
        with contextlib.suppress(BadReference):
            found += kernel_patterns(spec)
    return tuple(found)


def _errors(
    job: _Job, launch: Launcher, inputs: list[torch.Tensor], *, is_interpreted: bool
) -> Iterator[tuple[Error, Error, bool]]:
    """Error of every output, eager's own error there, and whether the limit is kept."""
    count = job.subject.output_count
    copies = [[t.clone() if n in job.subject.written else t for n, t in enumerate(inputs)] for _ in range(3)]
    original, truth = eager(job.graph, copies[0])[-count:], oracle(job.graph, copies[1])[-count:]
    outputs = []
    given = [None] * (count - len(job.subject.written)) + [copies[2][number] for number in job.subject.written]
    for tensor, planned, before in zip(original, planned_layouts(job.graph)[-count:], given, strict=True):
        # Triton's interpreter cuts bfloat16 off where a GPU rounds it: there the kernel stores float32 and torch rounds.
        dtype = torch.float32 if is_interpreted and tensor.dtype == torch.bfloat16 else tensor.dtype
        # Filled with what no kernel writes, so that an element that is left out shows.
        made = torch.empty_strided(planned.shape, planned.stride(), dtype=dtype, device=tensor.device).fill_(3)
        outputs.append(made if before is None else made.copy_(before))
    launch(*(inputs[index] for index in job.subject.inputs), *outputs)
    for ours, theirs, exact in zip(outputs, original, truth, strict=True):
        error, own = error_of(ours.to(theirs.dtype), exact), error_of(theirs, exact)
        yield error, own, is_within(error, own, theirs.dtype)


def _mode(backend: str) -> str:
    """``run``, ``interpret`` or ``compile``; any other text is the sentence that says why nothing can be done."""
    language = descriptor(backend)
    return (language.why_missing() or RUN) if _device_of(language) else language.without_device()


def _device_of(language: Backend) -> str:
    """The kind of device here on which kernels of a backend run; empty where there is none."""
    here = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    return next((kind for kind in here if kind in language.device_kinds), "")


def _row(case: str, backend: str, dtype: str, result: str, detail: str) -> CheckRow:
    return CheckRow(case=case, backend=backend, dtype=dtype, result=result, detail=detail)


class _Silent:
    def step(self, done: int, total: int, text: str) -> None:
        """Say nothing."""


def main(arguments: Sequence[str]) -> str:
    """The rows of a backend and a kernel as JSON: ``check BACKEND NAME [DIR …]``, run with the backend's interpreter on."""
    torch.set_num_threads(1)
    backend, name, *folders = arguments
    dirs = tuple(map(Path, folders))
    checker = _Checker(load_kernel(name, dirs), dirs, _Silent())
    return json.dumps([dataclasses.asdict(row) for row in checker.run([backend], with_patterns=False)])


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
