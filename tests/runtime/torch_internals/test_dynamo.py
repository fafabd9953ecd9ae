"""TorchDynamo: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch._C._dynamo import eval_frame
from transformers.utils import logging

from fusion_advisor.runtime.torch_internals import dynamo, fake_mode, symbolic_sizes
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph
from tests.tiny import Toy


def test_placeholder_values_are_fake_tensors_of_the_inputs():
    x = torch.randn(3, 5)
    values = dynamo_graph(lambda x: x.t() * 2, x, then=dynamo.placeholder_values)[1]
    assert [(type(value).__name__, tuple(value.shape), value.stride()) for value in values] == [("FakeTensor", (3, 5), (5, 1))]


def test_dynamo_traces_without_source_lines_and_keeps_modules():
    def meta(graph):
        nodes = [node for node in graph.graph.nodes if node.op.startswith("call")]
        return [(str(node.meta["stack_trace"]).strip(), "nn_module_stack" in node.meta) for node in nodes]

    model = Toy(blocks=1).eval()
    with dynamo.without_source_lines():
        _, without = dynamo_graph(model, torch.randn(2, 32), then=meta)
    _, lines = dynamo_graph(model, torch.randn(2, 32), then=meta)
    assert {text for text, _ in without} == {""} and all("tiny.py" in text for text, _ in lines)
    assert [has for _, has in without] == [has for _, has in lines] and any(has for _, has in lines)


def test_a_logger_that_warns_once_ends_no_graph():
    logger, graphs = logging.get_logger("fusion_advisor.tests"), []

    def warned(x):
        x = x + 1
        logger.warning_once("said once, and not by the graph")
        return x * 2

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    counts = []
    for context in (contextlib.nullcontext(), dynamo.without_repeated_warnings()):
        graphs.clear()
        torch.compiler.reset()
        with context:
            torch.compile(warned, backend=backend, dynamic=False)(torch.ones(2))
        counts.append(len(graphs))
    torch.compiler.reset()
    assert counts == [2, 1]


def test_dynamo_keeps_the_metrics_of_a_graph_in_which_warnings_are_passed_over(caplog):
    logger = logging.get_logger("fusion_advisor.tests")

    def warned(x):
        logger.warning_once("said once")
        return x * 2

    torch.compiler.reset()
    with caplog.at_level("ERROR", "torch._dynamo"), dynamo.without_repeated_warnings():
        torch.compile(warned, backend="eager", dynamic=False)(torch.ones(2))
        written = torch._dynamo.utils._get_dynamo_config_for_logging()
    torch.compiler.reset()
    assert json.loads(written)["recompile_limit"] == torch._dynamo.config.recompile_limit
    assert [record.message for record in caplog.records] == []


def test_what_the_first_compile_loads_no_start_of_a_saved_plan_loads():
    program = """
