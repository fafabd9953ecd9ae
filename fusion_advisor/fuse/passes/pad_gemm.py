"""Padded GEMMs: a linear whose output width is no multiple of eight runs on a weight with a few more rows.

GPT-2's vocabulary has 50,257 rows. In 16 bits no vector load or store fits an output row of that width, and cuBLAS falls back to
a kernel for elements aligned to nothing: on an H200 a head of 4,096 tokens takes 3.37 of a bf16 step's 6.43 ms. With seven more
rows it runs on the tensor cores' own kernels, and a copy of the columns that were asked for gives the caller the tensor that the
model gives: a kernel of ours, because ATen's takes twice as long. The rows are read from the memory after the weight, where
``weight_packing`` left room for them: no weight is copied, and what is written to a weight is seen. A weight with no room
after it is left alone.

That copy still writes and reads the result once more (217 of the 2,380 µs of GPT-2's bf16 step of 8 x 512 tokens, H200). Where
there are rows enough, the result can be stored where it belongs at once: see ``odd_width_gemm``. With a bias, as heads of masked
language models have, each call then copies x and the weight instead. Such a linear stays padded where those copies would move no
fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import is_in_autocast
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.trace_bytes import read_bytes
from fusion_advisor.fuse.rewrite.derived_tensors import Extended
from fusion_advisor.fuse.rewrite.layout_copy import put_copy
from fusion_advisor.fuse.rewrite.odd_rows import period_of
from fusion_advisor.fuse.rewrite.odd_width_gemm import LEAST_COLUMNS, LEAST_ROWS, OddRows, packing_bytes
from fusion_advisor.fuse.rewrite.price import PassEffect
from fusion_advisor.fuse.rewrite.record import PassRewrite
from fusion_advisor.records import Ref
from fusion_advisor.workload.weight_packing import GEMM_MULTIPLE, has_room, padded_rows, roomy_rows

_LINEAR = torch.ops.aten.linear.default
_PADDED = "padded"
"""Marks, in a node's ``meta``, the last op of a padded linear."""


