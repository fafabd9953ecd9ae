"""Kinds of library kernels: how each is rendered, checked and timed, and how many bytes it moves.

A kernel is a chain of pointwise ops and reductions, lowered from its reference, or a linear layer from the templates of
``codegen.gemm``. A new kind is one class here and its name in ``library.spec``; ``check``, ``render`` and ``bench`` ask no kind.
"""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.autotune.select_gemm import choose, is_served, launcher_for
from fusion_advisor.autotune.tune import best_tuning
from fusion_advisor.codegen.common.interface import BuiltKernel, Header, Launcher, Rendered, Tuning, library_origin
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.problem import AROUND, CUBLAS, GemvConfig, GemvProblem, candidates
from fusion_advisor.codegen.gemm.registry import LINEAR_BACKENDS, gemv_backend
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.ir.operand_names import with_names
from fusion_advisor.ir.program import Program
from fusion_advisor.library.linear import problem_of
from fusion_advisor.library.match import Pattern, find_match
from fusion_advisor.library.patterns import example, kernel_patterns, lower_reference, manifest_names
from fusion_advisor.library.spec import CHAIN, LINEAR, Case, KernelSpec
from fusion_advisor.lowering.lower import Lowered
from fusion_advisor.records import TensorMeta

Reference = Callable[..., Any]


def header_of(spec: KernelSpec, variant: str) -> Header:
    """The head comment of a library kernel."""
    return Header(title=spec.name, summary=spec.summary, origin=library_origin(spec.name, variant), source=spec.source)


def named_program(program: Program, patterns: tuple[Pattern, ...]) -> Program:
    """The Program with its kernel's own names; as it is where no pattern fits (a single element has no structure)."""
    found = find_match(program, patterns)
    return program if found is None else found.program


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One rendered kernel for a subject."""

    rendered: Rendered
    build: Callable[[Path], Any]
    """Writes the source to a file and compiles it; versions of one entry may share the result. Raises KernelBuildFailed."""
    bind: Callable[[Any], Launcher]
    """Binds what was built to the subject's sizes."""
    compile_for: Callable[[int], object]
    """Compiles for a compute capability whose device need not be here. Raises KernelBuildFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A launcher to time, or the sentence that says why there is none."""

    launch: Launcher | None = None
    inputs: tuple[int, ...] = ()
    """Of the reference's parameters, in the order of the kernel's operands."""
    tuning: str = ""
    build_ns: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where kernels are built and tuned."""

    device: torch.device
    folder: Path
    """For rendered sources."""
    store: TuningStore | None = None
    """Tuned launch parameters; the user's file by default."""


class Subject(ABC):
    """A kernel at one size: one reference at one case and dtype.

    Attributes:
        inputs: of the reference's parameters, in the order of the kernel's operands.
        output_count: the last outputs of the reference that the kernel computes.
        written: parameters that the last outputs are written into.
    """

    inputs: tuple[int, ...]
    output_count: int
    written: tuple[int, ...]

    @property
    @abstractmethod
    def elements(self) -> int:
        """What the kernel walks over."""

    @property
    @abstractmethod
    def moved_bytes(self) -> int:
        """Each operand once."""

    def why_unserved(self, backend: str, *, is_here: bool) -> str:
        """Say why a backend has no kernel for these sizes, or none for this device; empty where it has one.

        Args:
            backend: its name.
            is_here: whether the kernel would run here.
        """
        del backend, is_here
        return ""

    @abstractmethod
    def versions(self, backend: str) -> Iterator[Version]:
        """Render every version that a model may get."""

    @abstractmethod
    def tuned(self, backend: str, place: Place) -> Timed:
        """Build the version that is fastest at these sizes."""


