"""CUDA graphs of exact shapes in a range, on a recorder without a GPU: each shape its own, recorded at its second use."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from transformers import DynamicCache

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.apply_shapes import check_ranges, exact_and_general, serve_shapes
from fusion_advisor.fuse.cuda_graph import tail
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.replay import MOST_BYTES, Graphs
from fusion_advisor.fuse.decide.instruments import MEASURED
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.runtime.environment import measure_bandwidth
from fusion_advisor.timing.interleaving import CannotRecord
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.static_cache import cache_name
from tests import tiny
from tests.fuse.cuda_graph.fake_graph import FakeRecorder

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x) * 1.5, approximate="tanh")) + x


class Logits(Mlp):
    """Ends in a product, which is computed after the graph straight into the caller's memory."""

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x) * 1.5, approximate="tanh")).unflatten(0, (-1, 1))


def ranged(
    maker=Mlp, limit=4, shapes="batch=2..64", args=None, has_graphs=True, kwargs=None, most_bytes=MOST_BYTES, recorder=None
):
    """A model that serves ranges of its batch, its graphs and the recorder; its example is 5 rows."""
    torch.compiler.reset()
    model, recorder = maker().eval(), recorder or FakeRecorder()
    args, kwargs = (torch.randn(5, 32),) if args is None else args, kwargs or {}
    live = capture_regions(model, args, kwargs)
    graphs = Graphs(recorder, limit=limit, most_bytes=most_bytes) if has_graphs else None
    fused = FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, kwargs, graphs=graphs)
    loaded = describe_live(model, args, kwargs)
    options = ApplyOptions(shapes=read_shapes(shapes), keep="verified", compile=False)
    calls = check_ranges(loaded, options)
    fused.found, _ = serve_shapes(fused, loaded, options, calls, measure_bandwidth(torch.device("cpu")), Progress())
    return fused.apply(), recorder


@pytest.fixture
def served():
    with torch.no_grad():
        yield ranged()


def is_right(fused, rows):
    x = torch.randn(rows, 32)
    found, expected = fused(x), fused._original(x)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_each_exact_shape_is_recorded_at_its_second_use_and_replayed_after_it(served):
    fused, recorder = served
    for use in range(4):
        for count, rows in enumerate((2, 17, 64), start=1):
            assert is_right(fused, rows)
            assert recorder.recorded == (count if use == 1 else 3 if use > 1 else 0)
    assert recorder.replayed == 3 * 3
    assert fused.fallbacks == {} and fused.graphs.refusals == {}
    assert fused.graphs.summary.startswith("3 of at most 4 CUDA graphs are recorded and hold 1.06 MB")


def test_a_product_at_the_end_is_computed_after_the_graph_at_every_size(monkeypatch):
    monkeypatch.setattr(tail, "LEAST_BYTES", 40 * 32 * 4)
    with torch.no_grad():
        fused, recorder = ranged(Logits)
        for _ in range(3):
            assert is_right(fused, 7) and is_right(fused, 40)
        assert recorder.recorded == 2
        names = [memory.name for recording in fused.graphs.recordings for memory in recording.memories]
        assert names == ["", "down"]  # the first is small, and copied
        results = [fused(torch.randn(7, 32)) for _ in range(2)]
        assert results[0].data_ptr() != results[1].data_ptr()


def test_the_shape_that_was_replayed_longest_ago_goes_first(served):
    fused, recorder = served
    for rows in (2, 3, 4, 7, 8):  # the fifth takes the place of the first
        for _ in range(2):
            assert is_right(fused, rows)
    assert len(fused.graphs.recordings) == 4 and recorder.recorded == 5
    assert is_right(fused, 8) and is_right(fused, 3)
    assert recorder.recorded == 5
    assert is_right(fused, 2) and is_right(fused, 2)
    assert recorder.recorded == 5  # its graph has gone: two calls more say whether it comes often
    assert is_right(fused, 2)
    assert recorder.recorded == 6
    assert fused.fallbacks == {}


