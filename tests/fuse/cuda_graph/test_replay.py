"""What a recorded step assumes, on a fake graph: a call that breaks an assumption is never answered by a stale replay."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.errors import HalfWritten
from fusion_advisor.fuse.cuda_graph import replay
from fusion_advisor.fuse.cuda_graph.capturable import host_work
from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion
from fusion_advisor.fuse.cuda_graph.recording import backend_flags
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.call_signature import signature
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.rewrite.frozen_values import held_calls
from fusion_advisor.timing.interleaving import CannotRecord
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.tiny import Toy, gpt2, toy


def graphed_model(model, args=(), kwargs=None, recorder=None, **options):
    """A model whose captured graph is unchanged but replayed; applied."""
    live = capture_regions(model, args, kwargs or {})
    variant = Bench(live, on_cuda=False).build((), ())
    graphs = Graphs(recorder or FakeRecorder(), **options)
    return FusedModel(model, live.regions, variant.modules, args, kwargs or {}, graphs=graphs).apply()


@pytest.fixture
def model():
    return toy()[0]


@pytest.fixture
def x():
    return toy()[1][0]


@pytest.fixture
def recorder():
    return FakeRecorder()


@pytest.fixture
def fused(model, x, recorder):
    with torch.no_grad():
        yield graphed_model(model, (x,), recorder=recorder)


def others(x, count):
    return [torch.randn_like(x) for _ in range(count)]


def test_the_first_call_is_plain_the_second_is_recorded_and_every_later_one_replayed(fused, recorder, x):
    for number, value in enumerate(others(x, 5)):
        assert torch.equal(fused(value), fused._original(value))
        assert (recorder.recorded, recorder.replayed) == (min(number, 1), number)
    assert fused.fallbacks == {} and fused.graphs.refusals == {}
    (recording,) = fused.graphs.recordings
    assert recording.is_pure and recording.replays == 4
    assert len(recording.copies) == 1 and len(recording.read) == len([*fused.model.parameters(), *fused.model.buffers()])


def test_a_result_is_not_overwritten_by_later_calls(fused, x):
    values = others(x, 5)
    results = [fused(value) for value in values]
    for value, result in zip(values, results, strict=True):
        assert torch.equal(result, fused._original(value))


def test_static_outputs_are_the_graphs_own_memory(model, x):
    with torch.no_grad():
        fused = graphed_model(model, (x,), outputs="static")
        first, *same = (fused(value) for value in others(x, 4))
    assert len({result.data_ptr() for result in same}) == 1
    assert first.data_ptr() != same[0].data_ptr()


def test_the_graph_is_launched_before_the_guards_are_evaluated(fused, recorder, x, monkeypatch):
    for value in others(x, 3):
        fused(value)
    at = []
    real = fused._run_compiled
    monkeypatch.setattr(fused, "_run_compiled", lambda *args: (at.append(recorder.replayed), real(*args))[1])
    before = recorder.replayed
    fused(x)
    assert at == [before + 1] == [recorder.replayed]


def changed_attribute(model):
    model.norms[0].eps = 0.5


def replaced_submodule(model):
    model.norms[0] = torch.nn.Identity()


def forward_hook(model):
    model.lins[0].register_forward_hook(lambda module, args, output: output + 1)


CHANGES = [changed_attribute, replaced_submodule, forward_hook]


@pytest.mark.parametrize("change", CHANGES)
def test_a_replay_is_thrown_away_when_a_guard_fails(fused, recorder, x, change):
    for value in others(x, 3):
        fused(value)
    change(fused.model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [(value, fused(value)) for value in others(x, 4)]
    for value, result in results:
        assert torch.equal(result, fused._original(value))
    assert len([one for one in said if "original ops" in str(one.message)]) in (1, 2)


def new_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def new_parameter(model):
    model.lins[0].weight = torch.nn.Parameter(model.lins[0].weight * 3)


def assigned_state(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [new_data, new_parameter, assigned_state])
def test_a_moved_parameter_is_recorded_again(fused, recorder, x, change):
    for value in others(x, 3):
        fused(value)
    change(fused.model)
    for value in others(x, 3):
        assert torch.equal(fused(value), fused._original(value))
    assert recorder.recorded == 2 and len(fused.graphs.recordings) == 1
    assert fused.fallbacks == {}


def test_no_graph_reads_memory_that_was_freed(fused, recorder, x):
    for value in others(x, 3):
        fused(value)
    replayed = recorder.replayed
    new_data(fused.model)
    (recording,) = fused.graphs.recordings
    assert recording.gone and not recording.is_in_place()
    fused(x)
    assert recording.replays == replayed and recorder.replayed == replayed + 1  # the new recording's


def test_a_parameter_that_moved_while_its_memory_is_held_elsewhere_is_seen_behind_the_launch(fused, recorder, x):
    for value in others(x, 3):
        fused(value)
    held = [parameter.data for parameter in fused.model.parameters()]
    replayed = recorder.replayed
    new_data(fused.model)
    (recording,) = fused.graphs.recordings
    assert recording.is_in_place() and len(held) == len(list(fused.model.parameters()))
    for value in others(x, 3):
        assert torch.equal(fused(value), fused._original(value))
    assert recorder.recorded == 2 and recorder.replayed > replayed


class Several(torch.nn.Module):
    def forward(self, x, y, z):
        return torch.tanh(x) + y.float() * z


def test_inputs_of_several_dtypes_and_layouts_are_copied_in(recorder):
    def inputs():
        return torch.randn(4, 8), torch.randint(9, (4, 8)), torch.randn(4, 16)[:, :8]

    model = Several().eval()
    live = capture_regions(model, inputs(), {})
    fused = FusedModel(model, live.regions, [r.graph for r in live.regions], inputs(), {}, graphs=Graphs(recorder)).apply()
    with torch.no_grad():
        for _ in range(4):
            values = inputs()
            assert torch.equal(fused(*values), fused._original(*values))
    assert recorder.replayed == 3 and len(fused.graphs.recordings[0].copies) == 3


def test_weights_written_in_place_are_used_without_recording_again(fused, recorder, x):
    for value in others(x, 3):
        fused(value)
    fused.model.load_state_dict(Toy().state_dict())
    assert torch.equal(fused(x), fused._original(x))
    assert recorder.recorded == 1


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(8))

    def forward(self, x):
        return x * torch.tanh(self.table)


def test_a_value_folded_from_a_buffer_is_computed_again_when_the_buffer_is_written_to(recorder):
    model, x = Scaled().eval(), torch.randn(3, 8)
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=False).build((), ("fold-frozen",))
    assert variant.changed["fold-frozen"]
    fused = FusedModel(model, live.regions, variant.modules, (x,), {}, graphs=Graphs(recorder)).apply()
    with torch.no_grad():
        for _ in range(3):
            for value in others(x, 3):
                assert torch.equal(fused(value), fused._original(value))
            model.table.add_(1.0)
    assert recorder.recorded == 3, (fused.fallbacks, fused.graphs.refusals)


def test_a_frozen_value_is_never_computed_while_a_graph_is_recorded(recorder):
    """Nothing runs then: what was computed would be what the memory happened to hold."""
    model, x = Scaled().eval(), torch.randn(3, 8)
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=False).build((), ("fold-frozen",))
    fused = FusedModel(model, live.regions, variant.modules, (x,), {}, graphs=Graphs(recorder)).apply()
    (call,) = held_calls(variant.modules[0])
    with torch.no_grad():
        for number in range(3):
            for value in others(x, 3):
                before = recorder.recorded
                addresses = [one.data_ptr() for one, _ in call.versions]
                result = fused(value)
                assert torch.equal(result, fused._original(value))
                if recorder.recorded > before:
                    assert addresses == [one.data_ptr() for one, _ in call.versions]
            model.table = torch.randn(8)
            assert recorder.recorded == number + 1


def test_refresh_keeps_the_recorded_graph(recorder):
    model, x = Scaled().eval(), torch.randn(3, 8)
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=False).build((), ("fold-frozen",))
    fused = FusedModel(model, live.regions, variant.modules, (x,), {}, graphs=Graphs(recorder)).apply()
    (call,) = held_calls(variant.modules[0])
    with torch.no_grad():
        for _ in range(3):
            address = call(model.table).data_ptr()
            for value in others(x, 3):
                assert torch.equal(fused(value), fused._original(value))
            model.table.data.mul_(2)
            fused.refresh()
            assert call(model.table).data_ptr() == address
    assert recorder.recorded == 1


def test_a_transposed_weight_at_the_same_address_is_seen(fused, x):
    for value in others(x, 3):
        fused(value)
    weight = fused.model.lins[0].weight
    weight.data = weight.data.t()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in others(x, 3):
            assert torch.equal(fused(value), fused._original(value))


def test_addresses_that_keep_changing_end_the_recording(fused, recorder, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in others(x, 12):
            new_data(fused.model)
            assert torch.equal(fused(value), fused._original(value))
    assert recorder.recorded == 1 + replay._MOST_MOVES
    assert any("addresses" in reason for reason in fused.graphs.refusals)
    assert fused.graphs.recordings == ()


class Factor:
    """What a cache of its own numbers is to a model that reads them."""

    def __init__(self, number, size=1):
        self.values = torch.full((size,), float(number))


class Multiplied(torch.nn.Module):
    """Reads a tensor that an object holds."""

    def forward(self, x, factor):
        return torch.tanh(x) * factor.values.sum(), factor.values.view(-1, 1)


@pytest.mark.parametrize(("size", "recorded"), [(1, 2), (2000, 1 + replay._MOST_MOVES)], ids=["a number", "many"])
def test_numbers_that_each_object_holds_in_memory_of_its_own_are_copied_in(recorder, size, recorded):
    model, x = Multiplied().eval(), torch.randn(3, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = graphed_model(model, (x, Factor(1, size)), recorder=recorder)
        kept = [Factor(number, size) for number in range(9)]
        recorder.protect(*(factor.values for factor in kept))  # views of them are given
        for factor in [*kept, *kept[3:6]]:
            result, given = fused(x, factor)
            torch.testing.assert_close(result, torch.tanh(x) * factor.values.sum())
            assert given.data_ptr() == factor.values.data_ptr()
        factor.values.add_(1)
        torch.testing.assert_close(fused(x, factor)[0], torch.tanh(x) * factor.values.sum())
    assert recorder.recorded == recorded and fused.fallbacks == {}
    assert [reason for reason in fused.graphs.refusals if "addresses" in reason] == (
        [] if size == 1 else [*fused.graphs.refusals]
    )


def test_backend_flags_are_part_of_the_record(fused, recorder, x):
    for value in others(x, 3):
        fused(value)
    before = torch.backends.cuda.flash_sdp_enabled()
    try:
        torch.backends.cuda.enable_flash_sdp(not before)
        fused(x)
        assert recorder.recorded == 2
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def test_either_switch_of_tf32_is_part_of_the_record(fused, x):
    """Once the newer one was used, reading the older one raises."""
    matmul = torch.backends.cuda.matmul
    before, flags = matmul.fp32_precision, []
    try:
        for precision in ("ieee", "tf32"):
            matmul.fp32_precision = precision
            flags.append(backend_flags())
            for value in others(x, 3):
                assert torch.equal(fused(value), fused._original(value))
    finally:
        matmul.fp32_precision = before
    assert flags[0] != flags[1] and fused.fallbacks == {}


def grad(fused, x):
    with torch.enable_grad():
        return fused(x)


def train(fused, x):
    fused.model.train()
    return fused(x)


def autocast(fused, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fused(x)


def other_shape(fused, x):
    return fused(torch.cat((x, x)))


@pytest.mark.parametrize("call", [grad, train, autocast, other_shape])
def test_a_call_that_was_not_verified_replays_nothing_and_says_so_once(fused, recorder, x, call):
    for value in others(x, 3):
        fused(value)
    plain = copy.deepcopy(fused.revert())
    fused.apply()
    for value in others(x, 3):
        fused(value)
    before = recorder.replayed
    with pytest.warns(UserWarning, match="original ops") as said:
        results = [call(fused, x), call(fused, x)]
    assert len(said) == 1 and recorder.replayed == before
    expected = plain.train()(x) if call is train else call(plain, x)
    assert all(torch.equal(result, expected) for result in results)
    fused.model.eval()
    assert torch.equal(fused(x), fused._original(x)) and recorder.replayed == before + 1


def test_a_hook_and_a_dropout_in_training_are_seen_behind_the_launch(model, recorder, x):
    model.dropout = torch.nn.Dropout(0.5).eval()
    hooks = []
    changes = [
        (model.dropout.train, model.dropout.eval),
        (lambda: hooks.append(model.register_forward_hook(lambda *_: None)), lambda: hooks.pop().remove()),
    ]
    with torch.no_grad():
        fused = graphed_model(model, (x,), recorder=recorder)
        for value in others(x, 3):
            fused(value)
        before = recorder.replayed
        for make, take_back in changes:
            make()
            with pytest.warns(UserWarning, match="original ops"):
                assert torch.equal(fused(x), fused._original(x))
            take_back()
            assert torch.equal(fused(x), fused._original(x))
    assert len(fused.fallbacks) == 2 and recorder.replayed == before + 4


@pytest.mark.parametrize("why", ["the call comes from another stream", "being recorded"])
def test_what_the_recorder_refuses_runs_launch_by_launch_and_is_said_once(fused, recorder, x, why):
    for value in others(x, 3):
        fused(value)
    recorder.why_not = why
    with pytest.warns(UserWarning, match=why) as said:
        for value in others(x, 2):
            assert torch.equal(fused(value), fused._original(value))
    assert len(said) == 1 and fused.graphs.refusals == {why: 2} and recorder.replayed == 2


def test_a_recording_that_fails_names_the_line_and_is_not_tried_again(model, x):
    recorder = FakeRecorder()

    def record(call):
        call()
        raise CannotRecord("operation not permitted when stream is capturing")

    recorder.record = record
    with torch.no_grad():
        fused = graphed_model(model, (x,), recorder=recorder)
        fused(x)
        with pytest.warns(UserWarning, match=r"not permitted.*`output`") as said:
            for value in others(x, 3):
                assert torch.equal(fused(value), fused._original(value))
    assert len(said) == 1
    (reason,) = fused.graphs.refusals
    assert fused.graphs.recordings == () and "not permitted" in reason


def test_another_thread_runs_launch_by_launch_meanwhile(fused, recorder, x):
    for value in others(x, 3):
        fused(value)
    inside, go, found = threading.Event(), threading.Event(), []
    real = fused.graphs._recordings
    (recording,) = real.values()
    play = recording.play

    def slow():
        play()
        inside.set()
        go.wait(20)

    recording.play = slow
    values = others(x, 2)

    def first():
        torch.set_num_threads(1)  # OpenMP counts per thread: the fixture's 1 does not reach this thread's first GEMM
        with torch.no_grad():
            found.append(fused(values[0]))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with pytest.warns(UserWarning, match="another thread"):
        second = fused(values[1])
    go.set()
    thread.join()
    assert torch.equal(second, fused._original(values[1])) and torch.equal(found[0], fused._original(values[0]))


def test_reverting_drops_the_recordings_and_restores_exactly(model, x, recorder):
    attributes = dict(model.__dict__)
    with torch.no_grad():
        fused = graphed_model(model, (x,), recorder=recorder)
        for value in others(x, 3):
            fused(value)
        fused.revert()
        assert model.__dict__ == attributes and fused.graphs.recordings == ()
        replayed = recorder.replayed
        model(x)
        assert recorder.replayed == replayed


class Counter(torch.nn.Module):
    """Writes to a buffer, as a decode step writes to its cache."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.factor = 2.0

    def forward(self, x):
        self.total.add_(x.sum(0))
        return self.total * self.factor + x


