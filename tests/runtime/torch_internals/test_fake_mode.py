"""Fake tensors: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.runtime.torch_internals import dynamo, fake_mode, fx_trace, tensor_memory
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph


def test_a_fake_tensor_is_plain_unless_more_than_its_layout_is_known_of_it():
    plain, symbolic = (
        dynamo_graph(
            lambda x: x * 2, torch.randn(3, 5), dynamic=dynamic, then=lambda graph: dynamo.placeholder_values(graph)[-1]
        )[1]
        for dynamic in (False, True)
    )
    assert fake_mode.is_plain_fake(plain)
    assert not fake_mode.is_plain_fake(symbolic)
    assert not fake_mode.is_plain_fake(torch.randn(3))
    with plain.fake_mode:
        assert not fake_mode.is_plain_fake(torch.tensor(5))  # its value is known
        assert not fake_mode.is_plain_fake(torch.randn(3, 5).to_sparse())


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_detached_fake_is_what_detach_gives(needs_grad):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode():
        value = torch.nn.Parameter(torch.empty(4, 6), requires_grad=needs_grad) if needs_grad else torch.empty(6, 4).t()[1:]
        found, expected = fake_mode.detached_fake(value), value.detach()
        for name in ("shape", "dtype", "device", "requires_grad", "fake_mode"):
            assert getattr(found, name) == getattr(expected, name)
        assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())
        assert type(found) is type(expected) and found is not value
        assert tensor_memory.storage_key(found) == tensor_memory.storage_key(value)


def test_fake_mode_of_fakes_is_their_own_and_of_nothing_is_none():
    fakes = fake_mode.fake_tensors([torch.randn(3), 7])
    assert fake_mode.fake_mode_of([7, *fakes]) is fakes[0].fake_mode
    assert isinstance(fake_mode.fake_mode_of([7]), contextlib.nullcontext)


def test_fake_tensors_keep_layouts_and_leave_other_values():
    transposed = torch.randn(3, 4).t()
    fake, other = fake_mode.fake_tensors([transposed, "text"])
    assert (fake.shape, fake.stride(), fake.dtype) == (transposed.shape, transposed.stride(), transposed.dtype)
    assert other == "text"


def test_a_graph_is_given_the_layouts_of_other_inputs():
    module = fx_trace.retrace_to_aten(lambda x: (x + 1).t(), fake_mode.fake_tensors([torch.randn(3, 4)]))
    fake_mode.propagate(module, [torch.randn(5, 6)])
    shapes = [tuple(node.meta["val"].shape) for node in module.graph.nodes if node.op == "call_function"]
    assert shapes == [(5, 6), (6, 5)]


def test_fake_result_runs_a_node_on_the_layouts_of_its_inputs():
    module = fx_trace.retrace_to_aten(lambda x: (x + 1).view(6, 2), fake_mode.fake_tensors([torch.randn(3, 4)]))
    nodes = {str(node.target): node for node in module.graph.nodes}
    added, viewed = nodes["aten.add.Tensor"], nodes["aten.view.default"]
    again = fake_mode.fake_result(module, viewed)
    assert (type(again).__name__, tuple(again.shape)) == ("FakeTensor", (6, 2))
    assert tensor_memory.storage_key(again) == tensor_memory.storage_key(added.meta["val"])
    added.meta["val"] = added.meta["val"].new_empty(3, 8)[:, :4]
    with pytest.raises((RuntimeError, ValueError)):
        fake_mode.fake_result(module, viewed)


def test_fake_result_leaves_the_layouts_of_its_inputs():
    module = fx_trace.retrace_to_aten(lambda x: (x + 1).unsqueeze_(0), fake_mode.fake_tensors([torch.randn(3, 4)]))
    nodes = {str(node.target): node for node in module.graph.nodes}
    before = nodes["aten.add.Tensor"].meta["val"]
    for _ in range(2):
        assert fake_mode.fake_result(module, nodes["aten.unsqueeze_.default"]).shape == (1, 3, 4)
    assert before.shape == (3, 4)


@pytest.mark.parametrize(
    "reshape", [lambda x: x.reshape(1, 8, 4, 4), lambda x: x.unflatten(2, (4, 4)), lambda x: x.view(1, 8, 2, 2, 4)]
)
def test_one_image_is_reshaped_to_the_strides_of_eager(reshape):
    """Tokens of attention become an image that is channels last but for the stride of its batch, which convolutions look at."""
    tokens = torch.randn(1, 16, 8)

    def image(x):
        return reshape(x.transpose(1, 2))

    module = fx_trace.retrace_to_aten(image, fake_mode.fake_tensors([tokens]))
    node = next(node for node in module.graph.nodes if node.target in fake_mode._RESHAPES)
    assert fake_mode.fake_result(module, node).stride() == image(tokens).stride()
    fake_mode.propagate(module, [tokens])
    assert node.meta["val"].stride() == image(tokens).stride()
    assert tensor_memory.storage_key(node.meta["val"]) == tensor_memory.storage_key(node.all_input_nodes[0].meta["val"])


def test_pointwise_ops_on_one_image_give_the_strides_of_eager():
    """``x / 1`` keeps the odd stride of the batch in eager, ``silu`` does not."""
    image, other = torch.randn(1, 16, 8).transpose(1, 2).reshape(1, 8, 4, 4), torch.randn(1, 8, 4, 4)
    ops = {"div": lambda x, y: x / 1, "silu": lambda x, y: torch.nn.functional.silu(x), "add": torch.add}
    for name, op in ops.items():
        module = fx_trace.retrace_to_aten(op, fake_mode.fake_tensors([image, other]))
        node = next(node for node in module.graph.nodes if node.op == "call_function")
        assert fake_mode.fake_result(module, node).stride() == op(image, other).stride(), name


def test_a_batch_of_images_and_a_contiguous_one_are_left_alone():
    for tokens in (torch.randn(2, 16, 8).transpose(1, 2), torch.randn(1, 8, 16)):
        module = fx_trace.retrace_to_aten(lambda x: x.reshape(-1, 8, 4, 4), fake_mode.fake_tensors([tokens]))
        node = next(node for node in module.graph.nodes if node.target in fake_mode._RESHAPES)
        value = node.meta["val"]
        assert fake_mode.laid_as_in_eager(node, value, (node.all_input_nodes[0].meta["val"], [-1, 8, 4, 4]), {}) is value
        assert value.stride() == tokens.reshape(-1, 8, 4, 4).stride()


def test_which_arguments_a_call_writes_to():
    def call(x, mean, count, name):
        count[0].add_(1)
        return x + mean.mul_(2).sum(), name

    args = (torch.randn(2, 3), torch.zeros(3), torch.zeros(2))
    assert fake_mode.written_arguments(call, (*args, "")) == {1, 2}
    assert fake_mode.written_arguments(lambda *args: args[0] / 2, args) == frozenset()
    assert fake_mode.written_arguments(lambda *args: bool(args[0].sum() > 0), args) == frozenset()
    assert all(torch.equal(one, torch.zeros_like(one)) for one in args[1:])


def test_gradients_of_rows_have_the_strides_of_eager():
    """The gradient that the op is given has its rows turned, as one that comes from a mean over tokens."""
    rows, turned, weight = torch.randn(2, 6, 4), torch.randn(2, 4, 6).transpose(1, 2), torch.ones(4)
    _, mean, scale = torch.ops.aten.native_layer_norm(rows, [4], weight, weight, 1e-5)
    calls = {
        torch.ops.aten.native_layer_norm_backward: (turned, rows, [4], mean, scale, weight, weight, [True, True, False]),
        torch.ops.aten._log_softmax_backward_data: (turned, rows, -1, torch.float32),
    }
    for op, args in calls.items():
        graph = torch.fx.Graph()
        given = [graph.placeholder(f"x{n}") if isinstance(one, torch.Tensor) else one for n, one in enumerate(args)]
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        holders = [one for one in given if isinstance(one, torch.fx.Node)]
        for node, fake in zip(holders, fake_mode.fake_tensors(tensors), strict=True):
            node.meta["val"] = fake
        node = graph.call_function(op.default, tuple(given))
        graph.output(node)
        found = fake_mode.fake_result(torch.fx.GraphModule({}, graph), node)
        theirs = op(*args)
        pairs = zip(*((one if isinstance(one, tuple) else (one,)) for one in (found, theirs)), strict=True)
        assert all(one is other is None or one.stride() == other.stride() for one, other in pairs), op


def test_a_linear_of_open_sizes_has_a_result():
    """In C++ a product asks for the number of elements, which torch 2.11 refuses where a size is open."""
    module = make_fx(lambda x, w: x[:, -1:] * w[0], tracing_mode="symbolic")(torch.randn(5, 7, 8), torch.randn(6, 8))
    taken = next(node for node in module.graph.nodes if "slice" in str(node.target) and node.args[1] == 1)
    weight = module.graph.find_nodes(op="placeholder")[1]
    with module.graph.inserting_before(module.graph.output_node()):
        linear = module.graph.call_function(torch.ops.aten.linear.default, (taken, weight))
    found = fake_mode.fake_result(module, linear)
    assert found.dim() == 3 and found.shape[1] == 1 and not isinstance(found.shape[0], int)


@pytest.mark.parametrize("is_turned", [False, True], ids=["dense", "heads-side-by-side"])
def test_attention_of_an_open_batch_has_a_result_of_an_open_batch(is_turned):
    """In C++ attention on a GPU asks for the batch, to choose its kernel (torch 2.11), and the graph is for that batch alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    open_batch = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    mode = FakeTensorMode(shape_env=environment)
    like = torch.empty(3, 197, 12, 64).transpose(1, 2) if is_turned else torch.empty(3, 12, 197, 64)
    batch = mode.from_tensor(like, symbolic_context=open_batch).shape[0]
    device = "cuda" if torch.version.cuda else "cpu"  # a fake tensor needs no GPU, but a build for one
    with mode:
        value = torch.empty_strided((batch, 12, 197, 64), like.stride(), device=device, dtype=torch.bfloat16)
    graph = torch.fx.Graph()
    placeholder = graph.placeholder("value")
    placeholder.meta["val"] = value
    node = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, (placeholder,) * 3)
    graph.output(node)
    found = fake_mode.fake_result(torch.fx.GraphModule({}, graph), node)
    assert not isinstance(found.shape[0], int) and not environment.guards
