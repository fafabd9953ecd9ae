"""One test for each private API of torch that is leaned on: when a release moves one, it is named here."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch._guards import TracingContext

from fusion_advisor.runtime import torch_internals
from tests.tiny import Toy


def dynamo_graph(function, *inputs, dynamic=False, then=None, **named):
    """Run a function under dynamo; return its graph, and what ``then`` made of it inside the backend."""
    found = []

    def backend(graph, _):
        found.append((graph, then(graph) if then else None))
        return graph.forward

    with torch.no_grad(), torch_internals.raise_recompile_limit(64):
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs, **named)
    return found[0]


def test_placeholder_values_are_fake_tensors_of_the_inputs():
    x = torch.randn(3, 5)
    values = dynamo_graph(lambda x: x.t() * 2, x, then=torch_internals.placeholder_values)[1]
    assert [(type(value).__name__, tuple(value.shape), value.stride()) for value in values] == [("FakeTensor", (3, 5), (5, 1))]


def test_copy_all_writes_into_the_tensors_that_are_there():
    into = [torch.zeros(3), torch.tensor(0), torch.zeros(2, 2).t()]
    places = [tensor.data_ptr() for tensor in into]
    torch_internals.copy_all(into, [torch.ones(3), torch.tensor(7), torch.arange(4.0).view(2, 2)])
    assert [tensor.data_ptr() for tensor in into] == places
    assert into[0].sum() == 3 and into[1] == 7 and into[2].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1, 3).expand(4, 3),
        lambda: torch.zeros(3, 1).expand(2, 3, 4),
        lambda: torch.zeros(()).expand(3),
        lambda: torch.zeros(5).unfold(0, 3, 1),
        lambda: torch.nn.Parameter(torch.zeros(1, 3)).expand(4, 3),
        lambda: torch.zeros(1, 0).expand(4, 0),
    ],
    ids=["rows", "two dims", "scalar", "windows", "of a parameter", "empty"],
)
def test_copy_all_writes_into_an_expanded_tensor(make):
    into = make()
    wanted = make().detach()
    wanted = torch.full((5,), 7.0).as_strided(wanted.shape, wanted.stride())
    torch_internals.copy_all([into], [wanted.clone()])
    assert torch.equal(into, wanted) and into.stride() == wanted.stride()


def test_lists_are_added_at_once():
    lists = [torch.tensor([1]), torch.tensor([2])], [torch.tensor([10]), torch.tensor([20])]
    assert [int(value) for value in torch_internals.ADD_MANY(*lists)] == [11, 22]
    torch_internals.ADD_MANY_IN_PLACE(lists[0], 5)
    assert [int(value) for value in lists[0]] == [6, 7]


def test_the_mask_that_attention_makes_is_read_off():
    q, mask = torch.randn(1, 2, 3, 8), torch.tensor([[True, False, True]])
    made = torch_internals.mask_in_attention(q, q, q, mask.expand(1, 1, 3, 3), scale=0.5)
    assert made.dtype == q.dtype and made.shape == (1, 1, 3, 3)
    assert torch.equal(made == 0, mask.expand(1, 1, 3, 3)) and float(made.min()) < -60000
    # A mask that is additive already is not converted.
    assert torch_internals.mask_in_attention(q, q, q, made) is None


def test_a_fake_tensor_is_plain_unless_more_than_its_layout_is_known_of_it():
    plain, symbolic = (
        dynamo_graph(
            lambda x: x * 2, torch.randn(3, 5), dynamic=dynamic, then=lambda graph: torch_internals.placeholder_values(graph)[-1]
        )[1]
        for dynamic in (False, True)
    )
    assert torch_internals.is_plain_fake(plain)
    assert not torch_internals.is_plain_fake(symbolic)
    assert not torch_internals.is_plain_fake(torch.randn(3))
    with plain.fake_mode:
        assert not torch_internals.is_plain_fake(torch.tensor(5))  # its value is known
        assert not torch_internals.is_plain_fake(torch.randn(3, 5).to_sparse())


def test_a_lazy_graph_module_generates_its_code_when_it_is_needed():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), 1)))
    made = torch_internals.lazy_graph_module(torch.nn.Module(), graph, class_name="Made")
    generated = []
    graph.set_codegen(_Telling(generated))
    made.recompile()
    assert torch.fx.Interpreter(made).run(1) == 2 and not generated
    assert made(torch.tensor(1)) == 2 and generated
    assert "torch.add" in made.code


class _Telling(torch.fx.graph.CodeGen):
    def __init__(self, generated):
        super().__init__()
        self.generated = generated

    def _gen_python_code(self, *args, **kwargs):
        self.generated.append(1)
        return super()._gen_python_code(*args, **kwargs)


def test_dynamo_traces_without_source_lines_and_keeps_modules():
    def meta(graph):
        nodes = [node for node in graph.graph.nodes if node.op.startswith("call")]
        return [(str(node.meta["stack_trace"]).strip(), "nn_module_stack" in node.meta) for node in nodes]

    model = Toy(blocks=1).eval()
    with torch_internals.without_source_lines():
        _, without = dynamo_graph(model, torch.randn(2, 32), then=meta)
    _, lines = dynamo_graph(model, torch.randn(2, 32), then=meta)
    assert {text for text, _ in without} == {""} and all("tiny.py" in text for text, _ in lines)
    assert [has for _, has in without] == [has for _, has in lines] and any(has for _, has in lines)


def test_what_the_first_compile_would_load_is_loaded():
    program = """