class _Chain(Subject):
    def __init__(self, spec: KernelSpec, variant: str, lowered: Lowered, program: Program) -> None:
        self.inputs, self.output_count, self.written = lowered.inputs, len(lowered.outputs), lowered.written
        self._spec, self._lowered, self._program = spec, lowered, program
        self._header = header_of(spec, variant)

    @property
    def elements(self) -> int:
        return math.prod(self._program.dims)

    @property
    def moved_bytes(self) -> int:
        return self._program.moved_bytes

    def versions(self, backend: str) -> Iterator[Version]:
        maker = backend_named(backend)
        rendered = maker.render(self._program, self._header, tuning=Tuning(), fast_math=False)
        yield Version(
            rendered=rendered,
            build=lambda path: maker.build(rendered, path),
            bind=lambda built: built.bind(self._program),
            compile_for=lambda arch: descriptor(backend).compile_for(self._program, rendered, arch),
        )

    def tuned(self, backend: str, place: Place) -> Timed:
        program = with_names(self._lowered.program, manifest_names(self._spec, self._lowered))
        choice = best_tuning(program, self._spec.tunables, backend, place.device, header=self._header, store=place.store)
        started = time.perf_counter_ns()
        maker = backend_named(backend)
        rendered = maker.render(program, self._header, tuning=choice.tuning, fast_math=False)
        built: BuiltKernel = maker.build(rendered, place.folder / f"{rendered.entry}{rendered.suffix}")
        launch = built.bind(program)
        words = f"{built.tuning} ({choice.text})" if built.tuning else ""
        return Timed(launch=launch, inputs=self.inputs, tuning=words, build_ns=time.perf_counter_ns() - started)


class _Linear(Subject):
    def __init__(self, spec: KernelSpec, variant: str, problem: GemvProblem) -> None:
        self.inputs, self.output_count, self.written = tuple(range(len(spec.inputs))), 1, ()
        self.problem = problem
        self._header = header_of(spec, variant)

    @property
    def elements(self) -> int:
        return self.problem.weight_rows * self.problem.k

    @property
    def moved_bytes(self) -> int:
        return self.problem.moved_bytes

    def why_unserved(self, backend: str, *, is_here: bool) -> str:
        if not candidates(self.problem, (backend,)):
            return f"{backend} has no kernel for this; cuBLAS computes it"
        if is_here and not is_served(self.problem, "cuda"):
            return "its kernel is for another GPU, or needs cuda-core; cuBLAS computes it"
        return ""

    def versions(self, backend: str) -> Iterator[Version]:
        maker = gemv_backend(backend)
        for config in candidates(self.problem, (backend,)):
            rendered = maker.render(self.problem, self._header, config=config)
            yield Version(
                rendered=rendered,
                build=functools.partial(maker.build, rendered),
                bind=functools.partial(self._bound, config),
                compile_for=functools.partial(maker.compile_for, self.problem, rendered, config=config),
            )

    def _bound(self, config: GemvConfig, built: Any) -> Launcher:
        launch: Launcher = built.bind(self.problem, config)
        return launch

    def tuned(self, backend: str, place: Place) -> Timed:
        return self._chosen((backend,), place, with_cublas=False)

    def cublas(self, place: Place) -> Timed:
        """Torch's fused ops around cuBLAS, what a careful user would write: ``F.rms_norm``, ``addmm``."""
        del place
        return Timed(launch=torch_launcher(self.problem), inputs=self.inputs)

    def chosen(self, place: Place) -> Timed:
        """What the library takes by itself; cuBLAS with or without our kernels around it takes part."""
        return self._chosen(LINEAR_BACKENDS, place, with_cublas=True)

    def _chosen(self, backends: tuple[str, ...], place: Place, *, with_cublas: bool) -> Timed:
        choice = choose(
            self.problem, place.device, header=self._header, backends=backends, with_cublas=with_cublas, store=place.store
        )
        if choice.config == CUBLAS and not with_cublas:
            return Timed(note=f"no kernel of ours for these rows and dtype in {backends[0]}")
        started = time.perf_counter_ns()
        launch = launcher_for(self.problem, choice.config, header=self._header, folder=place.folder, store=place.store)
        taken = {CUBLAS.form: "cuBLAS", **dict.fromkeys(AROUND.values(), "our kernels around cuBLAS")}
        return Timed(
            launch=launch, inputs=self.inputs, tuning=choice.text, build_ns=time.perf_counter_ns() - started,
            note=f"takes {taken.get(choice.config.form, choice.config.form)}" if with_cublas else "",
        )  # fmt: skip


