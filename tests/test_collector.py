"""The collector of cycles is paused where it is said to be, and as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from fusion_advisor.collector import collector_paused


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
