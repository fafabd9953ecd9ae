"""Kernels of linears: chosen and built for a problem, checked against the ops that they replace, bound to their sites.

Nothing is timed in the step here: ``try_linear_kernels`` does that, and a saved plan puts kernels in again that it tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_advisor.autotune.select_gemm import GemvChoice, choose, is_served
from fusion_advisor.codegen.common.interface import Header, Launcher, library_origin
from fusion_advisor.codegen.gemm.problem import AROUND, CUBLAS, GemvConfig, GemvProblem
from fusion_advisor.codegen.gemm.registry import LINEAR_BACKENDS, gemv_backend
from fusion_advisor.content import content_dir
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite, fused_call
from fusion_advisor.fuse.stages.gemm_sites import Place, original_of
from fusion_advisor.fuse.stages.linear_kinds import Kind
from fusion_advisor.library.manifest import read_spec
from fusion_advisor.library.spec import LINEAR
from fusion_advisor.records import Numerics, RenderedKernel, Tolerance
from fusion_advisor.verify.check_chain import SCALES, check_calls, random_like, with_special_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A compiled kernel, bound to its problem."""

    kernel: RenderedKernel
    launch: Launcher


Make = Callable[[GemvProblem, Header, str], "Made | str"]
"""Builds a kernel for a problem, given the name of its file; a sentence where there is none that pays.

Raises KernelBuildFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKernels:
    """Where kernels of linears come from on one device.

    Attributes:
        make: builds one.
        is_served: whether there may be one for a problem.
    """

    make: Make
    is_served: Callable[[GemvProblem, torch.device], bool] = is_served


def linear_kernels(
    kernel_dir: Path,
    device: torch.device,
    *,
    backend: str | None,
    log: Callable[[str], None],
    choose: Callable[..., GemvChoice] = choose,
) -> LinearKernels | None:
    """Return what chooses and builds kernels on a device; None where there are none for it.

    Args:
        kernel_dir: where sources go.
        device: where they will run.
        backend: one of ``LINEAR_BACKENDS``, None for the faster one. The others have no such kernels.
        log: gets a line for each choice.
        choose: says which configuration computes a problem.
    """
    backends = LINEAR_BACKENDS if backend is None else tuple(name for name in LINEAR_BACKENDS if name == backend)
    if device.type != "cuda" or not backends:
        return None

    def make(problem: GemvProblem, header: Header, file: str) -> Made | str:
        choice = choose(problem, device, header=header, backends=backends)
        log(f"{header.title} {problem.m} x {problem.n} x {problem.k}: {choice.text} in {choice.tune_ns / 1e9:.2f} s")
        # A step has the norm's and the gate's kernels around cuBLAS as fusions of their own.
        if choice.config == CUBLAS or choice.config.form in AROUND.values():
            times = "; ".join(f"{text} {ns / 1e3:.1f} µs" for text, ns in choice.tried)
            return f"cuBLAS and the ops around it are faster, or no kernel serves ({choice.source}{': ' * bool(times)}{times})"
        return build(problem, header, choice.config, kernel_dir / file, tuning=choice.text)

    return LinearKernels(make=make)


def build(problem: GemvProblem, header: Header, config: GemvConfig, path: Path, *, tuning: str) -> Made:
    """Render and compile one configuration.

    Args:
        problem: at its sizes.
        header: for the head comment.
        config: one of ours.
        path: of the source, without its suffix.
        tuning: the configuration and how it was chosen, for the report.

    Raises:
        KernelBuildFailed: it does not serve the problem, or does not compile.
    """
    backend = config.form.partition("_")[0]
    rendered = gemv_backend(backend).render(problem, header, config=config)
    path = path.with_name(path.name + rendered.suffix)
    built = gemv_backend(backend).build(rendered, path)
    launch = built.bind(problem, config)
    kernel = RenderedKernel(
        name=rendered.entry,
        backend=backend,
        path=f"kernels/{path.name}",
        source=rendered.file_text,
        origin=header.origin,
        build_ns=built.build_ns,
        tuning=tuning,
    )
    return Made(kernel=kernel, launch=launch)


def check(bench: Bench, kind: Kind, made: Made, *, seed: int, tolerance: Tolerance | None = None) -> Numerics:
    """Compare a kernel with the ops it replaces: on every site's own tensors, and on the first one's weights and random rows."""
    sites = [original_of(bench, place) for place in kind.places]
    calls = [_bound(bench, place, made, is_poisoned=True) for place in kind.places]
    (first, roots), call = sites[0], calls[0]
    # Only the activations are scaled: no real model has weights at 32 times their size.
    rows_at = rows_of(kind)
    is_rows = [number in rows_at for number in range(len(roots))]
    fresh = []
    for number, scale in enumerate(SCALES):
        rows = iter(random_like([root for root, is_fresh in zip(roots, is_rows, strict=True) if is_fresh], seed + number, scale))
        fresh.append([next(rows) if is_fresh else root for root, is_fresh in zip(roots, is_rows, strict=True)])
    on_their_own = [(chain, bound, own) for (chain, own), bound in zip(sites, calls, strict=True)]
    trials = [*on_their_own, *((first, call, given) for given in fresh)]
    text = f"the own tensors of {len(sites)} sites; the first one's weights and random rows ×2, ×32 and ×0.001 in magnitude"
    numerics = check_calls(trials, inputs=f"{text}; the worst is shown", tolerance=tolerance)
    return with_special_rows(numerics, first, call, roots, rows=rows_at, seed=seed, tolerance=tolerance)


def rows_of(kind: Kind) -> tuple[int, ...]:
    """Return which operands of a kind's kernel hold activations: the others are weights and biases."""
    return tuple(number for number, (name, _) in enumerate(kind.problem.operands[:-1]) if name in ("x", "residual"))