def pad_linears(graph: Graph, region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Let linears of an odd output width compute a rounded one; returns how many.

    Args:
        graph: rewritten in place.
        region: its example tensors say whether there is room after a weight.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = zip(placeholders, region.roles, region.example_args, strict=True)
    values = {node: value for node, role, value in named if role == "parameter"}  # the same tensor in every run of the region
    odd = [node for node in graph.nodes if node.target is _LINEAR and _is_padded_best(node, values)]
    for number, linear in enumerate(odd):
        _pad(graph, linear, f"{region.index}_{number}")
    return len(odd)


def store_odd_rows(graph: Graph, region: Region, constants: dict[str, torch.Tensor]) -> int:
    """Let padded linears on many rows store their results without padding; returns how many.

    Args:
        graph: rewritten in place; its odd linears are padded first where they are not yet.
        region: its example tensors say whether there is room after a weight.
        constants: as every pass gets them; none is made.
    """
    pad_linears(graph, region, constants)
    given = dict(zip([node for node in graph.nodes if node.op == "placeholder"], region.example_args, strict=True))
    changed = 0
    for out in [node for node in graph.nodes if node.meta.get(_PADDED)]:
        part = out.all_input_nodes[0]
        wide = part.all_input_nodes[0]
        x, padded, *biases = wide.all_input_nodes
        parameters = [operand.all_input_nodes[0] for operand in (padded, *biases)]
        value = out.meta["val"]
        rows, columns = math.prod(value.shape[:-1]), value.shape[-1]
        if columns < LEAST_COLUMNS or rows < LEAST_ROWS * period_of(columns):
            continue
        if is_in_autocast(wide):  # it casts the operands of a linear, but of no product into given memory
            continue
        if biases and packing_bytes(rows, columns, x.meta["val"].shape[-1]) >= _copied_bytes(out):
            continue
        if not biases and not has_room(given[parameters[0]], roomy_rows(columns)):
            continue
        call = OddRows(f"odd_rows_{region.index}_{changed}", columns, has_bias=bool(biases))
        with graph.inserting_before(out):
            stored = graph.call_function(call, (x, *parameters))
        stored.meta = {key: value for key, value in out.meta.items() if key != _PADDED}
        out.replace_all_uses_with(stored)
        for node in (out, part, wide, padded, *biases):
            graph.erase_node(node)
        changed += 1
    return changed


def _is_padded_best(linear: Node, values: Mapping[Node, Any]) -> bool:
    parameters = [parameter for parameter in linear.args[1:] if isinstance(parameter, Node)]
    tensors = [values[parameter] for parameter in parameters if parameter in values]
    if linear.kwargs or len(tensors) < len(parameters):
        return False
    rows, columns = tensors[0].shape
    if tensors[0].element_size() != 2 or rows % GEMM_MULTIPLE == 0 or columns % GEMM_MULTIPLE:
        return False
    return linear.meta["val"].is_contiguous() and all(has_room(tensor, padded_rows(rows)) for tensor in tensors)


def _pad(graph: Graph, linear: Node, name: str) -> None:
    like = linear.meta["val"]
    rows = like.shape[-1]
    padded = padded_rows(rows)
    origin: dict[str, Any] = {key: linear.meta[key] for key in ("nn_module_stack", "stack_trace") if key in linear.meta}
    with graph.inserting_before(linear):
        operands: list[Node | None] = []
        for kind, source in zip(("weight", "bias"), linear.args[1:], strict=False):
            if not isinstance(source, Node):
                operands.append(None)
                continue
            operand = graph.call_function(Extended(f"padded_{kind}_{name}", padded), (source,))
            value = source.meta["val"]
            operand.meta = {**origin, "val": value.new_empty((padded, *value.shape[1:]))}
            operands.append(operand)
        wide = graph.call_function(_LINEAR, (linear.args[0], *operands))
        wide.meta = {**origin, "val": like.new_empty((*like.shape[:-1], padded))}
        part = graph.call_function(torch.ops.aten.slice.Tensor, (wide, -1, 0, rows))
        part.meta = {**origin, "val": wide.meta["val"][..., :rows]}
        out = put_copy(graph, part, PAD_GEMM.id)
        out.meta = {**linear.meta, _PADDED: True}
    linear.replace_all_uses_with(out)
    graph.erase_node(linear)


def _padded_ns(effect: PassEffect) -> int:
    """A product as those that stay, and a copy of its result, for each linear; both are launched once more."""
    after_ns = 2.0 * effect.sites * effect.launch_cost_ns
    for op in effect.capture.ops:
        if op.target != "aten.linear.default" or op.index not in effect.newly_removed:
            continue
        runs, result = effect.capture.runs_of(op), read_bytes(op.outputs[0])
        operands = [effect.capture.ops[one.index].outputs[0] for one in op.args if isinstance(one, Ref)]
        moved_bytes = runs * (sum(map(read_bytes, operands)) + result)
        after_ns += effect.gemms_ns(effect.products(op), moved_bytes, runs) + effect.copies_ns(2 * runs * result, runs)
    return max(0, effect.saved_ns - round(after_ns))


def _copied_bytes(out: Node) -> int:
    """What a copy of a result reads and writes."""
    return 2 * int(out.meta["val"].nbytes)


def _stored_ns(effect: PassEffect) -> int:
    """The copy of a whole result goes; a bias's operands are packed; each makes more launches than a product and a copy."""
    moved_bytes = more_launches = 0
    for node, _, often in effect.nodes():
        if not isinstance(node.target, OddRows):
            continue
        x, _, *biases = node.all_input_nodes
        *outer, width = x.meta["val"].shape
        packed = packing_bytes(math.prod(outer), node.meta["val"].shape[-1], width) if biases else 0
        moved_bytes += often * (_copied_bytes(node) - packed)
        more_launches += often * (node.target.launches - 2)
    return max(0, effect.saved_ns + round(effect.copy_ns(moved_bytes)) - more_launches * effect.launch_cost_ns)


PAD_GEMM = PassRewrite(id="pad-gemm", title="padded GEMMs", apply=pad_linears, predict=_padded_ns)
ODD_WIDTH_GEMM = PassRewrite(
    id="odd-width-gemm",
    title="odd-width GEMMs",
    apply=store_odd_rows,
    predict=_stored_ns,
    after={"pad-gemm": "it removes the copy after a padded GEMM"},
)
