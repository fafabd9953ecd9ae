"""Kernels of recurrences as ops of a package: the op makes the state, launches, and hands out rows and the last state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from fusion_advisor.codegen.common.interface import environment
from fusion_advisor.codegen.common.site import Layout, is_empty, tensors_of
from fusion_advisor.codegen.common.value_names import ValueNames
from fusion_advisor.codegen.cpp.arguments import Layout as CppLayout
from fusion_advisor.codegen.recurrence.reference import Made, recurrence_reference, triton_file
from fusion_advisor.codegen.triton.launcher import FLOORS, own_dtype
from fusion_advisor.codegen.triton.reference import RESERVED
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.expressions import Printer
from fusion_advisor.export.kernel_ops import CarriedState, KernelOp, KernelOps, free_name
from fusion_advisor.fuse.decide.session import ScanSource
from fusion_advisor.fuse.scans.sites import ScanSite
from fusion_advisor.fuse.stages.scan_kernels import HEADER
from fusion_advisor.records import TensorMeta

_SMALL = 0.05
"""Factor of random inputs: a state that grows from step to step must not overflow in the kernel's dtype."""


def scan_op(source: ScanSource, fusion_id: str, metas: Sequence[TensorMeta], taken: Collection[str]) -> KernelOp:
    """Describe one kernel of a recurrence.

    Args:
        source: the loop that the kernel stands for, and the kernel as it was rendered.
        fusion_id: its row of the report.
        metas: layouts of the site's inputs, then of its rows, then of its last state where somebody reads it.
        taken: names of other ops.

    Raises:
        CannotExport: it has no elements, or its first state is made of what no source can hold.
    """
    site, rendered = source.site, source.rendered
    program = site.recurrence.program
    if is_empty(program):
        raise CannotExport(detail=f"{rendered.entry} has no elements to compute")
    names = _names(site)
    count = len(names.given)
    inputs = tuple(zip(names.given, metas[:count], strict=True))
    results = tuple(zip(("rows", "last_state"), metas[count:], strict=False))
    tensors = tensors_of(program, [_layout(meta) for meta in _by_operand(site, metas[:count], metas[count])])
    own = own_dtype(program)
    operands = [
        Made(
            name=name, is_output=tensor.is_output,
            made=f"torch.empty_strided({place}dtype=torch.{tensor.dtype}, device=device).zero_()" if tensor.is_output
            else _random(place, tensor.dtype, tensor.below),
        )
        for name, tensor in zip(names.operands, tensors, strict=True)
        for place in [_place(tensor.layout or Layout(shape=(tensor.element_count,), strides=(1,)))]
    ]  # fmt: skip
    launch: dict[str, str] = {}
    if rendered.suffix == ".py":
        rendered = triton_file(rendered, site.recurrence, operands)
    else:
        launch = {"integers": repr(tuple(one.value for one in CppLayout(program).parameters)), "checks": "0"}
    name = free_name(rendered.entry, taken)
    state = TensorMeta(
        shape=tuple(site.state.shape), stride=tuple(site.state.stride()), dtype=program.operands[site.recurrence.state].dtype,
        device=metas[0].device,
    )  # fmt: skip
    carried = CarriedState(state=state, operands=_places(site), first=_first(site, names.given), is_handed_out=len(results) > 1)
    return KernelOp(
        name=name, fusion_id=fusion_id, summary=HEADER.summary, origin=HEADER.origin, rendered=rendered, inputs=inputs,
        outputs=results, launch=launch, carried=carried, reference=_reference(site, name, names, inputs, results, carried, own),
    )  # fmt: skip


class _Named:
    """Names of a site's tensors.

    Attributes:
        given: of what its op is given.
        operands: of the kernel's operands; ``state`` is the state's, ``rows`` the rows'.
    """

    def __init__(self, given: tuple[str, ...], operands: tuple[str, ...]) -> None:
        self.given, self.operands = given, operands


