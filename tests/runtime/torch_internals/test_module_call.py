"""``nn.Module``: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import copy

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


def test_hook_tables_hold_every_forward_hook() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    tables = module_call.hook_tables(module)
    assert not any(tables)
    for add in (module.register_forward_hook, module[0].register_forward_pre_hook):
        handle = add(lambda *_: None)
        assert sum(map(len, tables)) == 1
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert any(tables)
    handle.remove()
    assert not any(tables)
