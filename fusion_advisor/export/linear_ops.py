"""Kernels of linear layers as ops of a package, with the norm, gate or residual around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import astuple

from fusion_advisor.codegen.common.interface import environment
from fusion_advisor.codegen.gemm.cuda import ALIGNMENT_BYTES, launch_shape
from fusion_advisor.codegen.gemm.hopper_gated import THREADS, matrix_maps, shared_bytes_of, tiles_of
from fusion_advisor.codegen.gemm.launcher import reference_of
from fusion_advisor.codegen.gemm.problem import blocks_of
from fusion_advisor.codegen.gemm.registry import gemv_backend
from fusion_advisor.export.kernel_ops import KernelOp, KernelOps, free_name, layout_key
from fusion_advisor.export.scan_ops import scan_op
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, LinearSource
from fusion_advisor.records import TensorMeta

_WITH_TENSOR_MAPS = "cuda_wgmma"


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
        source: what it is rendered from.
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
    launch = f"dict(macros={{}}, grid=({blocks}, 1, 1), block=({threads}, 1, 1), shared_bytes=0, integers=())"
    return {"launches": f"({launch},)", "alignment": repr(ALIGNMENT_BYTES), "is_for_one_arch": "False"}


def _mapped_launch(source: LinearSource) -> dict[str, str]:
    """The arguments of a launch with tensor maps, which the package makes from its tensors' addresses."""
    problem, config = source.problem, source.config
    return {
        "maps": repr(tuple(astuple(one) for one in matrix_maps(problem, config))), "tiles": repr(tiles_of(problem, config)),
        "cluster": repr(blocks_of(problem)), "threads": repr(THREADS), "shared_bytes": repr(shared_bytes_of(config)),
    }  # fmt: skip
