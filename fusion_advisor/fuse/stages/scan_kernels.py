"""Kernels of unrolled recurrences on one device: built, bound to their sites, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Node

from fusion_advisor.capture.loops.one_op import UnrolledLoop
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Rendered
from fusion_advisor.codegen.recurrence.cpp import CppRecurrences
from fusion_advisor.codegen.recurrence.triton import TritonRecurrences
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, ScanSource
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite, fused_call
from fusion_advisor.fuse.rewrite.scan_kernels import TITLE
from fusion_advisor.fuse.scans.sites import LeftOp, ScanSite, find_scans
from fusion_advisor.fuse.stages.gemm_sites import Place
from fusion_advisor.ir.recurrence import Recurrence
from fusion_advisor.records import Numerics, Ref, RenderedKernel, Tolerance
from fusion_advisor.records.op_facts import LOOP_PREFIX
from fusion_advisor.verify.check_chain import check_calls
from fusion_advisor.verify.subgraph_oracle import OriginalChain, original_chain

HEADER = Header(
    title=TITLE,
    summary="a loop over time that Python unrolled, with the ops that prepare its steps, in one kernel",
    origin="generated from the graph",
)
_BACKENDS: Mapping[str, tuple[CppRecurrences | TritonRecurrences, ...]] = {
    "cpu": (CppRecurrences(),),
    "cuda": (TritonRecurrences(),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanKind:
    """Loops that one kernel computes.

    Attributes:
        name: of the unrolled loop's op.
        sites: of the graphs.
        places: the same by op indices.
    """

    name: str
    sites: tuple[ScanSite, ...]
    places: tuple[Place, ...]

    @property
    def recurrence(self) -> Recurrence:
        """What the kernel computes."""
        return self.sites[0].recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeScan:
    """A compiled kernel, bound to its kind."""

    kernel: RenderedKernel
    rendered: Rendered
    launch: Launcher


def find_kinds(bench: Bench, taken: Iterable[int] = ()) -> tuple[list[ScanKind], list[LeftOp]]:
    """Return the loops of all regions by kernel, and those that stay op by op.

    Args:
        bench: over the graphs.
        taken: ops that other kernels have taken in.
    """
    found: dict[object, tuple[list[ScanSite], list[Place]]] = {}
    left: list[LeftOp] = []
    gone = set(taken)
    for region, index_of in zip(bench.live.regions, bench.index_of, strict=True):
        for site in find_scans(region, [node for node, index in index_of.items() if index in gone]):
            if isinstance(site, LeftOp):
                left.append(site)
                continue
            place = Place(
                region=region.index,
                members=tuple(index_of[node] for node in site.members),
                inputs=tuple(index_of[node] for node in site.given),
            )
            # Equal loops, by their digest, start from equal states too.
            key = (name_of(site.loop), site.recurrence, len(site.outputs), _start(site), len(site.members))
            sites, places = found.setdefault(key, ([], []))
            sites.append(site)
            places.append(place)
    kinds = [ScanKind(name=name_of(sites[0].loop), sites=tuple(sites), places=tuple(places)) for sites, places in found.values()]
    return kinds, left


def name_of(loop: Node) -> str:
    """Return the name of an unrolled loop's op."""
    assert isinstance(loop.target, UnrolledLoop)
    return loop.target.__name__


def _start(site: ScanSite) -> object:
    inputs = site.given
    return None if site.before is None else tuple(inputs.index(node) for node in site.inputs_before)


def build(kind: ScanKind, device: torch.device, path: Path, *, backend: str | None = None) -> MadeScan:
    """Render and compile the kernel of a kind.

    Args:
        kind: what to compute.
        device: where it will run.
        path: of the source, without its suffix.
        backend: its name; None for the one of the device.

    Raises:
        KernelBuildFailed: no backend serves, or it does not compile.
    """
    maker = next((one for one in _BACKENDS.get(device.type, ()) if backend in (None, one.name)), None)
    if maker is None:
        raise KernelBuildFailed(kernel=TITLE, target=backend or device.type, cause="recurrences have no kernel in it")
    rendered = maker.render(kind.recurrence, HEADER)
    path = path.with_name(path.name + rendered.suffix)
    built = maker.build(rendered, path)
    launch = launcher_of(kind.sites[0], built.bind(kind.recurrence))
    kernel = RenderedKernel(
        name=rendered.entry, backend=rendered.backend, path=f"kernels/{path.name}", source=rendered.file_text,
        origin=HEADER.origin, build_ns=built.build_ns, tuning=built.tuning,
    )  # fmt: skip
    return MadeScan(kernel=kernel, rendered=rendered, launch=launch)


