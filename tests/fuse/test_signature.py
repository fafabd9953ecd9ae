"""What makes two calls with a KV cache alike: its class, its tensors' layouts and its plain values."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import pytest
import torch

from fusion_advisor.fuse.signature import ObjectKey, signature


class Layer:
    """A cache layer: tensors, and a count kept in Python."""

    def __init__(self, length=8, count=0, dtype=torch.float32):
        self.keys = torch.zeros(2, length, 4, dtype=dtype)
        self.position = torch.tensor(0)
        self.count = count


class OtherLayer(Layer):
    """Another class with the same attributes."""


class Cache:
    """Holds layers."""

    def __init__(self, *layers):
        self.layers = list(layers)

    def first(self):
        return self.layers[0]


def key(*layers, **more):
    return signature((), {"cache": Cache(*layers), **more})


def test_caches_of_one_layout_are_alike_whatever_their_tensors_hold():
    full = Layer()
    full.position.add_(5)
    full.keys.normal_()
    assert key(Layer(), Layer()) == key(full, Layer())
    assert hash(key(Layer())) == hash(key(full))


@pytest.mark.parametrize(
    "layer",
    [Layer(length=9), Layer(count=1), Layer(dtype=torch.float64), OtherLayer()],
    ids=["shape", "count in Python", "dtype", "class"],
)
def test_another_class_layout_or_plain_value_is_another_call(layer):
    assert key(Layer(), layer) != key(Layer(), Layer())


def test_a_stride_an_attribute_or_a_layer_more_is_another_call():
    turned, marked = Layer(), Layer()
    turned.keys = turned.keys.transpose(0, 1).contiguous().transpose(0, 1)
    marked.is_full = True
    assert len({key(Layer()), key(turned), key(marked), key(Layer(), Layer())}) == 4


def test_what_cannot_be_looked_into_equals_nothing():
    held = Cache(Layer())
    held.owner = held
    for value in (print, held, object()):
        assert signature((value,), {}) != signature((value,), {})


def replaced_layer(cache):
    cache.layers[1] = Layer()


def added_layer(cache):
    cache.layers.append(Layer())


def other_tensor(cache):
    cache.layers[1].keys = cache.layers[1].keys.clone()


def other_count(cache):
    cache.layers[0].count = 7


def more_attributes(cache):
    cache.layers[0].is_full = True


@pytest.mark.parametrize("change", [replaced_layer, added_layer, other_tensor, other_count, more_attributes])
def test_an_object_is_read_again_as_soon_as_it_holds_another_thing(change):
    cache, objects = Cache(Layer(), Layer()), {}

    def read():
        passed = []
        return signature((cache,), {}, None, objects, passed), passed[0]

    first, seen = read()
    cache.layers[1].keys.normal_()
    assert read() == (first, seen) and len(objects) == 1
    change(cache)
    again, other = read()
    assert other is not seen and again == signature((cache,), {})


@pytest.mark.parametrize("owner", [lambda cache: cache, lambda cache: cache.first], ids=["itself", "a method"])
def test_an_object_that_refers_to_itself_is_not_kept_alive(owner):
    cache, objects = Cache(Layer()), {}
    cache.layers[0].owner = owner(cache)
    signature((cache,), {}, None, objects)
    reference = weakref.ref(cache)
    del cache
    gc.collect()
    assert reference() is None and not objects


def test_keys_are_hashed_once_and_compared_once():
    class Counted(str):
        __slots__ = ()
        asked: ClassVar[list[str]] = []

        def __hash__(self):
            self.asked.append("hash")
            return super().__hash__()

        def __eq__(self, other):
            self.asked.append("equal")
            return super().__eq__(other)

    one, other = ObjectKey((Counted("a"), 1)), ObjectKey((Counted("a"), 1))
    known = {one: True}
    assert known[other] and Counted.asked == ["hash", "hash", "equal"]
    assert known[other] and hash(other) == hash(one) and len(Counted.asked) == 3
    assert one != ObjectKey((Counted("a"), 2)) and one != (Counted("a"), 1)


def test_order_of_keywords_does_not_matter_and_order_of_positions_does():
    assert signature((), {"a": 1, "b": 2}) == signature((), {"b": 2, "a": 1})
    assert signature((1, 2), {}) != signature((2, 1), {})
    assert signature((torch.ones(2),), {}) != signature(([torch.ones(2)],), {})
