"""The kernels of a rewritten graph as ops of the package: what each is called with, what it allocates, and how it is launched."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph

from fusion_advisor.codegen.common.interface import Header, Rendered, environment
from fusion_advisor.codegen.common.position_checks import checks_of
from fusion_advisor.codegen.common.site import Layout, SiteTensor, is_empty, tensors_of
from fusion_advisor.codegen.cpp.arguments import Layout as CppLayout
from fusion_advisor.codegen.registry import backend
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.codegen.triton.launcher import FAST_MATH_FLOOR, FLOORS, own_dtype
from fusion_advisor.codegen.triton.reference import torch_reference
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.launches.cuda import cuda_facts
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.rewrite.layout_copy import PlainCopy, copy_program
from fusion_advisor.ir.program import Program, nests
from fusion_advisor.records import TensorMeta

TORCH = "torch"
"""Backend of an op that is no kernel but several ops of torch, which Python calls."""
_HASH = re.compile(r"_[0-9a-f]{6}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedState:
    """The state of a recurrence, which its op makes before it launches the kernel.

    Attributes:
        state: its layout.
        operands: of the kernel, in order: the place among the op's inputs, or ``STATE`` or ``ROWS``.
        first: expression of the state before the first step, over the op's inputs; empty where that is zero.
        is_handed_out: whether the last state is the op's second result.
    """

    state: TensorMeta
    operands: tuple[str, ...]
    first: str
    is_handed_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOp:
    """One op of the package.

    Attributes:
        name: of the op, an identifier that no other op of the package has.
        fusion_id: ``F1`` …: the row of the report that it comes from.
        summary: the ops that it computes, in one sentence.
        rendered: its kernel; ``rendered.file_text`` is the file that is shipped.
        inputs: the tensors that it reads, with the layouts that were verified.
        outputs: the tensors that it computes.
        in_place: positions of the outputs that it is given after the inputs and writes into; it returns the others.
        launch: keyword arguments of its launcher in ``ops.py``, as Python source.
        reference: source of the same computation in plain PyTorch.
        carried: the state of a recurrence; None for any other kernel.
        stem: of the file's name; empty for the kernel's entry.
    """

    name: str
    fusion_id: str
    summary: str
    origin: str
    rendered: Rendered
    inputs: tuple[tuple[str, TensorMeta], ...]
    outputs: tuple[tuple[str, TensorMeta], ...]
    launch: Mapping[str, str]
    reference: str = field(repr=False)
    in_place: tuple[int, ...] = ()
    carried: CarriedState | None = None
    stem: str = ""

    @property
    def file(self) -> str:
        """Name of the kernel's file."""
        return f"{self.stem or self.rendered.entry}{self.rendered.suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOps:
    """The ops of a graph, and which op each call in it is."""

    ops: tuple[KernelOp, ...]
    by_call: Mapping[int, KernelOp]
    """By ``id`` of the call that stands in the rewritten graph."""

    def of(self, target: Callable[..., Any] | str) -> KernelOp | None:
        """Return the op of a node's target; None where it is no kernel of a chain."""
        return self.by_call.get(id(target))


def kernel_ops(bench: Bench, fusions: Sequence[BuiltFusion]) -> KernelOps:
    """Describe the ops of kept fusions; sites of one kernel and one layout share an op.

    Args:
        bench: over the graphs that the fusions were built on.
        fusions: as they were built.
    """
    made: dict[Any, KernelOp] = {}
    by_call: dict[int, KernelOp] = {}
    for fusion in fusions:
        rendered = _rendered(fusion)
        for site in fusion.sites:
            inputs = [bench.ops[index].outputs[0] for index in site.inputs]
            outputs = [bench.ops[index].outputs[0] for index in site.outputs]
            in_place = tuple(place for place, index in enumerate(site.outputs) if bench.ops[index].mutates)
            inputs = inputs[: len(inputs) - len(in_place)]  # the last ones are the outputs that it is given
            # Two parts of one tensor have equal sources and layouts: where each begins stands in the program alone.
            key = (rendered.source, repr(fusion.planned.program), *map(layout_key, inputs), None, *map(layout_key, outputs))
            if key not in made:
                taken = {op.name for op in made.values()}
                source = OpSource(fusion.planned.program, fusion.planned.header, site.fusion_id, fusion.kernel.fast_math)
                made[key] = with_own_file(chain_op(source, rendered, inputs, outputs, taken, in_place), made.values())
            by_call[id(site.call)] = made[key]
    return KernelOps(ops=tuple(made.values()), by_call=by_call)


def with_own_file(op: KernelOp, others: Iterable[KernelOp]) -> KernelOp:
    """Return an op whose file launches it: a Triton kernel's file holds the sizes of one site, which others may not share.

    Args:
        op: of a package.
        others: that the package has.
    """
    same = [one for one in others if one.rendered.entry == op.rendered.entry]
    if op.rendered.suffix != ".py" or all(one.rendered.file_text == op.rendered.file_text for one in same):
        return op
    return replace(op, stem=f"{op.rendered.entry}_{len(same) + 1}")


def layout_key(meta: TensorMeta) -> tuple[object, ...]:
    """Return what is equal for two tensors that one op serves."""
    return (meta.shape, meta.stride, meta.dtype)


def free_name(entry: str, taken: Collection[str]) -> str:
    """Return a name for an op.

    Args:
        entry: of its kernel.
        taken: names of other ops.
    """
    base = _HASH.sub("", entry.removeprefix("fa_"))
    return next(one for number in range(1, 10_000) if (one := base if number == 1 else f"{base}_{number}") not in taken)