def launcher_of(site: ScanSite, launch: Launcher) -> Launcher:
    """Return what is given a site's inputs and outputs: it makes the first state, launches, and hands out the last state.

    Args:
        site: of the loop.
        launch: of its kernel, which takes the operands of the recurrence.
    """
    inputs = site.given
    own = [inputs.index(node) for node in site.inputs]
    first = [inputs.index(node) for node in site.inputs_before]
    program, state_at = site.recurrence.program, site.recurrence.state
    shape, stride = tuple(site.state.shape), tuple(site.state.stride())
    dtype = getattr(torch, program.operands[state_at].dtype)
    before, count = site.before, len(inputs)

    def call(*tensors: torch.Tensor) -> None:
        rows, *last = tensors[count:]
        is_same = bool(last) and last[0].dtype == dtype and last[0].stride() == stride
        state = last[0] if is_same else torch.empty_strided(shape, stride, dtype=dtype, device=rows.device)
        if before is None:
            state.zero_()
        else:
            state.copy_(before(*(tensors[at] for at in first)))
        given = iter([tensors[at] for at in own])
        launch(*(
            state if number == state_at else rows if operand.is_output else next(given)
            for number, operand in enumerate(program.operands)
        ))  # fmt: skip
        if last and not is_same:
            last[0].copy_(state)

    return call


def original_scan(bench: Bench, place: Place) -> tuple[OriginalChain, list[torch.Tensor]]:
    """Return a loop's original ops and its own tensors; the bench has observed them."""
    chain = original_chain(bench.ops, bench.index_of[place.region], place.members, place.inputs, _outputs(bench, place))
    return chain, [bench.values[index] for index in place.inputs]


def check(bench: Bench, kind: ScanKind, made: MadeScan, *, seed: int, tolerance: Tolerance | None = None) -> Numerics:
    """Compare a kernel with the ops it replaces: on every site's own tensors, and on smaller ones of the first site.

    A state that grows from step to step overflows in float32 and not in float64, so no input is made larger than the model's own:
    each number is multiplied by one between a half and one, and once more by a twentieth.
    """
    sites = [original_scan(bench, place) for place in kind.places]
    calls = [bound(bench, place, made, is_poisoned=True) for place in kind.places]
    (first, roots), call = sites[0], calls[0]
    trials = [(chain, one, own) for (chain, own), one in zip(sites, calls, strict=True)]
    trials += [(first, call, _smaller(roots, seed + n, scale)) for n, scale in enumerate((1.0, 0.05))]
    words = f"the own tensors of {len(sites)} sites; the first one's times numbers from 0.5 to 1, and those times 0.05"
    return check_calls(trials, inputs=f"{words}; the worst is shown", tolerance=tolerance)


def _smaller(roots: Sequence[torch.Tensor], seed: int, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    found = []
    for root in roots:
        factor = torch.rand(root.shape, generator=generator) * 0.5 + 0.5
        fresh = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device=root.device)
        found.append(fresh.copy_(root * (scale * factor).to(root.device)) if root.is_floating_point() else root)
    return found


def check_first(bench: Bench, kind: ScanKind, made: MadeScan, *, tolerance: Tolerance | None = None) -> Numerics:
    """Compare a kernel that passed :func:`check` before with the ops, on the first site's own tensors."""
    chain, roots = original_scan(bench, kind.places[0])
    call = bound(bench, kind.places[0], made, is_poisoned=True)
    return check_calls([(chain, call, roots)], inputs="the first site's own tensors", tolerance=tolerance)


def install(bench: Bench, kind: ScanKind, made: MadeScan, *, name: str) -> BuiltLinear:
    """Bind a kernel to the sites of its kind."""
    sites = [
        SiteRewrite(
            fusion_id=name, members=place.members, inputs=place.inputs, outputs=_outputs(bench, place),
            call=bound(bench, place, made),
        )
        for place in kind.places
    ]  # fmt: skip
    return BuiltLinear(id=name, sites=tuple(sites), scan=ScanSource(site=kind.sites[0], rendered=made.rendered))


def bound(bench: Bench, place: Place, made: MadeScan, *, is_poisoned: bool = False) -> Callable[..., torch.Tensor]:
    """Return the call that takes a site's place."""
    layouts = [bench.ops[index].outputs[0] for index in place.inputs]
    results = [bench.ops[index].outputs[0] for index in _outputs(bench, place)]
    return fused_call(made.kernel.name, made.launch, layouts, results, is_poisoned=is_poisoned)


def _outputs(bench: Bench, place: Place) -> tuple[int, ...]:
    """Return the ops whose results a site's call makes: the last member, or the two that take the loop's results apart."""
    loop = next(index for index in place.members if bench.ops[index].target.startswith(LOOP_PREFIX))
    apart = [
        index for index in place.members if bench.ops[index].target == "getitem" and Ref(index=loop) in bench.ops[index].args
    ]
    return tuple(sorted(apart, key=lambda index: str(bench.ops[index].args[1]))) or place.members[-1:]