def test_a_step_that_writes_to_a_small_buffer_writes_once_per_call_also_when_it_was_launched_in_vain():
    model, plain = Counter().eval(), Counter().eval()
    x = torch.randn(3, 4)
    recorder = FakeRecorder(model.total)
    with torch.no_grad():
        fused = graphed_model(model, (x,), recorder=recorder)
        model.total.zero_()  # capturing ran it once
        for value in others(x, 5):
            torch.testing.assert_close(fused(value), plain(value))
            torch.testing.assert_close(model.total, plain.total)
        (recording,) = fused.graphs.recordings
        assert not recording.is_pure and recording.replays == recorder.replayed == 4
        before = model.total.clone()
        model.factor = 3.0  # a guard fails, and the buffer is written to once, not twice
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(x)
        torch.testing.assert_close(model.total, before + x.sum(0))
        assert recorder.replayed == 5  # in vain


class ThroughDropout(torch.nn.Module):
    """Writes to what it is given through dropouts that drop nothing: eager returns their input itself."""

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout()
        self.register_buffer("total", torch.zeros(3, 4))

    def forward(self, x):
        self.dropout(self.total).view(-1).add_(1)
        self.dropout(x)[0].add_(1)
        return x * 2 + self.total


def test_a_step_that_writes_to_what_it_is_given_through_a_dropout_writes_at_every_call():
    model, plain = ThroughDropout().eval(), ThroughDropout().eval()
    x, expected = torch.zeros(3, 4), torch.zeros(3, 4)
    recorder = FakeRecorder(x, model.total)
    with torch.no_grad():
        fused = graphed_model(model, (x,), recorder=recorder)
        x.zero_(), model.total.zero_()  # capturing ran it
        for _ in range(4):
            torch.testing.assert_close(fused(x), plain(expected))
            torch.testing.assert_close(x, expected)
            torch.testing.assert_close(model.total, plain.total)
        (recording,) = fused.graphs.recordings
    assert recorder.replayed == 3 and not recording.is_pure and not recording.copies


