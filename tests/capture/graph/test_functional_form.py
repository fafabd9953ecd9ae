"""In-place ops on values of the graph's own, and numbers in tensors of the host: rewritten only where nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion_advisor.capture.graph.tracer import capture_regions
from tests.tiny import Calling

X = torch.randn(3, 5, 8)


def graph_of(function, x=X):
    """Capture a function; returns the names of its ops, after comparing results, strides and what is written to the input."""
    model = Calling(function)
    with torch.no_grad():
        (region,) = capture_regions(model, (x.clone(),), {}).regions
        ours, theirs = x.clone(), x.clone()
        got, expected = region.graph(ours), model(theirs)
    got = got[0] if isinstance(got, tuple | list) else got
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got.stride() == expected.stride() and got.dtype == expected.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return [str(node.target) for node in region.graph.graph.nodes if node.op == "call_function"]


def summed(x):
    score = x * 2
    score += x.exp()
    return torch.relu_(score - 1)


def viewed(x):
    score = x * 2
    score.view(-1, 8).add_(1.0)
    return score * 3


def read_before(x):
    score = x * 2
    other = score + 1
    score += 1
    return score * other


def read_after_by_another_name(x):
    score = x * 2
    rows = score.view(-1, 8)
    score.mul_(3)
    return rows + 1


def of_the_caller(x):
    x.add_(1)
    return x * 2


def narrower(x):
    counts = (x * 4).to(torch.int32)
    counts.mul_(3)
    half = x.half()
    half.add_(x)  # the sum stays in 16 bits
    return half + counts


@pytest.mark.parametrize(
    ("function", "left"),
    [(summed, 0), (read_before, 0), (viewed, 1), (read_after_by_another_name, 1), (of_the_caller, 1), (narrower, 1)],
)
def test_what_nobody_else_reads_is_made_anew(function, left):
    names = graph_of(function)
    assert sum(name.split(".")[1].endswith("_") for name in names) == left


def test_a_view_that_was_written_to_is_followed():
    def function(x):
        rows = (x * 2).view(-1, 8)
        rows.add_(1.0)
        return rows.view(3, 5, 8) * rows.sum()

    assert not any(name.split(".")[1].endswith("_") for name in graph_of(function))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_in_tensors_of_the_host_become_numbers(dtype):
    def function(x):
        scale = torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 3)
        return x / scale.to(x.dtype) + torch.tensor(2)

    names = graph_of(function, X.to(dtype))
    assert names == ["aten.div.Tensor", "aten.add.Tensor"]


def test_numbers_that_decide_a_dtype_or_are_returned_stay():
    def decides(x):
        return x.int() * torch.tensor(0.5, dtype=torch.float64)

    def returned(x):
        return torch.tensor(3.0) * 2 + 0 * x.sum()

    assert "aten.mul.Tensor" in graph_of(decides)
    assert graph_of(returned)


IMAGES, WINDOWS = torch.randn(2, 3, 9, 10), {size: torch.randn(4, 3, size, size) for size in (2, 3, 5)}


def convolutions_of(function):
    """Capture a function of images; returns the names of its convolutions, after comparing results and strides."""
    with torch.no_grad():
        (region,) = capture_regions(Calling(function), (IMAGES,), {}).regions
        (got,), expected = region.graph(*region.example_args), function(IMAGES)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got.stride() == expected.stride()
    return [str(node.target) for node in region.graph.graph.nodes if "conv2d" in str(node.target)]


@pytest.mark.parametrize("dilation", [1, 2, (2, 1)], ids=str)
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("size", [3, 5])
def test_padding_by_name_becomes_numbers(size, padding, dilation):
    bias = torch.randn(4)

    def function(x):
        return functional.conv2d(x, WINDOWS[size], bias, padding=padding, dilation=dilation) * 2

    assert convolutions_of(function) == ["aten.conv2d.default"]


def test_a_stride_and_groups_stay_with_padding_by_name():
    weight = torch.randn(6, 1, 3, 3)
    assert convolutions_of(lambda x: functional.conv2d(x, weight, None, 2, "valid", 1, 3) * 2) == ["aten.conv2d.default"]


def test_an_even_windows_padding_stays_by_name():
    """It is wider on one side."""
    assert convolutions_of(lambda x: functional.conv2d(x, WINDOWS[2], padding="same") * 2) == ["aten.conv2d.padding"]
