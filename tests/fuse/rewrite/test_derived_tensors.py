"""Values kept between calls: computed once, again when a source changes, and views that are the weights themselves."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.rewrite.derived_tensors import Held, Joined
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged


def counted(sources):
    calls = []

    def compute(*tensors):
        calls.append(len(tensors))
        return sum(tensors) * 2

    return Held("double", compute, sources), calls


def test_a_held_value_is_computed_once():
    a, b = torch.ones(3), torch.ones(3)
    call, calls = counted([a, b])
    assert call(a, b) is call(a, b)
    assert torch.equal(call(a, b), torch.full((3,), 4.0))
    assert calls == [2]


def test_it_is_computed_again_after_a_write_an_exchange_or_a_move():
    a, b = torch.ones(3), torch.ones(3)
    call, calls = counted([a, b])
    a.add_(1)
    assert torch.equal(call(a, b), torch.full((3,), 6.0))
    b[1:].zero_()
    assert torch.equal(call(a, b), torch.tensor([6.0, 4.0, 4.0]))
    c = torch.zeros(3)
    assert torch.equal(call(a, c), torch.full((3,), 4.0))
    c.data = torch.ones(3)
    assert torch.equal(call(a, c), torch.full((3,), 6.0))
    assert len(calls) == 5
    call(a, c)
    assert len(calls) == 5


def test_a_write_that_counts_no_version_needs_a_refresh_which_keeps_the_memory():
    a, b = torch.ones(3), torch.ones(3)
    call, _ = counted([a, b])
    before = call(a, b)
    a.data.mul_(3)
    assert call(a, b) is before
    call.refresh()
    assert torch.equal(call(a, b), torch.full((3,), 8.0))
    assert call(a, b) is before  # a CUDA graph reads this address
    b.add_(1)
    call.refresh()
    assert call(a, b) is before
    assert torch.equal(before, torch.full((3,), 10.0))


def test_a_value_that_overlaps_itself_or_changed_its_layout_is_refreshed_too():
    a = torch.ones(3)
    call = Held("wide", lambda x: (x * 2).unsqueeze(1).expand(-1, 4), [a])
    a.data.mul_(3)
    call.refresh()
    assert torch.equal(call(a), torch.full((3, 4), 6.0))
    longer = torch.ones(5)
    assert torch.equal(call(longer), torch.full((5, 4), 2.0))


def test_a_value_in_a_source_s_own_memory_is_never_written_to():
    a = torch.ones(3)
    call = Held("itself", lambda x: x.contiguous(), [a])
    b = torch.zeros(3)
    assert torch.equal(call(b), b)
    assert torch.equal(a, torch.ones(3))


def test_a_value_made_in_inference_mode_is_computed_again_outside_of_it():
    a = torch.ones(3)
    call = Held("double", lambda x: x * 2, [a])
    with torch.inference_mode():
        inference = torch.full((3,), 4.0)
        assert torch.equal(call(inference), torch.full((3,), 8.0))
    assert torch.equal(call(a), torch.full((3,), 2.0))
    assert call.versions == ((a, a._version),)


def parts(memory, *rows):
    return list(memory.split(rows))


def test_joined_tensors_are_viewed_not_copied():
    memory = torch.randn(10, 4)
    a, b, c = parts(memory, 2, 5, 3)
    call = Joined("weight", [b, c])
    assert call(b, c).data_ptr() == b.data_ptr()
    assert torch.equal(call(b, c), memory[2:])
    assert call(b, c) is call(b, c)
    c.data.mul_(2)  # counts no version, and is seen all the same
    assert torch.equal(call(b, c), torch.cat([b, c]))
    assert torch.equal(call(a, b), memory[:7])


def test_joined_tensors_that_moved_apart_are_refused_until_they_are_back():
    memory = torch.randn(10, 4)
    a, b = parts(memory, 4, 6)
    call = Joined("weight", [a, b])
    with pytest.raises(LayoutChanged, match="no longer"):
        call(a, b.clone())
    assert torch.equal(call(a, b), memory)
    b.data = b.clone()
    with pytest.raises(LayoutChanged):
        call(a, b)


def test_a_joined_view_wants_no_gradient():
    memory = torch.randn(10, 4)
    a, b = map(torch.nn.Parameter, parts(memory, 4, 6))
    assert not Joined("weight", [a, b])(a, b).requires_grad
