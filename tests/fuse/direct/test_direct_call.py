"""A verified call runs what dynamo compiled without dynamo, and only while everything that its guards look at is the same."""

from __future__ import annotations

import operator
import types

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.direct.direct_call import Shortcut
from fusion_advisor.fuse.direct.unchanged import Unchanged
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.runtime.torch_internals import dynamo

factors = {"scale": 2.0}


def scaled(x, by=1.0):
    return x * by


class Settings:
    def __init__(self):
        self.bias = 1.0


class Layer(torch.nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.sizes, self.pair = [1.0, 2.0], (1.0, 1.5)

    def forward(self, x):
        return self.norm(torch.tanh(self.lin(x))) * self.sizes[0] * self.factor * self.pair[1]


class OtherLayer(Layer):
    def forward(self, x):
        return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.settings = Settings()

    def forward(self, x, y, *, offset=0.5):
        for layer in self.layers:
            x = scaled(layer(x))
        if hasattr(self, "missing"):
            x = x * self.missing
        return {"out": x * factors["scale"] + y * self.settings.bias + offset}


@pytest.fixture
def put_back():
    kept, code, defaults = scaled, scaled.__code__, scaled.__defaults__
    yield
    globals()["scaled"], kept.__code__, kept.__defaults__ = kept, code, defaults
    Layer.factor = 1.0
    if "missing" in vars(Net):
        del Net.missing


@pytest.fixture(params=["words", "python"])
def fused(request, put_back):
    torch.manual_seed(0)
    model, args = Net().eval(), (torch.randn(4, 8), torch.randn(4, 8))
    live = capture_regions(model, args, {})
    made = FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, {}, live=live)
    with made, torch.no_grad():
        for _ in range(2):
            made(*two())
        (verified,) = made._verified.values()
        graphs = made._rewritten.runners
        verified.shortcut = Shortcut(model, made._compiled, graphs, in_words=request.param == "words")
        made(*two())
        yield made
    factors["scale"] = 2.0


def direct_of(fused):
    (verified,) = fused._verified.values()
    return verified.shortcut.direct


def two():
    return torch.randn(4, 8), torch.randn(4, 8)


def test_the_next_call_does_without_dynamo(fused):
    def refuse(*args, **kwargs):
        raise AssertionError("dynamo was asked")

    assert direct_of(fused) is not None
    fused._compiled = refuse
    for _ in range(3):
        x, y = two()
        torch.testing.assert_close(fused(x, y)["out"], fused._original(x, y)["out"], rtol=0, atol=0)
    assert fused.fallbacks == {}


def test_other_globals_and_attributes_change_nothing(fused):
    direct = direct_of(fused)
    globals()["counter"] = 1
    assert direct.may_run(two(), {})
    globals()["counter"] = 2
    assert direct.may_run(two(), {})
    del globals()["counter"]
    assert direct.may_run(two(), {})


def test_a_change_that_the_graph_does_not_see_is_noted_anew(fused):
    before = direct_of(fused)
    fused.model.settings.other = 1
    assert not before.may_run(two(), {})
    for _ in range(2):
        fused(*two())
    assert direct_of(fused) is not before and direct_of(fused).may_run(two(), {})
    assert fused.fallbacks == {}


def test_weights_stay_live(fused):
    fused.model.layers[1].lin.weight.data.mul_(3)
    fused.model.layers[1].norm.weight.data = torch.randn(8)
    x, y = two()
    assert direct_of(fused).may_run((x, y), {})
    torch.testing.assert_close(fused(x, y)["out"], fused._original(x, y)["out"], rtol=0, atol=0)


def replace_dict(model):
    layer = model.layers[0]
    layer.__dict__ = {**layer.__dict__, "sizes": [3.0, 2.0]}


