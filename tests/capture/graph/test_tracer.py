"""What the tracer writes down of a model: ops as the model calls them, their modules, lines, views and writes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fusion_advisor.capture.graph.fx_nodes import module_path, relative_path, source_path
from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import retrace, trace
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.errors import CannotCapture
from fusion_advisor.records import OpClass, Ref
from fusion_advisor.records.serialize import dump_record
from tests.tiny import profiled, region_of, toy


def ops_of(function, *inputs):
    return region_of(function, *inputs)[1]


def test_layers_stay_whole_and_know_their_module_and_line():
    _, capture, _ = profiled("gpt2")
    targets = {op.target for op in capture.ops}
    assert {"aten.layer_norm.default", "aten.scaled_dot_product_attention.default", "aten.addmm.default"} <= targets
    tanh = [op for op in capture.ops if op.target == "aten.tanh.default"]
    assert [op.module_path for op in tanh] == ["transformer.h.0.mlp.act", "transformer.h.1.mlp.act"]
    for op in tanh:
        assert op.source_file == "transformers/activations.py"
        assert "tanh" in source_path(op.source_file).read_text().splitlines()[op.source_line - 1]
        assert "tanh" in op.source_text


def passed_on(forward):
    @functools.wraps(forward)
    def decorated(*given, **named):
        return forward(*given, **named)

    return decorated


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Tanh()])

    def forward(self, x):
        return self.parts[1](x)


class Decorated(Plain):
    """As forwards of transformers are since 5.24: the frame that dynamo captures is the decorator's."""

    forward = passed_on(Plain.forward)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (Plain(), "parts.1"),
        (Decorated(), "parts.1"),
        (torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh()), "1"),
        (torch.nn.Sequential(Decorated()), "0.parts.1"),
    ],
)
def test_modules_are_named_from_the_model_on(model, path):
    live = capture_regions(model, (torch.randn(2, 4),), {})
    (tanh,) = (op for op in describe(live.regions[0])[0] if op.target == "aten.tanh.default")
    assert tanh.module_path == path


def test_every_computing_op_has_a_line():
    for name in ("gpt2", "qwen2"):
        _, capture, _ = profiled(name)
        assert all(op.source_line > 0 and op.source_file for op in capture.ops if op.role == "op")


def test_parameters_are_named_after_the_module_that_holds_them():
    model, capture, live = profiled("qwen2")
    named = {op.target for op in capture.ops if op.role == "parameter"}
    assert named <= set(dict(model.named_parameters()))
    assert "model.layers.1.mlp.gate_proj.weight" in named
    roles = dict(zip(live.regions[0].names, live.regions[0].roles, strict=True))
    assert roles["input_ids"] == "input"
    assert [op.target for op in capture.ops if op.role == "buffer"] == ["model.rotary_emb.inv_freq"]


def test_positional_inputs_are_named_by_place():
    _, capture, _ = profiled("toy")
    assert "args.0" in {op.target for op in capture.ops if op.role == "input"}


def test_a_view_names_the_owner_of_its_storage_through_other_views():
    ops = ops_of(lambda x: (x + 1).view(-1)[2:].unsqueeze(0) * 2, torch.randn(3, 4))
    add = next(op for op in ops if op.target == "aten.add.Tensor")
    views = [op for op in ops if op.op_class is OpClass.VIEW]
    assert len(views) == 3
    assert {op.alias_of for op in views} == {add.index}
    assert views[-1].outputs[0].offset == 2


def test_a_view_op_that_copies_is_memory():
    ops = ops_of(lambda x: x.t().reshape(-1) + x.contiguous().view(-1), torch.randn(3, 4))
    classes = {op.target: op.op_class for op in ops if op.role == "op"}
    assert classes["aten.t.default"] is OpClass.VIEW
    assert [op_class for target, op_class in classes.items() if "clone" in target or "reshape" in target] == [OpClass.MEMORY]


def test_a_cast_that_changes_nothing_is_a_view_and_one_that_does_is_pointwise():
    ops = ops_of(lambda x: (x.to(torch.float32), x.to(torch.float64)), torch.randn(3))
    assert [op.op_class for op in ops if op.target.startswith("aten.to")] in (
        [OpClass.VIEW, OpClass.POINTWISE],
        [OpClass.POINTWISE],  # the tracer may drop the first altogether
    )


def test_writes_name_the_owner_also_through_a_view():
    def function(x, cache):
        cache.view(-1)[:3].copy_(x)
        return cache + 1

    ops = ops_of(function, torch.randn(3), torch.randn(2, 4))
    cache = next(op.index for op in ops if op.target == "x1")
    assert [op.mutates for op in ops if op.target == "aten.copy_.default"] == [(cache,)]
    assert [op for op in ops if op.mutates] == [op for op in ops if op.target == "aten.copy_.default"]


