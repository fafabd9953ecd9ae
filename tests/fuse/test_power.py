"""What a step feels of copies: where they stand and the arithmetic here, the measurement on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_advisor.fuse.power as power
from fusion_advisor.environment import measure_bandwidth
from fusion_advisor.fuse.bench import Bench, calls_in_step
from fusion_advisor.fuse.decide import StepRunner
from fusion_advisor.fuse.power import Copies, CostShares, Launches, measure_cost_shares, measured_share, put_between, share_of
from fusion_advisor.records import Bandwidth
from fusion_advisor.timing.measure import TURN_S
from fusion_advisor.timing.watch import is_at_power_limit
from tests.tiny import bench_of, planned, profiled

CPU = torch.device("cpu")
BANDWIDTH = Bandwidth(copy_bytes_per_s=10**11, launch_ns=1000)


def test_the_share_is_what_the_step_grew_by_over_what_the_copies_take():
    alone, longer = [1000, 1010, 990, 1005, 995, 1000, 1001], [1060, 1071, 1049, 1066, 1054, 1061, 1060]
    assert share_of(alone, longer, 100) == pytest.approx(0.6, abs=0.01)
    assert share_of(longer, alone, 100) == 0  # noise: no copy makes a step shorter
    assert share_of(alone, longer, 20) == 1


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_each_call_copies_another_part_of_the_buffer():
    copies = Copies(4000, CPU, buffer_bytes=10_000)
    copies._target.zero_()
    for copied in (1000, 2000, 2000):  # the third begins anew: a half part is left
        copies()
        assert int((copies._target != 0).sum()) == copied
    assert copies.each_bytes == 4000
    assert Copies(1 << 30, CPU, buffer_bytes=10_000).each_bytes == 10_000


def test_copies_are_the_kernel_whose_speed_was_measured():
    copies, seen = Copies(1000, CPU, buffer_bytes=10_000), Seen()
    with seen:
        copies()
        copies()
    assert [name for name in seen.names if "slice" not in name] == ["aten.mul.out"] * 2
    assert torch.equal(copies._target[:496], copies._source[:496])
    assert copies._at % 8 == 0 and copies.each_bytes == 992


def test_launches_are_of_the_kernel_whose_time_was_measured():
    launches, seen = Launches(3, CPU), Seen()
    with seen:
        launches()
    assert seen.names == ["aten.add_.Tensor"] * 3 and launches.count == 3


def test_a_kernel_costs_as_a_launch_and_as_traffic():
    shares = CostShares(copies=0.8, launches=0.2, launch_ns=1000)
    assert shares.cost_ns(50_000, 10, 500) == pytest.approx(0.8 * 40_000 + 0.2 * 15_000)
    assert shares.cost_ns(6_000, 10, 500) == pytest.approx(0.2 * 11_000)  # none of it is traffic
    assert shares.cost_ns(0, 1, 500) == pytest.approx(100)
    assert CostShares().cost_ns(50_000, 10, 500) == 55_000


def fused_step():
    _, _, live = profiled("toy")
    bench, built = bench_of(live, planned("toy"))
    return bench, lambda: bench.build(built, ())


def test_copies_stand_behind_each_fused_kernel_and_change_nothing():
    bench, build = fused_step()
    expected, variant, copies = bench.run(build()), build(), Copies(64, CPU, buffer_bytes=1 << 16)
    put_between(variant, copies)
    (found,) = bench.run(variant)
    torch.testing.assert_close(found, expected[0], rtol=0, atol=0)
    behind = [node.next.target is copies for module in variant.modules for node in module.graph.nodes if "fusion_id" in node.meta]
    assert behind == [True] * sum(calls_in_step(variant, bench.live.runs_of_regions()).values()) != []
    assert copies._at == 16 * len(behind)


def test_where_nothing_draws_power_together_the_whole_copy_is_felt():
    bench, build = fused_step()
    variant, runner = build(), StepRunner(bench)
    (step,) = runner.recorded([lambda: bench.run(variant)])
    # At a rate that no memory has, the copies take longer than they are said to.
    copies = Copies(10**6, CPU, buffer_bytes=1 << 22)
    share = measured_share(runner, step, bench, build(), copies, alone_ns=1, budget_s=0.5)
    assert share == 1.0


def test_a_cpu_and_a_step_without_kernels_have_no_power_limit():
    bench, build = fused_step()
    assert measure_cost_shares(bench, build, saving_ns=1000, bandwidth=BANDWIDTH) == CostShares()
    on_cuda = Bench(bench.live, on_cuda=True)
    assert measure_cost_shares(on_cuda, lambda: bench.build((), ()), saving_ns=1000, bandwidth=BANDWIDTH) == CostShares()


@pytest.mark.parametrize(("free_bytes", "is_measured"), [(2**30, True), (2**30 - 1, False)])
def test_nothing_is_put_in_where_the_device_is_nearly_full(monkeypatch, free_bytes, is_measured):
    put_in = []

    def share(_runner, _step, _bench, _variant, extra, *, alone_ns):
        put_in.append((extra, alone_ns))
        return 0.5 if isinstance(extra, Copies) else 0.25

    bench, build = fused_step()
    runner = StepRunner(bench)
    monkeypatch.setattr(runner, "turn_s", lambda _: TURN_S)
    monkeypatch.setattr(power, "StepRunner", lambda _: runner)
    monkeypatch.setattr(power, "interleave", lambda *_, **__: [[1_000_000] * 9])
    monkeypatch.setattr(power, "measured_share", share)
    monkeypatch.setattr(power, "_DEVICE", CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 2**37))
    found = measure_cost_shares(Bench(bench.live, on_cuda=True), build, saving_ns=200_000, bandwidth=BANDWIDTH)
    assert found == (CostShares(copies=0.5, launches=0.25, launch_ns=1000) if is_measured else CostShares())
    if is_measured:
        (_, copies_ns), (launches, launches_ns) = put_in
        assert copies_ns == pytest.approx(200_000, rel=0.01) and isinstance(launches, Launches)
        assert launches_ns == pytest.approx(100_000, rel=0.01)


class Gelus(torch.nn.Module):
    """A large product before each chain."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8192, 8192, bias=False) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            u = layer(x)
            x = 0.5 * u * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * torch.pow(u, 3.0))))
        return x


@pytest.mark.gpu
@pytest.mark.serial
def test_products_at_the_power_limit_feel_a_copy_or_a_part_of_it():
    """All of it on an H200 (products 20.17 ms at 690 W, with copies of 1.53 ms 21.70); Qwen2.5-7B's prefill feels 0.9 there."""
    import fusion_advisor as fa

    model = Gelus().to("cuda", torch.bfloat16).eval()
    report = fa.apply(model, (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16),), compile=False).report
    assert report.bandwidth.copy_bytes_per_s == pytest.approx(measure_bandwidth("cuda").copy_bytes_per_s, rel=0.1)
    least = 0.2 if is_at_power_limit(report.after.wall.clocks) else 1.0
    assert least <= report.copy_cost_share <= 1.0
    assert 0 <= report.short_launch_cost_share <= 1