import sys, torch
from fusion_advisor.runtime import torch_internals
before = set(sys.modules)
torch_internals.compiled_call(torch.nn.ReLU(), lambda graph, inputs: graph.forward)
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} & {"functorch", "networkx", "sympy"}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


LINEARS = [((5, 6), True), ((2, 5, 6), True), ((2, 5, 6), False), ((2, 3, 5, 6), True), ((6,), False)]


@pytest.mark.parametrize(("shape", "has_bias"), LINEARS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_gradients_a_linear_is_one_step_of_a_trace_with_the_same_result(device, shape, has_bias):
    def traced(context, *, needs_grad):
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            x, weight, bias = (torch.empty(size, device=device) for size in (shape, (4, 6), (4,)))
            weight.requires_grad_()
            with context, enable_python_dispatcher(), torch.set_grad_enabled(needs_grad), torch_internals._Watch() as watch:
                found = [torch.nn.functional.linear(x, weight, bias if has_bias else None) for _ in range(2)]
        layouts = [(one.shape, one.stride(), one.dtype, one.device.type, one.requires_grad) for one in found]
        return [name for name, _ in watch.seen], layouts

    # Autograd asks for the device's guard, which a build for CPUs does not have.
    for needs_grad in (False, True) if device == "cpu" or torch.cuda.is_available() else (False,):
        plain, expected = traced(contextlib.nullcontext(), needs_grad=needs_grad)
        ops, layouts = traced(torch_internals.linear_in_one_step(), needs_grad=needs_grad)
        assert layouts == expected
        assert "aten.linear.default" not in plain
        assert ops == (plain if needs_grad else ["aten.linear.default"] * 2)
        assert traced(contextlib.nullcontext(), needs_grad=needs_grad) == (plain, expected)


def test_a_linear_in_one_step_leaves_calls_and_other_tensors_alone():
    from torch._dispatch.python import enable_python_dispatcher

    x, weight = torch.randn(2, 6), torch.randn(4, 6, requires_grad=True)
    with torch_internals.linear_in_one_step(), enable_python_dispatcher(), torch.no_grad(), torch_internals._Watch() as watch:
        torch.nn.functional.linear(x, weight)
    assert "aten.mm.default" in [name for name, _ in watch.seen]
    expected = torch.nn.functional.linear(x, weight)
    with torch_internals.linear_in_one_step(), torch_internals.linear_in_one_step():
        found = torch.nn.functional.linear(x, weight)
    assert torch.equal(found, expected) and found.requires_grad


def test_a_linear_in_one_step_is_taken_away_by_the_last_of_several_threads():
    keys = set(torch.ops.aten.linear.default.py_kernels)
    failures, before = [], sys.getswitchinterval()

    def enter():
        try:
            for _ in range(100):
                with torch_internals.linear_in_one_step():
                    assert len(torch.ops.aten.linear.default.py_kernels) > len(keys)
        except Exception as error:  # noqa: BLE001 - a thread's error is nobody's otherwise
            failures.append(error)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures and set(torch.ops.aten.linear.default.py_kernels) == keys


@pytest.mark.parametrize("is_untried", [False, True])
def test_guards_that_are_left_untried_guard_nonetheless(is_untried, monkeypatch):
    timed, graphs = [], []
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: timed.append(1) or 0.0)

    def backend(graph, _):
        graphs.append(graph)
        if is_untried:
            torch_internals.leave_new_guards_untried()
        return graph.forward

    class Scaled(torch.nn.Module):
        factor = 2

        def forward(self, x):
            return x * self.factor

    model = Scaled()
    call = torch_internals.compiled_call(model, backend)
    with torch.no_grad():
        for rows, compiled in ((2, 1), (2, 1), (3, 2)):
            assert call(torch.ones(rows)).sum() == 2 * rows and len(graphs) == compiled
        model.factor = 5
        assert call(torch.ones(3)).sum() == 15
    assert len(graphs) == 3 and len(timed) == (0 if is_untried else 3)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_detached_fake_is_what_detach_gives(needs_grad):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode():
        value = torch.nn.Parameter(torch.empty(4, 6), requires_grad=needs_grad) if needs_grad else torch.empty(6, 4).t()[1:]
        found, expected = torch_internals.detached_fake(value), value.detach()
        for name in ("shape", "dtype", "device", "requires_grad", "fake_mode"):
            assert getattr(found, name) == getattr(expected, name)
        assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())
        assert type(found) is type(expected) and found is not value
        assert torch_internals.storage_key(found) == torch_internals.storage_key(value)


