"""The fused training step is timed with other ways to run it, and the memory of its CUDA graphs counts as its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.fuse.decide.instruments import MEASURED
from fusion_advisor.fuse.modes.apply_training import apply_training
from fusion_advisor.fuse.modes.training_runs import TrainingJob, baselines_of
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.records import EAGER, OURS, Status, StepProfile
from fusion_advisor.workload.load import describe_live
from tests.fuse.modes.test_apply_training import OPTIONS
from tests.fuse.train.test_trained_graph import WIDTH, Block

BEFORE = StepProfile(label="eager", device_ns=7, launches=1, categories=(), kernels=())


class Recorded:
    """Stands for a model whose step has been recorded: notes in which order it is asked for what."""

    def __init__(self, model):
        self.asked = []
        self.original_call = model
        self._model = model

    def forget_recorded(self):
        self.asked.append("forget")

    def compiled_call(self, *args):
        self.asked.append("run")
        return self._model(*args)


def test_graphs_are_recorded_again_where_the_memory_of_ours_is_counted():
    torch.manual_seed(0)
    loaded = describe_live(Block().train(), (torch.randn(8, 5, WIDTH),), phase="train")
    job = TrainingJob(
        loaded=loaded, options=replace(OPTIONS, runs=5), progress=Progress(), clock=PhaseClock(Progress()), instruments=MEASURED,
        on_cuda=False, optimise=lambda *_, **__: None,
    )  # fmt: skip
    fused = Recorded(loaded.model)
    rows, _ = baselines_of(job, fused, Step(launches=(), calls=0), BEFORE, lambda *_: None)
    assert [row.name for row in rows] == [EAGER, OURS]
    assert fused.asked[:2] == ["forget", "run"] and fused.asked.count("forget") == 1


@pytest.mark.gpu
def test_peak_memory_of_a_step_in_graphs_holds_their_pool():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.LayerNorm(1024), torch.nn.GELU()) for _ in range(8)])
    x = torch.randn(8192, 1024, device="cuda", requires_grad=True)
    loaded = describe_live(model.cuda().train(), (x,), phase="train")
    report = apply_training(loaded, replace(OPTIONS, effort="quick")).report
    graph = next(row for row in report.rewrites if row.id == "cuda-graph")
    assert graph.status is Status.KEPT, graph.reason
    eager, ours = (next(one for one in report.baselines if one.name == name) for name in (EAGER, OURS))
    assert graph.held_bytes < ours.step.peak_memory_bytes < 1.5 * eager.step.peak_memory_bytes
    torch.compiler.reset()
