"""A mask that keeps attention from being one kernel becomes contiguous, once for all layers; any other mask stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from fusion_advisor.capture.graph.contiguous_rows import MASKS_ID, gives_numbers, has_attention_kernel, lay_masks_out
from fusion_advisor.capture.graph.fx_nodes import ATTENTION, attention_argument
from fusion_advisor.capture.graph.layout_copies import LAID_OUT
from fusion_advisor.capture.graph.retrace import parameter_names
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.passes.in_trace import CONTIGUOUS_MASKS
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.rewrite.graph_rewriter import rewrite_region
from fusion_advisor.records import Status
from fusion_advisor.runtime.torch_internals import dynamo
from fusion_advisor.workload.load import describe_live

HEADS, WIDTH, LENGTH = 4, 16, 24


class Relative(nn.Module):
    """Two self-attentions that share a bias of relative positions, looked up as T5 does it.

    Args:
        mask: makes the mask of one attention from the permuted bias ``[1, heads, queries, keys]``.
        options: of attention.
    """

    def __init__(self, mask=lambda bias: bias, *, length=LENGTH, width=WIDTH, **options):
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleList(nn.Linear(HEADS * width, 3 * HEADS * width) for _ in range(2))
        self.table = nn.Parameter(torch.randn(2 * length - 1, HEADS))
        self.mask, self.options, self.length, self.width = mask, options, length, width

    def forward(self, x):
        bias = self.bias()
        for projection in self.projections:
            q, k, v = projection(x).view(*x.shape[:2], 3 * HEADS, self.width).transpose(1, 2).chunk(3, dim=1)
            out = scaled_dot_product_attention(q, k, v, self.mask(bias), scale=1.0, **self.options)
            x = x + out.transpose(1, 2).reshape(x.shape)
        return self.end(x, bias)

    def bias(self):
        places = torch.arange(self.length, device=self.table.device)
        return self.table[places - places[:, None] + self.length - 1].permute(2, 0, 1).unsqueeze(0)

    def end(self, x, _bias):
        return x


def causal(bias):
    allowed = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    return torch.where(allowed, bias, torch.finfo(bias.dtype).min)


def hidden(bias):
    return bias > -1


def of_each_image(bias):
    lengths = torch.tensor([LENGTH, LENGTH // 2], device=bias.device)
    return bias + torch.where(torch.arange(LENGTH, device=bias.device) < lengths[:, None], 0.0, -100.0)[:, None, None]


def of_each_query(bias):
    return bias[..., :1].contiguous().expand(bias.shape)


X = torch.randn(2, LENGTH, HEADS * WIDTH)


def captured(model):
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (X,), {}).regions
    return region


class Filled(Relative):
    """Its mask hides keys that the input chooses."""

    def forward(self, x):
        shown = x[:, :, 0] > -100
        q, k, v = self.projections[0](x).view(*x.shape[:2], 3 * HEADS, self.width).transpose(1, 2).chunk(3, dim=1)
        mask = torch.where(shown[:, None, None], self.bias(), torch.finfo(x.dtype).min)
        return scaled_dot_product_attention(q, k, v, mask, scale=1.0).transpose(1, 2).reshape(x.shape)


def has_rows(call):
    """What decides on a GPU; a CPU serves strided masks too."""
    return attention_argument(call, "attn_mask").meta["val"].stride(-1) == 1


def parameters_of(region):
    return parameter_names(region.graph, dynamo.placeholder_values(region.original))


def attentions(region):
    return [node for node in region.graph.graph.nodes if node.target is ATTENTION]


def copies(region):
    return [node for node in region.graph.graph.nodes if node.meta.get(LAID_OUT) == MASKS_ID]


def test_on_a_cpu_no_mask_is_copied():
    region = captured(Relative())
    assert not copies(region) and not any(map(has_rows, attentions(region)))
    assert all(map(has_attention_kernel, attentions(region)))


@pytest.mark.parametrize(
    "mask", [lambda bias: bias, causal, hidden, of_each_image], ids=["bias", "causal", "bool", "each image's own"]
)
def test_a_permuted_bias_is_copied_once_for_all_layers(mask):
    model = Relative(mask)
    region = captured(model)
    assert lay_masks_out(region.graph, has_kernel=has_rows) == 1
    (copy,) = copies(region)
    assert copy.all_input_nodes[0].target is torch.ops.aten.unsqueeze.default
    assert len(attentions(region)) == 2 and all(map(has_rows, attentions(region)))
    with torch.no_grad():
        torch.testing.assert_close(region.graph(*region.example_args)[0], model(X))


def test_a_mask_that_repeats_one_column_is_copied_for_each_attention():
    model = Relative(of_each_query)
    region = captured(model)
    assert lay_masks_out(region.graph, has_kernel=has_rows) == 2
    assert [copy.all_input_nodes[0].target for copy in copies(region)] == [torch.ops.aten.expand.default] * 2
    with torch.no_grad():
        torch.testing.assert_close(region.graph(*region.example_args)[0], model(X))


@pytest.mark.parametrize("is_kept", [True, False])
def test_without_the_pass_the_copy_goes_again(is_kept):
    model = Relative(causal)
    region = captured(model)
    lay_masks_out(region.graph, has_kernel=has_rows)
    name = copies(region)[0].name
    indices = {node: number for number, node in enumerate(region.graph.graph.nodes)}
    module, changed = rewrite_region(region, indices, [], [CONTIGUOUS_MASKS.apply] if is_kept else [])
    assert changed == ([1] if is_kept else [])
    assert [node.name for node in module.graph.nodes if node.name == name] == [name] * is_kept
    with torch.no_grad():
        torch.testing.assert_close(module(*region.example_args)[0], model(X))


class Writing(Relative):
    def bias(self):
        bias = super().bias()
        bias[..., 0] = 0.5
        return bias


class WritingLater(Relative):
    def end(self, x, bias):
        bias.zero_()
        return x


@pytest.mark.parametrize(
    "model",
    [
        Relative(lambda bias: bias.contiguous()),
        Relative(lambda _: None),
        Relative(lambda bias: bias, dropout_p=0.5),
        Writing(),
        WritingLater(),
    ],
    ids=["rows already", "no mask", "dropout", "written to", "written to afterwards"],
)
def test_other_masks_stay(model):
    region = captured(model)
    before = str(region.graph.graph)
    assert lay_masks_out(region.graph, has_kernel=has_rows) == 0
    assert str(region.graph.graph) == before


def test_a_mask_of_another_dtype_than_the_query_stays():
    with torch.no_grad():
        model = Relative(lambda bias: bias.float()).eval().to(torch.bfloat16)
        (region,) = capture_regions(model, (X.to(torch.bfloat16),), {}).regions
    assert len(attentions(region)) == 2 and not any(map(has_rows, attentions(region)))
    assert lay_masks_out(region.graph, has_kernel=has_rows) == 0


def test_where_no_layout_makes_it_one_kernel_the_mask_stays():
    region = captured(Relative(causal))
    before = [(node.name, node.meta["val"].stride()) for node in attentions(region)]
    assert lay_masks_out(region.graph, has_kernel=lambda _: False) == 0
    assert not copies(region) and [(node.name, node.meta["val"].stride()) for node in attentions(region)] == before
    assert not any(map(has_rows, attentions(region)))


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_mask_that_an_input_chooses_is_copied_only_if_the_kernel_gives_numbers_where_all_is_hidden(is_finite):
    model = Filled()
    region = captured(model)
    asked = []

    def is_safe(call):
        asked.append(has_rows(call))
        return is_finite

    assert lay_masks_out(region.graph, parameters_of(region), has_rows, is_safe) == is_finite
    assert asked and all(asked)
    with torch.no_grad():
        torch.testing.assert_close(region.graph(*region.example_args)[0], model(X))


def test_a_mask_of_parameters_alone_asks_nothing_of_the_kernel():
    region = captured(Relative(causal))
    assert lay_masks_out(region.graph, parameters_of(region), has_rows, lambda _: pytest.fail("asked")) == 1


class Buffered(Relative):
    """Its places are a buffer, which somebody may write to between two calls."""

    def __init__(self):
        super().__init__()
        places = torch.arange(LENGTH)
        self.register_buffer("places", places - places[:, None] + LENGTH - 1)

    def bias(self):
        return self.table[self.places].permute(2, 0, 1).unsqueeze(0)


def test_a_buffer_counts_as_an_input():
    asked = []
    region = captured(Buffered())
    assert gives_numbers(attentions(region)[0])
    placeholders = [node.name for node in region.graph.graph.nodes if node.op == "placeholder"]
    roles = dict(zip(placeholders, region.roles, strict=True))
    assert parameters_of(region) == [name for name, role in roles.items() if role == "parameter"]
    assert lay_masks_out(region.graph, parameters_of(region), has_rows, lambda call: asked.append(call) or True) == 1
    assert len(asked) == 2


class Returning(Relative):
    def end(self, x, bias):
        return x, bias


def test_what_the_model_returns_keeps_its_strides():
    model = Returning()
    region = captured(model)
    assert lay_masks_out(region.graph, has_kernel=has_rows) == 1
    with torch.no_grad():
        got, expected = region.graph(*region.example_args), model(X)
    assert [one.stride() for one in got] == [one.stride() for one in expected]
    torch.testing.assert_close(got, list(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [lambda bias: bias, causal, hidden], ids=["bias", "causal", "bool"])
def test_on_a_gpu_one_kernel_serves_attention_as_right_as_eager(mask):
    model = Relative(mask, length=256, width=64).eval()
    x = torch.randn(2, 256, HEADS * 64)
    with torch.no_grad():
        exact = model.double()(x.double())
        model, given = model.to("cuda", torch.bfloat16), x.to("cuda", torch.bfloat16)
        eager = model(given)
        (region,) = capture_regions(model, (given,), {}).regions
        assert len(copies(region)) == 1 and all(map(has_attention_kernel, attentions(region)))
        got = region.graph(*region.example_args)[0]
        eager_error, error = ((one.double().cpu() - exact).abs().mean() for one in (eager, got))
        assert error <= 1.1 * eager_error
        run = apply_workload(describe_live(model, (given,)), ApplyOptions(min_share=0.0, effort="quick"))
        try:
            row = next(row for row in run.report.rewrites if row.id == MASKS_ID)
            assert row.sites == 1 and row.status is Status.KEPT
            assert run.report.model_check.is_passed
        finally:
            run.revert()


@pytest.mark.gpu
def test_on_a_gpu_a_mask_that_an_input_chooses_is_copied_only_if_the_kernel_gives_numbers():
    model = Filled(length=256, width=64).eval().to("cuda", torch.bfloat16)
    x = torch.randn(2, 256, HEADS * 64, device="cuda", dtype=torch.bfloat16)
    hidden = x.clone()
    hidden[:, :, 0] = -200.0  # hides every key
    with torch.no_grad():
        (region,) = capture_regions(model, (x,), {}).regions
        is_copied = bool(copies(region))
        if not is_copied:
            lay_masks_out(region.graph, has_kernel=has_attention_kernel, is_safe=lambda _: True)
        assert has_attention_kernel(attentions(region)[0])
        assert model(hidden).isfinite().all()
        got = region.graph(*(hidden if value is x else value for value in region.example_args))[0]
        assert is_copied == bool(got.isfinite().all())
