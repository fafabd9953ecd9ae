"""What dynamo compiled for a function is found with its guards, and a part of them is checked alone."""

from __future__ import annotations

import gc

import torch

from fusion_advisor.runtime.torch_internals import compiled_code


def compiled_addition():
    def graph_of(module, inputs):
        return module.forward

    def add(x, y):
        return x + y

    call = torch.compile(add, backend=graph_of, dynamic=False)
    call(torch.ones(3), torch.ones(3))
    (found,) = compiled_code.compiled_codes(add)
    return add, call, found


def test_the_code_is_found_with_its_graph():
    add, call, found = compiled_addition()
    assert compiled_code.innermost(call) is add
    assert torch.equal(found.graph(torch.ones(3), torch.ones(3))[0], torch.full((3,), 2.0))
    assert found.root.check({"x": torch.ones(3), "y": torch.ones(3)})
    assert not found.root.check({"x": torch.ones(3), "y": torch.ones(4)})
    assert found.is_alive()
    torch._dynamo.reset()
    assert not found.is_alive()


def test_code_whose_guarded_class_was_freed_is_left_out():
    def choose(x, kind):
        return x + 1 if kind is torch.Tensor else x + 2

    kind = type("Kind", (), {})
    call = torch.compile(choose, backend=lambda module, inputs: module.forward, dynamic=False)
    call(torch.ones(3), kind)
    assert len(list(compiled_code.compiled_codes(choose))) == 1
    del kind
    gc.collect()
    assert list(compiled_code.compiled_codes(choose)) == []


def test_a_part_of_the_guards_is_checked_alone():
    _, _, found = compiled_addition()
    nodes = {node.get_source(): node for node in found.root.get_child_managers()}
    only_x = found.only(lambda node: node is not nodes["L['y']"])
    assert only_x({"x": torch.ones(3), "y": torch.ones(4)})
    assert not only_x({"x": torch.ones(4), "y": torch.ones(3)})


def test_a_dicts_version_changes_with_its_items():
    table = {"a": 1}
    before = compiled_code.dict_versions([table, {}])
    assert compiled_code.dict_versions([table, {}])[0] == before[0]
    table["a"] = 2
    assert compiled_code.dict_versions([table])[0] != before[0]


def test_a_stance_is_seen():
    assert compiled_code.is_stance_default()
    with torch.compiler.set_stance("force_eager"):
        assert not compiled_code.is_stance_default()


def test_hooks_make_a_call_more_than_its_forward():
    layer = torch.nn.Linear(2, 2)
    assert compiled_code.has_plain_call(layer)
    layer.register_forward_hook(lambda *_: None)
    assert not compiled_code.has_plain_call(layer)


def test_dynamo_trusts_tensors_in_dicts_unless_configured():
    assert compiled_code.trusts_tensors_in_dicts()
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False):
        assert not compiled_code.trusts_tensors_in_dicts()


def test_code_that_goes_on_in_a_closure_of_its_own_is_no_whole_function():
    """Where the rest of a function has a closure, torch 2.11 keeps it as a constant and not by a global name."""
    shift = torch.ones(3)

    class Base:
        def forward(self, x):
            return x * 2

    class Broken(Base):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(y) + shift

    broken = Broken()
    call = torch.compile(broken.forward, backend=lambda module, inputs: module.forward, dynamic=False)
    assert torch.equal(call(torch.ones(3)), torch.full((3,), 5.0))
    assert list(compiled_code.compiled_codes(Broken.forward)) == []


def test_tensors_are_compared_at_once_and_none_may_be_there_twice():
    tensors = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)]
    check = compiled_code.same_tensors(tensors)
    assert check(*tensors) and check(torch.ones(2, 3), tensors[1])
    assert not check(torch.zeros(3, 2), tensors[1]) and not check(torch.zeros(3, 2).t(), tensors[1])
    assert not check(torch.zeros(2, 3).double(), tensors[1]) and not check(torch.zeros(2, 3, device="meta"), tensors[1])
    assert not check(torch.nn.Parameter(tensors[0]), tensors[1]) and not check(torch.zeros(2, 3, requires_grad=True), tensors[1])
    assert not compiled_code.same_tensors([torch.zeros(2), torch.ones(2)])(*[torch.zeros(2)] * 2)


def test_code_is_written_anew_and_stays_as_it_was():
    def double(x):
        return x * 2

    def thrice(instructions):
        place = next(place for place, one in enumerate(instructions) if one.opname == "LOAD_CONST" and one.argval == 2)
        instructions[place] = compiled_code.like(instructions[place], "LOAD_CONST", 3)
        return True

    made = compiled_code.rewritten(double.__code__, thrice)
    assert type(double)(made, {})(5) == 15 and double(5) == 10
    assert compiled_code.rewritten(double.__code__, lambda instructions: False) is None


def test_the_names_of_dynamos_functions_are_found():
    space = {"a": torch._dynamo.utils, "b": torch._dynamo, "c": torch._dynamo.utils}
    assert compiled_code.names_of_dynamos_functions(space) == {"a", "c"}
