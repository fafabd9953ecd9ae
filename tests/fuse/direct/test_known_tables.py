"""Dynamo's code reads parameters from known tables; a model that changes is still seen, and no parameter is kept alive."""

from __future__ import annotations

import dis
import functools
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.direct.known_tables import Arguments, with_known_tables
from fusion_advisor.fuse.live.fused_model import FusedModel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.LayerNorm(8)})
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x, extra=None):
        x = self.parts["b"](torch.tanh(self.parts["a"](x))) + self.shift
        return {"out": x if extra is None else x * extra, "sum": x.sum()}


def wrapped(forward):
    @functools.wraps(forward)
    def outer(*args, **kwargs):
        return forward(*args, **kwargs)

    return outer


class Packed(Net):
    forward = wrapped(Net.forward)


@pytest.fixture(params=[Net, Packed])
def fused(request):
    torch.manual_seed(0)
    model, args = request.param().eval(), (torch.randn(4, 8), torch.randn(4, 8))
    live = capture_regions(model, args, {})
    made = FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, {}, live=live)
    with made, torch.no_grad():
        for _ in range(3):
            made(*args)
        yield made, args


def direct_of(made):
    (verified,) = made._verified.values()
    return verified.shortcut.direct


def instructions_of(code):
    return [(one.opname, one.argval) for one in dis.get_instructions(code)]


def test_the_way_from_the_model_is_gone(fused):
    made, _ = fused
    direct = direct_of(made)
    before, after = instructions_of(direct._compiled.code), instructions_of(direct._run.__code__)
    assert ("LOAD_ATTR", "_parameters") in before and ("LOAD_ATTR", "_modules") in before
    assert not {("LOAD_ATTR", "_parameters"), ("LOAD_ATTR", "_modules"), ("LOAD_ATTR", "_buffers")} & set(after)
    assert not any(str(value).startswith("record_pregraph") for _, value in after)
    hash(direct._run.__code__)  # debuggers keep code in dicts
    for _ in range(3):
        x, extra = torch.randn(4, 8), torch.randn(4, 8)
        ours, theirs = made(x, extra), made.model._call_impl(x, extra)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and list(ours) == list(theirs)


def test_values_that_change_are_read(fused):
    made, args = fused
    made.model.parts["a"].weight.mul_(2)
    made.model.shift.data = torch.randn(8)
    assert torch.equal(made(*args)["out"], made.model._call_impl(*args)["out"])
    assert direct_of(made).may_run(args, {})


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_was_replaced_is_seen(fused, name):
    made, args = fused
    layer = made.model.parts["a"]
    setattr(layer, name, torch.nn.Parameter(torch.randn_like(getattr(layer, name))))
    assert not direct_of(made).is_current()
    assert torch.equal(made(*args)["out"], made.model._call_impl(*args)["out"])


def test_no_parameter_is_kept_alive(fused):
    made, _ = fused
    (holder,) = (one for one in direct_of(made)._run.__code__.co_consts if hasattr(one, "t0"))
    held = [getattr(holder, name) for name in type(holder).__slots__]
    model = made.model
    assert {id(table) for table in held} >= {id(part._parameters) for part in model.parts.values()} | {id(model._buffers)}
    assert not any(isinstance(table, torch.Tensor) for table in held)


def test_another_submodule_is_seen(fused):
    made, args = fused
    made.model.parts["a"] = torch.nn.Linear(8, 8)
    assert torch.equal(made(*args)["out"], made.model._call_impl(*args)["out"])
    made.model.shift = torch.randn(8)
    assert torch.equal(made(*args)["out"], made.model._call_impl(*args)["out"])


def test_a_table_that_is_not_compared_is_not_trusted():
    model = Net()

    def read(self):
        return self._buffers["shift"]

    table = model._buffers

    def run(code):
        return type(read)(code, {})(model)

    assert with_known_tables(read.__code__, {"self": model}, lambda value: value is not table, {}) is not None
    assert with_known_tables(read.__code__, {"self": model}, lambda _: False, {}) is None
    code = with_known_tables(read.__code__, {"self": model}, lambda value: True, {})
    assert run(code) is model.shift and ("LOAD_ATTR", "_buffers") not in instructions_of(code)
    model._buffers = {"shift": torch.zeros(8)}  # what a comparison would have found
    assert run(code) is not model.shift


def test_what_decides_an_attribute_by_code_is_not_followed():
    class Own(Net):
        @property
        def tables(self):
            return SimpleNamespace(x=1)

    def read(self):
        return self.tables

    assert with_known_tables(read.__code__, {"self": Own()}, lambda _: True, {}) is None


def test_what_runs_after_a_call_is_left_alone():
    def read(self, other):
        other()
        return self._buffers

    assert with_known_tables(read.__code__, {"self": Net()}, lambda _: True, {}) is None


def test_arguments_in_one_tuple_are_followed_as_far_as_they_are_known():
    def read(*args):
        kept = args
        return kept[1], kept[0]._buffers["shift"], args

    model = Net()
    code = with_known_tables(read.__code__, {"args": Arguments((model,))}, lambda _: True, {})
    found = None if code is None else type(read)(code, {})(model, 5)
    assert found is None or (found[0] == 5 and found[1] is model.shift and found[2] == (model, 5))