def test_a_stride_that_nobody_steps_by_needs_no_trace():
    with torch.no_grad():
        fused, recorder = ranged(shapes="batch=1..8")
        traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for width in (32, 33, 40, 64):
            x = torch.randn(1, width)[:, :32]
            assert x.is_contiguous() and x.stride() == (width, 1)
            torch.testing.assert_close(fused(x), fused._original(x), rtol=1e-5, atol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traced
        assert fused.fallbacks == {}
        assert (recorder.recorded, recorder.replayed) == (1, 3)  # all of them are one shape


def test_a_weight_that_moves_is_recorded_again_at_every_shape(served):
    fused, recorder = served
    for rows in (3, 9):
        assert all(is_right(fused, rows) for _ in range(3))
    before = recorder.recorded
    fused.model.up.weight.data = torch.randn(64, 32)
    for rows in (3, 9):
        assert all(is_right(fused, rows) for _ in range(3))
    assert recorder.recorded == before + 2
    assert fused.fallbacks == {}


@pytest.mark.parametrize("part", ["rows", "strides", "dtype", "grad", "train"])
def test_no_graph_of_another_call_answers(served, part):
    fused, recorder = served
    for _ in range(3):
        assert is_right(fused, 6)
    replayed = recorder.replayed
    x = {"rows": torch.randn(65, 32), "strides": torch.randn(32, 6).T, "dtype": torch.randn(6, 32).double()}.get(part)
    x = torch.randn(6, 32) if x is None else x
    if part == "dtype":
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="dtype"):
            fused(x)
    elif part == "grad":
        with torch.enable_grad(), pytest.warns(UserWarning, match="gradients"):
            assert fused(x).requires_grad
    else:
        fused.model.train(part == "train")
        with pytest.warns(UserWarning, match="original ops"):
            assert torch.equal(fused(x), fused._original(x))
        fused.model.eval()
    assert recorder.replayed == replayed
    assert is_right(fused, 6)


