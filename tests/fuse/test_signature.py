"""What makes two calls with a KV cache alike: its class, its tensors' layouts and its plain values."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.signature import signature


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


def test_order_of_keywords_does_not_matter_and_order_of_positions_does():
    assert signature((), {"a": 1, "b": 2}) == signature((), {"b": 2, "a": 1})
    assert signature((1, 2), {}) != signature((2, 1), {})
    assert signature((torch.ones(2),), {}) != signature(([torch.ones(2)],), {})
