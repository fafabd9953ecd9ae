"""What makes two calls with a KV cache alike: its class, its tensors' layouts and its plain values."""

from __future__ import annotations

import copy
import enum
import gc
import weakref
from collections import OrderedDict
from typing import ClassVar

import pytest
import torch

from fusion_advisor.fuse.direct.words import words_are_readable
from fusion_advisor.fuse.live.call_signature import Form, ObjectKey, parts_of, signature


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


@pytest.mark.parametrize("change", [replaced_layer, added_layer, other_tensor, other_count, more_attributes])
def test_a_change_is_seen_after_a_write_that_changes_nothing(change):
    cache, objects = Cache(Layer(), Layer()), {}
    before = signature((cache,), {}, None, objects)
    (seen,) = objects.values()
    for _ in range(3):
        assert signature((cache,), {}, None, objects) == before
        assert (seen.words is not None) == words_are_readable()
        cache.layers[0].count = cache.layers[0].count
        cache.note = 1
        del cache.note
    assert signature((cache,), {}, None, objects) == before and next(iter(objects.values())) is seen
    change(cache)
    assert signature((cache,), {}, None, objects) == signature((cache,), {})
    assert next(iter(objects.values())) is not seen


def test_an_order_that_changes_without_a_version_is_seen():
    cache, objects = Cache(Layer()), {}
    cache.table = OrderedDict(a=torch.zeros(2), b=torch.ones(3))
    before = [signature((cache,), {}, None, objects) for _ in range(3)][-1]
    cache.table.move_to_end("a")
    assert signature((cache,), {}, None, objects) != before


def grown(cache):
    for layer in cache.layers:
        layer.keys = torch.cat([layer.keys, layer.keys[:, :1]], dim=1)


def one_layer_grown(cache):
    cache.layers[1].keys = torch.zeros(2, 9, 4)


def turned(cache):
    cache.layers[0].keys = cache.layers[0].keys.transpose(0, 1).contiguous().transpose(0, 1)


def other_dtype(cache):
    cache.layers[0].keys = cache.layers[0].keys.double()


def no_tensor(cache):
    cache.layers[0].keys = None


def a_parameter(cache):
    cache.layers[0].keys = torch.nn.Parameter(cache.layers[0].keys)


def tensors_swapped(cache):
    layer = cache.layers[0]
    layer.keys, layer.position = layer.position, layer.keys


GROWN = [grown, one_layer_grown, turned, other_dtype, no_tensor, a_parameter, tensors_swapped, other_tensor, replaced_layer]


@pytest.mark.parametrize("change", GROWN)
def test_a_cache_with_other_tensors_has_the_key_of_one_that_is_read_for_the_first_time(change):
    cache, objects = Cache(Layer(), Layer()), {}
    before = signature((cache,), {}, None, objects)
    for _ in range(3):
        change(cache)
        again = signature((cache,), {}, None, objects)
        assert again == signature((cache,), {}) and hash(again) == hash(signature((cache,), {}))
        assert (again == before) == (change in (other_tensor, replaced_layer, a_parameter)) or change is tensors_swapped
    assert len(objects) == 1
    reference = weakref.ref(cache)
    del cache
    gc.collect()
    assert reference() is None and not objects


def test_a_signature_is_its_form_and_the_layouts_of_its_tensors():
    def read(length, count=0, x=None, **more):
        leaves, objects = [], []
        cache, x = Cache(Layer(length, count)), torch.zeros(3, 1) if x is None else x
        parts = parts_of(signature((x,), {"cache": cache, **more}, leaves, {}, objects), leaves, objects)
        assert [(one.shape, one.dtype, one.device, one.stride()) for one in parts.tensors()] == list(parts.layouts)
        assert parts.tensors()[0] is x
        return parts

    one = read(8)
    assert {len(one.layouts), len(read(8, more=torch.ones(2)).layouts)} == {3, 4}
    for same in (read(9), read(8, x=torch.zeros(4, 2, dtype=torch.int64))):
        assert same.form == one.form and hash(same.form) == hash(one.form) and same.layouts != one.layouts
    for other in (read(8, count=1), read(8, flag=True), read(8, flag=1), read(8, more=torch.ones(2)), read(8, more=Cache())):
        assert other.form != one.form


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

    one, other = (ObjectKey(Form((Counted("a"), 1)), ()) for _ in range(2))
    known = {one: True}
    assert known[other] and Counted.asked == ["hash", "hash", "equal"]
    assert known[other] and hash(other) == hash(one) and len(Counted.asked) == 3
    assert one != ObjectKey(Form((Counted("a"), 2)), ()) and one != (Counted("a"), 1)


def test_order_of_keywords_does_not_matter_and_order_of_positions_does():
    assert signature((), {"a": 1, "b": 2}) == signature((), {"b": 2, "a": 1})
    assert signature((1, 2), {}) != signature((2, 1), {})
    assert signature((torch.ones(2),), {}) != signature(([torch.ones(2)],), {})


DIFFERENT = [
    0.0, -0.0, 0, False, None, 1, 1.0, True, complex(0, 0), complex(0, -0.0), complex(-0.0, 0), complex(-0.0, -0.0), "0", "", b"",
    float("nan"), float("inf"), float("-inf"), 5e-324, complex(float("nan"), 0.0), complex(0.0, float("nan")), 2**53,
    float(2**53),
]  # fmt: skip


class Name(str):
    """A str that may do anything."""

    __slots__ = ()


class Holder:
    """Holds one value as an attribute."""

    def __init__(self, value):
        self.value = value


AROUND = {
    "alone": lambda value: value,
    "in a tuple": lambda value: (value,),
    "in a list of lists": lambda value: [[value]],
    "in a dict": lambda value: {"k": value},
    "as a key of a dict": lambda value: {value: 1},
    "in an object": Holder,
    "in a dict of an object": lambda value: Holder({"k": [value]}),
    "as a key in an object": lambda value: Holder({value: 1}),
}


@pytest.mark.parametrize("around", AROUND)
def test_values_that_are_equal_and_mean_different_things_are_different_calls(around):
    keys = [signature((AROUND[around](value),), {}) for value in (*DIFFERENT, Name("0"))]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("around", AROUND)
def test_a_value_is_the_same_call_each_time(around):
    """A NaN equals nothing, itself included: each call with one would be a call never seen."""
    for value in (*DIFFERENT, float("-nan")):
        fresh = [type(value)(value) if isinstance(value, float | complex) else value for _ in range(2)]
        assert signature((AROUND[around](fresh[0]),), {}) == signature((AROUND[around](fresh[1]),), {})


def test_a_numpy_float_is_no_python_float():
    numpy = pytest.importorskip("numpy")
    assert signature((numpy.float64(1.0),), {}) != signature((1.0,), {})
    assert signature((numpy.float64(-0.0),), {}) != signature((numpy.float64(0.0),), {})


class Kind(enum.Enum):
    A = 1
    B = 2


FIXED = [slice(0, 4), slice(0, 5), slice(None), range(4), range(5), ..., Kind.A, Kind.B, torch.float16, torch.strided]


@pytest.mark.parametrize("value", FIXED, ids=str)
def test_a_slice_a_range_and_a_member_of_an_enum_are_the_same_call_each_time(value):
    again = copy.deepcopy(value)
    assert signature((value,), {"x": [value]}) == signature((again,), {"x": [again]})
    assert sum(signature((other,), {}) == signature((value,), {}) for other in FIXED) == 1


def test_a_slice_of_tensors_equals_no_other():
    cut = slice(torch.tensor(0), None)
    assert signature((cut,), {}) != signature((cut,), {})