def _rendered(fusion: BuiltFusion) -> Rendered:
    """Render a kernel as it was built, with the launcher of its site at the end of the file."""
    kernel, planned = fusion.kernel, fusion.planned
    return backend(kernel.backend).render(
        planned.program, planned.header, tuning=kernel.parameters, fast_math=kernel.fast_math
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpSource:
    """What a chain's kernel is rendered from."""

    program: Program
    header: Header
    fusion_id: str
    fast_math: bool = False


def with_copies(ops: KernelOps, graph: Graph) -> KernelOps:
    """Add the copies of a graph that change a layout and have a kernel.

    Args:
        ops: other kernels of the graph.
        graph: as it is printed.
    """
    made: dict[object, KernelOp] = {}
    by_call = dict(ops.by_call)
    taken = {op.name for op in ops.ops}
    for copy in [node.target for node in graph.nodes if isinstance(node.target, PlainCopy)]:
        key = (copy.kernel.source, layout_key(copy.layout))
        if key not in made:
            program, header = copy_program(copy.layout)
            parameters = copy.kernel.parameters
            rendered = backend(copy.kernel.backend).render(program, header, tuning=parameters, fast_math=False)
            made[key] = chain_op(OpSource(program, header, copy.made_for), rendered, [copy.layout], [copy.plain], taken)
            taken.add(made[key].name)
        by_call[id(copy)] = made[key]
    return KernelOps(ops=(*ops.ops, *made.values()), by_call=by_call)


def chain_op(
    source: OpSource, rendered: Rendered, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta], taken: Collection[str],
    in_place: tuple[int, ...] = (),
) -> KernelOp:  # fmt: skip
    """Describe a chain's kernel at one site.

    Args:
        source: the kernel's program, from which its text is rendered.
        rendered: the kernel.
        inputs: layouts of the tensors that it reads.
        outputs: layouts of those that it computes.
        taken: names of other ops.
        in_place: positions of the outputs that the op is given.

    Raises:
        CannotExport: it has no elements to compute.
    """
    program, fast_math = source.program, source.fast_math
    metas = [*inputs, *outputs]
    rendered = with_launcher(rendered, program, tensors=metas, fast_math=fast_math)
    tensors = tensors_of(program, [Layout(shape=meta.shape, strides=meta.stride) for meta in metas])
    named = [(tensor.name, meta) for tensor, meta in zip(tensors, metas, strict=True)]
    name = free_name(rendered.entry, taken)
    return KernelOp(
        name=name, fusion_id=source.fusion_id, summary=source.header.summary, origin=source.header.origin,
        rendered=rendered, inputs=tuple(named[: len(inputs)]), outputs=tuple(named[len(inputs) :]),
        launch=_LAUNCH[rendered.suffix](program, rendered),
        reference=_reference(program, tensors, metas, name, in_place, fast_math=fast_math), in_place=in_place,
    )  # fmt: skip


def _cpp_facts(program: Program, rendered: Rendered) -> dict[str, str]:
    """The integers of a C++ kernel, and how many of its loop nests check positions."""
    parts = [part.program for part in nests(program)]
    if all(map(is_empty, parts)):
        raise CannotExport(detail=f"{rendered.entry} has no elements to compute")
    integers = [parameter.value for part in parts for parameter in CppLayout(part).parameters]
    return {
        "integers": repr(tuple(integers)),
        "checks": repr(sum(bool(checks_of(part)) for part in parts)),
    }


def _triton_facts(program: Program, rendered: Rendered) -> dict[str, str]:
    """Nothing: the launch in a Triton kernel's file has its site's sizes as defaults."""
    del program, rendered
    return {}


_LAUNCH: Mapping[str, Callable[[Program, Rendered], dict[str, str]]] = {
    ".cpp": _cpp_facts,
    ".py": _triton_facts,
    ".cu": cuda_facts,
}
"""What a launch must know, by the suffix of the kernel's file."""


def _reference(
    program: Program,
    tensors: Sequence[SiteTensor],
    metas: Sequence[TensorMeta],
    name: str,
    in_place: tuple[int, ...],
    *,
    fast_math: bool,
) -> str:
    """Print a module with ``make_inputs`` and ``reference`` of a kernel."""
    reference = torch_reference(program, tensors)
    own = own_dtype(program)
    made = [(tensor.name, _made(tensor, meta)) for tensor, meta in zip(tensors, metas, strict=True)]
    return environment().get_template("export/reference.py.jinja").render(
        op=name, tensors=[{"name": name, "made": text} for name, text in made], helpers=reference.helpers,
        reference=reference.lines, own=own, input_count=sum(not tensor.is_output for tensor in tensors),
        floor=FAST_MATH_FLOOR if fast_math else FLOORS[own], is_approximate=fast_math,
        in_place=in_place,
    )  # fmt: skip


def _made(tensor: SiteTensor, meta: TensorMeta) -> str:
    place, dtype = f"{meta.shape}, {meta.stride}, ", f"torch.{tensor.dtype}"
    if tensor.is_output:
        return f"torch.empty_strided({place}dtype={dtype}, device=device).zero_()"
    if tensor.dtype.startswith(("float", "bfloat")):
        return f"normal({place}{dtype})"
    return f"whole({place}{dtype}, {2 if tensor.dtype == 'bool' else tensor.below})"
