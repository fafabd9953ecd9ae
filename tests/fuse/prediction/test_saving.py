"""A chain's saving: its kernel takes the share of its ops' traced time that it takes alone, and its own launches stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.fuse.prediction.saving import OF_ALONE, chain_saving_ns, is_scaled, kernel_ns, most_saving_ns
from tests.report.fixtures import applied, chain, timing

CHAIN = replace(chain(2, ("mul",), 10, 100_000, 0.1), launches=40)
FUSION = replace(applied().fusions[0], chain_id="C2", chain_before=timing(10_000), chain_after=timing(2_000))
assert CHAIN.runs == 10


def test_ops_that_take_alone_what_they_take_in_the_step_leave_the_kernels_time_as_it_is():
    assert kernel_ns(FUSION, CHAIN) == pytest.approx(20_000)
    assert chain_saving_ns(FUSION, CHAIN, 500) == 100_000 - 20_000 + 30 * 500  # ten of forty launches stay
    assert most_saving_ns(FUSION, CHAIN, 500) == 100_000 - 20_000 + 40 * 500


@pytest.mark.parametrize(
    ("before_ns", "scale"), [(8_400, 1 / 0.84), (12_000, 1 / 1.2), (2_000, OF_ALONE), (90_000, 1 / OF_ALONE)]
)
def test_a_kernel_that_its_ops_say_is_slower_in_the_step_is_expected_to_be_slower(before_ns, scale):
    fusion = replace(FUSION, chain_before=timing(before_ns))
    assert kernel_ns(fusion, CHAIN) == pytest.approx(20_000 * scale)
    assert chain_saving_ns(fusion, CHAIN, 0) == round(100_000 - 20_000 * scale)


def test_a_time_that_includes_the_call_from_python_is_taken_as_it_is():
    on_cpu = replace(FUSION, chain_before=timing(8_400, method="cpu_time"), chain_after=timing(2_000, method="cpu_time"))
    assert not is_scaled(on_cpu) and is_scaled(FUSION)
    assert chain_saving_ns(on_cpu, CHAIN, 500) == most_saving_ns(on_cpu, CHAIN, 500) == 100_000
    without = replace(FUSION, chain_before=None)
    assert chain_saving_ns(without, CHAIN, 500) == 100_000


def test_nothing_is_expected_of_a_kernel_that_was_not_timed_and_no_loss_of_a_slow_one():
    assert chain_saving_ns(replace(FUSION, chain_after=None), CHAIN, 500) is None
    assert chain_saving_ns(replace(FUSION, chain_after=timing(90_000)), CHAIN, 0) == 0
