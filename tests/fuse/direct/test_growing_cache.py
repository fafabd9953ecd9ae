"""One graph with open sizes serves a cache that grows, past dynamo, and a model that changes under it goes through dynamo."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.direct.direct_call import Shortcut
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.shapes.call_sizes import resized
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.static_cache import cache_name
from tests import tiny


@pytest.fixture(scope="module")
def decode():
    """(model, its shortcut, the call that is resized)."""
    model, kwargs = tiny.gpt2()
    calls = ranged_calls(describe_live(model, (), kwargs), read_shapes("batch=1..8,seq=1..32,cached=1..60"))
    call = next(one for one in calls if one.name == "decode")
    args, again = resized(call.args, call.kwargs, call.dims, {"batch": 3, "cached": 11})
    opened = capture_open(model, args, again, call.dims)
    return model, Shortcut(model, opened.live.compiled.call, [opened.region.route]), call


def at(call, cached):
    return resized(call.args, call.kwargs, call.dims, {"batch": 3, "cached": cached})


def test_each_length_runs_past_dynamo(decode):
    model, shortcut, call = decode
    with torch.no_grad():
        shortcut(*at(call, 12))
        direct = shortcut.direct
        assert direct is not None and direct.words > 100
        for cached in (5, 17, 18, 40):
            args, kwargs = at(call, cached)
            _, same = at(call, cached)
            expected = model(*args, **same)
            assert direct.may_run(args, kwargs)
            found = shortcut(args, kwargs)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
            cache = kwargs[cache_name(model)]
            assert cache.get_seq_length() == cached + 1
            for mine, its in zip(cache.layers, same[cache_name(model)].layers, strict=True):
                torch.testing.assert_close(mine.keys, its.keys, rtol=1e-4, atol=1e-5)
        assert shortcut.direct is direct


def test_lengths_that_do_not_fit_each_other_are_refused(decode):
    _, shortcut, call = decode
    with torch.no_grad():
        shortcut(*at(call, 12))
        args, kwargs = at(call, 9)
        assert shortcut.direct.may_run(args, kwargs)
        cache = next(value for value in kwargs.values() if hasattr(value, "layers"))
        cache.layers[1].values = cache.layers[1].values[:, :, :4]
        assert not shortcut.direct.may_run(args, kwargs)


def test_a_config_that_changes_is_seen(decode):
    model, shortcut, call = decode
    with torch.no_grad():
        shortcut(*at(call, 12))
        assert shortcut.direct.may_run(*at(call, 9))
        model.config.output_hidden_states = True
        try:
            assert not shortcut.direct.may_run(*at(call, 9))
        finally:
            model.config.output_hidden_states = False
