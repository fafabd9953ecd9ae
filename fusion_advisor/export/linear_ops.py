"""Linear layers as ops of a package: kernels with the norm, gate or residual around them, and products of an odd width."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import astuple
from pathlib import Path

import torch
from torch.fx import Graph, Node

from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.gemm.cuda import ALIGNMENT_BYTES, launch_shape
from fusion_advisor.codegen.gemm.hopper_gated import THREADS, matrix_maps, shared_bytes_of, tiles_of
from fusion_advisor.codegen.gemm.launcher import reference_of
from fusion_advisor.codegen.gemm.problem import blocks_of
from fusion_advisor.codegen.gemm.registry import gemv_backend
from fusion_advisor.export.kernel_ops import TORCH, KernelOp, KernelOps, free_name, layout_key
from fusion_advisor.export.scan_ops import scan_op
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, LinearSource
from fusion_advisor.fuse.passes.pad_gemm import ODD_WIDTH_GEMM
from fusion_advisor.fuse.rewrite import odd_rows
from fusion_advisor.fuse.rewrite.derived_tensors import Extended
from fusion_advisor.fuse.rewrite.odd_rows import store, with_bias
from fusion_advisor.fuse.rewrite.odd_width_gemm import OddRows
from fusion_advisor.records import TensorMeta
from fusion_advisor.verify.check_chain import layout_of

_WITH_TENSOR_MAPS = "cuda_wgmma"
_ODD_FLOOR = 2e-6
"""Relative error that is allowed even where an op-by-op computation has none: sums of hundreds of products in another order."""


def why_not(linear: BuiltLinear) -> str:
    """Say why a package cannot hold a linear's kernel; empty where it can.

    Args:
        linear: as it was built again.
    """
    if linear.meets_ranks:
        return "it writes into the memory of other GPUs, which a package does not map"
    return ""


def with_linears(ops: KernelOps, bench: Bench, linears: Sequence[BuiltLinear]) -> KernelOps:
    """Add the kernels of linears to a graph's ops; sites of one kernel and one layout share an op.

    Args:
        ops: of the chains.
        bench: over the graphs that the kernels were built on.
        linears: kernels of recurrences are among them; those without a kernel of their own (they call an op of torch's) are
            passed over.
    """
    made: dict[object, KernelOp] = {}
    by_call = dict(ops.by_call)
    taken = {op.name for op in ops.ops}
    for linear in linears:
        if linear.source is None and linear.scan is None:
            continue
        for site in linear.sites:
            metas = [bench.ops[index].outputs[0] for index in (*site.inputs, *site.outputs)]
            key = (linear.id, *map(layout_key, metas))
            if key not in made:
                made[key] = _op(linear, metas, taken)
                taken.add(made[key].name)
            by_call[id(site.call)] = made[key]
    return KernelOps(ops=(*ops.ops, *made.values()), by_call=by_call)


def _op(linear: BuiltLinear, metas: Sequence[TensorMeta], taken: Collection[str]) -> KernelOp:
    if linear.scan is not None:
        return scan_op(linear.scan, linear.id, metas, taken)
    assert linear.source is not None
    return linear_op(linear.source, linear.id, metas, taken)


def linear_op(source: LinearSource, fusion_id: str, metas: Sequence[TensorMeta], taken: Collection[str]) -> KernelOp:
    """Describe one kernel at one site.

    Args:
        source: the problem and the configuration that its kernel is rendered for.
        fusion_id: its row of the report.
        metas: layouts of the site's operands, the result's last.
        taken: names of other ops.
    """
    problem, config, header = source.problem, source.config, source.header
    rendered = gemv_backend(config.form.partition("_")[0]).render(problem, header, config=config)
    named = [(name, meta) for (name, _), meta in zip(problem.operands, metas, strict=True)]
    reference = reference_of(problem, config, [meta.shape for meta in metas])
    name = free_name(rendered.entry, taken)
    text = environment().get_template("export/reference.py.jinja").render(
        op=name, tensors=[{"name": one, "made": made} for one, made in reference.tensors], helpers=frozenset[str](),
        reference=reference.lines, own="float32", input_count=len(metas) - 1, floor=reference.floor, is_approximate=False,
    )  # fmt: skip
    return KernelOp(
        name=name, fusion_id=fusion_id, summary=f"{problem.text}, {problem.m} x {problem.n} x {problem.k}", origin=header.origin,
        rendered=rendered, inputs=tuple(named[:-1]), outputs=tuple(named[-1:]), launch=_launch(source, rendered.suffix),
        reference=text,
    )  # fmt: skip


def _launch(source: LinearSource, suffix: str) -> dict[str, str]:
    """The launcher's arguments; a Triton kernel's file has its launch in it."""
    if suffix != ".cu":
        return {}
    if source.config.form == _WITH_TENSOR_MAPS:
        return _mapped_launch(source)
    blocks, threads = launch_shape(source.problem, source.config)
    launch = {"macros": {}, "grid": (blocks, 1, 1), "block": (threads, 1, 1), "shared_bytes": 0, "integers": ()}
    return {"launches": repr((launch,)), "alignment": repr(ALIGNMENT_BYTES), "is_for_one_arch": "False"}


def _mapped_launch(source: LinearSource) -> dict[str, str]:
    """The arguments of a launch with tensor maps, which the package makes from its tensors' addresses."""
    problem, config = source.problem, source.config
    return {
        "maps": repr(tuple(astuple(one) for one in matrix_maps(problem, config))), "tiles": repr(tiles_of(problem, config)),
        "cluster": repr(blocks_of(problem)), "threads": repr(THREADS), "shared_bytes": repr(shared_bytes_of(config)),
    }  # fmt: skip


def with_odd_rows(ops: KernelOps, graph: Graph) -> KernelOps:
    """Add the products of a graph whose rows have an odd width; each reads its weight with the rows after it.

    Args:
        ops: of the graph.
        graph: as it is printed; the view of a weight becomes a call of its own, as it is for a padded product.
    """
    made: dict[object, KernelOp] = {}
    by_call = dict(ops.by_call)
    taken = {op.name for op in ops.ops}
    for node in list(graph.nodes):
        if not isinstance(node.target, OddRows):
            continue
        x, weight, *biases = node.all_input_nodes
        if not biases:
            weight = _extended(graph, node, node.target.extended, weight)
        operands = ("x", "weight", "bias") if biases else ("x", "weight")
        metas = [layout_of(one.meta["val"]) for one in (x, weight, *biases, node)]
        call = OddRowsCall(node.target)
        node.target, node.args = call, (x, weight, *biases)
        key = (*operands, *map(layout_key, metas))
        if key not in made:
            made[key] = _odd_op(operands, metas, taken)
            taken.add(made[key].name)
        by_call[id(call)] = made[key]
    return KernelOps(ops=(*ops.ops, *made.values()), by_call=by_call)


class OddRowsCall:
    """A product of an odd width that is given what it reads: without a bias, the weight with the rows after it.

    Args:
        product: of the rewritten graph.
    """

    def __init__(self, product: OddRows) -> None:
        self.__name__ = self.__qualname__ = product.__name__
        self._columns = product.columns

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias``: [..., K] by [N + 7, K], or by [N, K] with a bias [N]."""
        flat_x = x.reshape(-1, x.shape[-1])
        wide = weight
        if bias is not None:
            flat_x, wide = with_bias(flat_x, weight, bias)
        out = x.new_empty((*x.shape[:-1], self._columns))
        store(flat_x, wide, out.view(-1, self._columns))
        return out


def _extended(graph: Graph, node: Node, view: Extended, weight: Node) -> Node:
    with graph.inserting_before(node):
        made = graph.call_function(view, (weight,))
    value = weight.meta["val"]
    made.meta = {**node.meta, "val": value.new_empty((view.rows, *value.shape[1:]))}
    return made


def _odd_op(operands: Sequence[str], metas: Sequence[TensorMeta], taken: Collection[str]) -> KernelOp:
    columns, width = metas[-1].shape[-1], metas[0].shape[-1]
    names, environment_of = (*operands, "out"), environment()
    entry = f"fa_odd_rows_{columns}_{width}{'_bias' * ('bias' in operands)}"
    source = Path(odd_rows.__file__).read_text(encoding="utf-8")
    text = environment_of.get_template("export/odd_rows.py.jinja").render(
        source=source, names=names, columns=columns, width=width
    )
    name = free_name(entry, taken)
    tensors = [{"name": one, "made": _made(one, meta, width)} for one, meta in zip(names, metas, strict=True)]
    bias = " + bias.to(dtype)" if "bias" in operands else ""
    reference = environment_of.get_template("export/reference.py.jinja").render(
        op=name, helpers=frozenset[str](), own="float32", input_count=len(operands), floor=_ODD_FLOOR, is_approximate=False,
        tensors=tensors, reference=[f"out.copy_(x.to(dtype) @ weight[:{columns}].to(dtype).T{bias})"],
    )  # fmt: skip
    named = list(zip(names, metas, strict=True))
    return KernelOp(
        name=name, fusion_id=ODD_WIDTH_GEMM.id, summary=f"a product of {columns} columns, stored without padding",
        origin="cuBLAS", rendered=Rendered(backend=TORCH, entry=entry, source=text, suffix=".py"),
        inputs=tuple(named[:-1]), outputs=tuple(named[-1:]), launch={}, reference=reference,
    )  # fmt: skip


def _made(name: str, meta: TensorMeta, width: int) -> str:
    place = f"{tuple(meta.shape)}, {tuple(meta.stride)}, "
    if name == "out":
        return f"torch.empty_strided({place}dtype=torch.{meta.dtype}, device=device).zero_()"
    return f"normal({place}torch.{meta.dtype})" + f".mul_({width**-0.5:.6g})" * (name == "weight")