CHANGES = {
    "attribute": lambda model: setattr(model.layers[2].norm, "eps", 0.5),
    "submodule": lambda model: operator.setitem(model.layers, 1, torch.nn.Identity()),
    "no submodule": lambda model: operator.delitem(model.layers, 2),
    "parameter": lambda model: setattr(
        model.layers[0].lin, "bias", torch.nn.Parameter(torch.ones(8, dtype=torch.float64).float())
    ),
    "no parameter": lambda model: setattr(model.layers[0].lin, "bias", None),
    "class": lambda model: setattr(model.layers[0], "__class__", OtherLayer),
    "dict": replace_dict,
    "settings": lambda model: setattr(model.settings, "bias", 4.0),
    "list": lambda model: operator.setitem(model.layers[0].sizes, 0, 5.0),
    "longer list": lambda model: model.layers[0].sizes.append(3.0),
    "other list": lambda model: setattr(model.layers[1], "sizes", [2.0, 2.0]),
    "global": lambda model: operator.setitem(factors, "scale", 7.0),
    "forward": lambda model: setattr(model.layers[0], "forward", types.MethodType(OtherLayer.forward, model.layers[0])),
    "own forward": lambda model: setattr(model, "forward", lambda x, y: {"out": y}),
    "training": lambda model: model.layers[0].norm.train(),
    "attribute of a class": lambda model: setattr(Layer, "factor", 3.0),
    "getattr of a class": lambda model: setattr(Net, "missing", 3.0),
    "attribute that was missing": lambda model: setattr(model, "missing", 4.0),
    "parameter that was missing": lambda model: model.register_parameter("missing", torch.nn.Parameter(torch.ones(8))),
    "tuple": lambda model: setattr(model.layers[1], "pair", (1.0, 9.0)),
    "defaults": lambda model: setattr(scaled, "__defaults__", (5.0,)),
    "code": lambda model: setattr(scaled, "__code__", (lambda x, by=1.0: x - by).__code__),
    "function": lambda model: operator.setitem(globals(), "scaled", lambda x: x + 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("ignore:fusion-advisor runs the original ops")
def test_a_change_is_seen(fused, change):
    if change is CHANGES["defaults"] and not dynamo.isolates():
        pytest.skip("before torch 2.12 dynamo itself runs a function whose defaults were exchanged as it was")
    direct = direct_of(fused)
    assert direct.may_run(two(), {})
    change(fused.model)
    assert not direct.may_run(two(), {})
    for _ in range(4):
        x, y = two()
        torch.testing.assert_close(fused(x, y)["out"], fused._original(x, y)["out"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(5, 8), torch.randn(5, 8)),
        (torch.randn(4, 8).double(), torch.randn(4, 8)),
        (torch.randn(8, 4).t(), torch.randn(4, 8)),
        (torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)),
        (*[torch.randn(4, 8)] * 2,),
    ],
    ids=["size", "dtype", "stride", "gradient", "one tensor twice"],
)
def test_other_inputs_are_refused(fused, args):
    assert direct_of(fused).may_run(two(), {})
    assert not direct_of(fused).may_run(args, {})
    assert direct_of(fused).may_run(two(), {})  # nothing of the refused call is left in the guards
    assert not direct_of(fused).may_run(two(), {"offset": 0.25})
    assert direct_of(fused).may_run(two(), {"offset": 0.5})


def test_global_state_is_compared(fused):
    with torch.enable_grad():
        assert not direct_of(fused).may_run(two(), {})
    with torch.autocast("cpu"):
        assert not direct_of(fused).may_run(two(), {})
    with torch.compiler.set_stance("force_eager"):
        assert not direct_of(fused).may_run(two(), {})
    with torch.device("meta"):
        assert not direct_of(fused).may_run((torch.randn(4, 8, device="cpu"), torch.randn(4, 8, device="cpu")), {})
    for switch, now in (
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
    ):
        switch(torch.float64 if now is torch.float32 else not now)
        try:
            assert not direct_of(fused).may_run((torch.randn(4, 8).float(), torch.randn(4, 8).float()), {})
        finally:
            switch(now)
    assert direct_of(fused).may_run(two(), {})


def test_what_dynamo_forgot_is_not_run(fused):
    direct = direct_of(fused)
    torch._dynamo.reset()
    assert not direct.may_run(two(), {})


def test_a_reverted_model_keeps_none_of_it(fused):
    fused.revert()
    assert direct_of(fused) is None


