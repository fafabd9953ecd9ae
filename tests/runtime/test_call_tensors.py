"""What an object among the arguments carries."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.runtime.call_tensors import copied, objects_in, tensors_in, without_numbers


class Layer:
    """A cache layer: tensors, and a count kept in Python."""

    def __init__(self, length=8, count=0, dtype=torch.float32):
        self.keys = torch.zeros(2, length, 4, dtype=dtype)
        self.position = torch.tensor(0)
        self.count = count


class Cache:
    """Holds layers."""

    def __init__(self, *layers):
        self.layers = list(layers)


def test_tensors_are_named_after_their_place():
    cache = Cache(Layer(), Layer())
    found = dict(tensors_in("cache", cache))
    assert list(found) == [f"cache.layers.{layer}.{name}" for layer in (0, 1) for name in ("keys", "position")]
    assert found["cache.layers.1.keys"] is cache.layers[1].keys
    assert [name for name, _ in tensors_in("pair", (torch.ones(1), {"x": torch.ones(1)}))] == ["pair.0", "pair.1.x"]


def test_objects_are_found_once_each():
    layer = Layer()
    cache = Cache(layer, layer)
    assert list(objects_in({"cache": cache, "n": 7})) == [cache, layer]


def test_a_copy_shares_no_object_and_no_changed_tensor():
    cache = Cache(Layer(), Layer(count=2))
    twin = copied({"cache": cache}, lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) else leaf)["cache"]
    assert twin is not cache and twin.layers is not cache.layers and twin.layers[1] is not cache.layers[1]
    assert twin.layers[1].keys.dtype == torch.float64 and twin.layers[1].count == 2
    twin.layers[0].keys.add_(1)
    assert cache.layers[0].keys.sum() == 0 and cache.layers[0].keys.dtype == torch.float32


@pytest.mark.parametrize(
    ("tensor", "lack"),
    [
        (torch.eye(3).to_sparse(), "`x.0` is sparse (sparse_coo)"),
        (torch.eye(3).to_sparse_csr(), "`x.0` is sparse (sparse_csr)"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "`x.0` is a nested tensor"),
        (torch.empty(3, device="meta"), "`x.0` lies on the device `meta`"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), ""),
    ],
)
def test_a_tensor_that_cannot_be_compared_is_named_with_the_reason(tensor, lack):
    found = without_numbers(torch.nn.Linear(2, 2), (), {"x": [tensor]})
    assert found.startswith(lack) and bool(found) is bool(lack)


def test_a_lazy_weight_is_named():
    assert without_numbers(torch.nn.LazyLinear(2), (), {}).startswith("`weight` is not initialised yet: call the model once")
