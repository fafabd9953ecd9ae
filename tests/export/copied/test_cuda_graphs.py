"""When a graph is recorded and replayed, what is copied, and what is the caller's own; on a CPU, by a fake recorder."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from fusion_advisor.export.copied.cuda_graphs import MOST_GRAPHS, CudaRecorder, Graphs
from fusion_advisor.export.copied.graph_outputs import Late


class Cache:
    """Counts in place, as a static cache writes."""

    def __init__(self):
        self.keys = torch.zeros(4)


class Output(NamedTuple):
    """Results of their own memory, views of one another, arguments, views of arguments, plain values."""

    total: torch.Tensor
    first: torch.Tensor
    x: torch.Tensor
    part: torch.Tensor
    keys: torch.Tensor
    cache: Any
    name: str


class Step:
    """A forward that writes into its cache; while a fake records it, it computes into memory of the graph and counts nothing."""

    def __init__(self):
        self.weight = torch.full((4,), 2.0)
        self.runs = 0

    def __call__(self, call):
        self.runs += 1
        call["cache"].keys.add_(1)
        total = call["x"] * self.weight + call["cache"].keys
        return Output(total, total[:2], call["x"], call["x"][1:3], call["cache"].keys[:3], call["cache"], "step")


class FakeRecorder:
    """Records as a GPU does: recording changes no cache, and a replay writes into the memory of the recorded results."""

    def __init__(self, *, refusal=""):
        self.refusal = refusal
        self.replays = 0
        self.is_inside = False
        self.now = 0

    def is_recording(self):
        return self.is_inside

    def stream(self, device):
        return self.now

    def record(self, run):
        if self.refusal:
            raise RuntimeError(f"{self.refusal}\nmore")
        output = run()
        output.cache.keys.sub_(1)
        output.total.fill_(float("nan"))  # recording computes nothing

        def replay():
            self.replays += 1
            with torch.inference_mode(output.total.is_inference()):  # a device asks for no mode
                output.total.copy_(run().total)

        return output, replay


def setup(**options):
    step, recorder, notes = Step(), FakeRecorder(**options), []
    graphs = Graphs(recorder, [step.weight], ["cache.keys"], notes.append)

    def run(cache, x):
        return graphs.run({"cache": cache, "x": x}, {"cache.keys": cache.keys, "x": x}, step)

    return step, recorder, notes, run


def test_the_second_call_is_recorded_and_every_call_writes_its_cache_once():
    _, recorder, notes, run = setup()
    cache = Cache()
    for number in range(1, 5):
        x = torch.full((4,), float(number))
        found = run(cache, x)
        assert torch.equal(found.total, 2 * x + number)
        assert torch.equal(cache.keys, torch.full((4,), float(number)))
        assert recorder.replays == max(0, number - 1)
    assert notes == []


def test_results_are_copies_and_arguments_are_the_callers():
    _, recorder, _, run = setup()
    cache = Cache()
    run(cache, torch.ones(4))
    earlier = run(cache, torch.ones(4))
    kept = earlier.total.clone()
    x = torch.arange(4.0)
    found = run(cache, x)
    assert recorder.replays == 2
    assert torch.equal(earlier.total, kept)
    assert found.x is x
    assert found.part.data_ptr() == x[1:].data_ptr()
    assert torch.equal(found.part, x[1:3])
    assert found.cache is cache
    assert found.keys.data_ptr() == cache.keys.data_ptr()
    assert found.first.data_ptr() == found.total.data_ptr()
    assert found.name == "step"


def test_another_cache_has_a_graph_of_its_own_and_the_first_keeps_its():
    _, recorder, _, run = setup()
    caches = [Cache(), Cache()]
    for _ in range(3):
        for cache in caches:
            run(cache, torch.ones(4))
    assert recorder.replays == 4
    assert all(torch.equal(cache.keys, torch.full((4,), 3.0)) for cache in caches)


def test_another_object_with_the_same_tensors_is_handed_back():
    _, recorder, _, run = setup()
    cache, twin = Cache(), Cache()
    twin.keys = cache.keys
    run(cache, torch.ones(4))
    run(cache, torch.ones(4))
    assert run(twin, torch.ones(4)).cache is twin
    assert recorder.replays == 2


def test_a_parameter_that_moved_is_another_graph():
    step, recorder, _, run = setup()
    cache = Cache()
    for _ in range(2):
        run(cache, torch.ones(4))
    step.weight.data = torch.full((4,), 5.0)
    found = run(cache, torch.ones(4))
    assert recorder.replays == 1
    assert torch.equal(found.total, torch.full((4,), 8.0))


def test_what_cannot_be_recorded_runs_kernel_by_kernel_and_is_counted():
    _, recorder, notes, run = setup(refusal="not permitted")
    cache = Cache()
    for number in range(1, 4):
        assert torch.equal(run(cache, torch.ones(4)).total, torch.full((4,), 2.0 + number))
    assert notes == ["no CUDA graph: not permitted"] * 2
    assert recorder.replays == 0


def test_inside_somebodys_recording_nothing_is_recorded():
    step, recorder, _, run = setup()
    cache = Cache()
    recorder.is_inside = True
    for _ in range(3):
        run(cache, torch.ones(4))
    assert (step.runs, recorder.replays) == (3, 0)


def test_a_call_from_another_stream_runs_kernel_by_kernel():
    """A graph may be under way on the first one, and reads the memory that a call is copied into."""
    _, recorder, notes, run = setup()
    recorder.now = 0
    cache = Cache()
    for _ in range(3):
        run(cache, torch.ones(4))
    recorder.now = 7
    assert torch.equal(run(cache, torch.ones(4)).total, torch.full((4,), 6.0))
    assert recorder.replays == 2 and notes == ["no CUDA graph: the call comes from another stream than the first one did"]
    recorder.now = 0
    assert torch.equal(run(cache, torch.ones(4)).total, torch.full((4,), 7.0)) and recorder.replays == 3


def test_a_call_from_another_stream_is_not_started():
    step, recorder = Step(), FakeRecorder()
    graphs = Graphs(recorder, [step.weight], ["cache.keys"], lambda reason: None, ["cache.keys"])
    cache = Cache()
    call = {"cache": cache, "x": torch.ones(4)}
    for _ in range(2):
        graphs.run(call, {"cache.keys": cache.keys, "x": call["x"]}, step)
    recorder.now = 7
    assert graphs.started(call, {"cache.keys": cache.keys}) is None and recorder.replays == 1
    recorder.now = 0
    assert graphs.started(call, {"cache.keys": cache.keys}) is not None


def test_so_many_caches_have_graphs():
    _, recorder, notes, run = setup()
    caches = [Cache() for _ in range(MOST_GRAPHS + 1)]
    for _ in range(2):
        for cache in caches:
            run(cache, torch.ones(4))
    assert recorder.replays == MOST_GRAPHS
    assert len(notes) == 2
    assert torch.equal(caches[-1].keys, torch.full((4,), 2.0))


def test_a_call_that_was_started_in_vain_is_undone():
    step, recorder, notes = Step(), FakeRecorder(), []
    cache, x = Cache(), torch.ones(4)
    call, tensors = {"cache": cache, "x": x}, {"cache.keys": cache.keys, "x": x}
    held = {"cache.keys": cache.keys}
    graphs = Graphs(recorder, [step.weight], ["cache.keys"], notes.append, ["cache.keys"])
    assert graphs.started(call, held) is None
    for _ in range(2):
        graphs.run(call, tensors, step)
    assert torch.equal(cache.keys, torch.full((4,), 2.0))
    started = graphs.started(call, held)
    assert started.is_for([step.weight.data_ptr()]) and not started.is_for([cache.keys.data_ptr()])
    started.undo()
    assert recorder.replays == 2 and torch.equal(cache.keys, torch.full((4,), 2.0))
    found = graphs.started(call, held).results()
    assert torch.equal(cache.keys, torch.full((4,), 3.0)) and torch.equal(found.total, torch.full((4,), 5.0))


def test_a_call_whose_writes_cannot_be_undone_is_not_started():
    step, recorder, notes = Step(), FakeRecorder(), []
    cache, x = Cache(), torch.ones(4)
    call, tensors = {"cache": cache, "x": x}, {"cache.keys": cache.keys, "x": x}
    graphs = Graphs(recorder, [step.weight], ["cache.keys"], notes.append)
    for _ in range(2):
        graphs.run(call, tensors, step)
    assert graphs.started(call, {"cache.keys": cache.keys}) is None and recorder.replays == 1


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_graph_is_not_started_where_memory_that_it_reads_was_freed(is_kept):
    step, recorder = Step(), FakeRecorder()
    cache, x = Cache(), torch.ones(4)
    call, tensors, held = {"cache": cache, "x": x}, {"cache.keys": cache.keys, "x": x}, {"cache.keys": cache.keys}
    graphs = Graphs(recorder, [step.weight], ["cache.keys"], lambda reason: None, ["cache.keys"])
    for _ in range(2):
        graphs.run(call, tensors, step)
    before = step.weight.detach() if is_kept else None
    step.weight.data = torch.full((4,), 5.0)
    started = graphs.started(call, held)
    assert (started is not None) is is_kept
    if started is not None:
        assert not started.is_for([step.weight.data_ptr()]) and started.is_for([before.data_ptr()])
        started.undo()
    for _ in range(2):
        found = graphs.run(call, tensors, step)
    assert torch.equal(found.total, torch.full((4,), 9.0)) and graphs.started(call, held) is not None


def test_a_graph_is_not_started_for_another_cache():
    step, recorder = Step(), FakeRecorder()
    graphs = Graphs(recorder, [step.weight], ["cache.keys"], lambda reason: None, ["cache.keys"])
    caches, x = [Cache(), Cache()], torch.ones(4)
    for cache in caches[:1] * 2:
        graphs.run({"cache": cache, "x": x}, {"cache.keys": cache.keys, "x": x}, step)
    assert [graphs.started({"cache": one, "x": x}, {"cache.keys": one.keys}) is None for one in caches] == [False, True]


def test_results_are_copied_in_one_go_each_and_arguments_likewise():
    """Two results that share memory are one copy, an empty one is one of its own, a part of a memory copies that part alone."""
    x, y, weight = torch.arange(6.0), torch.ones(2), torch.ones(1)

    def forward(call):
        whole = call["x"] * weight + call["y"].sum()
        late = Late.of(torch.add, whole, 1) if call["x"] is not x else whole + 1
        return {"parts": [whole[1:3], whole[2:4]], "none": whole[:0], "late": (late, late), "number": 3}

    class Kept:
        def is_recording(self):
            return False

        def record(self, run):
            output = run()
            self.whole = output["parts"][0]._base

            def replay():
                self.whole.copy_(run()["parts"][0]._base)

            return output, replay

    graphs = Graphs(Kept(), [weight], [], lambda reason: None)
    call = {"x": x, "y": y}
    graphs.run(call, call, forward)
    graphs.run(call, call, forward)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = graphs.started(call, {})
    found = started.results()
    names = [event.name for event in profile.events() if event.cpu_parent is None]
    assert names.count("aten::_foreach_copy_") == 1 and names.count("aten::clone") == 2
    expected = x + 2
    first, second = found["parts"]
    assert torch.equal(first, expected[1:3]) and torch.equal(second, expected[2:4])
    assert second.data_ptr() == first[1:].data_ptr() and first.untyped_storage().nbytes() == 12
    assert found["none"].shape == (0,) and found["number"] == 3
    assert found["late"][0] is found["late"][1] and torch.equal(found["late"][0], expected + 1)


def test_what_was_recorded_in_inference_mode_serves_calls_outside_it():
    _, recorder, _, run = setup()
    cache = Cache()
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad):
        with mode():
            found = run(cache, torch.full((4,), float(recorder.replays)))
    assert recorder.replays == 2 and torch.equal(found.total, torch.full((4,), 5.0))


@pytest.mark.gpu
def test_torch_records_what_the_fake_stands_for():
    step, notes = Step(), []
    step.weight = step.weight.cuda()
    graphs = Graphs(CudaRecorder(), [step.weight], ["cache.keys"], notes.append)
    cache = Cache()
    cache.keys = cache.keys.cuda()
    for number in range(1, 6):
        x = torch.full((4,), float(number), device="cuda")
        found = graphs.run({"cache": cache, "x": x}, {"cache.keys": cache.keys, "x": x}, step)
        assert torch.equal(found.total, 2 * x + number)
        assert found.x is x
    assert step.runs == 2  # launched, recorded; then replayed
    assert notes == []
