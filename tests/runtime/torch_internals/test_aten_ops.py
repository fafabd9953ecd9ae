"""ATen: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.runtime.torch_internals import aten_ops, fake_mode
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph


def test_copy_all_writes_into_the_tensors_that_are_there():
    into = [torch.zeros(3), torch.tensor(0), torch.zeros(2, 2).t()]
    places = [tensor.data_ptr() for tensor in into]
    aten_ops.copy_all(into, [torch.ones(3), torch.tensor(7), torch.arange(4.0).view(2, 2)])
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
    aten_ops.copy_all([into], [wanted.clone()])
    assert torch.equal(into, wanted) and into.stride() == wanted.stride()


def test_lists_are_added_at_once():
    lists = [torch.tensor([1]), torch.tensor([2])], [torch.tensor([10]), torch.tensor([20])]
    assert [int(value) for value in aten_ops.ADD_MANY(*lists)] == [11, 22]
    aten_ops.ADD_MANY_IN_PLACE(lists[0], 5)
    assert [int(value) for value in lists[0]] == [6, 7]


def test_the_mask_that_attention_makes_is_read_off():
    q, mask = torch.randn(1, 2, 3, 8), torch.tensor([[True, False, True]])
    made = aten_ops.mask_in_attention(q, q, q, mask.expand(1, 1, 3, 3), scale=0.5)
    assert made.dtype == q.dtype and made.shape == (1, 1, 3, 3)
    assert torch.equal(made == 0, mask.expand(1, 1, 3, 3)) and float(made.min()) < -60000
    # A mask that is additive already is not converted.
    assert aten_ops.mask_in_attention(q, q, q, made) is None


def test_a_node_that_only_says_something_is_known():
    def graph(x):
        aten_ops.SAYS_ONLY("fusion-advisor.test")
        return x * 2

    targets = [node.target for node in dynamo_graph(graph, torch.randn(3))[0].graph.nodes]
    assert aten_ops.SAYS_ONLY in targets


@pytest.mark.parametrize("options", [(), ([1],), ([2, 2], [1, 1], [1], 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_around_cudnn_the_bias_of_a_convolution_is_added_afterwards(device, options):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight, bias = (torch.empty(shape, device=device) for shape in ((2, 6, 8, 8), (4, 6, 3, 3), (4,)))
        is_added_after = aten_ops.adds_bias_after_convolution(x, weight, bias, *options)
    assert is_added_after == (device == "cuda" and torch.backends.cudnn.is_available())


def test_a_convolution_of_one_sample_or_of_mixed_dtypes_is_not_asked_about():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        shapes = (6, 8, 8), (1, 6, 8, 8), (4, 6, 3, 3), (4,)
        sample, batch, weight, bias = (torch.empty(shape, device="cuda") for shape in shapes)
        assert aten_ops.adds_bias_after_convolution(sample, weight, bias) is False
        assert aten_ops.adds_bias_after_convolution(batch, weight, bias.half()) is False


@pytest.mark.parametrize("is_fake", [True, False])
def test_whether_one_kernel_serves_attention_is_read_off(is_fake):
    q = torch.randn(1, 2, 3, 8)
    if is_fake:
        (q,) = fake_mode.fake_tensors([q])
    assert aten_ops.has_attention_kernel(q, q, q, scale=0.5)
    assert not aten_ops.has_attention_kernel(q, q, q, None, 0.5)  # with dropout a CPU computes the formula


def subtracting_infinities(query, key, value, mask, *_arguments, **_options):
    scores = (query @ key.transpose(-1, -2) + mask) * 1.44
    return (scores - scores.amax(-1, keepdim=True)).exp() @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_kernel_that_gives_nan_where_all_is_hidden_is_found(dtype):
    q = torch.randn(2, 2, 3, 8)
    mask = torch.ones(2, 1, 3, 3).to(dtype)
    for given in ([q, q, q, mask], fake_mode.fake_tensors([q, q, q, mask])):
        assert aten_ops.is_finite_where_all_is_hidden(*given, scale=1.0)
    if dtype == torch.float32:
        assert not aten_ops.is_finite_where_all_is_hidden(q, q, q, mask, attention=subtracting_infinities)


def test_real_ones_have_the_layout():
    for value in (torch.zeros(2, 3, 4).transpose(1, 2), torch.zeros(2, 8)[:, ::2], torch.zeros(3, 1).expand(3, 4)):
        (fake,) = fake_mode.fake_tensors([value])
        made = fake_mode.real_ones(fake)
        assert torch.equal(made, torch.ones(value.shape)) and not fake_mode.is_fake(made)
        assert made.stride() == value.stride() or 0 in value.stride()
