"""Parts of a start without a trace: code and values described, effects of a call, layouts, graphs."""

from __future__ import annotations

import ast
import dataclasses
import gc
import json
import math
import weakref
from collections import OrderedDict

import pytest
import torch

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.capture.sizes.size_nodes import let_nodes_stand_for_sizes
from fusion_advisor.fuse.start.described import CannotDescribe, code_digest, described
from fusion_advisor.fuse.start.graph_text import decode_graph, encode_graph
from fusion_advisor.fuse.start.guard_tree import Differs
from fusion_advisor.fuse.start.object_changes import ObjectCode
from fusion_advisor.fuse.start.outputs import form_of, holds_number, maker, marked
from fusion_advisor.fuse.start.record import lasting_change
from fusion_advisor.fuse.start.size_conditions import all_hold, condition_of
from fusion_advisor.runtime.torch_internals import compiled_code, dispatcher, fake_mode, stored_sizes, symbolic_sizes
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


SEEN: list = []


def keeps_what_it_computes(x):
    """As models that keep their attention maps to look at: no constant stands in the list."""
    SEEN.append(x * 2)
    return x * 2


def makes_its_own(x):
    own = []
    own.append(x)
    return own[0] * 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (sets_another, (("a Holder", id(HELD)),)),
        (sets_the_same, ()),
        (sets_an_item, (("a dict", 0),)),
        (keeps_what_it_computes, (("a list", 0),)),
        (makes_its_own, ()),
    ],
)
def test_what_a_call_leaves_behind_is_noted(function, expected):
    before, HELD.same = HELD.number, 5
    assert effects_of(function, torch.ones(4)) == expected
    HELD.number = before


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (Written(attributes=[(HELD, "number", 0)], made=("cache.keys",)), ""),
        (Written(modules=[({}, "count", 0)]), "the call sets `count` of the model"),
        (Written(contents=[([], [])]), "the call changes a list, a dict or a set of the model"),
        (Written(tensors={"x": torch.ones(1)}), ""),
    ],
)
def test_what_a_call_changes_is_said(written, expected):
    assert lasting_change(written) == expected


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


