"""What a trace is mended in: dropouts that drop nothing, and what a transform computes."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import capture_regions, writes_to_inputs
from fusion_advisor.errors import CannotCapture
from fusion_advisor.records import OpClass
from tests.capture.graph.test_tracer import ops_of
from tests.tiny import Calling, region_of


def test_dropout_that_is_off_is_a_view_of_its_input():
    ops = ops_of(lambda x: torch.nn.functional.dropout(x + 1, 0.5, False) * 2, torch.randn(3))
    dropout = next((op for op in ops if "dropout" in op.target), None)
    assert dropout is None or (dropout.op_class is OpClass.VIEW and dropout.alias_of == dropout.index - 1)


@pytest.mark.parametrize(("chance", "is_training"), [(0.5, False), (0.0, True)])
def test_what_is_written_through_a_dropout_that_is_off_is_written_to_its_input(chance, is_training):
    class Writing(torch.nn.Module):
        def forward(self, x):
            same = torch.nn.functional.dropout(x[:, :4], chance, is_training)
            same[0].mul_(2)
            return (same * 2).t(), torch.nn.functional.dropout(same, 0.5, False).reshape(-1)

    region, ops, _ = region_of(Writing(), torch.randn(4, 8))
    assert writes_to_inputs(region)
    values = {node.name: node.meta["val"] for node in region.graph.graph.nodes if node.op == "call_function"}
    real = torch.empty(4, 8)[:, :4]
    expected = {"dropout": real, "select": real[0], "mul_": real[0], "mul": real * 2, "t": (real * 2).t(), "dropout_1": real}
    for name, value in expected.items():
        assert (values[name].shape, values[name].stride()) == (value.shape, value.stride()), name
    by_name = {op.target: op for op in ops}
    assert by_name["aten.mul_.Tensor"].mutates == (0,)
    assert by_name["aten.reshape.default"].op_class is OpClass.MEMORY  # a copy: its input has gaps
    assert all(op.alias_of == 0 for op in ops if op.target == "aten.dropout.default")


def test_dropout_that_is_on_computes():
    ops = ops_of(lambda x: torch.nn.functional.dropout(x + 1, 0.5, True) * 2, torch.randn(3))
    live = [op for op in ops if "dropout" in op.target or "bernoulli" in op.target]
    assert live and all(op.op_class is not OpClass.VIEW for op in live)


def pulled_back(x):
    result, backward = torch.func.vjp(torch.sin, x)
    return backward(result)[0]


@pytest.mark.parametrize("function", [pulled_back, lambda x: torch.func.jacrev(torch.sin)(x[0, 0])])
def test_what_a_transform_computes_after_its_end_is_refused_and_never_taken_for_a_constant(function):
    """The backward pass is called when the level that recorded it is left."""
    with pytest.raises(CannotCapture, match=r":\d+\) reads what a transform of torch.func computes"):
        capture_regions(Calling(function), (torch.randn(2, 8, 4),), {})


def test_a_graph_with_a_quantized_tensor_is_refused_and_its_codes_are_never_taken_for_floats():
    def rounded(x):
        return torch.nn.functional.gelu(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()) * 2

    own = r"test_retrace\.py:\d+\) makes a quantized tensor: tracing takes it for floats"
    with pytest.raises(CannotCapture, match=own if torch.__version__ >= "2.12" else "op by op"):  # dynamo 2.11 traces none
        capture_regions(Calling(rounded), (torch.randn(2, 8, 4),), {})


class Averaging(torch.nn.Module):
    """Moves a buffer by its data, as codebooks do (VQ-VAE)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.data.mul_(0.5).add_(x.data.mean(0), alpha=0.5)
        return torch.tanh(x - self.mean)


def test_writes_to_the_data_of_a_buffer_are_writes_to_the_buffer():
    model, x = Averaging(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    (region,) = capture_regions(model, (x,), {}).regions
    assert writes_to_inputs(region)
    plain = Averaging()
    given = {"args.0": x, "mean": model.mean}
    (result,) = region.graph(*(given[name] for name in region.names))
    assert torch.equal(result, plain(x)) and torch.equal(model.mean, plain.mean)


def test_what_vmap_computes_in_vain_is_left_out():
    def in_vain(x):
        torch.vmap(lambda row: row.exp() + 1)(x)
        return x * 2

    x = torch.randn(2, 8, 4)
    (region,) = capture_regions(Calling(in_vain), (x,), {}).regions
    torch.testing.assert_close(region.graph(*region.example_args)[0], x * 2)
    assert "aten.mul.Tensor" in {op.target for op in describe(region)[0]}


def test_one_image_made_of_tokens_is_traced_with_the_strides_of_eager():
    """Only the stride of its one image is not that of channels last: group norms and convolutions then keep channels first."""

    def decoder(tokens, image, kernel):
        hidden = (tokens.transpose(1, 2).reshape(1, 8, 4, 4) + image) / 1
        return torch.nn.functional.conv2d(torch.nn.functional.group_norm(hidden, 2), kernel, padding=1)

    inputs = torch.randn(1, 16, 8), torch.randn(1, 8, 4, 4), torch.randn(8, 8, 3, 3)

    class Strides(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if n.op == "call_function":
                assert n.meta["val"].stride() == result.stride(), n.name
            return result

    traced = trace(decoder, inputs)
    Strides(traced).run(*inputs)
    assert sum(node.op == "call_function" for node in traced.graph.nodes) >= 6


def test_what_runs_in_autocast_of_the_models_own_has_the_dtypes_of_its_results():
    """Without its casts a kernel for what follows would read bfloat16 numbers as float32."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.tanh(self.linear(x)) * 2

    model, x = Model().eval(), torch.randn(3, 8)
    (region,) = capture_regions(model, (x,), {}).regions
    found = {str(node.target): node.meta["val"].dtype for node in region.graph.graph.nodes if "val" in node.meta}
    assert found["aten.linear.default"] == found["aten.tanh.default"] == torch.bfloat16
    with torch.no_grad():
        (result,) = region.graph(*region.example_args)
        assert torch.equal(result, model(x))