def test_where_memory_runs_out_fewer_graphs_are_kept_and_that_is_said(served):
    fused, recorder = served
    for rows in (2, 3, 4, 7):
        for _ in range(2):
            assert is_right(fused, rows)
    recorder.fails = CannotRecord("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert is_right(fused, 11)
    with pytest.warns(UserWarning, match="no memory for another one; 3 are kept from now on"):
        assert is_right(fused, 11)
    assert len(fused.graphs.recordings) == 2
    recorder.fails = None
    assert is_right(fused, 11)
    assert len(fused.graphs.recordings) == 3
    assert is_right(fused, 2)
    assert len(fused.graphs.recordings) == 3
    assert fused.fallbacks == {}


def test_an_error_that_is_not_of_memory_is_not_tried_again(served):
    fused, recorder = served
    recorder.fails = CannotRecord("operation not permitted when stream is capturing")
    assert is_right(fused, 11)
    with pytest.warns(UserWarning, match="not permitted"):
        assert is_right(fused, 11)
    recorder.fails = None
    assert is_right(fused, 11) and recorder.recorded == 0
    assert is_right(fused, 12) and is_right(fused, 12)
    assert recorder.recorded == 1


def test_a_model_without_weights_of_its_own_shares_no_graph_with_its_copy(served):
    fused, _ = served
    other = copy.deepcopy(fused.model)
    for _ in range(3):
        assert is_right(fused, 6)
    x = torch.randn(6, 32)
    assert torch.allclose(other(x), fused(x), rtol=1e-5, atol=1e-5)


ROOMS = "batch=1..4,seq=1..16,cached=1..24"


def prefill(fused, rows, length):
    """Scores of a prompt, and its cache."""
    like = next(table.example[1] for table in fused.shapes if table.example[1]["input_ids"].shape[1] > 1)
    generator = torch.Generator().manual_seed(rows * length)
    cache = DynamicCache(config=fused.model.config)
    own = {"input_ids": torch.randint(1, 200, (rows, length), generator=generator), cache_name(fused.model): cache}
    if "position_ids" in like:
        own["position_ids"] = torch.arange(length)[None].expand(rows, -1).contiguous()
    if "attention_mask" in like:
        own["attention_mask"] = torch.ones_like(own["input_ids"])
    logits = fused.model(**{**like, **own}).logits
    return logits, [part for layer in cache.layers for part in (layer.keys, layer.values)]


@pytest.fixture
def prefilling():
    torch.manual_seed(0)
    with torch.no_grad():
        model, kwargs = tiny.llama()
        kwargs = {"input_ids": kwargs["input_ids"][:, :5]}
        fused, recorder = ranged(lambda: model, shapes=ROOMS, args=(), kwargs=kwargs)
        yield fused, recorder
        fused.revert()


def test_a_prompt_of_a_length_that_comes_again_runs_in_a_graph_and_its_cache_is_the_callers(prefilling):
    fused, recorder = prefilling
    first = {}
    for use in range(4):
        for rows, length in ((2, 9), (3, 9), (1, 1)):
            logits, cache = prefill(fused, rows, length)
            expected, own = first.setdefault((rows, length), (logits.clone(), [part.clone() for part in cache]))
            assert torch.equal(logits, expected) and all(map(torch.equal, cache, own)), (use, rows, length)
            first[rows, length, use] = cache, own
    for cache, own in (value for key, value in first.items() if len(key) == 3):
        assert all(map(torch.equal, cache, own))  # no later replay wrote to it
    assert recorder.recorded == 3 and recorder.replayed == 3 * 3
    assert fused.fallbacks == {} and fused.graphs.refusals == {}


def test_a_prompt_whose_cache_is_large_is_launched_op_by_op_without_a_word(prefilling, recwarn):
    fused, recorder = prefilling
    for table in fused.shapes:
        table.most_result_bytes = 10_000  # 5 tokens of 2 layers are less, 16 are more
    fused.serve(fused.shapes)
    for _ in range(3):
        small, large = prefill(fused, 1, 2), prefill(fused, 2, 16)
    assert sum(part.nbytes for part in small[1]) < 10_000 < sum(part.nbytes for part in large[1])
    assert recorder.recorded == 1 and recorder.replayed == 2
    assert fused.fallbacks == {} and fused.graphs.refusals == {} and not recwarn.list


class Pool(FakeRecorder):
    """A recorder whose pool holds what is planted until it is given back; some of its graphs may still be there then.

    Attributes:
        held: bytes of the pool.
        left: graphs that something held when the pool was given back: its memory stays then.
    """

    def __init__(self):
        super().__init__()
        self.held, self.left, self._graphs = 0, 0, []

    def record(self, call):
        replay, result = super().record(call)

        class Graph:
            def play(self):
                replay()

        graph = Graph()
        self._graphs.append(weakref.ref(graph))
        return graph.play, result

    def pool_bytes(self):
        return self.held

    def give_back(self):
        super().give_back()
        self.left += sum(graph() is not None for graph in self._graphs)


OF_A_ROW = (32 + 2 * 64) * 4
"""What a graph of an Mlp holds for a row: its input, and what GELU reads and makes. The result takes less, later."""


def uses(fused, rows, count=2):
    assert all(is_right(fused, rows) for _ in range(count))


def test_a_size_whose_graph_would_hold_too_much_is_launched_and_not_recorded_again(recwarn):
    with torch.no_grad():
        fused, recorder = ranged(most_bytes=20 * OF_A_ROW, recorder=Pool())
        uses(fused, 21, 4)
        uses(fused, 40, 4)
        assert recorder.recorded == 0 and fused.graphs.recordings == ()
        assert fused.graphs.summary.endswith(
            "2 sizes run launch by launch: their graphs would hold up to 25.6 kB each, and all together may hold 12.8 kB."
        )
        uses(fused, 8, 4)
        assert recorder.recorded == 1 and recorder.replayed == 3
    assert fused.fallbacks == {} and fused.graphs.refusals == {} and not recwarn.list


def test_graphs_are_dropped_to_make_room_for_the_bytes_of_another(recwarn):
    with torch.no_grad():
        fused, recorder = ranged(most_bytes=20 * OF_A_ROW, recorder=Pool(), limit=9)
        uses(fused, 16)
        uses(fused, 4)  # shares what passes in the first
        uses(fused, 6)
        assert recorder.recorded == 3 and len(fused.graphs.recordings) == 3
        uses(fused, 12)  # the first goes, the others may stay
        assert recorder.recorded == 4 and len(fused.graphs.recordings) == 3
        for rows in (4, 6, 12):
            uses(fused, rows)
        assert recorder.recorded == 4 and recorder.given_back == 0
        assert fused.graphs.summary.startswith("3 of at most 9 CUDA graphs are recorded and hold")
    assert fused.graphs.refusals == {} and not recwarn.list


def test_a_larger_graph_fits_into_no_memory_of_smaller_ones_and_comes_first_in_an_empty_pool(recwarn):
    with torch.no_grad():
        fused, recorder = ranged(most_bytes=20 * OF_A_ROW, recorder=Pool(), limit=9)
        uses(fused, 8)
        uses(fused, 16)  # what passes in both and what they keep is more than 20 rows' bytes
        assert recorder.recorded == 2 and (recorder.given_back, recorder.left) == (1, 0)
        assert len(fused.graphs.recordings) == 1
        uses(fused, 8, 3)  # after twice as many calls as at first
        assert recorder.recorded == 3 and len(fused.graphs.recordings) == 2
        uses(fused, 16)
        assert recorder.recorded == 3 and recorder.given_back == 1
    assert fused.graphs.refusals == {} and not recwarn.list


def test_graphs_that_hold_more_than_was_counted_are_dropped_and_fewer_are_kept(recwarn):
    with torch.no_grad():
        fused, recorder = ranged(most_bytes=20 * OF_A_ROW, recorder=Pool(), limit=9)
        uses(fused, 6)
        recorder.held = 40 * OF_A_ROW  # 6 and 4 rows were counted
        uses(fused, 4)
        assert recorder.recorded == 2 and fused.graphs.recordings == ()
        assert (recorder.given_back, recorder.left) == (1, 0)
        recorder.held = 0
        uses(fused, 4, 3)
        assert recorder.recorded == 3 and len(fused.graphs.recordings) == 1
        uses(fused, 3, 2)  # what was missed leaves room for one at a time
        assert recorder.recorded == 4 and len(fused.graphs.recordings) == 1 and recorder.given_back == 2
    assert fused.graphs.refusals == {} and not recwarn.list and "launch by launch" not in fused.graphs.summary


def test_a_single_graph_that_holds_more_than_was_counted_is_not_recorded_again():
    with torch.no_grad():
        fused, recorder = ranged(most_bytes=20 * OF_A_ROW, recorder=Pool())
        recorder.held = 21 * OF_A_ROW
        uses(fused, 4, 5)
        assert recorder.recorded == 1 and fused.graphs.recordings == () and "1 size runs" in fused.graphs.summary
        assert (recorder.given_back, recorder.left) == (1, 0)


def test_the_graph_of_the_verified_sizes_is_not_counted():
    with torch.no_grad():
        fused, recorder = ranged(most_bytes=4 * OF_A_ROW, recorder=Pool())
        recorder.held = 1 << 30
        uses(fused, 5, 3)
        assert recorder.recorded == 1 and recorder.replayed == 2
        recorder.held += 2 * OF_A_ROW
        uses(fused, 3)
        assert len(fused.graphs.recordings) == 2
        recorder.held += 3 * OF_A_ROW
        uses(fused, 2)
        assert fused.graphs.recordings == ()  # one pool gives back all or nothing
        assert (recorder.given_back, recorder.left) == (1, 0)
        recorder.held = 1 << 30
        uses(fused, 5, 1)
        assert len(fused.graphs.recordings) == 1


def test_a_range_is_timed_against_the_exact_plan_as_calls_run():
    with torch.no_grad():
        fused, recorder = ranged()
        loaded = describe_live(fused.model, (torch.randn(5, 32),), {})
        exact, general, is_replayed = exact_and_general(fused, loaded, MEASURED)
        assert is_replayed and exact.times_ns and general.times_ns
        assert recorder.recorded == 2 and recorder.replayed >= len(exact.times_ns) + len(general.times_ns)
        assert fused.graphs.recordings == () and fused.graphs.is_on
        fused.graphs.is_on = False
        assert exact_and_general(fused, loaded, MEASURED)[2] is False
        assert recorder.recorded == 2 and not fused.graphs.is_on


class WrittenOut(torch.nn.Module):
    """An activation of three ops, for one kernel."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.gpu
def test_real_graphs_hold_no_more_than_they_may():
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(256, 8192), WrittenOut(), torch.nn.Linear(8192, 256)).eval().cuda()
    args, most = (torch.randn(5, 256, device="cuda"),), 300_000_000
    with torch.no_grad():
        live = capture_regions(model, args, {})
        modules = Bench(live, on_cuda=True).build((), ()).modules
        fused = FusedModel(model, live.regions, modules, args, {}, graphs=Graphs(CudaRecorder(), most_bytes=most))
        loaded = describe_live(model, args, {})
        options = ApplyOptions(shapes=read_shapes("batch=2..8192"), keep="verified", compile=False)
        calls = check_ranges(loaded, options)
        serve_shapes(fused, loaded, options, calls, measure_bandwidth(torch.device("cuda")), Progress())
        fused.apply()
        for rows in (3000, 8000, 2900, 1000, 3000):  # 3,000 rows hold 197 MB while its kernel runs, 8,000 hold 524
            x = torch.randn(rows, 256, device="cuda")
            for _ in range(4):
                torch.testing.assert_close(fused(x), fused._original(x), rtol=1e-3, atol=1e-3)
            held, kinds = fused.graphs.pool_bytes(), [one.held for one in fused.graphs._recordings]
            assert held <= most, f"{held} bytes after {rows} rows, counted {kinds}: {fused.graphs.summary}"
        assert "1 size runs launch by launch: its graph would hold up to 5" in fused.graphs.summary
        for _ in range(20):  # whichever graphs were dropped on the way, one comes back and stays
            fused(x)
        assert fused.graphs.recordings and fused.graphs.pool_bytes() <= most