def test_equal_items_that_are_set_at_each_call_are_left_to_dynamo(fused):
    sizes = fused.model.layers[0].sizes
    for number in range(8):
        sizes[1] = float(f"{number}.5")  # no guard asks for it
        sizes[0] = float("1.0")
        fused(*two())
    direct = direct_of(fused)
    sizes[0] = float("1.0")
    assert direct is not None and direct.may_run(two(), {})
    sizes[0] = 3.0
    assert not direct.may_run(two(), {})


class Part:
    """A layer of a cache."""

    kind, is_filled = "plain", True

    def __init__(self):
        self.keys = torch.zeros(4, 0)

    def update(self, keys):
        self.keys = torch.cat((self.keys, keys), 1)
        return self.keys


class Memory:
    def __init__(self):
        self.layers, self.offset = [Part(), Part()], 1.0


class Appending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)

    def forward(self, x, memory):
        for layer in memory.layers:
            x = torch.tanh(self.lin(x)) + layer.update(x).sum(1, keepdim=True) * memory.offset
            x = x if layer.kind == "plain" and layer.is_filled else x * 2
        return x


def filled(columns=6):
    memory = Memory()
    for layer in memory.layers:
        layer.keys = torch.ones(4, columns)
    return memory


@pytest.fixture
def appending():
    torch.manual_seed(0)
    model, example = Appending().eval(), (torch.randn(4, 8), filled())
    live = capture_regions(model, example, {})
    live.written.rewind()
    made = FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, example, {}, live=live)
    with made, torch.no_grad():
        for _ in range(3):
            made(torch.randn(4, 8), filled())
        yield made
    Part.kind = "plain"


def test_a_cache_that_grows_is_passed_by_dynamo(appending):
    direct = direct_of(appending)
    x, memory, other = torch.randn(4, 8), filled(), filled()
    assert direct.may_run((x, memory), {})
    torch.testing.assert_close(appending(x, memory), appending._original(x, other), rtol=0, atol=0)
    for layer, expected in zip(memory.layers, other.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=0, atol=0)
    assert not direct.may_run((x, memory), {})  # it has grown
    assert appending.fallbacks == {}


CHANGED_CACHES = {
    "class": lambda memory: setattr(memory.layers[1], "__class__", type("Sub", (Part,), {"kind": "other"})),
    "class attribute": lambda memory: setattr(Part, "kind", "other"),
    "own attribute": lambda memory: setattr(memory.layers[0], "kind", "other"),
    "plain value": lambda memory: setattr(memory, "offset", 2.0),
    "layer less": lambda memory: memory.layers.pop(),
    "tensor": lambda memory: setattr(memory.layers[0], "keys", torch.ones(4, 5)),
    "dtype": lambda memory: setattr(memory.layers[0], "keys", torch.ones(4, 6).bfloat16()),
    "resized": lambda memory: memory.layers[0].keys.resize_(4, 3),
    "one tensor twice": lambda memory: setattr(memory.layers[0], "keys", memory.layers[1].keys),
    "layout": lambda memory: setattr(memory.layers[1], "keys", torch.ones(6, 4).t()),
}


@pytest.mark.parametrize("change", CHANGED_CACHES.values(), ids=CHANGED_CACHES)
@pytest.mark.filterwarnings("ignore:fusion-advisor runs the original ops")
def test_another_cache_goes_through_dynamo(appending, change):
    direct, x, memory = direct_of(appending), torch.randn(4, 8), filled()
    change(memory)
    assert not direct.may_run((x, memory), {})
    again = filled()
    change(again)
    torch.testing.assert_close(appending(x, memory), appending._original(x, again), rtol=1e-6, atol=1e-6)


class Node:
    """A node of a guard tree with nothing below it."""

    def get_leaf_guards(self):
        return [types.new_class("LENGTH_CHECK")()]

    def get_accessors(self):
        return []

    get_child_managers = get_accessors


def test_what_may_change_unseen_stays_with_dynamo():
    assert Unchanged().follow(Node(), (1, 2))
    assert not Unchanged(with_lists=False).follow(Node(), [1, 2])