class Memory:
    """Rows appended one call after the other, as a static KV cache holds them."""

    def __init__(self, rows=40):
        self.rows = torch.zeros(rows, 4)
        self.count = torch.zeros(1, dtype=torch.int64)


class Appender(torch.nn.Module):
    """Appends its input to a memory and sums up what that holds."""

    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, x, memory):
        place = memory.count + torch.arange(x.shape[0])
        memory.rows.index_copy_(0, place, x)
        memory.count.add_(x.shape[0])
        is_held = torch.arange(memory.rows.shape[0]) < memory.count
        return (memory.rows * is_held[:, None]).sum(0) * self.factor


@pytest.fixture
def appending():
    model, memory, recorder = Appender().eval(), Memory(), FakeRecorder()
    recorder.protect(memory.rows, memory.count)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = graphed_model(model, (torch.randn(2, 4), memory), recorder=recorder)
        memory.rows.zero_()
        memory.count.zero_()
        for value in [torch.randn(2, 4) for _ in range(3)]:
            fused(value, memory)
        yield fused, memory, recorder


def test_a_step_that_appends_is_launched_before_the_guards(appending, monkeypatch):
    fused, memory, recorder = appending
    (recording,) = fused.graphs.recordings
    ((saved, _),) = recording.saved
    assert not recording.is_pure and saved() is memory.count
    at = []
    real = fused._run_compiled
    monkeypatch.setattr(fused, "_run_compiled", lambda *args: (at.append(recorder.replayed), real(*args))[1])
    x, held = torch.randn(2, 4), memory.rows[:6].clone()
    torch.testing.assert_close(fused(x, memory), torch.cat((held, x)).sum(0) * 2)
    assert at == [3] == [recorder.replayed] and int(memory.count) == 8


