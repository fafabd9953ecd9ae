"""Which rows a bench runs: from a kernel's own cases, its presets, or shapes that the user gave."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.errors import UsageError
from fusion_advisor.evaluate.bench.row import BenchOptions
from fusion_advisor.library.discover import list_kernels, load_kernel
from fusion_advisor.library.spec import Case, KernelSpec
from fusion_advisor.workload.device import resolve_device

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What will be run."""

    jobs: tuple[tuple[KernelSpec, Case], ...]
    options: BenchOptions


def plan_bench(
    name: str | None,
    *,
    shapes: Sequence[Mapping[str, int]] = (),
    dtypes: Sequence[str] = (),
    preset: str = "",
    backends: Sequence[str] = (),
    variant: str = "",
    device: str = "auto",
    with_compile: bool = True,
    kernel_dirs: Sequence[Path] = (),
) -> BenchPlan:
    """Turn what was asked into jobs.

    Args:
        name: a kernel; None for all.
        shapes: sizes by letter, instead of the kernel's cases.
        dtypes: ``bf16``, ``fp16``, ``fp32``; by default bf16 on a GPU and fp32 on a CPU.
        preset: name of a sweep, instead of the kernel's cases.
        backends: ours that take part; all by default.
        variant: a reference; the first by default.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        with_compile: whether ``torch.compile`` takes part.
        kernel_dirs: folders of the user's own kernels.

    Raises:
        UsageError: something named does not exist.
    """
    specs = list_kernels(kernel_dirs) if name is None else (load_kernel(name, kernel_dirs).spec,)
    where = resolve_device(device)
    wanted = _dtypes(dtypes) or (("bfloat16",) if where.type == "cuda" else ("float32",))
    for backend in backends:
        descriptor(backend)
    if preset:
        known = sorted({p.name for spec in specs for p in spec.presets})
        specs = tuple(spec for spec in specs if any(p.name == preset for p in spec.presets))
        if not specs:
            near = difflib.get_close_matches(preset, known, n=1)
            help_text = (
                f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known) or 'none; [[preset]] in kernel.toml'}"
            )
            raise UsageError(detail=f"no preset `{preset}`{f' of {name}' if name else ''}", help=help_text)
    jobs = []
    for spec in specs:
        for case in _cases(spec, shapes, preset, wanted):
            kept = tuple(dtype for dtype in wanted if dtype in case.dtypes)
            if kept:
                jobs.append((spec, replace(case, dtypes=kept)))
    if not jobs:
        raise UsageError(detail="no kernel has these dtypes", help="`kernels list --json` names each kernel's dtypes")
    options = BenchOptions(
        device=where, backends=tuple(backends), with_compile=with_compile, variants=(variant,) if variant else ()
    )
    if variant:
        _check_variant(variant, specs)
    return BenchPlan(jobs=tuple(jobs), options=options)


def _cases(spec: KernelSpec, shapes: Sequence[Mapping[str, int]], preset: str, dtypes: tuple[str, ...]) -> tuple[Case, ...]:
    if shapes:
        letters = list(dict.fromkeys(dim for tensor in spec.inputs for dim in tensor.shape if isinstance(dim, str)))
        for given in shapes:
            if set(given) != set(letters):
                example = ",".join(f"{letter}=…" for letter in letters)
                raise UsageError(
                    detail=f"{spec.name} has the sizes {', '.join(letters)}; --shapes gave {', '.join(given) or 'none'}",
                    help=f"--shapes {example}",
                )
        kept = tuple(dtype for dtype in dtypes if dtype in spec.dtypes)
        return tuple(Case(sizes=tuple((letter, given[letter]) for letter in letters), dtypes=kept) for given in shapes)
    if preset:
        return tuple(case for found in spec.presets if found.name == preset for case in found.cases())
    return spec.bench


def _dtypes(names: Sequence[str]) -> tuple[str, ...]:
    found = []
    for name in names:
        dtype = DTYPES.get(name, name)
        if dtype not in DTYPES.values():
            raise UsageError(detail=f"there is no dtype `{name}`", help=f"one of: {', '.join(DTYPES)}")
        found.append(dtype)
    return tuple(dict.fromkeys(found))


def _check_variant(variant: str, specs: Sequence[KernelSpec]) -> None:
    from fusion_advisor.library.discover import load_references

    known = sorted({name for spec in specs for name, _ in load_references(spec).references})
    if variant not in known:
        raise UsageError(detail=f"no reference is called `{variant}`", help=f"known: {', '.join(known)}")
