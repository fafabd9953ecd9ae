"""One graph for all sizes: it is traced once, says what it takes for granted, and at each size is the graph of that size."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.sizes.one_size import at_one_size, runnable_at
from fusion_advisor.capture.sizes.open_capture import OneSizeOnly, call_tensors, capture_open, sizes_of
from fusion_advisor.runtime.torch_internals import symbolic_sizes
from tests import tiny


class Rows(torch.nn.Module):
    """Scales rows and looks at the length as ``look`` says."""

    def __init__(self, look=lambda x: x):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.look = look

    def forward(self, x):
        x = self.look(x)
        return (x * self.weight).flatten(0, 1)


DIMS = {"x": ("batch", "seq", "")}


def opened(look=lambda x: x, batch=3, seq=11):
    return capture_open(Rows(look).eval(), (), {"x": torch.randn(batch, seq, 8)}, DIMS)


def seen_at(found, batch, seq):
    """What the graph is called with at some sizes."""
    found.region.route.seen = seen = []
    with torch.no_grad():
        found.live.compiled.call(x=torch.randn(batch, seq, 8))
    found.region.route.seen = None
    return seen[0][1]


def test_one_trace_serves_every_size():
    found = opened()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for batch, seq in ((2, 2), (16, 4096), (5, 3)):
        args = seen_at(found, batch, seq)
        assert found.region.graph(*args)[0].shape == (batch * seq, 8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert set(found.names.values()) == {"batch", "seq"}
    assert found.guards == ()


def window(x):
    """The last tokens, as a cache with a sliding window keeps them."""
    return (x * 2.0)[:, -7:]


@pytest.mark.parametrize(("seq", "sizes"), [(11, (8, 11, 40)), (4, (2, 4, 6))])
def test_a_slice_of_the_last_tokens_follows_from_the_length(seq, sizes):
    """Torch before 2.12 does not say how long it is where a length may be 1: what decides it is asked there."""
    found = opened(window, seq=seq)
    assert all(found.holds({"batch": 5, "seq": size}) for size in sizes)
    for size in (*range(2, 12), 40):
        if found.holds({"batch": 5, "seq": size}):
            args = seen_at(found, 5, size)
            (x,) = (one for one in args if isinstance(one, torch.Tensor) and one.dim() == 3)
            result = found.region.graph(*args)[0]
            assert result.shape == (5 * min(size, 7), 8) and torch.equal(result, Rows(window)(x))
    if torch.__version__ < "2.12":
        assert not found.holds({"batch": 1, "seq": seq}) and not found.holds({"batch": 5, "seq": 1})


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_the_graph_of_one_size_has_the_same_ops_in_the_same_order(name):
    model, kwargs = getattr(tiny, name)()
    kwargs["input_ids"] = torch.randint(1, 200, (3, 11))
    found = capture_open(model, (), kwargs, {"input_ids": ("batch", "seq")})
    for batch, seq in ((2, 7), (5, 33)):
        ids = torch.randint(1, 200, (batch, seq))
        found.region.route.seen = seen = []
        with torch.no_grad():
            expected = found.live.compiled.call(**{**kwargs, "input_ids": ids}).logits
        found.region.route.seen = None
        one = at_one_size(found, seen[0][1])
        ops, _ = describe(one.regions[0])
        there, _ = describe(found.region, symbols=found.symbols({"batch": batch, "seq": seq}))
        assert [(op.target, op.outputs, op.op_class, op.alias_of) for op in ops if op.outputs] == [
            (op.target, op.outputs, op.op_class, op.alias_of) for op in there if op.outputs
        ]
        with torch.no_grad():
            torch.testing.assert_close(one.regions[0].graph(*seen[0][1])[0], expected)
            ran = runnable_at(found, seen[0][1])
            assert torch.equal(ran.graph(*seen[0][1])[0], one.regions[0].graph(*seen[0][1])[0])
            assert torch.equal(ran.original.forward(*ran.example_args)[0], expected)
    assert len(symbolic_sizes.assumptions_of(found.environment)) == len(found.guards)


def test_records_remember_how_their_numbers_follow_from_the_sizes():
    found = opened()
    leaves = {}
    tracked, _ = describe(found.region, symbols=found.symbols({"batch": 3, "seq": 11}), leaves=leaves)
    flat = next(op for op in tracked if op.target.startswith("aten.flatten"))
    (out,) = flat.outputs
    assert out.shape == (33, 8)
    values = [symbolic_sizes.at_sizes(leaf, found.symbols({"batch": 5, "seq": 7})) for leaf in leaves]
    assert values[out.shape[0].form[1]] == 35
    assert type(out.shape[1]) is int


def test_a_branch_on_a_size_stands_in_the_guards():
    found = opened(lambda x: x.relu() if x.shape[1] > 32 else x, seq=11)
    assert found.holds({"batch": 3, "seq": 32})
    assert not found.holds({"batch": 3, "seq": 33})
    assert found.holds_alone("seq", 32)
    assert not found.holds_alone("seq", 33)
    assert found.holds_alone("batch", 1000)


@pytest.mark.parametrize("target", [0, -2, (0, 1), None])
def test_that_a_squeeze_keeps_a_dim_stands_in_the_guards(target):
    found = opened(lambda x: x.squeeze() if target is None else x.squeeze(target))
    is_first, is_second = target in (0, (0, 1), None), target in (-2, (0, 1), None)
    assert found.holds({"batch": 1, "seq": 5}) != is_first
    assert found.holds({"batch": 3, "seq": 1}) != is_second
    assert found.holds({"batch": 2, "seq": 2})


def test_a_computed_size_that_a_squeeze_keeps_stands_in_the_guards():
    found = opened(lambda x: x.flatten(0, 1).squeeze(0)[None])
    assert not found.holds({"batch": 1, "seq": 1})
    assert found.holds({"batch": 1, "seq": 2}) and found.holds({"batch": 2, "seq": 1})


def test_a_combination_that_is_ruled_out_is_a_hole():
    found = opened(lambda x: x if x.shape[0] * x.shape[1] != 64 else x.relu())
    assert not found.holds({"batch": 4, "seq": 16})
    assert found.holds_but_for_holes({"batch": 4, "seq": 16})
    assert found.holds({"batch": 4, "seq": 17})


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (lambda x: x + torch.ones(11, 1), "the model takes size 11 of `.*x`, dim 1, for a constant"),
        (lambda x: (x.relu(), torch._dynamo.graph_break())[0] + 1, "graphs"),
    ],
)
def test_what_serves_one_size_alone_is_refused_with_the_reason(look, words):
    with pytest.raises(OneSizeOnly, match=words):
        opened(look)


def test_tensors_that_disagree_on_a_dim_have_no_sizes():
    tensors = call_tensors((torch.ones(2, 3),), {"y": torch.ones(2, 4), "z": [torch.ones(5)]})
    assert list(tensors) == ["args.0", "y", "z.0"]
    assert sizes_of(tensors, {"args.0": ("b", "s"), "y": ("b", "")}) == {"b": 2, "s": 3}
    assert sizes_of(tensors, {"args.0": ("b", "s"), "y": ("b", "s")}) is None
    assert sizes_of(tensors, {"args.0": ("b",)}) is None
    assert sizes_of(tensors, {"gone": ("b",)}) is None


def test_a_size_that_no_input_hands_over_is_read_off_a_tensor():
    found = opened(lambda x: x.transpose(0, 1).contiguous())
    for name, (slot, dim) in found.slots().items():
        args = seen_at(found, 4, 9)
        assert (args[slot] if dim is None else args[slot].shape[dim]) == {"batch": 4, "seq": 9}[name]


class Counts(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        self.calls.add_(1)
        return x.flatten(0, 1) * 2


def test_a_buffer_that_is_written_to_is_refused_by_name():
    with pytest.raises(OneSizeOnly, match="writes to `calls`, which the model keeps"):
        capture_open(Counts().eval(), (), {"x": torch.randn(3, 11, 8)}, DIMS)


@torch.compiler.disable
def looked_at(x, part):
    return x if part is None else x[:, : x.shape[1] // part]


class Ahead(torch.nn.Module):
    """Calls what no graph has, ahead of its first op."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return looked_at(x, self.part).sin() * 2