def test_arguments_become_plain_records():
    ops = ops_of(lambda x: torch.cat((x, x.to(torch.float16).float()), dim=-1).sum((0, 1), keepdim=True), torch.randn(3, 4))
    cat = next(op for op in ops if op.target.startswith("aten.cat"))
    assert isinstance(cat.args[0], tuple) and all(isinstance(item, Ref) for item in cat.args[0])
    casts = [str(op.args) + str(op.kwargs) for op in ops if op.target.startswith("aten.to")]
    assert any("dtype:float16" in text for text in casts)
    assert next(op for op in ops if op.target.startswith("aten.sum")).args[1] == (0, 1)


def test_region_indices_run_on():
    region, ops, _ = region_of(lambda x: x + 1, torch.randn(3))
    moved, index_of = describe(region, first_index=100)
    assert [op.index for op in moved] == [op.index + 100 for op in ops]
    assert sorted(index_of.values()) == [op.index for op in moved]
    assert moved[1].args[0] == Ref(index=100)


class Broken(torch.nn.Module):
    def forward(self, x):
        y = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return torch.tanh(y) + 1


def test_a_graph_break_gives_two_regions_and_its_reason():
    live = capture_regions(Broken(), (torch.randn(3),), {})
    assert [region.index for region in live.regions] == [0, 1]
    assert len(live.breaks) == 1
    assert "test_tracer.py" in live.breaks[0].source
    assert live.breaks[0].reason
    assert torch.equal(live.output, Broken()(live.regions[0].example_args[0]))


class Skipped(torch.nn.Module):
    @torch._dynamo.disable
    def forward(self, x):
        return x + 1


def test_a_model_that_dynamo_skips_is_refused_by_name():
    with pytest.raises(CannotCapture, match=r"`mymodel` .* op by op"):
        capture_regions(Skipped(), (torch.randn(3),), {}, model_id="mymodel")


class StopsEarly(torch.nn.Module):
    """A loop that ends where its values say so: dynamo follows no loop with a break in it."""

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(x) * 2
            if x.sum().item() > 100:
                break
        return x


def test_an_op_that_no_loop_may_hold_is_named_with_its_line():
    model, x = StopsEarly(), torch.randn(3)
    with pytest.raises(CannotCapture, match=r"op by op.*first op: .+ \(tests/capture/graph/test_tracer\.py:\d+\)"):
        capture_regions(model, (x,), {})
    assert torch.equal(model(x), torch.tanh(2 * torch.tanh(2 * torch.tanh(2 * torch.tanh(x)))) * 2)


@pytest.mark.parametrize("model", [torch.nn.Identity(), torch.nn.Sequential()])
def test_a_call_without_an_op_is_told_from_one_that_dynamo_does_not_follow(model):
    with pytest.raises(CannotCapture, match=r"(?m)`model` could not be captured: its call runs no op$"):
        capture_regions(model, (torch.ones(3),), {})


def forward(net, x):
    for layer in net.layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    return x


class Brief(torch.nn.Module):
    """Its author calls ``self`` otherwise."""

    forward = forward

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2))


def test_module_paths_are_the_models_whatever_its_author_calls_self():
    model = Brief()
    (region,) = capture_regions(model, (torch.randn(3, 4),), {}).regions
    paths = [module_path(node) for node in region.graph.graph.nodes if node.op == "call_function"]
    assert paths == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


class Checkpointed(torch.nn.Module):
    """One op of dynamo's graph cannot be traced on: a checkpoint within a branch."""

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.checked, torch.cos, (x,)) * 2

    def checked(self, x):
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)


def test_an_op_that_cannot_be_traced_is_named():
    with pytest.raises(CannotCapture, match=r"tag_activation_checkpoint.*_checkpoint_context_fn"):
        capture_regions(Checkpointed(), (torch.randn(3),), {}, model_id="mymodel")


def test_what_a_list_holds_belongs_to_the_item_taken_out_of_it():
    def function(x):
        (only,) = torch._foreach_mul([x], 2.0)
        return torch.tanh(only.view(-1))

    _, ops, _ = region_of(function, torch.randn(3, 4))
    item = next(op for op in ops if op.target == "getitem")
    view = next(op for op in ops if op.target.startswith("aten.view"))
    assert item.alias_of is None and view.alias_of == item.index


