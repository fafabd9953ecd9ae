"""A cache that calls pass again and again is compared in bulk, and each change that dynamo's guards see is seen."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.direct.passed_object import PassedObject
from fusion_advisor.fuse.direct.words import words_are_readable
from fusion_advisor.fuse.live.call_signature import signature
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.ranks.shard import plan_of, shard
from tests import tiny

pytestmark = pytest.mark.skipif(not words_are_readable(), reason="another Python, or no C++ compiler")


class Slot:
    """A layer of a cache."""

    kind, is_filled = "plain", True

    def __init__(self):
        self.keys, self.count, self.limit = torch.ones(4, 4), torch.ones(4, 8), 7


class Memory:
    scale = 1.0

    def __init__(self):
        self.layers, self.offset = [Slot(), Slot()], 1.0

    @property
    def is_whole(self):
        return len(self.layers) > 0 and self.layers[-1].is_filled


class Writing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)
        self.register_buffer("base", torch.ones(4, 8))

    def forward(self, x, memory):
        x = x + self.base
        for layer in memory.layers:
            x = torch.tanh(self.lin(x)) * memory.offset + layer.count * memory.scale
            layer.keys.add_(x[:, :4])
            x = x + layer.keys.sum() * layer.limit
            x = x if layer.kind == "plain" and layer.is_filled and memory.is_whole else x * 2
        return x


def fused_of(model, args, kwargs):
    live = capture_regions(model, args, kwargs)
    live.written.rewind()
    return FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, kwargs, live=live), live


@pytest.fixture
def writing():
    torch.manual_seed(0)
    memory = Memory()
    made, _ = fused_of(Writing().eval(), (torch.randn(4, 8), memory), {})
    with made, torch.no_grad():
        for _ in range(12):
            made(torch.randn(4, 8), memory)
        yield made, memory
    Slot.kind, Memory.scale = "plain", 1.0


def direct_of(made):
    (verified,) = made._verified.values()
    return verified.shortcut.direct


def may_run(made, *args, **kwargs):
    leaves, objects = [], []
    signature(args, kwargs, leaves, made._objects, objects)
    return direct_of(made).may_run(args, kwargs, leaves, objects)


def all_hold(made, *args, **kwargs):
    return direct_of(made).passes_all_guards(direct_of(made).variables(args, kwargs))


def noted(made):
    return [one for seen in made._objects.values() for one in seen.followed.values() if type(one) is PassedObject]


def copy_of(memory):
    made = object.__new__(type(memory))
    vars(made).update({**vars(memory), "layers": []})  # in the same order
    copies = {}
    for layer in memory.layers:
        one = object.__new__(type(layer))
        for name, value in vars(layer).items():
            is_tensor = isinstance(value, torch.Tensor)
            vars(one)[name] = copies.setdefault(id(value), value.detach().clone()) if is_tensor else value
        made.layers.append(one)
    return made


def refuse(*args, **kwargs):
    raise AssertionError("dynamo was asked about the whole call")


def test_a_cache_that_is_passed_again_is_not_asked_about(writing):
    made, memory = writing
    assert len(noted(made)) == 1
    direct_of(made)._check = refuse
    for _ in range(3):
        x, other = torch.randn(4, 8), copy_of(memory)
        torch.testing.assert_close(made(x, memory), made._original(x, other), rtol=0, atol=0)
        torch.testing.assert_close(memory.layers[1].keys, other.layers[1].keys, rtol=0, atol=0)
    assert made.fallbacks == {}


def test_another_cache_like_it_is_asked_about(writing):
    made, memory = writing
    x, other = torch.randn(4, 8), copy_of(memory)
    assert may_run(made, x, other)
    direct_of(made)._check = refuse
    with pytest.raises(AssertionError, match="dynamo was asked"):
        may_run(made, x, other)


def test_a_change_that_no_guard_sees_is_asked_about(writing):
    made, memory = writing
    memory.note = "later"
    assert all_hold(made, torch.randn(4, 8), memory) and may_run(made, torch.randn(4, 8), memory)


def replace_dict(memory):
    layer = memory.layers[0]
    layer.__dict__ = {**vars(layer), "limit": 9}


CHANGES = {
    "class": lambda memory: setattr(memory.layers[1], "__class__", type("Sub", (Slot,), {"kind": "other"})),
    "class of the cache": lambda memory: setattr(memory, "__class__", type("Sub", (Memory,), {"scale": 3.0})),
    "class attribute": lambda memory: setattr(Slot, "kind", "other"),
    "class attribute of the cache": lambda memory: setattr(Memory, "scale", 2.0),
    "own attribute": lambda memory: setattr(memory.layers[0], "kind", "other"),
    "plain value": lambda memory: setattr(memory, "offset", 2.0),
    "plain value of a layer": lambda memory: setattr(memory.layers[1], "limit", 3),
    "dict": replace_dict,
    "layer less": lambda memory: memory.layers.pop(),
    "other list": lambda memory: setattr(memory, "layers", memory.layers[:1]),
    "one layer twice": lambda memory: memory.layers.__setitem__(0, memory.layers[1]),
    "size": lambda memory: setattr(memory.layers[0], "count", torch.ones(1, 8)),
    "size in place": lambda memory: memory.layers[0].count.resize_(1, 8),
    "dtype": lambda memory: setattr(memory.layers[0], "count", torch.ones(4, 8).bfloat16()),
    "dtype in place": lambda memory: setattr(memory.layers[0].keys, "data", torch.ones(4, 4).double()),
    "strides": lambda memory: setattr(memory.layers[1], "keys", torch.ones(4, 4).t()),
    "strides in place": lambda memory: memory.layers[1].keys.t_(),
    "one tensor twice": lambda memory: setattr(memory.layers[0], "keys", memory.layers[1].keys),
    "gradient": lambda memory: memory.layers[0].count.requires_grad_(),
    "class of a tensor": lambda memory: setattr(memory.layers[0], "count", torch.nn.Parameter(torch.ones(4, 8))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("ignore:fusion-advisor runs the original ops")
def test_a_change_in_the_same_cache_is_seen(writing, change):
    made, memory = writing
    assert may_run(made, torch.randn(4, 8), memory) and len(noted(made)) == 1
    change(memory)
    x = torch.randn(4, 8)
    assert not all_hold(made, x, memory) and not may_run(made, x, memory)
    other = copy_of(memory)
    torch.testing.assert_close(made(x, memory), made._original(x, other), rtol=1e-6, atol=1e-6)


def test_a_mark_on_a_tensor_is_seen(writing):
    made, memory = writing
    torch._dynamo.mark_dynamic(memory.layers[0].count, 0)
    x = torch.randn(4, 8)
    assert not all_hold(made, x, memory) and not may_run(made, x, memory)


def test_an_input_that_is_a_tensor_of_the_cache_is_seen(writing):
    made, memory = writing
    own = memory.layers[0].count
    assert not all_hold(made, own, memory) and not may_run(made, own, memory)


def test_a_buffer_that_is_a_tensor_of_the_cache_is_seen(writing):
    made, memory = writing
    made.model.base = memory.layers[0].count
    assert not may_run(made, torch.randn(4, 8), memory)


def test_other_arguments_and_global_state_are_still_asked_about(writing):
    made, memory = writing
    for x in (torch.randn(2, 8), torch.randn(4, 8).double(), torch.randn(8, 4).t()):
        assert not may_run(made, x, memory)
    with torch.enable_grad():
        assert not may_run(made, torch.randn(4, 8), memory)
    with torch.inference_mode():
        assert all_hold(made, torch.randn(4, 8), memory) == may_run(made, torch.randn(4, 8), memory)


def test_a_cache_is_freed_when_its_user_lets_go_of_it():
    torch.manual_seed(0)
    memory = Memory()
    made, live = fused_of(Writing().eval(), (torch.randn(4, 8), memory), {})
    del live
    with made, torch.no_grad():
        own = copy_of(memory)
        for _ in range(12):
            made(torch.randn(4, 8), own)
        (one,) = noted(made)
        parts = [weakref.ref(part) for part in (own, own.layers[0], own.layers[0].keys, one)]
        assert all(part() is not None for part in parts)
        del own, one
        gc.collect()
        assert [part() for part in parts] == [None] * 4


def test_a_reverted_model_keeps_none_of_it(writing):
    made, _ = writing
    made.revert()
    assert noted(made) == []


def wrapped(forward):
    @functools.wraps(forward)
    def outer(*args, **kwargs):
        return forward(*args, **kwargs)

    return outer


class Wrapped(Writing):
    forward = wrapped(Writing.forward)


def test_a_model_whose_forward_takes_all_in_one_tuple_is_compared_in_bulk():
    torch.manual_seed(0)
    memory = Memory()
    made, _ = fused_of(Wrapped().eval(), (torch.randn(4, 8),), {"memory": memory})
    with made, torch.no_grad():
        for _ in range(12):
            made(torch.randn(4, 8), memory=memory)
        direct = direct_of(made)
        assert any(node.get_source() == "L['args'][0]" for node in direct._unchanged.roots.values())
        assert len(noted(made)) == 1 and may_run(made, torch.randn(4, 8), memory=memory)
        made.model.lin.bias = None
        assert not may_run(made, torch.randn(4, 8), memory=memory)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@contextlib.contextmanager
def split_step(group):
    """A decode step of a split model, fused and called often enough to be called past dynamo."""
    model, _ = tiny.qwen2()
    shard(model, plan_of(model, "m", 1), 0, 1, group, model_id="m")
    kwargs = tiny.decode_step(model)
    made, live = fused_of(model, (), kwargs)
    with made, torch.no_grad():
        for _ in range(12):
            live.written.rewind()
            made(**kwargs)
        yield model, kwargs, made, live


def test_a_split_model_asks_dynamo_nothing_of_its_layers_nor_of_its_cache(group):
    with split_step(group) as (model, kwargs, made, live):
        assert len(noted(made)) == 1 and may_run(made, **kwargs)
        direct_of(made)._check = refuse
        live.written.rewind()
        found = made(**kwargs).logits
        live.written.rewind()
        torch.testing.assert_close(found, made._original(**kwargs).logits, rtol=1e-5, atol=1e-5)
        model.model.layers[1].mlp.down_proj.group_name = "another"
        assert not may_run(made, **kwargs)
        model.model.layers[1].mlp.down_proj.group_name = group


def test_a_split_model_whose_layer_types_change_is_not_run(group):
    with split_step(group) as (model, kwargs, made, _):
        assert may_run(made, **kwargs)
        types = model.config.layer_types
        for change in (lambda: types.append("full_attention"), lambda: types.__setitem__(0, "sliding_attention")):
            before = list(types)
            change()
            assert not all_hold(made, **kwargs) and not may_run(made, **kwargs)
            types[:] = before
        assert may_run(made, **kwargs)
