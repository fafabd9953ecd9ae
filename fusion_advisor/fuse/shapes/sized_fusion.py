"""Kept fusions at any sizes of a piece: one compiled kernel each, its integer arguments functions of the sizes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.capture.graph.op_records import SizeNumbers, describe, hash_of, tensor_metas
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes, base_of, dim_size
from fusion_advisor.capture.sizes.size_nodes import let_nodes_stand_for_sizes
from fusion_advisor.codegen.common.interface import BuiltKernel, KernelBuildFailed
from fusion_advisor.codegen.standalone import operand_layouts
from fusion_advisor.fuse.decide.session import BuiltFusion
from fusion_advisor.fuse.passes.registry import PASSES, size_bound
from fusion_advisor.fuse.rewrite.graph_rewriter import GraphPass, LayoutChanged, SiteRewrite, fused_call, rewrite_region
from fusion_advisor.fuse.rewrite.sized_call import sized_call
from fusion_advisor.fuse.shapes.open_kernel import OpenKernels, for_all_sizes, programs_at, tried_points
from fusion_advisor.fuse.shapes.pieces import Box, Piece
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.operand_names import named_like
from fusion_advisor.ir.program import Program, layout_key
from fusion_advisor.ir.sized_program import NoOneProgram, SizedProgram, points_for, require_same, sized_program
from fusion_advisor.lowering.lower import Lowered, lower
from fusion_advisor.records import OpNode, RenderedKernel, TensorMeta
from fusion_advisor.runtime.torch_internals import symbolic_sizes

Point = tuple[int, ...]
"""Sizes of the open dims of a piece, in the order of its names."""


class LooksAtSizes(Exception):
    """A graph pass that took one size for all; the text is its id."""


class Workpiece:
    """A piece's graph, its records at any sizes, and the kernels that were fitted to it.

    Attributes:
        names: of the dims that are open, in the order of sizes everywhere below.
        points: sizes at which chains are lowered: primes, where there are some.
        captured: the graph before its layouts were changed: what it computes is compared with that.
    """

    def __init__(self, piece: Piece, ahead: BuildAhead | None = None, captured: OpenCapture | None = None) -> None:
        """Look through a piece's graph.

        Args:
            piece: with a graph.
            ahead: compiles its kernels side by side.
            captured: the graph before its layouts were changed; None: they were not.
        """
        assert piece.opened is not None
        self.piece = piece
        self.opened: OpenCapture = piece.opened
        self.captured = captured or piece.opened
        places = self.opened.places()
        self.names = tuple(one.name for one in piece.box if one.name in places)
        self.fixed = {one.name: one.least for one in piece.box if one.name not in places}
        ops, self.index_of = describe(self.opened.region, symbols=self.opened.symbols(self.opened.sizes))
        self.ops: Sequence[OpNode] = ops
        self._nodes = {index: node for node, index in self.index_of.items()}
        self.places = {name: self.index_of[places[name]] for name in self.names}
        """By name the op index of the graph input that the size comes in."""
        ranges = {one.name: (one.least, one.most) for one in piece.box if one.name in self.names}
        self.points = [tuple(point.values()) for point in points_for(ranges)]
        self._leaves: dict[Any, int] = {}
        first = self.opened.symbols(self.sizes(self.points[0]))
        self._tracked = describe(self.opened.region, symbols=first, leaves=self._leaves)[0]
        self._records: dict[Point, list[OpNode]] = {}
        self._programs: dict[Any, SizedProgram] = {}
        self._at: tuple[Point, SizeNumbers, tuple[int, ...]] | None = None
        self.kernels = OpenKernels(ahead=ahead)

    @functools.cached_property
    def by_one_size(self) -> frozenset[str]:
        """Ids of graph passes that go by something else at one end of the piece than at another."""
        ends = itertools.product(*((one.least, one.most) for one in self.piece.box if one.name in self.names))
        return size_bound(self.opened.region.graph.graph, [self.opened.symbols(self.sizes(end)) for end in ends])

    @property
    def first_point(self) -> Point:
        """The sizes at which chains are lowered first."""
        return self.points[0]

    def sizes(self, point: Point) -> Sizes:
        """Return the size of every dim."""
        return {**dict(zip(self.names, point, strict=True)), **self.fixed}

    def leaves(self, point: Point) -> tuple[int, ...]:
        """Return the value of every size of the graph."""
        return self._numbers(point)[1]

    def _numbers(self, point: Point) -> tuple[SizeNumbers, tuple[int, ...]]:
        """Return what computes sizes of the graph, and their values; kernels of one call are bound one after the other."""
        if self._at is None or self._at[0] != point:
            number = SizeNumbers(self.opened.symbols(self.sizes(point)))
            self._at = point, number, tuple(map(number.of, self._leaves))
        return self._at[1:]

    def records(self, point: Point) -> list[OpNode]:
        """Return the graph's records at some sizes; those of the points to compare with are kept."""
        if point not in self._records:
            self._records[point] = describe(self.opened.region, symbols=self.opened.symbols(self.sizes(point)))[0]
        return self._records[point]

    def graph_hash(self) -> str:
        """Return what is equal for equal graphs: a hash of the records at the sizes that were traced."""
        return hash_of(self.ops)

    def forget_records(self) -> None:
        """Drop all records: every fusion has its program."""
        self._records.clear()
        self._tracked.clear()

    def metas(self, indices: Sequence[int], point: Point) -> list[TensorMeta]:
        """Return the layouts of some ops' results at some sizes."""
        number, _ = self._numbers(point)
        return [tensor_metas(self._nodes[index], number)[0] for index in indices]

    def operands(self, site: Lowered, point: Point) -> tuple[list[TensorMeta], list[TensorMeta], list[int]]:
        """Return the layouts of what a site's kernel is given and makes, and which outputs lie in the last ones given."""
        in_place = [position for position, index in enumerate(site.outputs) if self.ops[index].mutates]
        return self.metas(site.given, point), self.metas(site.outputs, point), in_place

    def layout_of(self, indices: Sequence[int]) -> tuple[Any, ...]:
        """Return what is equal for ops whose results have one layout at all sizes."""
        found = []
        for index in indices:
            value = self._nodes[index].meta["val"]
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            found.append((value.dtype, tuple(map(symbolic_sizes.expression_of, sizes))))
        return tuple(found)

    def form_of(self, members: Sequence[int], given: Sequence[int]) -> tuple[Any, ...]:
        """Return what is equal for sites whose ops are the same on the same layouts at all sizes.

        Args:
            members: op indices of a site.
            given: of what it reads.
        """

        def plain(value: Any) -> Any:
            if not isinstance(value, Node):
                return repr(value)
            size = value.meta.get("val")
            return symbolic_sizes.expression_of(size) if symbolic_sizes.is_size(size) else ""

        nodes = [self._nodes[index] for index in members]
        code = tuple((node.target, *map(plain, pytree.tree_leaves((node.args, node.kwargs)))) for node in nodes)
        made = tuple(symbolic_sizes.layout_key(one) for node in nodes for one in tensors_of(node.meta["val"]))
        return code, made, self.layout_of(given)

    def names_in(self, program: SizedProgram, lowered: Lowered) -> tuple[str, ...]:
        """Return the open dims that a site's launch depends on: a norm of the new token's row is the same for any KV cache."""
        leaves = list(self._leaves)
        symbols = set().union(*(symbolic_sizes.symbols_in(leaves[place]) for place in program.places))
        for _, sizes in self.layout_of((*lowered.given, *lowered.outputs)):
            symbols.update(*map(symbolic_sizes.symbols_in, sizes))
        used = {base_of(self.opened.names[symbol]) for symbol in symbols}
        return tuple(name for name in self.names if name in used)

    def point(self, names: Sequence[str], sizes: Point) -> Point:
        """Return a point of the piece with some sizes as given; the others do not matter."""
        given = dict(zip(names, sizes, strict=True))
        return tuple(given.get(name, size) for name, size in zip(self.names, self.first_point, strict=True))

    def program(self, members: Sequence[int], site: Lowered, *, model: Program) -> SizedProgram:
        """Return a chain's program as a function of the sizes.

        Args:
            members: op indices of its first site.
            site: as lowered where its kernel was built.
            model: the program that its kernel was rendered for.

        Raises:
            NoOneProgram: it is another program at some sizes, or one that reads other tensors: of open sizes a reshape may copy
                what it shows at each of them.
        """
        key = (tuple(members), tuple(site.outputs), tuple(site.given))
        if key not in self._programs:
            where = "the sizes it was lowered at"
            try:
                tracked = lower(self._tracked, members, site.outputs, is_exact=model.is_exact)
                if tracked.given != site.given:
                    raise NoOneProgram("with open sizes it reads other tensors than at the sizes where it was checked")
                found = sized_program(tracked.program)
                for point in self.points[1:]:
                    where = ", ".join(f"{name}={size}" for name, size in zip(self.names, point, strict=True))
                    lowered = lower(self.records(point), members, site.outputs, is_exact=model.is_exact).program
                    require_same(found, lowered, self.leaves(point), where)
            except CannotLower as error:
                raise NoOneProgram(f"at {where}: {error.reason}") from error
            self._programs[key] = found
        found = self._programs[key]
        return replace(found, example=named_like(found.example, model))