@pytest.mark.parametrize(
    ("schema", "is_described"),
    [
        ("(Tensor x, Tensor[] more, float by, int[]? sizes=None) -> Tensor", True), ("(Tensor x, str path) -> Tensor", False),
        ("(Tensor(a!) x) -> Tensor", False), ("(Tensor x) -> int", False), ("(float by) -> Tensor", False),
    ],
)  # fmt: skip
def test_an_op_of_another_library_is_described_where_it_computes_tensors(schema, is_described):
    with torch.library._scoped_library("of_a_test", "DEF") as library:
        library.define(f"twice{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("twice", lambda x, *_: x * 2, "CompositeExplicitAutograd")
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        (x.meta["val"],) = fake_mode.fake_tensors([torch.rand(3)])
        made = graph.call_function(torch.ops.of_a_test.twice.default, (x, [x], 0.5) if "more" in schema else (x,))
        made.meta["val"] = x.meta["val"]
        graph.output((made,))
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        if not is_described:
            with pytest.raises(CannotDescribe, match="which may do more than compute"):
                encode_graph(module)
            return
        data = json.loads(json.dumps(encode_graph(module)))
        again = decode_graph(data, torch.device("cpu"))
        assert torch.equal(again(torch.ones(3))[0], torch.full((3,), 2.0))
    with pytest.raises(CannotDescribe, match="which torch does not have"):  # its library is not loaded
        decode_graph(data, torch.device("cpu"))


def of_sizes(x):
    """Values of sizes that are computed: a sum, a product, half of a size."""
    rows, width = x.shape
    return x.reshape(-1, 2) * torch.arange(rows + rows // 2 + width, dtype=x.dtype).sum() + x.sum()


def test_a_graph_with_open_sizes_made_again_is_the_same_graph_at_all_sizes():
    opened = capture_open(Calling(of_sizes), (torch.rand(6, 8),), {}, {"args.0": ("rows", "")})
    for node in opened.region.graph.graph.nodes:
        if str(node.target) == "aten.arange.default":  # a size that a pass writes into an op is computed by a node of our own
            node.args = (node.args[0].meta["val"],)
    let_nodes_stand_for_sizes(opened.region.graph)
    symbols = list(opened.names)
    data = json.loads(json.dumps(encode_graph(opened.region.graph, symbols)))
    guards = [stored_sizes.plain(guard, symbols) for guard in opened.guards]
    bounds = [symbolic_sizes.range_of(opened.environment, symbol) for symbol in symbols]
    sizes = stored_sizes.open_sizes([6], bounds, guards)
    again = decode_graph(data, torch.device("cpu"), sizes)
    assert encode_graph(again, sizes.symbols) == data and {"size", "size.floordiv"} <= {row[2] for row in data["nodes"]}
    assert [stored_sizes.plain(guard, sizes.symbols) for guard in map(sizes.expression, guards)] == guards
    for rows in (2, 6, 9):
        x = torch.rand(rows, 8)
        given = [rows if isinstance(one, int) else x for one in opened.region.example_args]
        with torch.no_grad():
            (found,), (expected,) = again(*given), opened.region.graph(*given)
        assert torch.equal(found, expected) and torch.equal(found, of_sizes(x))
    with pytest.raises(CannotDescribe, match="one size"):
        decode_graph(data | {"layouts": [], "storages": []}, torch.device("cpu"))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("2 <= L['x'].size()[1]", True), ("L['x'].size()[0] != 3", False), ("L['x'].stride()[0] == L['x'].size()[1]", True),
        ("2 <= L['x'].size()[0] <= 3", True), ("(L['x'].size()[0] * L['x'].size()[1]) % 4 == 0 or not 1 < 2", True),
        ("L['x'].size()[1] == min(512, L['x'].size()[1]) and -1 < 0", True), ("L['x'].size()[1] // 2 > L['x'].size()[0]", False),
    ],
)  # fmt: skip
def test_what_dynamo_asks_of_sizes_is_asked_again(text, fits):
    condition = json.loads(json.dumps(condition_of(ast.parse(text, mode="eval").body, lambda way: 0)))
    assert all_hold([condition])([torch.empty(3, 4)]) is fits
    assert all_hold([["<=", 3, ["size", 0, 0]], condition])([torch.empty(3, 4)]) is fits
    assert not all_hold([condition, ["!=", ["stride", 0, 1], 1]])([torch.empty(3, 4)])


@pytest.mark.parametrize(
    "text", ["L['x'].shape[0] == 1", "open(L['x'])", "L['x'].size(0) == 1", "f(L['x'].size()[0])", "1.5 < 2"]
)
def test_what_is_no_condition_on_sizes_is_not_described(text):
    with pytest.raises(CannotDescribe, match="dynamo asks"):
        condition_of(ast.parse(text, mode="eval").body, lambda way: 0)


def test_numbers_in_an_output_are_found():
    x = torch.ones(2)
    results = marked([x, 3, None, 3])
    assert form_of({"a": results[1], "b": results[3], "c": 3}, lambda _: None) == {
        "dict": [["a", {"number": 1}], ["b", {"number": 3}], ["c", 3]]
    }
    assert not holds_number(form_of(results[1:], lambda _: None))

    def form(value):
        return holds_number(form_of(value, lambda _: {"result": 3}))

    assert not any(map(form, (x, [x, None, "text", True], {"a": (x,), 3: x})))
    assert all(map(form, (1, [x, 2], {"a": (x, 2.5)}, (x, [{"b": 7}]))))


def deep(depth):
    return ["not", deep(depth - 1)] if depth else True


@pytest.mark.parametrize(
    "condition", [None, "size", [], ["size", 0], ["size", "0", 1], ["size", -1, 0], ["==", 1], ["eval", "1"], {"==": 1}, deep(99)]
)
def test_what_is_no_condition_is_refused(condition):
    with pytest.raises((LookupError, TypeError, ValueError)):
        all_hold([condition])


def test_conditions_on_tensors_of_other_ranks_or_that_divide_by_zero_raise():
    with pytest.raises(IndexError):
        all_hold([["<=", 2, ["size", 0, 1]]])([torch.empty(3)])
    with pytest.raises(ArithmeticError):
        all_hold([["==", ["%", 4, ["size", 0, 0]], 0]])([torch.empty(0)])


