"""FX: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import pytest
import torch
from torch._guards import TracingContext

from fusion_advisor.runtime.torch_internals import dynamo, fake_mode, fx_trace
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph
from tests.tiny import Toy


def test_a_lazy_graph_module_generates_its_code_when_it_is_needed():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), 1)))
    made = fx_trace.lazy_graph_module(torch.nn.Module(), graph, class_name="Made")
    generated = []
    graph.set_codegen(_Telling(generated))
    made.recompile()
    assert torch.fx.Interpreter(made).run(1) == 2 and not generated
    assert made(torch.tensor(1)) == 2 and generated
    assert "torch.add" in made.code


def test_a_trace_below_autograd_has_the_batched_ops_of_vmap():
    rows = fake_mode.fake_tensors([torch.zeros(2, 3)])
    graph = fx_trace.retrace_to_aten(torch.vmap(lambda row: row.exp() + 1), rows, is_transformed=True)
    x = torch.randn(2, 3)
    assert torch.equal(graph(x), x.exp() + 1)


class _Telling(torch.fx.graph.CodeGen):
    def __init__(self, generated):
        super().__init__()
        self.generated = generated

    def _gen_python_code(self, *args, **kwargs):
        self.generated.append(1)
        return super()._gen_python_code(*args, **kwargs)


def test_retrace_to_aten_keeps_modules_lines_and_composite_ops():
    def retrace(graph):
        interpreter = torch.fx.Interpreter(graph)
        return fx_trace.retrace_to_aten(interpreter.run, dynamo.placeholder_values(graph))

    _, traced = dynamo_graph(Toy(blocks=1).eval(), torch.randn(2, 32), then=retrace)
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert "aten.layer_norm.default" in [str(node.target) for node in nodes]
    assert all(node.meta.get("stack_trace") for node in nodes)
    assert any("norms" in str(node.meta.get("nn_module_stack")) for node in nodes)


def test_retrace_puts_the_tracing_context_back():
    def retrace(graph):
        before = TracingContext.try_get().fake_mode
        fx_trace.retrace_to_aten(torch.fx.Interpreter(graph).run, dynamo.placeholder_values(graph))
        return before, TracingContext.try_get().fake_mode

    before, after = dynamo_graph(lambda x: x * 3, torch.randn(2), then=retrace)[1]
    assert before is not None
    assert after is before


def test_a_copy_of_a_graph_may_be_changed():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    copy = fx_trace.copied_graph(graph)
    copy.graph.find_nodes(op="call_function", target=torch.relu)[0].target = torch.neg
    copy.recompile()
    x = torch.tensor([2.0])
    assert copy(x) == -1 and graph(x) == 3


def test_the_data_of_a_tensor_is_a_view_without_a_gradient_and_the_graph_that_was_given_stays():
    def scaled(x):
        x.data.mul_(2)
        return x + 1

    graph, copy = dynamo_graph(scaled, torch.ones(3), then=fx_trace.with_data_detached)
    x = torch.ones(3)
    for one in (graph, copy):
        (result,) = one(x)
        assert torch.equal(result, x + 1)
    assert x[0] == 4
    targets = [[node.target for node in one.graph.nodes] for one in (graph, copy)]
    assert torch.detach not in targets[0] and torch.detach in targets[1]
    assert fx_trace.with_data_detached(copy) is copy


@pytest.mark.parametrize(
    ("function", "is_random"),
    [
        (lambda x: torch.ops.aten.native_dropout.default(x, 0.5, True), True),
        (lambda x: torch.ops.aten.native_dropout.default(x, 0.5, False), False),
        (lambda x: torch.ops.aten.native_dropout.default(x, 0.0, True), False),
        (lambda x: torch.ops.aten.bernoulli.default(x) + 1, True),
        (lambda x: torch.ops.aten.scaled_dot_product_attention.default(x, x, x), False),
        (lambda x: torch.ops.aten.scaled_dot_product_attention.default(x, x, x, None, 0.1), True),
        (lambda x: torch.ops.aten.relu.default(x) + 1, False),
    ],
)
def test_which_ops_draw_numbers(function, is_random):
    assert fx_trace.draws_numbers(torch.fx.symbolic_trace(function)) is is_random
