"""Numbers, calls and compilers: pytest tests. Needs torch and, for the whole model, what the model itself needs."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpt2_fused  # noqa: E402
from gpt2_fused import ops  # noqa: E402
from gpt2_fused.example import EXPECTED, NoModel, make_inputs, make_model  # noqa: E402

DEVICE = EXPECTED["device"]
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def model():
    try:
        return make_model()
    except NoModel as error:
        pytest.skip(str(error))


@pytest.fixture
def fused(model):
    yield gpt2_fused.apply(model)
    gpt2_fused.revert(model)


def tensors_of(output):
    return [one for leaf in torch.utils._pytree.tree_leaves(output) for one in held_by(leaf)]


def held_by(value):
    """Tensors of an argument, in objects too."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value if isinstance(value, (list, tuple)) else list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [] if isinstance(value, type) else [leaf for item in inner for leaf in held_by(item)]


def relative_error(found, right):
    found, right = found.double(), right.double()
    same = (found == right) | (found.isnan() & right.isnan())
    difference = torch.where(same, 0.0, found - right)
    scale = torch.where(right.isfinite(), right, 0.0).norm()
    return (difference.norm() / scale).nan_to_num(nan=float("inf") if difference.any() else 0.0).item()


@pytest.mark.parametrize("name", ops.ALL)
def test_a_kernel_is_as_near_to_float64_as_the_same_ops_one_by_one(name):
    reference = importlib.import_module(f"references.{name}")
    tensors = reference.make_inputs(DEVICE)
    in_place = reference.IN_PLACE
    inputs, outputs = tensors[: reference.INPUT_COUNT], tensors[reference.INPUT_COUNT :]
    truth = [torch.zeros_like(o, dtype=torch.float64 if o.is_floating_point() else o.dtype) for o in outputs]
    plain = [torch.zeros_like(o, dtype=reference.OWN_DTYPE if o.is_floating_point() else o.dtype) for o in outputs]
    reference.reference(*inputs, *truth, dtype=torch.float64)
    reference.reference(*inputs, *plain, dtype=reference.OWN_DTYPE)
    found = getattr(ops, name)(*inputs, *(outputs[place] for place in in_place))
    fresh = iter(found if isinstance(found, tuple) else (found,))
    results = [outputs[place] if place in in_place else next(fresh) for place in range(len(outputs))]
    for one, right, own in zip(results, truth, plain, strict=True):
        # An op-by-op computation, rounded once, has this error; the kernel may have half as much again.
        limit = 1.5 * relative_error(own.to(one.dtype), right) + reference.FLOOR
        assert relative_error(one, right) <= limit


@torch.no_grad()
def test_the_model_is_as_near_to_float64_as_it_was(model):
    own = tensors_of(model(**make_inputs()))
    gpt2_fused.apply(model)
    found = tensors_of(model(**make_inputs()))
    assert gpt2_fused.fallbacks(model) == {}
    gpt2_fused.revert(model)
    truth = tensors_of(copy.deepcopy(model).double()(**make_inputs(wide=True)))
    for one, eager, right in zip(found, own, truth, strict=True):
        assert relative_error(one, right) <= 2 * relative_error(eager, right) + 1e-6


@torch.no_grad()
def test_a_call_leaves_what_the_models_own_leaves(model):
    left = []
    for change in (lambda: None, lambda: gpt2_fused.apply(model)):
        change()
        inputs = make_inputs()
        model(**inputs)
        left.append([leaf for value in inputs.values() for leaf in held_by(value)])
    gpt2_fused.revert(model)
    for own, found in zip(*left, strict=True):
        assert own.shape == found.shape
        assert relative_error(found, own) <= 1e-5


@torch.no_grad()
def test_revert_gives_the_model_back(model):
    own, names = tensors_of(model(**make_inputs())), list(model.state_dict())
    gpt2_fused.apply(model)
    assert list(model.state_dict()) == names
    gpt2_fused.revert(model)
    assert "forward" not in vars(model)
    again = tensors_of(model(**make_inputs()))
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(own, again, strict=True))


def test_a_call_with_gradients_runs_the_models_own_forward(fused):
    fused(**make_inputs())
    assert list(gpt2_fused.fallbacks(fused)) == ["gradients are enabled: call it under torch.no_grad()"]


@torch.no_grad()
def test_torch_compile_sees_one_graph(fused):
    expected = tensors_of(fused(**make_inputs()))
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    torch._dynamo.reset()
    found = tensors_of(torch.compile(fused, fullgraph=True, backend=backend)(**make_inputs()))
    assert len(graphs) == 1
    assert any("gpt2_fused." in str(node.target) for node in graphs[0].graph.nodes)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) <= 1e-5


@torch.no_grad()
def test_torch_export_sees_the_ops(fused):
    program = torch.export.export(fused, (), make_inputs())
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(name.startswith("gpt2_fused.") for name in called)
    for one, other in zip(tensors_of(program.module()(**make_inputs())), tensors_of(fused(**make_inputs())), strict=True):
        assert relative_error(one, other) <= 1e-5


def test_another_model_is_refused(model):
    model.register_parameter("one_more", torch.nn.Parameter(torch.zeros(3)))
    try:
        with pytest.raises(gpt2_fused.ModelDiffers, match="one_more"):
            gpt2_fused.apply(model)
    finally:
        del model.one_more
