"""Biases written out, and put back where nothing took them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.split_bias import is_slower_with_bias, join_bias, leave_gemm_biases_apart, split_bias
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.runtime.torch_internals import aten_ops

CASES = {
    "1d": (lambda x, w, b: F.conv1d(x, w, b).transpose(1, 2), (2, 6, 9), (4, 6, 3)),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1).permute(0, 2, 3, 1), (2, 6, 8, 8), (4, 6, 3, 3)),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, padding=3, groups=6).flatten(2), (2, 6, 8, 8), (6, 1, 7, 7)),
    "3d": (lambda x, w, b: F.conv3d(x, w, b).flatten(2), (2, 2, 4, 4, 4), (3, 2, 2, 2, 2)),
}


def traced(name):
    function, shape, weight = CASES[name]
    torch.manual_seed(0)
    inputs = (torch.randn(shape), torch.randn(weight), torch.randn(weight[0]))
    return trace(function, inputs), inputs


def ops_of(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def described(graph, inputs):
    names = tuple("xwb")
    region = Region(index=0, graph=graph, original=graph, names=names, roles=("input",) * 3, example_args=inputs)
    return {op.target: op for op in describe(region)[0]}


@pytest.mark.parametrize("name", CASES)
def test_a_written_out_bias_gives_the_same_values_and_strides(name):
    graph, inputs = traced(name)
    expected, before = graph(*inputs), ops_of(graph)
    assert split_bias(graph, lambda *_: True, is_slower_with_bias) == 1
    graph.graph.lint()
    assert ops_of(graph) == ["aten.view.default", before[0], "aten.add.Tensor", *before[1:]]
    found = graph(*inputs)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_bias_that_nothing_took_goes_back(name):
    graph, inputs = traced(name)
    expected, before, args = graph(*inputs), ops_of(graph), described(graph, inputs)
    split_bias(graph, lambda *_: True, is_slower_with_bias)
    join_bias(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert ops_of(graph) == before
    now = described(graph, inputs)
    assert [(op.args, op.outputs) for op in now.values()] == [(op.args, op.outputs) for op in args.values()]
    assert torch.equal(graph(*inputs), expected)


@pytest.mark.parametrize("name", CASES)
def test_what_reads_the_sum_shows_its_storage(name):
    graph, inputs = traced(name)
    split_bias(graph, lambda *_: True, is_slower_with_bias)
    ops = described(graph, inputs)
    total, (*_, reader) = ops["aten.add.Tensor"], [op for op in ops.values() if op.role == "op"]
    assert (reader.op_class, reader.alias_of) == ("view", total.index)
    bare = ops[next(target for target in ops if "conv" in target)]
    assert (bare.args[2], bare.alias_of, total.alias_of) == (None, None, None)
    assert ops["aten.view.default"].alias_of == ops["b"].index


def test_a_convolution_that_adds_its_own_bias_keeps_it():
    graph, _ = traced("2d")
    before, asked = ops_of(graph), []
    assert split_bias(graph, lambda *args: asked.append(args), is_slower_with_bias) == 0
    assert ops_of(graph) == before
    ((x, weight, bias, *options),) = asked
    assert [tuple(value.shape) for value in (x, weight, bias)] == [(2, 6, 8, 8), (4, 6, 3, 3), (4,)]
    assert options == [[2, 2], [1, 1]]


def test_a_convolution_without_a_bias_is_not_asked_about():
    graph = trace(lambda x, w: F.conv2d(x, w) + x.sum(), (torch.randn(2, 6, 8, 8), torch.randn(4, 6, 3, 3)))
    assert split_bias(graph, lambda *_: pytest.fail("it has no bias"), is_slower_with_bias) == 0


def test_a_sum_in_another_layout_is_not_written_out():
    graph, _ = traced("2d")
    (convolution,) = [node for node in graph.graph.nodes if "conv" in str(node.target)]
    value = convolution.meta["val"]
    convolution.meta["val"] = value.new_empty_strided(value.shape, (64, 1, 16, 4))
    before = ops_of(graph)
    assert split_bias(graph, lambda *_: True, is_slower_with_bias) == 0
    assert ops_of(graph) == before


def test_a_convolution_that_is_read_as_well_stays_apart():
    graph, _ = traced("2d")
    split_bias(graph, lambda *_: True, is_slower_with_bias)
    (bare,) = [node for node in graph.graph.nodes if "conv" in str(node.target)]
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    output.args = ((output.args[0], bare),)
    join_bias(graph.graph)
    assert "aten.add.Tensor" in ops_of(graph)


def test_an_addition_that_the_model_wrote_stays_as_it_is():
    x, w, b = torch.randn(2, 6, 8, 8), torch.randn(4, 6, 3, 3), torch.randn(4)
    graph = trace(lambda x, w, b: F.conv2d(x, w) + b.view(-1, 1, 1), (x, w, b))
    before = ops_of(graph)
    join_bias(graph.graph)
    assert ops_of(graph) == before


GEMMS = {
    "linear": (lambda x, w, b: torch.tanh(F.linear(x, w.t(), b)), (2, 5, 6)),
    "addmm": (lambda x, w, b: torch.tanh(torch.addmm(b, x, w)), (5, 6)),
}


def gemm(name):
    function, shape = GEMMS[name]
    torch.manual_seed(0)
    inputs = (torch.randn(shape), torch.randn(6, 4), torch.randn(4))
    return trace(function, inputs), inputs


@pytest.mark.parametrize("name", GEMMS)
def test_a_gemms_bias_is_written_out_and_goes_back(name):
    graph, inputs = gemm(name)
    expected, before = graph(*inputs), ops_of(graph)
    assert split_bias(graph, lambda *_: False, lambda out: out.shape[-1] == 4) == 1
    graph.graph.lint()
    assert ops_of(graph)[-2:] == ["aten.add.Tensor", "aten.tanh.default"]
    torch.testing.assert_close(graph(*inputs), expected)
    join_bias(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert ops_of(graph) == before
    assert torch.equal(graph(*inputs), expected)


@pytest.mark.parametrize("name", GEMMS)
def test_a_pass_leaves_it_apart(name):
    graph, inputs = gemm(name)
    expected = graph(*inputs)
    split_bias(graph, lambda *_: False, lambda _: True)
    assert leave_gemm_biases_apart(graph.graph) == 1
    join_bias(graph.graph)
    graph.recompile()
    assert "aten.add.Tensor" in ops_of(graph)
    torch.testing.assert_close(graph(*inputs), expected)
    assert leave_gemm_biases_apart(graph.graph) == 0


def test_a_matrix_for_a_bias_stays_in_its_gemm():
    graph = trace(torch.addmm, (torch.randn(5, 4), torch.randn(5, 6), torch.randn(6, 4)))
    assert split_bias(graph, lambda *_: False, lambda _: True) == 0


def test_only_small_gemms_of_a_gpu_are_slower_with_a_bias():
    with torch.device("meta"):
        assert not is_slower_with_bias(torch.empty(128, 768))
    with torch._subclasses.FakeTensorMode():
        for shape, dtype, is_slower in (
            ((1, 128, 768), torch.float32, True),
            ((1024, 768), torch.float32, True),
            ((1024, 2304), torch.float32, False),
            ((1, 768), torch.float32, False),
            ((128, 768), torch.bfloat16, False),
        ):
            assert is_slower_with_bias(torch.empty(shape, dtype=dtype, device="cuda")) == is_slower, shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", ["2d", "depthwise"])
def test_on_a_gpu_the_bits_are_the_same(case, memory_format, dtype):
    groups = 96 if case == "depthwise" else 1
    x = torch.randn(8, 96, 28, 28, device="cuda", dtype=dtype).to(memory_format=memory_format)
    weight, bias = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((96, 96 // groups, 3, 3), (96,)))
    graph = trace(lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=groups), (x, weight, bias))
    expected = graph(x, weight, bias)
    is_after = aten_ops.adds_bias_after_convolution(x, weight, bias, [1, 1], [1, 1], [1, 1], groups)
    assert split_bias(graph, aten_ops.adds_bias_after_convolution, is_slower_with_bias) == is_after
    assert is_after or case == "depthwise"  # ATen has a depthwise kernel of its own for some layouts
    found = graph(x, weight, bias)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