import sys, torch
import fusion_advisor.fuse.live.restore_plan
print(sorted({name.partition(".")[0] for name in set(sys.modules)} & {"functorch", "networkx"}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("is_untried", [False, True])
def test_guards_that_are_left_untried_guard_nonetheless(is_untried, monkeypatch):
    timed, graphs = [], []
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: timed.append(1) or 0.0)

    def backend(graph, _):
        graphs.append(graph)
        if is_untried:
            dynamo.leave_new_guards_untried()
        return graph.forward

    class Scaled(torch.nn.Module):
        factor = 2

        def forward(self, x):
            return x * self.factor

    model = Scaled()
    call = dynamo.compiled_call(model, backend)
    with torch.no_grad():
        for rows, compiled in ((2, 1), (2, 1), (3, 2)):
            assert call(torch.ones(rows)).sum() == 2 * rows and len(graphs) == compiled
        model.factor = 5
        assert call(torch.ones(3)).sum() == 15
    assert len(graphs) == 3 and len(timed) == (0 if is_untried else 3)


@pytest.mark.parametrize("dynamic", [False, True])
def test_has_dynamic_shapes(dynamic):
    _, found = dynamo_graph(lambda x: x * 2, torch.randn(3, 5), dynamic=dynamic, then=dynamo.has_dynamic_shapes)
    assert found is dynamic


def test_guard_errors_are_raised_and_not_printed():
    import logging

    def fixed(x):
        return x + torch.ones(9, 1)

    logger = logging.getLogger("torch._guards")
    before = logger.level
    x = torch.randn(9, 7)
    symbolic_sizes.leave_open(x, [0])
    with pytest.raises(RuntimeError), dynamo.without_logged_guard_errors():
        assert not logger.isEnabledFor(logging.ERROR)
        dynamo_graph(fixed, x, dynamic=None)
    assert logger.level == before


def test_a_number_that_decides_a_shape_is_named():
    from torch._subclasses.fake_tensor import DataDependentOutputException

    why = dynamo.why_untraceable(DataDependentOutputException(torch.ops.aten._local_scalar_dense.default))
    assert why == "a number in a tensor decides its shapes (DataDependentOutputException)"
    assert dynamo.why_untraceable(ValueError("no")) is None


def test_break_reason_names_the_line():
    def breaks(x):
        y = x * 5
        torch._dynamo.graph_break()
        return y + 1

    graph, _ = dynamo_graph(breaks, torch.randn(2))
    reason, where = dynamo.break_reason(graph)
    assert reason
    assert "test_dynamo.py:" in where
    assert dynamo.break_reason(dynamo_graph(lambda x: x * 7, torch.randn(2))[0]) is None


class Called:
    """A forward that is no function: an object."""

    def __call__(self, x):
        return x.tanh() * 2


def toy_with(forward):
    """As accelerate's hooks put in: a forward of the instance that is no function of Python's."""
    model = Toy()
    model.forward = forward(model)
    return model


@pytest.mark.parametrize(
    "model",
    [
        Toy(), torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()), toy_with(lambda model: partial(Toy.forward, model)),
        toy_with(lambda _: Called()),
    ],
    ids=["own", "torch's", "partial", "object"],
)  # fmt: skip
def test_compiled_call_reaches_the_backend(model):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    x = torch.randn(2, 32)
    with torch.no_grad():
        assert torch.equal(dynamo.compiled_call(model, backend)(x), model(x))
    assert len(graphs) == 1


def test_compiled_calls_do_not_count_against_each_other():
    graphs = []

    def backend_of_its_own():
        # torch 2.11 runs what it compiled for one model in place of the next one's, where both have the same backend.
        return lambda graph, _: (graphs.append(graph), graph.forward)[1]

    x = torch.randn(2, 32)
    with torch.no_grad(), dynamo.raise_recompile_limit(64):
        for _ in range(20):
            dynamo.compiled_call(Toy(), backend_of_its_own())(x)
    assert len(graphs) == 20


def test_raise_recompile_limit_is_undone():
    before = torch._dynamo.config.recompile_limit
    with dynamo.raise_recompile_limit(64):
        assert torch._dynamo.config.recompile_limit == 64
    assert torch._dynamo.config.recompile_limit == before


def test_a_mode_of_torch_compile_reaches_it(monkeypatch):
    seen = {}
    dynamo.isolates()  # remembers the signature of torch's own, not of what stands for it below
    monkeypatch.setattr(torch, "compile", lambda call, **options: seen.update(options) or call)
    dynamo.compiled_call(torch.nn.Linear(2, 2), "inductor", mode="reduce-overhead")
    assert (seen["backend"], seen["mode"], seen["dynamic"]) == ("inductor", "reduce-overhead", False)


def test_dynamo_compiles_without_a_collection(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append(generation))
    for context, times in ((contextlib.nullcontext(), 1), (dynamo.no_collection(), 0)):
        collected.clear()
        with context, torch.no_grad():
            dynamo.compiled_call(torch.nn.ReLU6(), lambda graph, _: graph.forward)(torch.ones(3))
        assert len(collected) == times


class AroundLstm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LSTM(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x)[0])


def test_recurrent_layers_are_taken_into_graphs_only_where_that_is_asked():
    for context, count in ((contextlib.nullcontext(), 0), (dynamo.recurrent_layers_in_graphs(), 1)):
        graphs = []
        with context, torch.no_grad():
            dynamo.compiled_call(AroundLstm(), lambda graph, _, seen=graphs: seen.append(graph) or graph.forward)(
                torch.ones(2, 4)
            )
        assert len(graphs) == count
        torch.compiler.reset()


def test_dynamo_says_which_code_it_looked_through():
    class Twice(torch.nn.Module):
        def helper(self, x):
            return x * 2

        def forward(self, x):
            return self.helper(x)

    codes, modes = [], []

    def backend(graph_module, inputs):
        codes.extend(dynamo.traced_code())
        modes.extend(dynamo.fake_modes_of(graph_module))
        return graph_module.forward

    x = torch.ones(2)
    torch.compile(Twice(), backend=backend)(x)
    assert {Twice.helper.__code__, Twice.forward.__code__} <= set(codes) and len(set(codes)) == len(codes)
    assert modes
    fake_mode.forget_real_tensors(modes)
    torch.utils.swap_tensors(x, torch.zeros(2))