def test_a_node_that_only_says_something_is_known():
    def graph(x):
        torch_internals.SAYS_ONLY("fusion-advisor.test")
        return x * 2

    targets = [node.target for node in dynamo_graph(graph, torch.randn(3))[0].graph.nodes]
    assert torch_internals.SAYS_ONLY in targets


@pytest.mark.parametrize("dynamic", [False, True])
def test_has_dynamic_shapes(dynamic):
    _, found = dynamo_graph(lambda x: x * 2, torch.randn(3, 5), dynamic=dynamic, then=torch_internals.has_dynamic_shapes)
    assert found is dynamic


def test_fake_mode_of_fakes_is_their_own_and_of_nothing_is_none():
    fakes = torch_internals.fake_tensors([torch.randn(3), 7])
    assert torch_internals.fake_mode_of([7, *fakes]) is fakes[0].fake_mode
    assert isinstance(torch_internals.fake_mode_of([7]), contextlib.nullcontext)


def test_retrace_to_aten_keeps_modules_lines_and_composite_ops():
    def retrace(graph):
        interpreter = torch.fx.Interpreter(graph)
        return torch_internals.retrace_to_aten(interpreter.run, torch_internals.placeholder_values(graph))

    _, traced = dynamo_graph(Toy(blocks=1).eval(), torch.randn(2, 32), then=retrace)
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert "aten.layer_norm.default" in [str(node.target) for node in nodes]
    assert all(node.meta.get("stack_trace") for node in nodes)
    assert any("norms" in str(node.meta.get("nn_module_stack")) for node in nodes)


def test_retrace_puts_the_tracing_context_back():
    def retrace(graph):
        before = TracingContext.try_get().fake_mode
        torch_internals.retrace_to_aten(torch.fx.Interpreter(graph).run, torch_internals.placeholder_values(graph))
        return before, TracingContext.try_get().fake_mode

    before, after = dynamo_graph(lambda x: x * 3, torch.randn(2), then=retrace)[1]
    assert before is not None
    assert after is before


def test_fake_tensors_keep_layouts_and_leave_other_values():
    transposed = torch.randn(3, 4).t()
    fake, other = torch_internals.fake_tensors([transposed, "text"])
    assert (fake.shape, fake.stride(), fake.dtype) == (transposed.shape, transposed.stride(), transposed.dtype)
    assert other == "text"


