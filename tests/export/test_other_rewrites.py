"""What a package holds of rewrites that make no kernel of a chain: linears, epilogues, padded GEMMs and layout copies."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.fx import Graph
from transformers import BloomConfig, BloomForCausalLM

from fusion_advisor.codegen.common.interface import Header
from fusion_advisor.codegen.gemm.problem import GemvConfig, GemvProblem
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.expressions import Printer
from fusion_advisor.export.kernel_ops import KernelOps, with_copies, with_own_file
from fusion_advisor.export.linear_ops import linear_op
from fusion_advisor.export.package import files_of_ops
from fusion_advisor.export.parameters import joined_tensors
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.decide.session import LinearSource
from fusion_advisor.fuse.passes.gemm_epilogue import EpilogueCall
from fusion_advisor.fuse.rewrite import layout_copy
from fusion_advisor.fuse.rewrite.derived_tensors import Extended
from fusion_advisor.records import TensorMeta
from fusion_advisor.verify.check_chain import layout_of
from fusion_advisor.workload.weight_packing import leave_room
from tests.export import models

aten = torch.ops.aten
HEADER = Header(title="rmsnorm_linear", summary="a linear", origin="generated")
NORMED = GemvProblem(m=1, n=24, k=64, dtype="float32", has_norm=True, has_residual=True)
GATED = GemvProblem(m=3, n=16, k=32, dtype="float16", has_bias=True, is_gated=True)
FMA = GemvConfig(form="triton_fma", rows=16, warps=4, block_k=32, stages=2)
DOT = GemvConfig(form="triton_dot", rows=16, warps=4, block_k=32, stages=2)


def meta(shape, dtype):
    return TensorMeta(shape=shape, stride=torch.empty(shape, device="meta").stride(), dtype=dtype, device="cpu")


def op_of(problem, config, taken=(), leading=(1,)):
    source = LinearSource(problem=problem, config=config, header=HEADER)
    wide = ("x", "residual", "out")
    metas = [meta((*leading, *shape) if name in wide else shape, problem.dtype) for name, shape in problem.operands]
    return linear_op(source, "G1", metas, taken)


def test_linears_and_copies_are_right_as_ops_of_a_package(tmp_path):
    first = op_of(NORMED, FMA)
    second = op_of(GATED, DOT, {first.name})
    graph = Graph()
    part = torch.randn(8, 104)[:, :97]
    graph.call_function(layout_copy.build(layout_of(part), "cpp").again("pad-gemm"), (graph.placeholder("x"),))
    ops = with_copies(KernelOps(ops=(first, second), by_call={}), graph).ops
    assert len({op.name for op in ops}) == 3
    write_folder(files_of_ops(ops, "some_ops", "cpu"), tmp_path / "some_ops", force=False)
    command = [sys.executable, str(Path(__file__).with_name("run_ops.py")), str(tmp_path / "some_ops"), "some_ops"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert list(errors) == [op.name for op in ops]
    assert all(found <= limit for results in errors.values() for found, limit in results), errors


def test_a_cuda_linear_is_launched_over_the_weights_rows():
    op = op_of(NORMED, GemvConfig(form="cuda_fma", rows=16, warps=2, unroll=1))
    (launch,) = eval(op.launch["launches"])
    assert (launch["grid"], launch["block"], launch["integers"]) == ((2, 1, 1), (64, 1, 1), ())
    assert op.file.endswith(".cu")
    assert op.rendered.entry in op.rendered.source
    assert [name for name, _ in op.inputs] == ["x", "norm_weight", "weight", "residual"]


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize("use_gelu", [True, False])
def test_an_epilogue_is_printed_as_what_it_calls(is_linear, use_gelu):
    x, bias = torch.randn(2, 3, 8) if is_linear else torch.randn(6, 8), torch.randn(5)
    weight = torch.randn(5, 8) if is_linear else torch.randn(8, 5)
    shape = (2, 3, 5) if is_linear else (6, 5)
    call = EpilogueCall("linear_relu", shape, use_gelu=use_gelu, is_linear=is_linear)
    graph = Graph()
    node = graph.call_function(call, tuple(graph.placeholder(name) for name in ("x", "weight", "bias")))
    text = Printer(KernelOps(ops=(), by_call={}), "x.device").expression(node, lambda one: one.name)
    found = eval(text, {"aten": aten, "x": x, "weight": weight, "bias": bias})
    assert torch.equal(found, call(x, weight, bias))
    assert found.shape == shape


def padded():
    """A bf16 GPT-2 whose head has an odd width, and room after its weight."""
    model, inputs = models.gpt2(layers=1)
    model = model.to(torch.bfloat16)
    weight = model.lm_head.weight
    room = torch.zeros(104, 64, dtype=torch.bfloat16)[:97]
    weight.data = room.copy_(weight.data)
    return model, inputs


@torch.no_grad()
def test_a_padded_gemm_is_in_the_package(tmp_path, monkeypatch):
    model, inputs, fused = models.fused(padded)
    assert "pad-gemm" in {row.id for row in fused.report.rewrites if row.status == "kept"}
    right = fused(**inputs).logits
    assert fused.export(tmp_path / "padded_head") == ()
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / "padded_head")
    package = importlib.import_module("padded_head")
    own, names, address = model(**inputs).logits, list(model.state_dict()), model.lm_head.weight.data_ptr()
    package.apply(model)
    assert torch.equal(model(**inputs).logits, right)
    assert package.fallbacks(model) == {}
    assert list(model.state_dict()) == names
    assert model.lm_head.weight.data_ptr() != address  # another's memory may follow it there
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.transformer.wte.padded_weight.shape == (104, 64)
    package.revert(model)
    assert not hasattr(model.transformer.wte, "padded_weight")
    assert torch.equal(model(**inputs).logits, own)


class Odd(torch.nn.Module):
    """A head of an odd width on rows enough to be stored without padding, and a chain before it."""

    def __init__(self, *, has_bias):
        super().__init__()
        self.norm, self.head = torch.nn.LayerNorm(32), torch.nn.Linear(32, 97, bias=has_bias)

    def forward(self, x):
        """Compute."""
        return self.head(torch.nn.functional.gelu(self.norm(x) * 1.5))


def odd(has_bias):
    torch.manual_seed(0)
    model = Odd(has_bias=has_bias).bfloat16().eval()
    leave_room(model)
    return model, {"x": torch.randn(2, 1030, 32, dtype=torch.bfloat16)}


@torch.no_grad()
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "a bias"])
def test_an_odd_width_product_is_in_the_package(tmp_path, monkeypatch, has_bias):
    model, inputs, fused = models.fused(lambda: odd(has_bias))
    assert "odd-width-gemm" in {row.id for row in fused.report.rewrites if row.status == "kept"}
    right = fused(**inputs)
    name = f"odd_head_{has_bias}".lower()
    assert fused.export(tmp_path / name) == ()
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / name)
    package = importlib.import_module(name)
    model, _ = odd(has_bias)
    package.apply(model)
    assert torch.equal(model(**inputs), right)
    assert package.fallbacks(model) == {}
    assert hasattr(model.head, "padded_weight") is not has_bias
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**inputs), right)
    model.head.weight.mul_(2)  # nothing was kept of it
    doubled = model(**inputs)
    package.revert(model)
    torch.testing.assert_close(doubled, model(**inputs), rtol=2e-2, atol=2e-2)
    checked = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(tmp_path / name / "tests")]
    done = subprocess.run([*checked, "-k", "a_kernel"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@torch.no_grad()
def test_weights_that_lie_elsewhere_later_and_other_attributes_run_the_models_own_forward(tmp_path, monkeypatch):
    model, inputs, fused = models.fused(lambda: odd(has_bias=False))
    fused.export(tmp_path / "odd_head_moved")
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / "odd_head_moved")
    package = importlib.import_module("odd_head_moved")
    own = model(**inputs)
    package.apply(model)
    lay = model.head.weight.data
    model.head.weight.data = lay * 2
    torch.testing.assert_close(model(**inputs), own * 2)
    (reason,) = package.fallbacks(model)
    assert "apply again" in reason
    model.head.weight.data = lay
    model.norm.eps = 10.0
    torch.testing.assert_close(model(**inputs), type(model).forward(model, **inputs))
    assert package.fallbacks(model) == {reason: 1, "an attribute of a module is another than at apply": 1}
    model.norm.eps = 1e-5
    torch.testing.assert_close(model(**inputs), own, rtol=2e-2, atol=2e-2)
    assert sum(package.fallbacks(model).values()) == 2


def test_a_weight_that_is_padded_in_two_ways_is_refused():
    """A package lays a weight out once, with so many rows after it."""
    graph = Graph()
    weight = graph.placeholder("weight")
    weight.meta["val"] = torch.empty(98, 64)
    for rows in (104, 105):
        node = graph.call_function(Extended(f"padded_{rows}", rows), (weight,))
        node.meta["val"] = torch.empty(rows, 64)
    with pytest.raises(CannotExport, match="different numbers of rows"):
        joined_tensors(graph, {weight: "head.weight"})
    graph.erase_node(node)
    (found,) = joined_tensors(graph, {weight: "head.weight"}).values()
    assert (found.name, found.rows) == ("head.padded_weight", 104)


class Decaying(torch.nn.Module):
    """Writes into its argument, reads rows that share memory, and has roots of numbers that random inputs make negative."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x, state, gain):
        """Compute."""
        hidden = torch.tanh(self.linear(x)) * gain + x
        state.mul_(0.9).add_(hidden * hidden)
        return hidden / (state.sqrt() + 1e-3)