def _names(site: ScanSite) -> _Named:
    program, state = site.recurrence.program, site.recurrence.state
    names = ValueNames({*RESERVED, "state", "rows", "last_state", "step"})
    operands = tuple(
        "state" if number == state else "rows" if operand.is_output else names.fresh(operand.name.rstrip("0123456789"))
        for number, operand in enumerate(program.operands)
    )
    read = [name for name in operands if name not in ("state", "rows")]
    return _Named((*read, *(names.fresh("start") for _ in range(len(site.given) - len(read)))), operands)


def _places(site: ScanSite) -> tuple[str, ...]:
    """Return where each operand of the kernel comes from: the place among the op's inputs, or a name of ``_recurrence.py``."""
    read = iter(range(len(site.given)))
    program, state = site.recurrence.program, site.recurrence.state
    return tuple(
        "STATE" if number == state else "ROWS" if operand.is_output else str(next(read))
        for number, operand in enumerate(program.operands)
    )


def _by_operand(site: ScanSite, given: Sequence[TensorMeta], rows: TensorMeta) -> list[TensorMeta | None]:
    place: dict[str, TensorMeta | None] = {"STATE": None, "ROWS": rows}
    return [place[word] if word in place else given[int(word)] for word in _places(site)]


def _layout(meta: TensorMeta | None) -> Layout | None:
    return None if meta is None else Layout(shape=tuple(meta.shape), strides=tuple(meta.stride))


def _place(layout: Layout) -> str:
    return f"{layout.shape}, {layout.strides}, "


def _random(place: str, dtype: str, below: int) -> str:
    if dtype.startswith(("float", "bfloat")):
        return f"normal({place}torch.{dtype}).mul_({_SMALL})"
    return f"whole({place}torch.{dtype}, {2 if dtype == 'bool' else below})"


def _first(site: ScanSite, given: Sequence[str]) -> str:
    """Return the expression of the state before the first step; empty where it is zero."""
    if site.before is None:
        return ""
    graph = getattr(site.before, "graph", None)
    if not isinstance(graph, torch.fx.Graph):
        raise CannotExport(detail="its loop's first state is made by no graph")
    names = dict(zip(site.given, given, strict=True))
    sources = zip(graph.find_nodes(op="placeholder"), site.inputs_before, strict=True)
    texts = {node: names[source] for node, source in sources}
    printer = Printer(KernelOps(ops=(), by_call={}), f"{given[0]}.device")

    def read(node: Node) -> str:
        text = texts[node]
        return text if text.isidentifier() else f"({text})"

    for node in graph.nodes:
        if node.op == "call_function":
            texts[node] = printer.expression(node, read)
    result = graph.output_node().args[0]
    assert isinstance(result, Node)
    return texts[result]


def _reference(
    site: ScanSite, name: str, names: _Named, inputs: Sequence[tuple[str, TensorMeta]],
    results: Sequence[tuple[str, TensorMeta]], carried: CarriedState, own: str,
) -> str:  # fmt: skip
    reference = recurrence_reference(site.recurrence, names.operands)
    made = [(one, _random(_place(Layout(shape=tuple(m.shape), strides=tuple(m.stride))), m.dtype, 10)) for one, m in inputs]
    made += [
        (one, f"torch.empty_strided({tuple(m.shape)}, {tuple(m.stride)}, dtype=torch.{m.dtype}, device=device).zero_()")
        for one, m in results
    ]
    state = carried.state
    lines = [
        f"state = torch.empty_strided({state.shape}, {state.stride}, dtype=dtype, device=device)",
        f"state.copy_({carried.first})" if carried.first else "state.zero_()",
        *reference.lines,
        *(["last_state.copy_(state)"] if carried.is_handed_out else []),
    ]
    return environment().get_template("export/reference.py.jinja").render(
        op=name, tensors=[{"name": one, "made": text} for one, text in made], helpers=reference.helpers, reference=lines,
        own=own, input_count=len(inputs), floor=FLOORS[own], is_approximate=False,
    )  # fmt: skip