@pytest.mark.parametrize("is_seen_before", [False, True])
def test_an_append_in_vain_is_undone(appending, is_seen_before):
    fused, memory, recorder = appending
    if is_seen_before:  # dynamo then has a graph for it, and does not ask for one
        fused.model.factor = 3.0
        fused(torch.randn(2, 4), memory)
        fused.model.factor = 2.0
        fused(torch.randn(2, 4), memory)
    replayed, count, held = recorder.replayed, int(memory.count), memory.rows.clone()
    fused.model.factor = 3.0
    x = torch.randn(2, 4)
    found = fused(x, memory)
    torch.testing.assert_close(found, torch.cat((held[:count], x)).sum(0) * 3)
    assert (int(memory.count), recorder.replayed) == (count + 2, replayed + 1)


def test_another_memory_is_not_written_to_ahead(appending):
    fused, memory, recorder = appending
    before, other = memory.rows.clone(), Memory()
    recorder.protect(other.rows, other.count)
    for _ in range(3):
        x = torch.randn(2, 4)
        held = other.rows[: int(other.count)].clone()
        torch.testing.assert_close(fused(x, other), torch.cat((held, x)).sum(0) * 2)
    assert torch.equal(memory.rows, before)
    assert int(memory.count) == 6 and int(other.count) == 6


