"""Segments of a decode step on a growing cache, on a recorder without a GPU: the same bits, and every rule of other graphs."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch

from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.segmented_region import SegmentedRecording
from fusion_advisor.fuse.cuda_graph.segments import split
from fusion_advisor.timing.interleaving import CannotRecord
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.cuda_graph.growing import Decoding, launched, same, serving_decode
from tests.tiny import Calling, gpt2, llama, qwen2
from tools.measure_ranges import replays_of

PARTS = 3
"""Segments of a model with two layers: ahead of the first attention, between both, and after the second."""


@pytest.fixture
def served():
    recorder = FakeRecorder()
    with torch.no_grad():
        fused, call = serving_decode(qwen2(), recorder)
        yield fused, call, recorder


@pytest.mark.parametrize("model_of", [qwen2, llama, gpt2])
@pytest.mark.parametrize("name", ["decode", "padded decode"])
def test_twenty_steps_give_the_same_bits_and_are_recorded_once(model_of, name):
    recorder = FakeRecorder()
    with torch.no_grad():
        fused, call = serving_decode(model_of(), recorder, name=name)
        expected = launched(fused, call, 2)
        assert recorder.recorded == 0
        found = Decoding(fused, call, 2).step(20).all_bits()
        assert same(found, expected)
        assert recorder.recorded == PARTS
        (recording,) = fused.graphs.recordings
        assert recording.replays == 19 and recorder.replayed == PARTS * (19 + 1)  # once while it was recorded
        assert fused.graphs.ahead == 0 and fused.graphs.refusals == {} and fused.fallbacks == {}
        assert replays_of(fused) == {} and replays_of(fused, SegmentedRecording) == {id(recording): 19}
        segments = recording.segments
        assert segments.launches_inside / segments.launches > 0.7


def test_each_batch_has_its_own_and_they_may_take_turns(served):
    fused, call, recorder = served
    expected = [launched(fused, call, batch, seed=batch) for batch in (2, 4)]
    both = [Decoding(fused, call, batch, seed=batch) for batch in (2, 4)]
    for _ in range(20):
        for one in both:
            one.step()
    assert all(same(one.all_bits(), bits) for one, bits in zip(both, expected, strict=True))
    assert recorder.recorded == 2 * PARTS and len(fused.graphs.recordings) == 2
    assert fused.graphs.summary.startswith("2 of at most 4 CUDA graphs are recorded")


class Empty(FakeRecorder):
    """A recorder whose pool holds nothing beside copied inputs."""

    def pool_bytes(self):
        return 0


def test_what_segments_hold_is_counted_and_bounded(recwarn):
    with torch.no_grad():
        fused, call = serving_decode(qwen2(), Empty())
        for batch in (2, 4):
            Decoding(fused, call, batch).step(2)
        small, large = fused.graphs._recordings.items()
        for region, recording in (small, large):
            made = [one.value for player in recording.players for one in player._results if isinstance(one.value, torch.Tensor)]
            made += [memory.tensor for player in recording.players for memory in player._memories]
            outputs = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in made}
            assert region.held.kept == sum(outputs.values()) + sum(one.nbytes for one in recording.statics)
            assert region.held.passing > 0
        most = small[0].held.kept + large[0].held.total + small[0].held.passing - 1
        fused.revert()
        fused, call = serving_decode(qwen2(), recorder := Empty(), most_bytes=most)
        expected = launched(fused, call, 4)
        Decoding(fused, call, 2).step(2)
        assert same(Decoding(fused, call, 4).step(20).all_bits(), expected)
        assert recorder.recorded == 2 * PARTS and len(fused.graphs.recordings) == 1
        fused.revert()
        fused, call = serving_decode(qwen2(), recorder := Empty(), most_bytes=large[0].held.total - 1)
        assert same(Decoding(fused, call, 4).step(20).all_bits(), expected)
        Decoding(fused, call, 4).step(5)
        assert recorder.recorded == 0 and "1 size runs launch by launch" in fused.graphs.summary
    assert not recwarn.list


def test_another_cache_of_the_same_batch_is_replayed_at_once(served):
    fused, call, recorder = served
    Decoding(fused, call, 2).step(3)
    expected = launched(fused, call, 2, cached=17, seed=5)
    replayed = recorder.replayed
    assert same(Decoding(fused, call, 2, cached=17, seed=5).step(20).all_bits(), expected)
    assert recorder.recorded == PARTS and recorder.replayed == replayed + 20 * PARTS


def test_a_cache_that_is_kept_is_not_written_to_by_later_steps(served):
    fused, call, _ = served
    one = Decoding(fused, call, 2).step(6)
    kept = copy.deepcopy(one.cache)
    held = [(tensor, tensor.clone()) for tensor in one.all_bits()]
    one.step(4)
    Decoding(fused, call, 2, seed=9).step(5)
    assert all(torch.equal(tensor, then) for tensor, then in held)
    again = Decoding(fused, call, 2).step(6)  # the same steps, and other ones from there
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(kept.layers, again.cache.layers, strict=True))
    expected = launched(fused, call, 2, steps=10)
    assert same(again.step(4).all_bits(), expected)


def test_results_that_lie_in_a_segment_are_copied_out():
    recorder = FakeRecorder()
    model, kwargs = qwen2()
    model.config.output_hidden_states = True
    with torch.no_grad():
        fused, call = serving_decode((model, kwargs), recorder)

        def hidden(one):
            result = one.fused.model(**one.kwargs)
            return [*result.hidden_states, result.logits]

        Decoding(fused, call, 2).step(3)
        assert recorder.recorded == PARTS
        first = hidden(Decoding(fused, call, 2, seed=1))
        fused.graphs.is_on = False
        expected = hidden(Decoding(fused, call, 2, seed=1))
        fused.graphs.is_on = True
        Decoding(fused, call, 2, seed=2).step(2)
        assert len(first) == 4 and same(first, expected)


def test_weights_that_are_loaded_are_read_and_those_that_move_are_recorded_anew(served):
    fused, call, recorder = served
    Decoding(fused, call, 2).step(4)
    other = {name: torch.randn_like(value) * 0.1 for name, value in fused.model.state_dict().items()}
    fused.model.load_state_dict(other)
    assert same(Decoding(fused, call, 2).step(4).all_bits(), launched(fused, call, 2, steps=4))
    assert recorder.recorded == PARTS
    weight = fused.model.model.layers[1].mlp.up_proj.weight
    weight.data = torch.randn_like(weight)
    assert same(Decoding(fused, call, 2).step(4).all_bits(), launched(fused, call, 2, steps=4))
    assert recorder.recorded == 2 * PARTS and len(fused.graphs.recordings) == 1
    for _ in range(4):  # as often as other graphs are
        weight.data = torch.randn_like(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert same(Decoding(fused, call, 2).step(1).all_bits(), launched(fused, call, 2, steps=1))
    assert fused.graphs.recordings == ()


def test_all_segments_of_a_step_count_as_one_and_the_oldest_go_first(served):
    fused, call, recorder = served
    fused.graphs._limit = 2
    for batch in (2, 3, 4):
        expected = launched(fused, call, batch, steps=4)
        assert same(Decoding(fused, call, batch).step(4).all_bits(), expected)
    assert len(fused.graphs.recordings) == 2 and recorder.recorded == 3 * PARTS
    Decoding(fused, call, 4).step(2)
    assert recorder.recorded == 3 * PARTS
    Decoding(fused, call, 2).step(2)
    assert recorder.recorded == 3 * PARTS  # it waits twice as long as it did
    Decoding(fused, call, 2).step(1)
    assert recorder.recorded == 4 * PARTS


def test_off_or_on_another_stream_nothing_is_replayed(served):
    fused, call, recorder = served
    Decoding(fused, call, 2).step(3)
    replayed = recorder.replayed
    fused.graphs.is_on = False
    Decoding(fused, call, 2).step(2)
    fused.graphs.is_on = True
    recorder.why_not = "the call comes from another stream than the first one did"
    with pytest.warns(UserWarning, match="another stream"):
        found = Decoding(fused, call, 2).step(3).all_bits()
    assert recorder.replayed == replayed and same(found, launched(fused, call, 2, steps=3))
    recorder.why_not = None
    Decoding(fused, call, 2).step(1)
    assert recorder.replayed == replayed + PARTS


def test_another_thread_runs_launch_by_launch_meanwhile(served):
    fused, call, _ = served
    Decoding(fused, call, 2).step(3)
    expected = launched(fused, call, 2, seed=1, steps=1), launched(fused, call, 2, seed=2, steps=1)
    (recording,) = fused.graphs.recordings
    player = recording.players[1]
    play, inside, go, found = player._play, threading.Event(), threading.Event(), []

    def slow():
        inside.set()
        go.wait(20)
        play()

    player._play = slow

    def first():
        torch.set_num_threads(1)
        with torch.no_grad():
            found.append(Decoding(fused, call, 2, seed=1).step().all_bits())

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with pytest.warns(UserWarning, match="another thread"):
        second = Decoding(fused, call, 2, seed=2).step().all_bits()
    go.set()
    thread.join()
    assert same(second, expected[1]) and same(found[0], expected[0])


def test_gradients_and_autocast_run_the_original_ops(served):
    fused, call, recorder = served
    Decoding(fused, call, 2).step(3)
    replayed = recorder.replayed
    with pytest.warns(UserWarning, match="gradients"), torch.enable_grad():
        assert Decoding(fused, call, 2).step().results[0].requires_grad
    with pytest.warns(UserWarning, match="autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        Decoding(fused, call, 2).step()
    assert recorder.replayed == replayed


def test_reverting_drops_them_and_a_copy_of_the_model_has_none(served):
    fused, call, recorder = served
    expected = launched(fused, call, 2, steps=4)
    Decoding(fused, call, 2).step(4)
    replayed = recorder.replayed
    twin = copy.deepcopy(fused.model)
    one = Decoding(fused, call, 2)
    assert twin(**one.kwargs).logits.shape == (2, 1, 200) and recorder.replayed == replayed
    fused.revert()
    assert fused.graphs.recordings == ()
    Decoding(fused, call, 2).step(2)
    assert recorder.replayed == replayed
    with fused.apply():
        assert same(Decoding(fused, call, 2).step(4).all_bits(), expected)
        assert len(fused.graphs.recordings) == 1


def test_what_cannot_be_recorded_runs_launch_by_launch(served):
    fused, call, recorder = served
    expected = launched(fused, call, 2)
    recorder.fails = CannotRecord("the driver says no")
    with pytest.warns(UserWarning, match="the driver says no"):
        found = Decoding(fused, call, 2).step(20).all_bits()
    assert same(found, expected) and recorder.recorded == 0
    recorder.fails = None
    Decoding(fused, call, 2).step(4)
    assert recorder.recorded == 0  # what was refused once is not tried again; another batch is
    Decoding(fused, call, 3).step(4)
    assert recorder.recorded == PARTS


def test_a_flag_that_chooses_kernels_has_them_recorded_anew(served):
    fused, call, recorder = served
    Decoding(fused, call, 2).step(3)
    before = torch.backends.cuda.math_sdp_enabled()
    torch.backends.cuda.enable_math_sdp(not before)
    try:
        expected = launched(fused, call, 2, steps=3)
        assert same(Decoding(fused, call, 2).step(3).all_bits(), expected)
        assert recorder.recorded == 2 * PARTS
    finally:
        torch.backends.cuda.enable_math_sdp(before)


# -- what is split -------------------------------------------------------------------------------------------------------------


def mixed(x, w):
    """Eight launches of fixed sizes."""
    for _ in range(4):
        x = torch.tanh(x @ w) * 0.5
    return x


def opened(function):
    """A function of (rows, weight, what has been before) captured for any length of the last."""
    torch.compiler.reset()
    dims = {"args.0": ("batch", ""), "args.2": ("batch", "cached", "")}
    args = (torch.randn(3, 8), torch.randn(8, 8), torch.randn(3, 5, 8))
    with torch.no_grad():
        found = capture_open(Calling(function).eval(), args, {}, dims)
    return found, split(found.region.graph, found.symbols_of("cached"))


def attended(x, before):
    return torch.cat([before, x[:, None]], 1).softmax(1).sum(1)


def test_what_does_not_depend_on_the_length_is_gathered_into_as_few_segments_as_can_be():
    def step(x, w, before):
        scale = torch.tanh(before.sum(1))  # depends on the length, and so does what reads it
        y = mixed(x, w)
        z = attended(y, before)
        other = mixed(y, w)  # does not
        return mixed(z * scale + other, w), y.sum()

    _, segments = opened(step)
    assert len(segments.parts) == 2
    first, second = segments.parts
    assert len(first.module.graph.nodes) > 16 and {node.name for node in second.passed} == {"sum_1", "sum_2"}
    assert first.stays != frozenset(range(len(first.outputs)))  # one is a result


def test_a_segment_is_not_worth_a_few_launches():
    _, segments = opened(lambda x, w, before: torch.tanh(attended(mixed(x, w), before)) * 2.0)
    assert len(segments.parts) == 1
    _, segments = opened(lambda x, w, before: attended(torch.tanh(x @ w), before))
    assert segments is None


@pytest.mark.parametrize(
    "step",
    [
        lambda x, w, before: attended(torch.relu_(mixed(x, w)[:, :4]), before[..., :4]),
        lambda x, w, before: attended(torch.nn.functional.dropout(mixed(x, w), 0.5, training=True), before),
        lambda x, w, before: attended(mixed(x, w), before.mul_(2.0)),
    ],
    ids=["in place", "random", "writes to an input"],
)
def test_a_graph_whose_ops_must_keep_their_order_is_not_split(step):
    assert opened(step)[1] is None


def test_without_a_size_that_grows_nothing_is_split():
    found, segments = opened(lambda x, w, before: attended(mixed(x, w), before))
    assert segments is not None and split(found.region.graph, frozenset()) is None


def test_a_value_that_a_result_may_be_a_view_of_is_copied_out():
    def step(x, w, before):
        y = mixed(x, w)
        return attended(y, before), y.reshape(-1, 1, 8).expand(-1, before.shape[1], 8).transpose(0, 1)

    _, segments = opened(step)
    (part,) = segments.parts
    assert {part.outputs[place].target for place in part.stays} == {torch.ops.aten.unsqueeze.default}  # what is concatenated
    assert len(part.outputs) == 2

    def other(x, w, before):
        y = mixed(x, w)
        return attended(y, before) + 1.0, (before + y[:, None]).transpose(0, 1)

    (part,) = opened(other)[1].parts
    assert part.stays == frozenset(range(len(part.outputs)))


# -- on a device ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_of", [qwen2, gpt2])
def test_real_graphs_give_the_same_bits(model_of, dtype):
    model, kwargs = model_of()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor")
        fused, call = serving_decode((model.cuda().to(dtype), kwargs), CudaRecorder())
        expected = [launched(fused, call, batch, seed=batch) for batch in (2, 4)]
        both = [Decoding(fused, call, batch, seed=batch) for batch in (2, 4)]
        held = []
        for _ in range(20):
            for one in both:
                one.step()
                held.append((one.results[-1], one.results[-1].clone()))
        assert all(same(one.all_bits(), bits) for one, bits in zip(both, expected, strict=True))
        assert all(torch.equal(result, then) for result, then in held)
        assert [recording.replays for recording in fused.graphs.recordings] == [19, 19]
        assert fused.graphs.refusals == {} and fused.fallbacks == {} and fused.graphs.ahead == 0
        weight = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding)).weight
        weight.data = torch.randn_like(weight)
        assert same(Decoding(fused, call, 2).step(5).all_bits(), launched(fused, call, 2, steps=5))
        model.load_state_dict({name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()})
        assert same(Decoding(fused, call, 4).step(5).all_bits(), launched(fused, call, 4, steps=5))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            Decoding(fused, call, 4).step(20)
        assert torch.cuda.memory_allocated() == before
