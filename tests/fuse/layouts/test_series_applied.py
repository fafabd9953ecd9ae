"""A speech encoder whose series lie in channels last: kernels read and write them so, with right numbers."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.channels_last import ID, lay_channels_last
from fusion_advisor.capture.graph.split_bias import is_slower_with_bias, split_bias
from fusion_advisor.capture.layout_trial import settle_layouts
from fusion_advisor.capture.profile import profile_as_it_is
from fusion_advisor.fuse.decide.choose import _of_layout
from fusion_advisor.fuse.decide.session import Bench, replaced_sites
from fusion_advisor.fuse.decide.try_fusions import try_all
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.records import Status
from tests.capture.graph.test_series import CONV1D, CONV2D, Speech, captured, sound
from tests.fuse.layouts.test_fused_trial import MS, TIMER, Clock, Traces, trial
from tests.tiny import BANDWIDTH

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
OPTIONS = ApplyOptions(min_share=0.0, keep="verified")


class Scaled(Speech):
    """With more between the convolutions than one op."""

    def forward(self, series):
        series = nn.functional.gelu(self.one(series)) * 2.0
        return self.norm((nn.functional.gelu(self.two(series)) * 3.0).permute(0, 2, 1) + 1.0)


def targets(variant):
    return [node.target for module in variant.modules for node in module.graph.nodes]


@needs_compiler
@pytest.mark.parametrize(("batch", "is_split"), [(1, False), (2, False), (1, True), (2, True)])
def test_kernels_between_convolutions_of_series_keep_channels_last(batch, is_split):
    """Biases are written out on a GPU, as images: the kernel that adds one reads an image and returns a series."""
    model, series = Scaled().eval(), sound(batch)
    live = captured(model, series)
    assert lay_channels_last(live.regions[0].graph, lambda _: True) == 1
    assert split_bias(live.regions[0].graph, lambda *_: is_split, is_slower_with_bias) == 2 * is_split
    plan = make_plan(profile_as_it_is(live, BANDWIDTH, torch.device("cpu")), {}, min_share=0.0, is_timed=False)
    bench = Bench(live, on_cuda=False)
    fusions, built = try_all(bench, plan, OPTIONS, Progress(), lambda _: None)
    assert [(one.status, one.reason) for one in fusions if one.status is not Status.PLANNED] == []
    variant = bench.build(built, [ID])
    assert sum(replaced_sites(variant).values()) == 2 and targets(variant).count(CONV2D) == 2
    first = next(one for one in plan.fusions if "layer_norm" not in one.chain.ops)
    assert first.chain.ops == (*["add"] * is_split, "gelu", "mul")
    (written,) = (bench.ops[index].outputs[0] for index in first.sites[0].outputs)
    assert written.stride[1] == 1
    with torch.no_grad():
        expected, got = model(series), bench.run(variant)[0]
        truth = model.double()(series.double())
    own = (expected - truth).abs().max().item()
    assert (got - truth).abs().max().item() <= 2 * own + 1e-6
    assert got.stride() == expected.stride()
    assert targets(bench.build((), [ID])).count(CONV2D) == 2
    plain = bench.build((), ())
    assert targets(plain).count(CONV1D) == 2 and CONV2D not in targets(plain)
    assert targets(plain).count(torch.ops.aten.add.Tensor) == 1  # the model's own


@needs_compiler
def test_the_trial_serves_series_and_says_what_it_found():
    live, notes, clock = captured(Scaled(), sound()), [], Clock(-500 * MS)
    assert lay_channels_last(live.regions[0].graph, lambda _: True) == 1
    live.layouts = settle_layouts(
        live, None, on_cuda=False, timer=TIMER, difference=Clock(7 * MS), second_look=trial(Traces([5 * MS, MS]), clock, notes)
    )  # fmt: skip
    assert live.layouts[ID].is_kept and live.layouts[ID].sites == 1 and clock.calls == 1
    verdict = _of_layout(ID, Bench(live, on_cuda=False))
    assert verdict.status is Status.KEPT and "where kernels save less than" in verdict.reason