def test_what_a_trace_knows_of_real_tensors_can_be_forgotten():
    contexts, weight = [], torch.nn.Parameter(torch.ones(2))

    def backend(graph_module, inputs):
        contexts.append(dynamo.known_tensors())
        return graph_module.forward

    torch.compile(lambda x: x * weight, backend=backend)(torch.ones(2))
    (known,) = contexts
    assert any(one is weight for one in known)
    known.clear()
    assert not known and dynamo.known_tensors() == {}


def test_a_result_that_carries_a_gradient_is_known():
    weight = torch.nn.Parameter(torch.ones(4))

    def asked(x):
        with torch.enable_grad():
            return x * weight

    with torch.no_grad():
        found = [
            dynamo_graph(function, torch.randn(4), then=dynamo.gives_gradients)[1]
            for function in (asked, lambda x: (x * weight, weight, weight.view(2, 2)))
        ]
    assert found == [True, False]


def test_a_whole_number_out_of_a_tensor_is_known():
    number, factor = np.int64(2), np.float64(2.5)
    found = [
        dynamo_graph(function, torch.randn(4), then=dynamo.reads_sizes)[1]
        for function in (lambda x: x * int(number), lambda x: x * float(factor) + x.shape[0])
    ]
    assert found == [True, False]
    assert not dynamo_graph(lambda x: x * (x.shape[0] + 1), torch.randn(4), dynamic=True, then=dynamo.reads_sizes)[1]


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_call_that_stops_traces_is_compiled_by_nobody(is_traced):
    callbacks, traced = [], []

    def inside(x):
        callbacks.append(eval_frame.get_eval_frame_callback())
        return helper(x)

    def helper(x):
        return x.sin()

    def backend(graph_module, _):
        traced.extend(node.target for node in graph_module.graph.nodes if node.op == "call_method")
        return graph_module.forward

    stop = dynamo.stopping_traces(inside, "a test")
    outer = torch.compile(lambda x: stop(x.cos()).tan(), backend=backend) if is_traced else lambda x: stop(x.cos()).tan()
    x = torch.randn(3)
    assert torch.equal(outer(x), x.cos().sin().tan())
    assert callbacks == [None]  # dynamo compiles nothing that it calls
    assert traced == (["cos", "tan"] if is_traced else [])
    assert inspect.unwrap(stop) is inside
    torch._dynamo.reset()


def test_the_guard_that_failed_is_named_as_its_module_is():
    failed, model, x = [], Toy(blocks=1), torch.randn(2, 32)

    def backend(graph, inputs):
        failed.append(dynamo.failed_guard())
        return graph.forward

    call = dynamo.compiled_call(model, backend)
    call(x)
    call(x)
    next(model.norms[0].parameters()).requires_grad_(False)
    call(x)
    mismatch = "tensor 'self.norms.0.weight' requires_grad mismatch. expected requires_grad=1"
    assert failed == (["", mismatch] if dynamo.isolates() else [""])  # before torch 2.12 dynamo does not look at weights
    torch.compiler.reset()


def forward(net, x, other):
    return other(net.inner(x))


class Brief(torch.nn.Module):
    forward = forward

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)


def test_a_model_is_called_self_in_module_paths_and_no_other_module_is():
    graph, _ = dynamo_graph(Brief(), torch.randn(2, 4), torch.nn.ReLU(), then=dynamo.name_self)
    stacks = [node.meta["nn_module_stack"] for node in graph.graph.nodes if node.op == "call_function"]
    assert [path for path, _ in (next(reversed(stack.values())) for stack in stacks)] == ["L['self'].inner", "L['other']"]


def test_what_dynamo_wraps_in_every_process_that_compiles_is_unwrapped():
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.randn(3, 2))
    for name in ("__init__", "__setstate__"):
        wrapped = getattr(torch.nn.Module, name)
        assert wrapped.__module__ == "torch._dynamo.mutation_guard"
        assert dynamo.untagged(wrapped).__qualname__ == f"Module.{name}"
        assert dynamo.untagged(dynamo.untagged(wrapped)) is dynamo.untagged(wrapped)
    assert dynamo.untagged(torch.nn.Linear.forward) is torch.nn.Linear.forward and dynamo.untagged(3) == 3
