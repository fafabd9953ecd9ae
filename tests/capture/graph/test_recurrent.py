"""LSTMs, GRUs and plain RNNs: one op each, with chains around them in the same graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fusion_advisor as fa
from fusion_advisor.capture.graph.tracer import capture_regions

WIDTH = 24


class Recurrent(nn.Module):
    """A chain, a recurrent layer and a norm with its activation."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer, self.norm = kind(WIDTH, WIDTH, batch_first=True, **options), nn.LayerNorm(WIDTH)

    def forward(self, x, lengths=None):
        rows = functional.relu(x * 1.5 + 0.1)
        if lengths is None:
            rows, _ = self.layer(rows)
        else:
            packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            rows, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return functional.gelu(self.norm(rows))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 7, WIDTH)


@pytest.mark.parametrize(
    ("kind", "options", "op"),
    [
        (nn.LSTM, {}, "aten.lstm.input"),
        (nn.LSTM, {"num_layers": 2, "dropout": 0.2}, "aten.lstm.input"),
        (nn.GRU, {"bias": False}, "aten.gru.input"),
        (nn.RNN, {"nonlinearity": "relu"}, "aten.rnn_relu.input"),
    ],
    ids=str,
)
def test_a_recurrent_layer_is_one_op_in_one_graph(kind, options, op, x):
    live = capture_regions(Recurrent(kind, **options).eval(), (x,), {}, model_id="recurrent")
    (region,) = live.regions
    targets = [str(node.target) for node in region.graph.graph.nodes if node.op == "call_function"]
    assert targets.count(op) == 1
    assert {"aten.relu.default", "aten.layer_norm.default", "aten.gelu.default"} <= set(targets)


NO_PACKED = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="dynamo before 2.12 fails on packed sequences: their layer's caller runs op by op"
)


@pytest.mark.parametrize("lengths", [None, pytest.param((7, 4, 5), marks=NO_PACKED)], ids=["whole", "packed"])
def test_chains_around_a_recurrent_layer_are_fused_and_right(lengths, x):
    model = Recurrent(nn.LSTM).eval()
    given = (x,) if lengths is None else (x, torch.tensor(lengths))
    with torch.no_grad(), fa.apply(model, given, keep="verified", min_share=0.0, compile=False) as fused:
        kept = {one.kernel for one in fused.report.fusions if one.rendered}
        assert "layernorm_gelu_erf" in kept
        for scale in (1.0, -0.5):
            ours = fused(scale * x, *given[1:])
            truth = type(model)(nn.LSTM).double()
            truth.load_state_dict(model.state_dict())
            torch.testing.assert_close(ours.double(), truth(scale * x.double(), *given[1:]), rtol=1e-5, atol=1e-5)
        assert not fused.fallbacks
    torch.compiler.reset()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, rows):
        return functional.gelu(self.norm(rows))


class Untraceable(nn.Module):
    """Dynamo fails behind its recurrent layer, as it did on packed sequences."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH)
        self.norm = Normed()

    def forward(self, x):
        rows, _ = self.layer(x)
        if torch.compiler.is_compiling():
            rows = rows.view(5)
        return self.norm(rows)


def test_where_a_recurrent_layer_cannot_be_traced_other_modules_are_captured_all_the_same(x):
    model = Untraceable().eval()
    with torch.no_grad():
        live = capture_regions(model, (x,), {}, model_id="recurrent")
        (region,) = live.regions
        targets = [str(node.target) for node in region.graph.graph.nodes if node.op == "call_function"]
        assert targets == ["aten.layer_norm.default", "aten.gelu.default"]
        plain = model(-x)
        with fa.apply(model, (x,), keep="verified", min_share=0.0, compile=False) as fused:
            torch.testing.assert_close(fused(-x), plain)
            assert not fused.fallbacks and [one.kernel for one in fused.report.fusions] == ["layernorm_gelu_erf"]
    torch.compiler.reset()
