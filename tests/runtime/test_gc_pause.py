"""The collector of cycles is paused where it is said to be, and as it was afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from fusion_advisor.runtime.gc_pause import collector_paused, old_objects_left_out


def test_it_is_paused_inside_and_on_again_behind_an_error():
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), collector_paused():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_function_is_paused_at_each_call():
    @collector_paused()
    def is_on():
        return gc.isenabled()

    assert [is_on(), is_on(), gc.isenabled()] == [False, False, True]


class Node:
    def __init__(self):
        self.me = self


def test_what_was_made_inside_is_walked_in_the_next_full_collection_and_not_at_once():
    gc.collect()
    walked = []
    gc.callbacks.append(lambda phase, info: walked.append(info["generation"]) if phase == "start" else None)
    try:
        with collector_paused():
            assert walked == [1]  # what lay about before
            walked.clear()
            kept = [Node() for _ in range(5 * gc.get_threshold()[0])]
            gone = weakref.ref(kept.pop())
        assert gc.get_count()[0] < 100 and not walked
        assert gone() is not None and kept
        gc.collect()
        assert gone() is None
    finally:
        gc.callbacks.pop()


def test_objects_that_the_user_froze_stay_frozen():
    node = Node()
    gc.freeze()
    try:
        with collector_paused():
            pass
        # Frozen objects are in no generation. Their number may fall meanwhile: other threads drop some.
        assert not any(each is node for each in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(each is node for each in gc.get_objects())


def test_old_objects_are_walked_once_and_new_cycles_still_go():
    old = Node()
    old_one = weakref.ref(old)
    del old
    with old_objects_left_out():
        assert old_one() is None  # walked on the way in
        assert gc.get_freeze_count() > 2000 and len(gc.get_objects()) < 1000
        new = Node()
        new_one = weakref.ref(new)
        del new
        gc.collect()
        assert new_one() is None
    assert gc.get_freeze_count() < 2000


def test_what_the_user_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with old_objects_left_out():
            pass
        assert frozen - 100 < gc.get_freeze_count() <= frozen  # a few of what other tests left may end meanwhile
        assert frozen > 2000
    finally:
        gc.unfreeze()