def check_first(bench: Bench, kind: Kind, made: Made, *, tolerance: Tolerance | None = None) -> Numerics:
    """Compare a kernel that passed :func:`check` before with the ops: on a site's own tensors and one set of special rows."""
    chain, roots = original_of(bench, kind.places[0])
    call = _bound(bench, kind.places[0], made, is_poisoned=True)
    numerics = check_calls([(chain, call, roots)], inputs="the first site's own tensors", tolerance=tolerance)
    return with_special_rows(numerics, chain, call, roots, rows=rows_of(kind), most_runs=1, tolerance=tolerance)


def install(bench: Bench, kind: Kind, made: Made, *, name: str) -> BuiltLinear:
    """Bind a kernel to the sites of its kind."""
    sites = [
        SiteRewrite(
            fusion_id=name,
            members=place.members,
            inputs=place.inputs,
            outputs=place.members[-1:],
            call=_bound(bench, place, made),
        )
        for place in kind.places
    ]
    return BuiltLinear(id=name, sites=tuple(sites))


def _bound(bench: Bench, place: Place, made: Made, *, is_poisoned: bool = False) -> Callable[..., torch.Tensor]:
    """Bind a kernel to one site's layouts: sites of as many rows may divide them among other dims (``1 x 16`` and ``16``)."""
    layouts = [bench.ops[index].outputs[0] for index in place.inputs]
    result = bench.ops[place.members[-1]].outputs[0]
    return fused_call(made.kernel.name, made.launch, layouts, [result], is_poisoned=is_poisoned)


def header_of(title: str) -> Header:
    """Return what the head comment says: the library's words where the kernel is in it."""
    folder = content_dir("kernels") / title
    spec = read_spec(folder) if (folder / "kernel.toml").is_file() else None
    if spec is None or spec.kind != LINEAR:
        return Header(title=title, summary="a linear layer and what stands around it", origin="generated from the graph")
    return Header(title=title, summary=spec.summary, origin=library_origin(title), source=spec.source)