@dataclasses.dataclass
class Table(OrderedDict):
    """Items are the fields that are not None, as in the outputs of transformers."""

    first: object = None
    second: object = None
    third: object = None

    def __post_init__(self):
        Table.made += 1
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


Table.made = 0


@dataclasses.dataclass
class Summed(Table):
    """Has an item that is no field."""

    def __post_init__(self):
        super().__post_init__()
        self["all"] = self.first.sum()


@pytest.mark.parametrize(("kind", "runs"), [(Table, 0), (Summed, 1)])
def test_a_table_of_fields_is_made_as_its_own_code_makes_it(kind, runs):
    x, y = torch.ones(2), torch.zeros(3)
    template = kind(first=x, third=[y, 4])
    results = {id(x): 0, id(y): 1}
    form = form_of(template, lambda one: {"result": results[id(one)]})
    make, before = maker(json.loads(json.dumps(form)), template), Table.made
    made = make([x + 1, y + 1], [], {})
    assert Table.made - before == runs and type(made) is kind
    expected = kind(first=x + 1, third=[y + 1, 4])
    assert [*made] == [*expected] and [*vars(made)] == [*vars(expected)]
    assert torch.equal(made["first"], x + 1) and made["first"] is made.first and made["third"] is made.third
    assert torch.equal(made.third[0], y + 1) and made.second is None and "second" not in made
    assert make([x, y], [], {}).third is not made.third


class Held:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_outputs_of_all_kinds_are_made_anew():
    x, cache = torch.ones(2), Held(keys=torch.zeros(1), size=3)
    template = [(x,), (), {"a b": [x, None], 3: "text"}, cache, x]
    form = form_of(template, lambda one: {"input": 1} if one is x else {"result": 2}, {id(cache): "cache"})
    make = maker(form, template)
    made = make([0, 0, "r"], ["i", "j"], {"cache": "c"})
    assert made == [("j",), (), {"a b": ["j", None], 3: "text"}, "c", "j"]
    held = maker(form_of(cache, lambda _: {"result": 0}), cache)(["k"], [], {})
    assert type(held) is Held and vars(held) == {"keys": "k", "size": 3}


def test_objects_of_a_call_are_read_compared_and_set_by_written_code():
    def cache():
        return Held(layers=[Held(keys=torch.ones(1), size=3)], seen=1.0, all=[torch.ones(2)])

    sets = [
        ("cache.layers.0", "keys", {"result": 0}, None),
        ("cache", "seen", {"float": "0x1p+1"}, 2.0),
        ("cache", "odd name", 5, 5),
    ]
    code = ObjectCode(["cache.layers.0.keys", "cache.all.0"], [("cache.layers.0", "size", 3), ("cache", "seen", 1.0)], sets)
    call = {"cache": cache(), "more": 1}
    bound = code.bind(call)
    assert [id(one) for one in bound.tensors(call)] == [id(call["cache"].layers[0].keys), id(call["cache"].all[0])]
    bound.compare_numbers(call)
    for owner, name, other in ((call["cache"].layers[0], "size", True), (call["cache"], "seen", 1), (call["cache"], "seen", 2.0)):
        before = getattr(owner, name)
        setattr(owner, name, other)
        with pytest.raises(Differs, match=f"{name}` is {other}, and was {before}"):
            bound.compare_numbers(call)
        delattr(owner, name)
        with pytest.raises(Differs, match="is None"):
            bound.compare_numbers(call)
        setattr(owner, name, before)
    bound.set(["new"], [], call)
    assert vars(call["cache"].layers[0]) == {"keys": "new", "size": 3} and vars(call["cache"])["odd name"] == 5
    assert call["cache"].seen == 2.0
    del owner
    gone = weakref.ref(call.pop("cache"))
    gc.collect()
    assert gone() is None and bound is not None  # it holds none of the objects that the call passed
    for other in (Held(layers=[]), Held(layers=[cache()], all=torch.ones(1), seen=1.0)):
        with pytest.raises(Differs, match="objects hold others"):
            code.bind({"cache": other})