def test_tensors_put_into_the_memory_are_found(appending):
    fused, memory, recorder = appending
    old_rows, old_count = memory.rows, memory.count
    memory.rows, memory.count = old_rows.clone(), old_count.clone()
    recorder.protect(memory.rows, memory.count)
    before, x = old_rows.clone(), torch.randn(2, 4)
    torch.testing.assert_close(fused(x, memory), torch.cat((before[:6], x)).sum(0) * 2)
    assert torch.equal(old_rows, before)
    assert int(old_count) == 6


def test_original_ops_behind_an_append_ahead_are_an_error_once(appending, monkeypatch):
    fused, memory, _ = appending
    monkeypatch.setattr(
        fused, "_run_compiled", lambda _, args, kwargs, *__: fused._original(*args, **kwargs)
    )  # dynamo gave up: it asks no backend
    x = torch.randn(2, 4)
    with pytest.raises(HalfWritten, match="reset the cache"):
        fused(x, memory)
    count, held = int(memory.count), memory.rows.clone()
    torch.testing.assert_close(fused(x, memory), torch.cat((held[:count], x)).sum(0) * 2)


class Overwriting(torch.nn.Module):
    """Writes rows where its input says: an old row is lost."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(90, 4))

    def forward(self, x, place):
        self.rows.index_copy_(0, place, x)
        return self.rows.sum(0)


def test_a_step_that_overwrites_is_launched_after_the_guards():
    model, x, place = Overwriting().eval(), torch.randn(2, 4), torch.tensor([3, 5])
    recorder = FakeRecorder(model.rows)
    with torch.no_grad():
        fused = graphed_model(model, (x, place), recorder=recorder)
        for _ in range(4):
            fused(torch.randn(2, 4), place)
        (recording,) = fused.graphs.recordings
        assert recording.saved is None and not recording.may_be_undone(())


class Many(torch.nn.Module):
    """Results of every kind."""

    def forward(self, x, keep):
        y = x * 2
        return y, y[1:], x[1:], x, keep, y.t(), (x + 1).expand(2, *x.shape), torch.zeros(0, 3) + x.sum(), 7


def test_results_alias_what_they_alias_in_eager():
    model = Many().eval()
    x, keep = torch.randn(3, 4), torch.randn(2)
    with torch.no_grad():
        fused = graphed_model(model, (x, keep))
        for _ in range(4):
            a, b = torch.randn(3, 4), torch.randn(2)
            base = torch.randn(5, 4)
            a = base[1:4]
            found, expected = fused(a, b), fused._original(a, b)
            for one, other in zip(found, expected, strict=True):
                if isinstance(one, torch.Tensor):
                    assert torch.equal(one, other) and one.stride() == other.stride()
                else:
                    assert one == other
            assert found[3] is a and found[4] is b
            assert found[2].data_ptr() == a[1:].data_ptr()
            found[0][1, 0] = 99.0
            assert found[1][0, 0] == 99.0 and found[5][0, 1] == 99.0
    assert fused.graphs.recordings


class Sliced(torch.nn.Module):
    """Gives a copy of a slice, as a padded GEMM does, and the memory that it is a slice of."""

    def forward(self, x):
        wide = torch.tanh(x)
        return wide[:, :3].clone(memory_format=torch.contiguous_format), wide


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_the_last_copy_is_the_copy_out(outputs):
    model, x = Sliced().eval(), torch.randn(4, 5)
    with torch.no_grad():
        fused = graphed_model(model, (x,), outputs=outputs)
        results = []
        for value in others(x, 4):
            found, expected = fused(value), fused._original(value)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
            assert found[0].untyped_storage().data_ptr() != found[1].untyped_storage().data_ptr()
            results.append((found[0], expected[0]))
        (recording,) = fused.graphs.recordings
        copied = [memory.tensor.shape for memory in recording.memories if not memory.tensor.is_contiguous()]
        assert copied == ([(4, 3)] if outputs == "clone" else [])
        if outputs == "clone":
            assert all(torch.equal(one, other) for one, other in results)


class WrittenLater(torch.nn.Module):
    """Writes to what it has given a copy of."""

    def forward(self, x):
        wide = torch.tanh(x)
        part = wide[:, :3].clone(memory_format=torch.contiguous_format)
        wide.add_(1)
        return part, wide


def test_a_copy_of_what_is_written_to_later_stays_in_the_graph():
    """Behind the graph it would find the later values."""
    model, x = WrittenLater().eval(), torch.randn(4, 5)
    with torch.no_grad():
        fused = graphed_model(model, (x,))
        for value in others(x, 4):
            for one, other in zip(fused(value), fused._original(value), strict=True):
                assert torch.equal(one, other)
    assert fused.graphs.recordings


def test_expanded_inputs_are_copied_in():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    x = torch.randn(4).expand(3, 4)
    with torch.no_grad():
        fused = graphed_model(model, (x,))
        for _ in range(4):
            value = torch.randn(4).expand(3, 4)
            assert torch.equal(fused(value), fused._original(value))
    assert fused.graphs.recordings


def test_no_more_than_the_limit_is_held():
    model, (x,) = toy()
    recorder = FakeRecorder()
    with torch.no_grad():
        fused = graphed_model(model, (x,), recorder=recorder, limit=2)
        for rows in (2, 3, 4):
            args = (torch.randn(rows, 32),)
            live = capture_regions(model, args, {})
            fused._add(live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, {})
        for _ in range(3):
            for rows in (6, 2, 3, 4):
                value = torch.randn(rows, 32)
                assert torch.equal(fused(value), fused._original(value))
                assert len(fused.graphs.recordings) <= 2
    assert fused.fallbacks == {}


def test_shapes_that_take_turns_in_too_few_graphs_are_seldom_recorded():
    model, (x,) = toy()
    recorder = FakeRecorder()
    with torch.no_grad():
        fused = graphed_model(model, (x,), recorder=recorder, limit=1)
        args = (torch.randn(2, 32),)
        live = capture_regions(model, args, {})
        fused._add(live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, {})
        regions = set()
        for _ in range(30):
            for rows in (6, 2):
                value = torch.randn(rows, 32)
                assert torch.equal(fused(value), fused._original(value))
                regions |= set(fused.graphs._recordings)
        assert len(regions) == 2
        assert 4 <= recorder.recorded <= 10
    assert fused.fallbacks == {}


def test_a_generating_model_gives_the_same_tokens():
    model, inputs = gpt2()
    ids = inputs["input_ids"]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = graphed_model(model, (), inputs)
        logits = fused._original(**inputs).logits
        for _ in range(3):
            torch.testing.assert_close(fused(**inputs).logits, logits)
        assert fused.graphs.recordings
        assert torch.equal(fused.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_inference_mode_and_no_grad_may_take_turns(fused, x):
    for value in others(x, 3):
        with torch.inference_mode():
            one = fused(value.clone())
        assert torch.equal(one, fused(value))


def test_an_op_that_the_host_waits_for_is_named_with_its_line():
    traced = make_fx(lambda x: torch.nonzero(x).sum() + x, pre_dispatch=True)(torch.randn(3))
    assert "`nonzero`" in host_work(traced)
    assert host_work(make_fx(lambda x: x + 1, pre_dispatch=True)(torch.randn(3))) is None


class _On(torch.Tensor):
    """Says that it lies on a device that this machine need not have."""

    @staticmethod
    def __new__(cls, kind):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device=kind)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def copying(source, result):
    made = torch.fx.Graph()
    a = made.placeholder("a")
    b = made.call_function(torch.ops.aten._to_copy.default, (a,))
    made.output(b)
    a.meta["val"], b.meta["val"] = _On(source), _On(result)
    return torch.fx.GraphModule(torch.nn.Module(), made)


def test_copies_between_host_and_device_are_named():
    assert "host waits" in host_work(copying("cuda", "cpu"))
    assert "`a` is read in host memory" in host_work(copying("cpu", "cuda"))
    assert host_work(copying("cuda", "cuda")) is None


def reading(target, *, dims):
    """A graph whose op takes a tensor of the device, and a constant in host memory with so many dims."""
    made = torch.fx.Graph()
    a, constant = made.placeholder("a"), made.get_attr("constant")
    b = made.call_function(target, (constant, a))
    made.output(b)
    a.meta["val"], b.meta["val"], constant.meta["val"] = _On("cuda"), _On("cuda"), torch.zeros([2] * dims)
    owner = torch.nn.Module()
    owner.register_buffer("constant", torch.zeros([2] * dims))
    return torch.fx.GraphModule(owner, made)


def test_constants_in_host_memory_are_copied_unless_a_kernel_takes_one_number_along():
    assert host_work(reading(torch.ops.aten.mul.Tensor, dims=0)) is None
    assert "`constant` is read in host memory" in host_work(reading(torch.ops.aten.mul.Tensor, dims=1))
    assert "`constant` is read in host memory" in host_work(reading(torch.ops.aten.type_as.default, dims=0))


def test_a_region_that_needs_the_host_is_never_recorded(x):
    traced = make_fx(lambda x: torch.nonzero(x).sum() + x, pre_dispatch=True)(x)
    recorder = FakeRecorder()
    graphs = Graphs(recorder)
    region = GraphedRegion(traced, ("x",), graphs)
    with torch.no_grad(), pytest.warns(UserWarning, match="host waits"):
        for _ in range(3):
            graphs.run("key", [x], lambda: region(x))
    assert recorder.recorded == 0


class Holder:
    def __init__(self, *tensors):
        self.layers = list(tensors)
        self.length = 3


def test_signatures_tell_calls_apart():
    a, b = torch.randn(2, 3), torch.randn(3, 2).t()
    assert signature((a,), {}) == signature((a.clone(),), {})
    assert hash(signature((a, [a, {"k": a}]), {"f": True})) is not None
    different = [((a,), {}), ((b,), {}), ((a.double(),), {}), ((a, 1), {}), ((a, True), {}), ((a, 1.0), {}), ((), {"x": a})]
    keys = [signature(*call) for call in different]
    assert len(set(keys)) == len(keys)
    assert signature((), {"x": a, "y": 1}) == signature((), {"y": 1, "x": a})


def test_objects_are_told_apart_by_what_they_hold():
    seen = {}
    holder = Holder(torch.randn(2, 3))
    first = signature((holder,), {}, None, seen)
    assert signature((holder,), {}, None, seen) == first == signature((Holder(torch.randn(2, 3)),), {})
    holder.layers[0] = torch.randn(5, 3)
    holder.layers = list(holder.layers)
    assert signature((holder,), {}, None, seen) != first
    holder.layers = [torch.randn(2, 3)]
    assert signature((holder,), {}, None, seen) == first
    holder.length = 4
    assert signature((holder,), {}, None, seen) != first
    holder.length = 3
    holder.layers.append(torch.randn(2, 3))
    assert signature((holder,), {}, None, seen) != first
    del holder
    assert seen == {}
    holder = Holder()
    holder.anything = iter(())
    assert signature((holder,), {}) != signature((holder,), {})