@pytest.mark.parametrize("make", [lambda tensor: tensor, lambda tensor: torch_internals.fake_tensors([tensor])[0]])
def test_storage_key_is_shared_by_views_alone(make):
    tensor = make(torch.randn(4, 4))
    assert torch_internals.storage_key(tensor) == torch_internals.storage_key(tensor[1:].view(-1))
    assert torch_internals.storage_key(tensor) != torch_internals.storage_key(tensor.clone())


def test_break_reason_names_the_line():
    def breaks(x):
        y = x * 5
        torch._dynamo.graph_break()
        return y + 1

    graph, _ = dynamo_graph(breaks, torch.randn(2))
    reason, where = torch_internals.break_reason(graph)
    assert reason
    assert "test_dynamo.py:" in where
    assert torch_internals.break_reason(dynamo_graph(lambda x: x * 7, torch.randn(2))[0]) is None


def test_set_compiled_call_touches_one_instance_and_is_undone():
    model, other = Toy(), Toy()
    x = torch.randn(2, 32)
    keys = set(model.__dict__)
    assert torch_internals.set_compiled_call(model, lambda x: "mine") is None
    assert model(x) == "mine"
    assert isinstance(other(x), torch.Tensor)
    assert torch_internals.set_compiled_call(model, None)(x) == "mine"
    assert isinstance(model(x), torch.Tensor)
    assert set(model.__dict__) == keys


def test_set_compiled_call_is_the_slot_of_module_compile():
    model = Toy()
    model.compile(backend="eager")
    before = model.__dict__["_compiled_call_impl"]
    assert torch_internals.set_compiled_call(model, lambda x: "mine") is before
    torch_internals.set_compiled_call(model, before)
    assert model.__dict__["_compiled_call_impl"] is before


def test_the_compiled_call_is_left_out_of_copies():
    model = Toy()
    torch_internals.set_compiled_call(model, lambda x: "mine")
    assert isinstance(copy.deepcopy(model)(torch.randn(2, 32)), torch.Tensor)


def test_original_call_runs_forward_and_hooks_whatever_is_set():
    model = Toy()
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    torch_internals.set_compiled_call(model, lambda x: "mine")
    assert isinstance(torch_internals.original_call(model)(torch.randn(2, 32)), torch.Tensor)
    assert seen == [1]


@pytest.mark.parametrize("model", [Toy(), torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU())], ids=["own", "torch's"])
def test_compiled_call_reaches_the_backend(model):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    x = torch.randn(2, 32)
    with torch.no_grad():
        assert torch.equal(torch_internals.compiled_call(model, backend)(x), model(x))
    assert len(graphs) == 1


def test_compiled_calls_do_not_count_against_each_other():
    graphs = []

    def backend_of_its_own():
        # torch 2.11 runs what it compiled for one model in place of the next one's, where both have the same backend.
        return lambda graph, _: (graphs.append(graph), graph.forward)[1]

    x = torch.randn(2, 32)
    with torch.no_grad(), torch_internals.raise_recompile_limit(64):
        for _ in range(20):
            torch_internals.compiled_call(Toy(), backend_of_its_own())(x)
    assert len(graphs) == 20


def test_raise_recompile_limit_is_undone():
    before = torch._dynamo.config.recompile_limit
    with torch_internals.raise_recompile_limit(64):
        assert torch._dynamo.config.recompile_limit == 64
    assert torch._dynamo.config.recompile_limit == before


def test_fake_result_runs_a_node_on_the_layouts_of_its_inputs():
    module = torch_internals.retrace_to_aten(lambda x: (x + 1).view(6, 2), torch_internals.fake_tensors([torch.randn(3, 4)]))
    nodes = {str(node.target): node for node in module.graph.nodes}
    added, viewed = nodes["aten.add.Tensor"], nodes["aten.view.default"]
    again = torch_internals.fake_result(module, viewed)
    assert (type(again).__name__, tuple(again.shape)) == ("FakeTensor", (6, 2))
    assert torch_internals.storage_key(again) == torch_internals.storage_key(added.meta["val"])
    added.meta["val"] = added.meta["val"].new_empty(3, 8)[:, :4]
    with pytest.raises((RuntimeError, ValueError)):
        torch_internals.fake_result(module, viewed)