class Kind(ABC):
    """A kind of kernels.

    Attributes:
        peers_before: on CUDA, what is timed before our backends besides eager and ``torch.compile``, by name in the table.
        peers_after: what is timed after them.
    """

    peers_before: ClassVar[Mapping[str, Callable[[Any, Place], Timed]]] = {}
    peers_after: ClassVar[Mapping[str, Callable[[Any, Place], Timed]]] = {}

    @abstractmethod
    def subjects(
        self, spec: KernelSpec, variant: str, function: Reference, case: Case, dtype: str, patterns: tuple[Pattern, ...] = ()
    ) -> Iterator[Subject]:
        """Return what is to be computed at one case: with all outputs, then, where that is another kernel, with the last alone.

        Args:
            spec: the manifest, its inputs laid out as in the case.
            variant: name of the reference.
            function: the reference.
            case: the sizes.
            dtype: of the tensors whose dtype the manifest leaves open.
            patterns: give values the kernel's names.

        Raises:
            CannotLower: the reference is no kernel at these sizes.
        """

    @abstractmethod
    def render(
        self, spec: KernelSpec, variant: str, function: Reference, backend: str, case: Case, dtype: str, tuning: Tuning
    ) -> Rendered:
        """Render the kernel at one case, with its launcher."""


class _Chains(Kind):
    def subjects(
        self, spec: KernelSpec, variant: str, function: Reference, case: Case, dtype: str, patterns: tuple[Pattern, ...] = ()
    ) -> Iterator[Subject]:
        for lowered in lower_reference(spec, function, dict(case.sizes), dtype=getattr(torch, dtype)):
            yield _Chain(spec, variant, lowered, named_program(lowered.program, patterns))

    def render(
        self, spec: KernelSpec, variant: str, function: Reference, backend: str, case: Case, dtype: str, tuning: Tuning
    ) -> Rendered:
        kind = getattr(torch, dtype)
        lowered = next(lower_reference(spec, function, dict(case.sizes), dtype=kind))
        program = named_program(lowered.program, tuple(kernel_patterns(spec)))
        rendered = backend_named(backend).render(program, header_of(spec, variant), tuning=tuning, fast_math=False)
        made = [example(spec.inputs[index], dict(case.sizes), kind) for index in lowered.inputs]
        layouts = [TensorMeta(shape=tuple(t.shape), stride=tuple(t.stride()), dtype=str(t.dtype)) for t in made]
        return with_launcher(rendered, program, tensors=[*layouts, *[None] * len(lowered.outputs)])


class _Linears(Kind):
    peers_before: ClassVar[Mapping[str, Callable[[Any, Place], Timed]]] = {"cublas": _Linear.cublas}
    peers_after: ClassVar[Mapping[str, Callable[[Any, Place], Timed]]] = {"chosen": _Linear.chosen}

    def subjects(
        self, spec: KernelSpec, variant: str, function: Reference, case: Case, dtype: str, patterns: tuple[Pattern, ...] = ()
    ) -> Iterator[Subject]:
        del function, patterns
        yield _Linear(spec, variant, problem_of(spec, variant, case, dtype))

    def render(
        self, spec: KernelSpec, variant: str, function: Reference, backend: str, case: Case, dtype: str, tuning: Tuning
    ) -> Rendered:
        del function, tuning
        return gemv_backend(backend).render(problem_of(spec, variant, case, dtype), header_of(spec, variant))


KINDS: Mapping[str, Kind] = {CHAIN: _Chains(), LINEAR: _Linears()}


def kind_of(spec: KernelSpec) -> Kind:
    """Return the kind of a manifest's kernel."""
    return KINDS[spec.kind]
