"""Sites of rewrites without a kernel, counted in records, against the sites that the passes change in the live graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.fuse.decide.predict import removed_ops
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.registry import REWRITES
from fusion_advisor.fuse.plan.without_kernel import candidate_sites
from fusion_advisor.records import OpClass, OpNode, Ref, TensorMeta
from fusion_advisor.records.serialize import read_capture
from tests.tiny import profiled

CAPTURES = Path(__file__).parents[2] / "data" / "captures"


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_no_pass_changes_more_sites_than_were_counted(name):
    _, capture, live = profiled(name)
    counted = candidate_sites(capture)
    bench = Bench(live, on_cuda=False)
    for key in ("drop-masks", "group-heads", "share-masks", "pad-gemm", "patch-gemm"):
        assert bench.build((), (key,)).changed.get(key, 0) <= counted.get(key, 0), key
    for key in ("share-values", "fold-constants"):
        gone = removed_ops(bench, bench.build((), (key,))) - removed_ops(bench, bench.build((), ()))
        computing = [index for index in gone if capture.ops[index].op_class is not OpClass.VIEW]
        assert 0 < len(computing) <= counted[key], key


def test_a_captured_qwen_has_sites_in_every_layer():
    counted = candidate_sites(read_capture(CAPTURES / "qwen2.5-7b-bf16-1x512-h200.json.gz"))
    layers = 28
    # query, key and value are one GEMM, gate and up another
    assert (counted["drop-masks"], counted["group-heads"], counted["merge-gemms"]) == (layers, layers, 3 * layers)
    assert counted["cuda-graph"] == 1


def test_every_key_is_a_rewrite():
    counted = candidate_sites(read_capture(CAPTURES / "gpt2-fp32-1x1024-h200.json.gz"))
    assert set(counted) <= {rewrite.id for rewrite in REWRITES}


def op(index, target, op_class, args=(), shape=(4, 8), dtype="bfloat16", role="op"):
    meta = TensorMeta(shape=shape, stride=(shape[-1], 1) if len(shape) == 2 else (1,) * len(shape), dtype=dtype)
    return OpNode(index=index, region=0, target=target, op_class=op_class, args=args, outputs=(meta,), role=role)


def sites(ops):
    capture = read_capture(CAPTURES / "gpt2-fp32-1x1024-h200.json.gz")
    return candidate_sites(replace(capture, ops=tuple(ops), launches=()))


def test_a_padded_width_and_an_epilogue_are_seen():
    ops = [
        op(0, "x", OpClass.INPUT, role="input"),
        op(1, "w", OpClass.INPUT, role="parameter"),
        op(2, "aten.linear.default", OpClass.GEMM, (Ref(index=0), Ref(index=1)), shape=(4, 9)),
        op(3, "aten.gelu.default", OpClass.POINTWISE, (Ref(index=2),), shape=(4, 9)),
    ]
    assert sites(ops) == {"pad-gemm": 1, "gemm-epilogue": 1, "cuda-graph": 1}


def test_equal_ops_count_once_and_numbers_of_another_type_are_another_op():
    ops = [
        op(0, "x", OpClass.INPUT, role="input"),
        op(1, "aten.add.Tensor", OpClass.POINTWISE, (Ref(index=0), 1)),
        op(2, "aten.add.Tensor", OpClass.POINTWISE, (Ref(index=0), 1)),
        op(3, "aten.add.Tensor", OpClass.POINTWISE, (Ref(index=0), 1.0)),
        op(4, "aten.exp.default", OpClass.POINTWISE, (Ref(index=1),)),
        op(5, "aten.exp.default", OpClass.POINTWISE, (Ref(index=2),)),
    ]
    assert sites(ops)["share-values"] == 2