def test_fake_result_leaves_the_layouts_of_its_inputs():
    module = torch_internals.retrace_to_aten(lambda x: (x + 1).unsqueeze_(0), torch_internals.fake_tensors([torch.randn(3, 4)]))
    nodes = {str(node.target): node for node in module.graph.nodes}
    before = nodes["aten.add.Tensor"].meta["val"]
    for _ in range(2):
        assert torch_internals.fake_result(module, nodes["aten.unsqueeze_.default"]).shape == (1, 3, 4)
    assert before.shape == (3, 4)


def test_hook_tables_hold_every_forward_hook() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    tables = torch_internals.hook_tables(module)
    assert not any(tables)
    for add in (module.register_forward_hook, module[0].register_forward_pre_hook):
        handle = add(lambda *_: None)
        assert sum(map(len, tables)) == 1
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert any(tables)
    handle.remove()
    assert not any(tables)


def test_compilers_begin_with_empty_caches_and_get_theirs_back(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "before too")
    with torch_internals.empty_compile_caches():
        inside = os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]
    assert "before" not in inside[0] and "before" not in inside[1]
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]) == ("before", "before too")


def test_inductor_compiles_a_traced_graph():
    # A matrix product alone needs no code of Inductor's own, which a C++ compiler would take seconds for.
    a, b = torch.randn(4, 8), torch.randn(8, 2)
    module = torch_internals.retrace_to_aten(lambda x, y: (torch.mm(x, y),), torch_internals.fake_tensors([a, b]))
    (result,) = torch_internals.inductor(module, [a, b])(a, b)
    torch.testing.assert_close(result, a @ b)


def test_addresses_are_those_of_the_same_tensors_only():
    tensors = [torch.randn(4) for _ in range(3)]
    addresses = torch_internals.Addresses(tensors)
    assert addresses.are_of(tensors)
    assert not addresses.are_of(tensors[:2])
    assert not addresses.are_of([*tensors[:2], tensors[2].clone()])
    assert not addresses.are_of([tensors[1], tensors[0], tensors[2]])
    tensors[1].data = torch.randn(4)
    assert not addresses.are_of(tensors)


def watched_storage(device):
    freed = []
    parameter = torch.nn.Parameter(torch.randn(4, device=device))
    reference = torch_internals.storage_reference(parameter, freed.append)
    parameter.untyped_storage()  # a Python object that comes and goes is not the memory's end
    assert reference() is not None and freed == []
    held, parameter.data = parameter.data, torch.randn(4, device=device)
    assert reference() is not None and freed == []
    del held
    assert freed == [reference] and reference() is None


def test_a_storage_is_seen_to_be_freed_under_a_living_tensor():
    watched_storage("cpu")


@pytest.mark.gpu
def test_a_storage_is_seen_to_be_freed_on_a_gpu():
    watched_storage("cuda")


@pytest.mark.gpu
def test_addresses_and_streams_on_a_gpu():
    tensors = [torch.randn(4, device="cuda") for _ in range(3)]
    addresses = torch_internals.Addresses(tensors)
    assert addresses._at_once is not None
    assert addresses.are_of(tensors) and not addresses.are_of([*tensors[:2], tensors[2].clone()])
    assert torch_internals.current_device_number() == torch.cuda.current_device()
    other = torch.cuda.Stream()
    assert torch_internals.current_stream_number(0) == torch.cuda.current_stream(0).cuda_stream
    with torch.cuda.stream(other):
        assert torch_internals.current_stream_number(0) == other.cuda_stream