def test_capturing_leaves_the_model_alone():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    before = dict(model.__dict__)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    capture_regions(model, (torch.randn(2, 4),), {})
    assert model.__dict__ == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_many_captures_of_one_model_keep_working():
    model = torch.nn.Linear(4, 4)
    for _ in range(12):  # more than dynamo's own limit of graphs per code object
        assert len(capture_regions(model, (torch.randn(2, 4),), {}).regions) == 1


def test_a_retraced_graph_computes_the_same():
    collected = []

    def backend(graph, _):
        collected.append(retrace(graph))
        return graph.forward

    def function(x, y):
        return torch.nn.functional.gelu(x @ y) + x

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        torch.compile(function, backend=backend)(x, y)
        assert torch.equal(torch.as_tensor(collected[0](x, y)[0]), function(x, y))


def test_trace_needs_no_data():
    graph = trace(lambda x: x * 2, [torch.empty(10**6, 10**6, device="meta")])
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == ["aten.mul.Tensor"]


def test_paths_name_no_folder(tmp_path, monkeypatch):
    inside = tmp_path / "pkg" / "model.py"
    inside.parent.mkdir()
    inside.write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert relative_path(str(inside)) == "pkg/model.py"
    assert source_path("pkg/model.py") == inside
    assert source_path("pkg/none.py") is None
    assert source_path("") is None


class Slope(torch.nn.Module):
    """Asks for a gradient in its forward, between ops that need none."""

    def forward(self, x):
        scaled = torch.sigmoid(x) * 2
        with torch.enable_grad():
            at = scaled.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(at).pow(2).sum(), at)
        return torch.exp(slope.detach()) + x


class Hands(torch.nn.Module):
    """Gives its result a gradient."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        with torch.enable_grad():
            return torch.tanh(x * self.weight)


def test_ops_that_the_models_own_gradients_go_through_are_left_out():
    x = torch.randn(2, 3)
    live = capture_regions(Slope().eval(), (x,), {})
    targets = {str(node.target) for region in live.regions for node in region.graph.graph.nodes}
    assert "aten.exp.default" in targets and "aten.tanh.default" not in targets
    assert any("asks for gradients by itself" in one.reason for one in live.breaks)
    with torch.no_grad():
        torch.testing.assert_close(live.output, Slope()(x))


def test_a_model_whose_result_carries_gradients_is_refused():
    with pytest.raises(CannotCapture, match="asks for gradients by itself"):
        capture_regions(Hands().eval(), (torch.randn(2, 3),), {})


class Reads(torch.nn.Module):
    """Computes with NumPy's numbers."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        if isinstance(self.number, np.integer):
            return torch.tanh(x)[: int(self.number)] + 1
        return torch.tanh(x) * float(self.number)


def test_a_whole_number_of_numpys_is_no_size_of_a_graph():
    with pytest.raises(CannotCapture, match="a whole number that it computes with is read from a tensor"):
        capture_regions(Reads(np.int64(2)).eval(), (torch.randn(4, 3),), {})


def test_a_number_of_numpys_is_the_value_of_an_op():
    live = capture_regions(Reads(np.float64(1.5)).eval(), (torch.randn(4, 3),), {})
    ops, _ = describe(live.regions[0])
    (product,) = (op for op in ops if op.target.startswith("aten.mul"))
    assert all(isinstance(argument, Ref) for argument in product.args)
    text = dump_record(product, "a")
    assert "Ref" in text


@pytest.mark.parametrize("x", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_a_call_on_tensors_that_cannot_be_compared_is_refused_by_name(x):
    with pytest.raises(CannotCapture, match=r"`args\.0` (is sparse|lies on the device)"):
        capture_regions(torch.nn.Tanh(), (x,), {})


class Misshapen(torch.nn.Module):
    """Catches an error that dynamo does not let it catch."""

    def forward(self, x):
        try:
            return x.view(7, -1)
        except RuntimeError:
            return x


def test_what_stopped_dynamo_is_said_with_its_cause_and_line():
    with pytest.raises(
        CannotCapture, match=r"(?m)shape '\[7, -1\]' is invalid for input of size 6.* \(\S*test_tracer\.py:\d+\)$"
    ):
        capture_regions(Misshapen().eval(), (torch.randn(2, 3),), {})


def test_a_class_is_captured_however_many_of_its_models_were_and_were_compiled_since():
    """Dynamo 2.11 counts the graphs of a class together, and looks at no call of it any more once a compile passes its limit."""
    made = [toy() for _ in range(10)]
    for model, args in made:
        capture_regions(model, args, {})
    model, args = made[0]
    with torch.no_grad():
        torch.compile(model, backend="eager")(*args)
    assert len(capture_regions(model, args, {}).regions) == 1
