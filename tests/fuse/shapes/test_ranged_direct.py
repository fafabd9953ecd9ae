"""Calls in a range that come again: found by one lookup, their static cache compared in bulk, and every change still seen."""

from __future__ import annotations

import copy

import pytest
import torch

from fusion_advisor.fuse.direct.passed_object import PassedObject
from fusion_advisor.fuse.direct.words import words_are_readable
from fusion_advisor.workload.static_cache import cache_name
from tools.ranged_overhead import served

_CALLS = 14
"""From the ninth call with one cache on, it is compared in bulk."""


class Lookups(dict):
    """Counts what is asked of it."""

    asked = 0

    def get(self, key, default=None):
        self.asked += 1
        return super().get(key, default)


@pytest.fixture
def fused():
    torch.compiler.reset()
    made, args, kwargs = served("gpt2, static cache", 1)
    made.graphs.is_on = False  # every call computes
    with made, torch.no_grad():
        yield made, args, kwargs


def is_right(made, args, kwargs):
    """Whether a call gives what the original ops give on a copy of its cache."""
    theirs = copy.deepcopy(kwargs)
    ours, expected = made(*args, **kwargs).logits, made._original(*args, **theirs).logits
    return torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


def bulk_of(made):
    return [one for seen in made._objects.values() for one in seen.followed.values() if isinstance(one, PassedObject)]


@pytest.mark.skipif(not words_are_readable(), reason="versions of dicts cannot be read here")
def test_a_cache_that_comes_again_is_compared_in_bulk(fused):
    made, args, kwargs = fused
    assert is_right(made, args, kwargs) and bulk_of(made) == []
    assert all(is_right(made, args, kwargs) for _ in range(_CALLS)) and len(bulk_of(made)) == 1
    assert made.fallbacks == {}


@pytest.mark.parametrize("change", ["contents", "tensor", "layout", "attribute", "input"])
def test_what_changes_after_that_is_seen(fused, change):
    made, args, kwargs = fused
    assert all(is_right(made, args, kwargs) for _ in range(_CALLS))
    layer = kwargs[cache_name(made.model)].layers[0]
    if change == "contents":
        layer.keys.mul_(2)
    elif change == "tensor":
        layer.keys = torch.randn_like(layer.keys)
    elif change == "layout":  # in place: the object and its dict are the same
        layer.keys.data = layer.keys.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "attribute":
        layer.is_sliding = True
    else:
        kwargs["input_ids"] = torch.tensor([[7]])
    assert is_right(made, args, kwargs) and is_right(made, args, kwargs)


def test_another_dtype_in_place_is_seen(fused):
    made, args, kwargs = fused
    assert all(is_right(made, args, kwargs) for _ in range(_CALLS))
    for name in ("keys", "values"):
        tensor = getattr(kwargs[cache_name(made.model)].layers[0], name)
        tensor.data = tensor.double()
    with pytest.raises(RuntimeError):
        made._original(*args, **copy.deepcopy(kwargs))
    with pytest.raises(RuntimeError):
        made(*args, **kwargs)


def test_a_call_that_comes_again_is_looked_up_once(fused):
    made, args, kwargs = fused
    assert is_right(made, args, kwargs)
    (table,) = made.shapes
    made._verified, table._known = Lookups(made._verified), Lookups(table._known)
    assert all(is_right(made, args, kwargs) for _ in range(3))
    assert made._verified.asked == table._known.asked == 0
    made.serve([table])  # other ranges may serve it now
    assert is_right(made, args, kwargs) and made._verified.asked == table._known.asked == 1


def test_a_growing_cache_is_not_remembered_by_its_signature():
    torch.compiler.reset()
    made, args, kwargs = served("gpt2, growing cache", 1)
    with made, torch.no_grad():
        made(*args, **kwargs)
        assert made._known == {} and made.fallbacks == {}
