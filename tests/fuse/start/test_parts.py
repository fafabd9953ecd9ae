"""Parts of a start without a trace: code and values described, effects of a call, layouts, graphs."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.start.described import CannotDescribe, code_digest, described
from fusion_advisor.fuse.start.graph_text import decode_graph, encode_graph
from fusion_advisor.runtime.torch_internals import compiled_code, dispatcher, fake_mode
from tests.tiny import Calling, toy


def one(x):
    return [x + 1 for _ in range(3)]


def other(x):
    return [x + 2 for _ in range(3)]


def test_code_is_what_it_does_and_not_where_it_stands():
    text = "def f(x):\n    return {'a', 'b', 'c'} and x in {'a', 'b', 'c'}\n"
    spaces = [{}, {}]
    exec(compile(text, "one", "exec"), spaces[0])
    exec(compile(f"\n\n# moved\n{text}", "two", "exec"), spaces[1])
    digests = [code_digest(space["f"].__code__) for space in spaces]
    assert digests[0] == digests[1]
    assert code_digest(one.__code__) != code_digest(other.__code__)  # a number in what is inside


@pytest.mark.parametrize(
    ("left", "right"), [(1, True), (0.0, -0.0), (1, 1.0), ("1", 1), ((1,), [1]), (torch.float16, torch.bfloat16), (one, other)]
)
def test_values_that_mean_different_things_are_described_differently(left, right):
    first, second = described(left), described(right)
    assert (type(first), first) != (type(second), second)


def test_what_means_nothing_elsewhere_is_not_described():
    assert described(math.nan) == described(math.nan)
    with pytest.raises(CannotDescribe, match="object"):
        described(object())


def effects_of(function, *args):
    return capture_regions(Calling(function), args, {}, with_lines=False).regions[0].effects


KEPT: dict = {"count": 0, "same": 5}


class Holder:
    number, same = 0, 5


HELD = Holder()


def sets_another(x):
    HELD.number += 1
    return x * 2


def sets_the_same(x):
    HELD.same = 5
    return x * 2


def sets_an_item(x):
    KEPT["count"] += 1
    return x * 2


def makes_its_own(x):
    own = []
    own.append(x)
    return own[0] * 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [(sets_another, ("a Holder",)), (sets_the_same, ()), (sets_an_item, ("a dict",)), (makes_its_own, ())],
)
def test_what_a_call_leaves_behind_is_noted(function, expected):
    before, HELD.same = HELD.number, 5
    assert effects_of(function, torch.ones(4)) == expected
    HELD.number = before


def test_the_global_state_is_compared():
    before, check = compiled_code.global_state(), compiled_code.global_state_check()
    assert check() and "grad_mode" not in before and before["deterministic_algorithms"] is False
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert not check() and compiled_code.global_state() != before
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert check() and not dispatcher.is_function_mode_on()
    with torch.device("cpu"):
        assert dispatcher.is_function_mode_on()


def test_layouts_share_what_they_shared():
    cpu = torch.device("cpu")
    rows = [[0, 0, [2, 3], [3, 1], "float32", "cpu"], [0, 3, [3], [1], "float32", "cpu"], [1, 0, [2], [1], "int64", "cpu"]]
    first, view, alone = fake_mode.laid_out(rows, [24, 16], cpu, lambda name: getattr(torch, name))
    assert first.untyped_storage()._cdata == view.untyped_storage()._cdata != alone.untyped_storage()._cdata
    assert (view.shape, view.stride(), view.storage_offset(), view.dtype, view.device) == ((3,), (1,), 3, torch.float32, cpu)
    assert fake_mode.is_plain_fake(first)
    for wrong in ([0, 4, [3], [1], "float32", "cpu"], [0, 0, [-1], [1], "float32", "cpu"], [-1, 0, [1], [1], "float32", "cpu"]):
        with pytest.raises((ValueError, RuntimeError)):
            fake_mode.laid_out([wrong], [24, 16], cpu, lambda name: getattr(torch, name))


def constant(x):
    return x * torch.tensor([[1.0, -2.5], [math.inf, 0.125]]).t() + float("inf")


@pytest.mark.parametrize("model_of", [toy, lambda: (Calling(constant), (torch.rand(2, 2),))])
def test_a_graph_made_again_is_the_same_graph(model_of):
    model, args = model_of()
    region = capture_regions(model, args, {}, with_lines=False).regions[0]
    again = decode_graph(encode_graph(region.graph), torch.device("cpu"))
    before, after = list(region.graph.graph.nodes), list(again.graph.nodes)
    assert [(node.op, node.name, str(node.target)) for node in before] == [
        (node.op, node.name, str(node.target)) for node in after
    ]
    with torch.no_grad():
        found, expected = again(*region.example_args), region.graph(*region.example_args)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
