"""What a step feels of copies: the arithmetic here, the measurement on a GPU."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.environment import measure_bandwidth
from fusion_advisor.fuse.bench import Bench
from fusion_advisor.fuse.decide import StepRunner
from fusion_advisor.fuse.power import copy_cost_share, is_at_power_limit, share_of
from fusion_advisor.records import Clocks, ClockSample
from tests.tiny import profile_live


def test_the_share_is_what_the_step_grew_by_over_what_the_copies_take():
    alone, followed = [1000, 1010, 990, 1005, 995, 1000, 1001], [1060, 1071, 1049, 1066, 1054, 1061, 1060]
    assert share_of(alone, followed, 100) == pytest.approx(0.6, abs=0.01)
    assert share_of(followed, alone, 100) == 0  # noise: no copy makes a step shorter
    assert share_of(alone, followed, 20) == 1


def readings(*reasons):
    return Clocks(samples=tuple(ClockSample(reasons=one) for one in reasons))


@pytest.mark.parametrize(
    ("clocks", "is_held"),
    [
        (None, False),
        (Clocks(missing="no driver"), False),
        (readings(None, None), False),
        (readings((), ("sw_power_cap",)), False),
        (readings((), ("sw_power_cap",), ("sw_power_cap", "hw_slowdown")), True),
        (readings(("sw_thermal_slowdown",)), False),
    ],
)
def test_most_readings_must_name_the_power_limit(clocks, is_held):
    assert is_at_power_limit(clocks) == is_held


def bench_of(model, x):
    _, live = profile_live(model, (x,))
    return Bench(live, on_cuda=x.is_cuda)


def test_a_cpu_has_no_power_limit():
    runner = StepRunner(bench_of(torch.nn.ReLU(), torch.randn(4, 4)))
    assert copy_cost_share(runner, lambda: pytest.fail("nothing to time"), saving_ns=1000, copy_bytes_per_s=10**11) == 1.0


@pytest.mark.gpu
def test_products_at_the_power_limit_feel_a_part_of_a_copy_and_a_light_step_all_of_it():
    copy_bytes_per_s = measure_bandwidth("cuda").copy_bytes_per_s
    runner = StepRunner(bench_of(torch.nn.ReLU().cuda(), torch.randn(4, 4, device="cuda")))
    assert (
        copy_cost_share(runner, lambda: torch.zeros(8, device="cuda"), saving_ns=1000, copy_bytes_per_s=copy_bytes_per_s) == 1.0
    )
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3000):  # over four seconds: the limit holds for the mean of some time
        torch.mm(a, b)

    def products():
        for _ in range(20):
            torch.mm(a, b)

    share = copy_cost_share(runner, products, saving_ns=5_000_000, copy_bytes_per_s=copy_bytes_per_s)
    assert 0.2 < share < 0.97