def sized(work: Workpiece, fusion: BuiltFusion) -> BuiltFusion:
    """Return a fusion whose sites serve every size of a piece.

    Args:
        work: the piece.
        fusion: as it was built and checked at one point of it.

    Raises:
        NoOneProgram: its kernel serves some sizes alone.
    """
    if len(_alike(work, fusion)) > 1:
        raise NoOneProgram("its sites are other programs at other sizes")
    first = fusion.planned.sites[0]
    program = work.program(fusion.planned.chain.sites[0].op_indices, first, model=fusion.planned.program)
    kernel, built = _kernel_for_all_sizes(fusion, program, work)
    calls: dict[Any, Callable[..., Any]] = {}
    sites = []
    for site, lowered in zip(fusion.planned.chain.sites, fusion.planned.sites, strict=True):
        key, names = work.layout_of((*lowered.given, *lowered.outputs)), work.names_in(program, lowered)
        if key not in calls:
            bind = functools.partial(_bound, work, names, kernel.name, built, program, lowered)
            calls[key] = sized_call(kernel.name, len(names), bind)
        places = tuple(work.places[name] for name in names)
        sites.append(
            SiteRewrite(
                fusion_id=fusion.planned.id, members=site.op_indices, inputs=(*places, *lowered.given),
                outputs=lowered.outputs, call=calls[key],
            )
        )  # fmt: skip
    return replace(fusion, kernel=kernel, built=built, sites=tuple(sites))


