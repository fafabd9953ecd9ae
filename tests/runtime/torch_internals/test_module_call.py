"""``nn.Module``: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fusion_advisor.runtime.torch_internals import module_call
from tests.tiny import Toy


def test_set_compiled_call_touches_one_instance_and_is_undone():
    model, other = Toy(), Toy()
    x = torch.randn(2, 32)
    keys = set(model.__dict__)
    assert module_call.set_compiled_call(model, lambda x: "mine") is None
    assert model(x) == "mine"
    assert isinstance(other(x), torch.Tensor)
    assert module_call.set_compiled_call(model, None)(x) == "mine"
    assert isinstance(model(x), torch.Tensor)
    assert set(model.__dict__) == keys


def test_set_compiled_call_is_the_slot_of_module_compile():
    model = Toy()
    model.compile(backend="eager")
    before = model.__dict__["_compiled_call_impl"]
    assert module_call.set_compiled_call(model, lambda x: "mine") is before
    module_call.set_compiled_call(model, before)
    assert model.__dict__["_compiled_call_impl"] is before


def test_the_compiled_call_is_left_out_of_copies():
    model = Toy()
    module_call.set_compiled_call(model, lambda x: "mine")
    assert isinstance(copy.deepcopy(model)(torch.randn(2, 32)), torch.Tensor)


def test_original_call_runs_forward_and_hooks_whatever_is_set():
    model = Toy()
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    module_call.set_compiled_call(model, lambda x: "mine")
    assert isinstance(module_call.original_call(model)(torch.randn(2, 32)), torch.Tensor)
    assert seen == [1]


def test_a_trace_sees_a_compiled_call_that_is_shown_and_copies_and_pickles_are_their_own():
    model, x = Toy(), torch.randn(2, 32)
    keys = set(model.__dict__)
    module_call.set_compiled_call(model, torch.compiler.disable(lambda x: x + 1, reason="mine"))

    def doubled(one, x):
        return 2 * one(x)

    module_call.show_compiled_call(model)
    assert torch.equal(torch.compile(doubled, backend="eager")(model, x), 2 * (x + 1))
    with pytest.raises(Exception, match="mine"):
        torch.compile(lambda one, x: 3 * one(x), backend="eager", fullgraph=True)(model, x)
    own = module_call.original_call(model)(x)
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), own) and torch.equal(torch.compile(doubled, backend="eager")(other, x), 2 * own)
    assert copy.deepcopy(model).__call__.__self__ is not model and torch.equal(model.__call__(x), x + 1)
    module_call.hide_compiled_call(model)
    module_call.set_compiled_call(model, None)
    assert set(model.__dict__) == keys
    torch.compiler.reset()


def test_what_somebody_else_put_into_the_place_of_call_stays():
    model = Toy()
    model.__dict__["__call__"] = theirs = object()
    module_call.show_compiled_call(model)
    module_call.hide_compiled_call(model)
    assert model.__dict__["__call__"] is theirs


def test_hook_tables_hold_every_hook() -> None:
    module, everywhere = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.nn.modules.module
    tables, both = module_call.hook_tables(module), module_call.hook_tables(module, of_backward=True)
    assert not any(both)
    forward = (
        module.register_forward_hook, module[0].register_forward_pre_hook, everywhere.register_module_forward_hook,
        everywhere.register_module_forward_pre_hook,
    )  # fmt: skip
    backward = (
        module.register_full_backward_hook, module[0].register_full_backward_pre_hook, module[1].register_backward_hook,
        everywhere.register_module_full_backward_hook, everywhere.register_module_full_backward_pre_hook,
    )  # fmt: skip
    for add in (*forward, *backward):
        handle = add(lambda *_: None)
        assert sum(map(len, tables)) == (add in forward) and sum(map(len, both)) == 1
        handle.remove()
    assert not any(both)


def test_slots_hold_what_was_put_in_and_are_filled_with_nothing_else():
    model = Toy()
    assert module_call.call_slots(model) == {}
    module_call.set_compiled_call(model, torch.sin)
    module_call.show_compiled_call(model)
    slots = module_call.call_slots(model)
    assert set(slots) == {"_compiled_call_impl", "__call__"}
    module_call.fill_call_slots(model, {})
    assert module_call.call_slots(model) == {} and isinstance(model(torch.randn(2, 32)), torch.Tensor)
    module_call.fill_call_slots(model, slots)
    assert module_call.call_slots(model) == slots and torch.equal(model(torch.ones(2)), torch.ones(2).sin())
