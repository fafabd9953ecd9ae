"""What is noted of a call's objects: every change is seen, and nothing is kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fusion_advisor.export.copied.call_objects import Seen, spec_of, tensors_in


class Layer:
    """One layer of a cache."""

    def __init__(self):
        self.keys, self.values, self.length = torch.zeros(2, 3, 4), torch.ones(2, 3, 4), 5
        self.flags = (True, None)


class Cache:
    """A cache."""

    def __init__(self):
        self.layers, self.name = [Layer(), Layer()], "static"


class OtherLayer(Layer):
    """Another class with the same content."""


def noted(cache):
    call = {"cache": cache}
    seen = Seen()
    seen.note(call, ["cache"], list(tensors_in(spec_of("cache", cache))))
    return seen, call


def test_an_unchanged_object_is_known():
    cache = Cache()
    seen, call = noted(cache)
    cache.layers[0].keys.add_(1)  # numbers may change
    assert seen.is_unchanged(call)
    assert list(seen.tensors) == [f"cache.layers.{n}.{name}" for n in range(2) for name in ("keys", "values")]
    assert seen.tensors["cache.layers.1.values"] is cache.layers[1].values
    assert seen.storages == {one.untyped_storage().data_ptr() for layer in cache.layers for one in (layer.keys, layer.values)}


def rename(cache):
    vars(cache.layers[1])["other"] = vars(cache.layers[1]).pop("flags")


CHANGES = {
    "a tensor is replaced": lambda cache: setattr(cache.layers[1], "keys", torch.zeros(2, 3, 4)),
    "a tensor has other memory": lambda cache: cache.layers[1].keys.set_(torch.zeros(2, 3, 4)),
    "a tensor has other sizes": lambda cache: cache.layers[1].keys.resize_(2, 3, 2),
    "a tensor has other strides": lambda cache: cache.layers[1].keys.t_() if cache.layers[1].keys.dim() == 2
    else cache.layers[1].keys.transpose_(1, 2),
    "a tensor has another dtype": lambda cache: setattr(cache.layers[1].keys, "data", cache.layers[1].keys.int()),
    "a tensor is a number": lambda cache: setattr(cache.layers[1], "keys", 0),
    "a number is another": lambda cache: setattr(cache.layers[1], "length", 1000),
    "a tuple is another": lambda cache: setattr(cache.layers[1], "flags", (True, False)),
    "a name is another": rename,
    "there is one more": lambda cache: setattr(cache.layers[1], "more", 1),
    "there is one less": lambda cache: delattr(cache.layers[1], "length"),
    "a layer is another": lambda cache: cache.layers.__setitem__(1, Layer()),
    "a layer is more": lambda cache: cache.layers.append(Layer()),
    "a layer is less": lambda cache: cache.layers.pop(),
    "two layers change places": lambda cache: cache.layers.reverse(),
    "the list is another": lambda cache: setattr(cache, "layers", [*cache.layers]),
    "a class is another": lambda cache: setattr(cache.layers[1], "__class__", OtherLayer),
    "the cache's class is another": lambda cache: setattr(cache, "__class__", Layer),
    "a text is another": lambda cache: setattr(cache, "name", "dynamic"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    cache = Cache()
    seen, call = noted(cache)
    assert seen.is_unchanged(call)
    change(cache)
    assert not seen.is_unchanged(call)


def test_another_object_is_not_known():
    cache = Cache()
    seen, _ = noted(cache)
    assert not seen.is_unchanged({"cache": Cache()})
    assert not seen.is_unchanged({})
    assert not Seen().is_unchanged({"cache": cache})


def test_what_is_noted_goes_with_the_object():
    cache = Cache()
    seen, call = noted(cache)
    keys = weakref.ref(cache.layers[0].keys)
    call.clear()
    del cache
    gc.collect()
    assert keys() is None
    assert seen.tensors == {}


class Slotted:
    """Cannot be referred to weakly."""

    __slots__ = ("__dict__",)


def test_an_object_without_weak_references_is_read_each_time():
    one = Slotted()
    one.keys = torch.zeros(3)
    seen, call = noted(one)
    assert not seen.is_unchanged(call)
    assert seen.tensors == {}