def _alike(work: Workpiece, fusion: BuiltFusion) -> list[list[int]]:
    """Return the places of a fusion's sites in groups that are one program each at all sizes.

    Where it was built, sites may be alike by chance: a dim of one element lies the same wherever it stands.
    """
    planned = fusion.planned
    groups: dict[Any, list[int]] = {}
    for place, (site, lowered) in enumerate(zip(planned.chain.sites, planned.sites, strict=True)):
        groups.setdefault(work.form_of(site.op_indices, lowered.given), []).append(place)
    if len(groups) == 1:
        return list(groups.values())
    by_program: dict[Any, list[int]] = {}
    for places in groups.values():
        try:
            site = planned.chain.sites[places[0]]
            program = work.program(site.op_indices, planned.sites[places[0]], model=planned.program)
        except NoOneProgram:
            by_program[places[0]] = places
        else:
            by_program.setdefault((layout_key(program.example), program.forms), []).extend(places)
    return list(by_program.values())


def _parts(work: Workpiece, fusion: BuiltFusion) -> list[BuiltFusion]:
    """Return a fusion as several, each of sites that are one program at all sizes."""
    planned, groups = fusion.planned, _alike(work, fusion)
    if len(groups) == 1:
        return [fusion]
    return [
        replace(
            fusion,
            planned=replace(
                planned, chain=replace(planned.chain, sites=tuple(planned.chain.sites[place] for place in places)),
                sites=tuple(planned.sites[place] for place in places),
            ),
        )
        for places in groups
    ]  # fmt: skip


def _bound(
    work: Workpiece, names: Sequence[str], name: str, kernel: BuiltKernel, program: SizedProgram, lowered: Lowered, sizes: Point
) -> Callable[..., Any]:
    point = work.point(names, sizes)
    try:
        launch = kernel.bind(program.at(work.leaves(point)))
    except (NoOneProgram, KernelBuildFailed) as error:
        where = ", ".join(f"{dim}={size}" for dim, size in zip(names, sizes, strict=True))
        raise LayoutChanged(f"{name} at {where}: {error}") from error
    given, made, in_place = work.operands(lowered, point)
    return fused_call(name, launch, given, made, in_place=in_place)