def test_inductor_calls_an_op_that_it_was_told_of():
    # Where implicit fallbacks are off, only what it was told of compiles: nothing is written out for a log line then.
    library = torch.library.Library("fusion_advisor_test_told", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
    torch.library.register_fake("fusion_advisor_test_told::twice", torch.empty_like, lib=library)
    op = torch.ops.fusion_advisor_test_told.twice.default
    x = torch.randn(4)
    graph = torch.fx.Graph()
    graph.output((graph.call_function(op, (graph.placeholder("x"),)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with torch._inductor.config.patch(implicit_fallbacks=False):
        with pytest.raises(RuntimeError, match="missing lowering"):
            torch_internals.inductor(module, [x])
        torch_internals.inductor_calls_as_it_is(op)
        (result,) = torch_internals.inductor(module, [x])(x)
    torch.testing.assert_close(result, x + x)


def test_a_mode_of_torch_compile_reaches_it(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch, "compile", lambda call, **options: seen.update(options) or call)
    torch_internals.compiled_call(torch.nn.Linear(2, 2), "inductor", mode="reduce-overhead")
    assert (seen["backend"], seen["mode"], seen["dynamic"]) == ("inductor", "reduce-overhead", False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph, and this machine has no CUDA device")
def test_a_recorded_gemm_outlives_the_workspaces_that_others_free():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 4096), (4096, 256), (256,)))
    want = torch.addmm(bias, x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch_internals.own_gemm_workspace(), torch.cuda.graph(graph):
        out = torch.addmm(bias, x, weight)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    guard = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert not guard.any()


def test_dynamo_compiles_without_a_collection(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append(generation))
    for context, times in ((contextlib.nullcontext(), 1), (torch_internals.no_collection(), 0)):
        collected.clear()
        with context, torch.no_grad():
            torch_internals.compiled_call(torch.nn.ReLU6(), lambda graph, _: graph.forward)(torch.ones(3))
        assert len(collected) == times


def test_without_a_device_there_is_no_workspace_to_free():
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") or not torch.cuda.is_available()
    with torch_internals.own_gemm_workspace():
        pass


@pytest.mark.parametrize("options", [(), ([1],), ([2, 2], [1, 1], [1], 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_around_cudnn_the_bias_of_a_convolution_is_added_afterwards(device, options):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight, bias = (torch.empty(shape, device=device) for shape in ((2, 6, 8, 8), (4, 6, 3, 3), (4,)))
        is_added_after = torch_internals.adds_bias_after_convolution(x, weight, bias, *options)
    assert is_added_after == (device == "cuda" and torch.cuda.is_available() and torch.backends.cudnn.is_available())


def test_a_convolution_of_one_sample_or_of_mixed_dtypes_is_not_asked_about():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        shapes = (6, 8, 8), (1, 6, 8, 8), (4, 6, 3, 3), (4,)
        sample, batch, weight, bias = (torch.empty(shape, device="cuda") for shape in shapes)
        assert torch_internals.adds_bias_after_convolution(sample, weight, bias) is False
        assert torch_internals.adds_bias_after_convolution(batch, weight, bias.half()) is False


def test_wrapped_tensors_are_told_from_real_and_fake_ones():
    seen = []
    torch.vmap(lambda row: (seen.append(torch_internals.is_wrapped(row)), row)[1])(torch.zeros(2, 3))
    assert seen == [True]
    (fake,) = torch_internals.fake_tensors([torch.zeros(3)])
    assert not torch_internals.is_wrapped(fake) and not torch_internals.is_wrapped(torch.zeros(3))
    assert torch_internals.is_fake(fake) and not torch_internals.is_fake(torch.zeros(3)) and not torch_internals.is_fake(None)


def test_dynamo_says_which_code_it_looked_through():
    class Twice(torch.nn.Module):
        def helper(self, x):
            return x * 2

        def forward(self, x):
            return self.helper(x)

    codes, modes = [], []

    def backend(graph_module, inputs):
        codes.extend(torch_internals.traced_code())
        modes.extend(torch_internals.fake_modes_of(graph_module))
        return graph_module.forward

    x = torch.ones(2)
    torch.compile(Twice(), backend=backend)(x)
    assert {Twice.helper.__code__, Twice.forward.__code__} <= set(codes) and len(set(codes)) == len(codes)
    assert modes
    torch_internals.forget_real_tensors(modes)
    torch.utils.swap_tensors(x, torch.zeros(2))


def test_modes_and_tensor_classes_that_see_their_ops():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    class Own(torch.Tensor):
        pass

    assert not torch_internals.is_mode_active()
    with torch.device("cpu"):
        assert not torch_internals.is_mode_active()
        with Mode():
            assert torch_internals.is_mode_active()
    with torch_internals._Watch():
        assert torch_internals.is_mode_active()
    assert torch_internals.sees_its_ops(Own)
    assert not any(map(torch_internals.sees_its_ops, (torch.Tensor, torch.nn.Parameter)))