def decaying():
    torch.manual_seed(0)
    return Decaying().eval(), {"x": torch.randn(4, 16), "state": torch.rand(4, 16), "gain": torch.rand(16).expand(4, 16)}


def test_the_tests_of_a_package_pass_for_a_call_that_writes_into_its_arguments(tmp_path):
    """Each call of theirs has inputs of its own, and two NaNs are equal."""
    _, _, fused = models.fused(decaying)
    assert fused.export(tmp_path / "decaying") == ()
    fused.revert()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(tmp_path / "decaying" / "tests")]
    own = {"MODEL": f"{__file__}:decaying", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | own)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def bloom():
    torch.manual_seed(0)
    config = BloomConfig(n_layer=1, hidden_size=64, n_head=4, vocab_size=97)
    return BloomForCausalLM(config).eval(), {"input_ids": torch.randint(3, 90, (2, 16)), "use_cache": False}


@torch.no_grad()
def test_keys_and_values_of_one_tensor_have_ops_of_their_own(tmp_path, monkeypatch):
    """Their copies have one source and one layout, and begin at other places of query, key and value."""
    model, inputs, fused = models.fused(bloom)
    right = fused(**inputs).logits
    fused.export(tmp_path / "bloom_parts")
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / "bloom_parts")
    package = importlib.import_module("bloom_parts")
    package.apply(model)
    found = model(**inputs).logits
    assert package.fallbacks(model) == {}
    package.revert(model)
    assert torch.equal(found, right)


def test_a_triton_file_of_other_sizes_has_a_name_of_its_own():
    """Its launch holds the sizes of one site; a CUDA kernel's are in ops.py, so that one file serves."""
    first = op_of(NORMED, FMA)
    other = replace(first, name="other", rendered=replace(first.rendered, text="# other sizes"))
    assert with_own_file(first, [first]).file == first.file
    assert with_own_file(other, [first]).file == f"{first.rendered.entry}_2.py"
    in_cuda = replace(other, rendered=replace(other.rendered, suffix=".cu"))
    assert with_own_file(in_cuda, [first]).file == f"{first.rendered.entry}.cu"