def _kernel_for_all_sizes(fusion: BuiltFusion, program: SizedProgram, work: Workpiece) -> tuple[RenderedKernel, BuiltKernel]:
    """Return the kernel that serves the whole piece, compiled ahead for it.

    Raises:
        NoOneProgram: with the sizes at which it is written in another form.
    """

    def at(point: Point) -> Program:
        return program.at(work.leaves(point))

    ranges = [one for one in work.piece.box if one.name in work.names]
    ends = itertools.product(*((one.least, one.most) for one in ranges))
    return for_all_sizes(
        fusion, [(str(point), at(point)) for point in ends], [at(point) for point in work.points],
        programs_at(tried_points(ranges), at),
        operand_layouts(*work.operands(fusion.planned.sites[0], work.first_point)), work.kernels,
    )  # fmt: skip


def all_sized(work: Workpiece, fusions: Sequence[BuiltFusion]) -> tuple[list[BuiltFusion], list[tuple[str, str]]]:
    """Return the fusions that serve every size of a piece, and the others' kernels with the reason."""
    found, dropped = [], []
    for fusion in [part for whole in fusions for part in _parts(work, whole)]:
        try:
            found.append(sized(work, fusion))
        except NoOneProgram as error:
            dropped.append((fusion.planned.match.kernel, str(error)))
    return found, dropped


def build(work: Workpiece, fusions: Sequence[BuiltFusion], passes: Sequence[str]) -> GraphModule:
    """Return a piece's graph with rewrites in it.

    Args:
        work: the piece.
        fusions: from :func:`sized`.
        passes: ids of graph passes.

    Raises:
        LooksAtSizes: a pass goes by one size, or asked dynamo for the number that stands for an open one. This graph must not be
            used any more.
    """
    sites = [site for fusion in fusions for site in fusion.sites]
    for name in work.by_one_size.intersection(passes):
        raise LooksAtSizes(name)
    watched = [_watching(name, PASSES[name].apply, work) for name in PASSES if name in passes]
    module, _ = rewrite_region(work.opened.region, work.index_of, sites, watched)
    let_nodes_stand_for_sizes(module)  # a pass writes a value's shape into the ops that it makes
    return module


def _watching(name: str, apply: GraphPass, work: Workpiece) -> GraphPass:
    def run(graph: Any, region: Any, constants: dict[str, Any]) -> int:
        # As in the trace: else a tensor of open sizes asks whether one of them is 1, to tell how it lies.
        with watched(name, work.opened, work.piece.box), symbolic_sizes.ones_among_the_sizes():
            return apply(graph, region, constants)

    return run


@contextlib.contextmanager
def watched(name: str, opened: OpenCapture, box: Box) -> Iterator[None]:
    """See to it that what runs inside takes nothing more for granted of sizes than the trace, but what is true of a whole piece.

    An op that is laid out again may ask whether the batch is 1, to tell an image's layout: no size of 2 to 16 is.

    Args:
        name: of what runs.
        opened: the piece's graph.
        box: the piece's sizes.

    Raises:
        LooksAtSizes: it did; this graph must not be used any more.
    """
    before = _assumed_of(opened)
    yield
    ends = [{one.name: one.least for one in box}, {one.name: one.most for one in box}]
    known = {symbol: name for symbol, name in opened.names.items() if base_of(name) in ends[0]}
    ranges = {symbol: (dim_size(name, ends[0]), dim_size(name, ends[1])) for symbol, name in known.items()}
    if not all(symbolic_sizes.is_true_within(one, ranges) for one in _assumed_of(opened) - before):
        raise LooksAtSizes(name)


def _assumed_of(opened: OpenCapture) -> frozenset[Any]:
    """Return what is taken for granted of a piece's sizes. Dynamo does not know that yet of a graph that was read from a file."""
    environment = opened.environment
    return frozenset((*opened.guards, *(() if environment is None else symbolic_sizes.assumptions_of(environment))))