class Sliced(torch.nn.Module):
    """Reads a row of a table at the end of a length."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(64, 8))

    def forward(self, x):
        length = x.shape[1]
        return x * 2, self.table[length - 1 : length].sum(0)


def test_sizes_that_a_trace_leaves_open_are_refused_with_the_op():
    try:
        found = capture_open(Sliced().eval(), (), {"x": torch.randn(3, 11, 8)}, DIMS)
    except OneSizeOnly as error:
        assert str(error).endswith("do not follow from the sizes of the call")  # torch 2.13 gives the slice a size of its own
    else:
        assert sorted(found.names.values()) == ["batch", "seq"] and describe(found.region, symbols=found.symbols_now())


def test_python_ahead_of_the_graph_that_makes_its_input_is_refused():
    with pytest.raises(OneSizeOnly, match=r"Python makes `input\.\d` ahead of the graph"):
        capture_open(Ahead(2).eval(), (), {"x": torch.randn(3, 11, 8)}, DIMS)
    found = capture_open(Ahead(None).eval(), (), {"x": torch.randn(3, 11, 8)}, DIMS)
    assert sorted(found.names.values()) == ["batch", "seq"]


def test_what_the_call_is_given_may_be_written_to_and_is_put_back():
    found = opened(lambda x: x.add_(1))
    assert list(found.live.written.tensors) == ["x"]
    x = torch.zeros(2, 5, 8)
    written = found.written_in((), {"x": x})
    found.live.compiled.call(x=x)
    assert x.eq(1).all()
    written.restore()
    assert x.eq(0).all()
