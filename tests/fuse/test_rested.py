"""A whole run at the power limit of a GPU: single rewrites are told apart after rests, ways to run the step are shown in both."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.method_notes import method_notes
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.records import Status
from fusion_advisor.report import baseline_rows
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.clock_sampler import is_at_power_limit
from fusion_advisor.timing.wall_timer import as_timing
from tests.tiny import profiled


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


@pytest.mark.parametrize("rest", [0.0, 2.0])
def test_the_method_tells_of_rests_where_there_were_any(rest):
    _, _, live = profiled("toy")
    bench = Bench(live, on_cuda=False)
    timing = as_timing([9] * 6, "cuda_graph", rest=rest)
    decision = Decision(verdicts={}, noise_share=0.001, before=timing, after=timing, method="cuda_graph")
    told = " ".join(method_notes(decision, ApplyOptions(), bench))
    assert ("the device rested 2 times as long as each run took" in told) == bool(rest)


@pytest.mark.gpu
@pytest.mark.serial
def test_products_at_the_power_limit_are_told_apart_after_rests():
    """On a GPU without such a limit the same run is timed back to back, and nothing is shown of rests.

    The chain is memory-bound. Where the limit throttles the step in spite of the rests, the clock falls when the chain goes, and
    the saving is 0.58 to 0.62 of the chain's time. So the prediction is judged by its interval, which is no wider than that.
    """
    import fusion_advisor as fa

    model = Gelus().to("cuda", torch.bfloat16).eval()
    report = fa.apply(model, (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16),), compile=False).report
    is_held = is_at_power_limit(report.after.wall.clocks)
    assert report.step_before.rest == report.step_after.rest == (interleaving.REST if is_held else 0.0)
    assert baseline_rows.has_rested(report) == is_held
    (gelu,) = (fusion for fusion in report.fusions if fusion.status is Status.KEPT)
    low, high = gelu.step_delta_ci_ns
    assert high - low < 0.2 * -gelu.step_delta_ns
    if is_held:
        assert report.noise_share < 0.01
        assert report.after.rested.median_ns < report.after.wall.median_ns
        figures = (gelu.chain_before, gelu.chain_after, report.chains, report.after.wall.clocks)
        assert gelu.predicted_low_ns <= -gelu.step_delta_ns <= gelu.predicted_high_ns, figures
        assert gelu.predicted_low_ns > 0.5 * gelu.predicted_saving_ns and gelu.predicted_high_ns < 1.5 * gelu.predicted_saving_ns
