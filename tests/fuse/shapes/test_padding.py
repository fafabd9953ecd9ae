"""Calls rounded up to a capacity: which sizes may be, what the results look like, and which calls share a graph."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusion_advisor as fa
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.apply_shapes import check_ranges, serve_shapes
from fusion_advisor.fuse.cuda_graph.capturable import saved_inputs
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.instruments import MEASURED
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.padding_trial import faster_than_launches, trial_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.restore_shapes import restore_shapes
from fusion_advisor.fuse.shapes.padding import capacity, rounded_up
from fusion_advisor.fuse.shapes.pieces import Served
from fusion_advisor.fuse.shapes.proved_sizes import prove_sizes
from fusion_advisor.fuse.shapes.show_padding import show_padding
from fusion_advisor.records import SizeRange
from fusion_advisor.runtime.environment import measure_bandwidth
from fusion_advisor.workload.load import describe_live
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.shapes.test_graphs_of_ranges import OF_A_ROW, Mlp, Pool, is_right, ranged

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++"
)  # fmt: skip


class Normed(Mlp):
    """Each row reads all rows: padding of the batch changes every result."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Tokens(torch.nn.Module):
    """Attention over a few tokens, causal or not; hands out heads first, as a cache of keys is."""

    def __init__(self, *, is_causal):
        super().__init__()
        torch.manual_seed(0)
        self.is_causal = is_causal
        self.words = torch.nn.Embedding(50, 32)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, input_ids):
        x = self.words(input_ids)
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(x).split(32, 2))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        hidden = torch.nn.functional.gelu(self.out(mixed.transpose(1, 2).flatten(2)) * 1.5, approximate="tanh") + x
        return hidden, (k * 2.0)


class Causal(Tokens):
    def __init__(self):
        super().__init__(is_causal=True)


class Bidirectional(Tokens):
    def __init__(self):
        super().__init__(is_causal=False)


@pytest.mark.parametrize(("name", "sizes"), [("batch", (3, 8, 9, 17, 33)), ("seq", (1, 8, 9, 33, 65, 100))])
def test_a_capacity_is_at_least_the_size_and_at_most_a_quarter_more_or_one_step(name, sizes):
    for size in sizes:
        found = capacity(name, size)
        assert size <= found <= max(size * 1.25 + 1, size + 7)
        assert capacity(name, found) == found


def test_a_size_is_rounded_up_no_further_than_its_piece():
    box = (SizeRange(name="batch", least=2, most=18), SizeRange(name="seq", least=2, most=64))
    assert rounded_up({"batch": 17, "seq": 9}, ("batch", "seq"), box) == {"batch": 18, "seq": 16}
    assert rounded_up({"batch": 17, "seq": 9}, ("seq",), box) == {"batch": 17, "seq": 16}


@needs_compiler
def test_shapes_that_round_up_to_one_capacity_share_its_graph():
    with torch.no_grad():
        fused, recorder = ranged()
        (row,) = [piece for piece in fused.shapes[0].pieces if piece.padding is not None]
        assert row.padding.names == ("batch",)
        assert is_right(fused, 33) and recorder.recorded == 0
        assert is_right(fused, 34) and (recorder.recorded, recorder.replayed) == (1, 1)  # recorded at 40 rows
        for rows in (35, 36, 37, 39):
            assert is_right(fused, rows)
        assert (recorder.recorded, recorder.replayed, fused.graphs.padded) == (1, 5, 5)
        assert is_right(fused, 40) and recorder.recorded == 1  # the capacity itself is not padded
        assert is_right(fused, 35) and recorder.recorded == 2  # and a shape that comes again gets its own
        assert fused.graphs.padded == 5 and fused.fallbacks == {} and fused.graphs.refusals == {}
        assert "5 calls ran in a graph of larger sizes" in fused.graphs.summary


class Counting:
    """Pads as another one does, and counts."""

    def __init__(self, form):
        self.form, self.padded = form, 0

    def __getattr__(self, name):
        return getattr(self.form, name)

    def pad(self, *args):
        self.padded += 1
        return self.form.pad(*args)


@needs_compiler
def test_a_shape_is_not_padded_where_the_larger_graph_would_hold_too_much():
    with torch.no_grad():
        fused, recorder = ranged(most_bytes=38 * OF_A_ROW, recorder=Pool())
        (piece,) = [piece for piece in fused.shapes[0].pieces if piece.padding is not None]
        piece.padding = replace(piece.padding, form=(form := Counting(piece.padding.form)))
        for rows in (33, 34, 35, 36):  # one graph of 40 rows would serve all
            assert is_right(fused, rows)
        assert form.padded == 1  # when it was found to be too large
        assert recorder.recorded == fused.graphs.padded == 0 and "1 size runs launch by launch" in fused.graphs.summary
        assert is_right(fused, 33) and recorder.recorded == 1
        assert is_right(fused, 33) and recorder.replayed == 2


@needs_compiler
def test_a_result_of_a_padded_call_is_the_callers_own():
    with torch.no_grad():
        fused, _ = ranged()
        results = [(x := torch.randn(rows, 32), fused(x), fused._original(x)) for rows in (33, 34, 35, 36)]
        for _, found, expected in results:  # a later call has overwritten none
            assert found.stride() == expected.stride() and found.shape == expected.shape
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_model_whose_rows_read_each_other_is_not_padded_and_says_why():
    with torch.no_grad():
        fused, recorder = ranged(Normed)
        assert all(piece.padding is None for piece in fused.shapes[0].pieces)
        assert is_right(fused, 33) and is_right(fused, 34) and is_right(fused, 35)
        assert recorder.recorded == 0 and fused.graphs.padded == 0


def tokens(maker):
    args = (torch.randint(0, 50, (3, 7)),)
    return ranged(maker, shapes="batch=2..16,seq=2..64", args=args)


@needs_compiler
def test_causal_tails_and_batch_rows_pad_together_and_results_are_laid_out_as_eagers():
    with torch.no_grad():
        fused, recorder = tokens(Causal)
        assert {name for piece in fused.shapes[0].pieces if piece.padding for name in piece.padding.names} == {"batch", "seq"}
        for batch, seq in ((9, 33), (10, 34), (9, 37), (10, 39), (9, 40)):
            ids = torch.randint(0, 50, (batch, seq))
            for found, expected in zip(fused(ids), fused._original(ids), strict=True):
                assert (found.shape, found.stride()) == (expected.shape, expected.stride())
                assert found.is_contiguous() == expected.is_contiguous()
                assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert recorder.recorded == 1 and fused.graphs.padded == 4 and fused.fallbacks == {}


@needs_compiler
def test_tokens_that_look_ahead_are_not_padded_but_rows_are():
    with torch.no_grad():
        fused, _ = tokens(Bidirectional)
        rows = fused.found.pieces
        assert {name for row in rows for name in row.padded} == {"batch"}
        reasons = {reason for row in rows for name, reason in row.not_padded if name == "seq"}
        assert reasons and all(
            "the model attends to all of `seq`, padding too, without a mask, in `scaled" in reason for reason in reasons
        )


class Placed(Causal):
    """Adds an embedding of each place: the places follow from the length alone."""

    def __init__(self):
        super().__init__()
        self.places = torch.nn.Embedding(64, 32)

    def forward(self, input_ids):
        hidden, keys = super().forward(input_ids)
        return hidden + self.places(torch.arange(input_ids.shape[1], device=input_ids.device) + 0), keys


class Made(TorchDispatchMode):
    """Notes what ops make."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.tensors += [weakref.ref(one) for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        return result


class Lasting(FakeRecorder):
    """Counts the tensors that were made while a graph was recorded and are alive after it, its results left out."""

    lasting = 0

    def record(self, call):
        with Made() as made:
            play, result = super().record(call)
        alive = [one() for one in made.tensors if one() is not None]
        self.lasting += sum(1 for one in alive if all(one is not other for other in result))
        return play, result


@needs_compiler
def test_what_follows_from_sizes_is_computed_ahead_of_recordings():
    args, recorder = (torch.randint(0, 50, (3, 7)),), Lasting()
    with torch.no_grad():
        fused, _ = ranged(Placed, shapes="batch=2..16,seq=2..64", args=args, recorder=recorder)
        for batch, seq in ((9, 33), (10, 34), (9, 37), (10, 34)):  # the second of 10 x 40, the last its own
            ids = torch.randint(0, 50, (batch, seq))
            torch.testing.assert_close(fused(ids), fused._original(ids), rtol=1e-4, atol=1e-5)
        assert recorder.recorded == 2 and fused.graphs.padded == 2
        assert recorder.lasting == 0


@needs_compiler
def test_no_padding_where_calls_are_no_graphs():
    with torch.no_grad():
        fused, _ = ranged(has_graphs=False)
        assert all(piece.padding is None for piece in fused.shapes[0].pieces)
        assert is_right(fused, 33) and is_right(fused, 34)


@needs_compiler
def test_a_weight_that_moves_is_read_where_it_lies_now():
    with torch.no_grad():
        fused, recorder = ranged()
        assert is_right(fused, 33) and is_right(fused, 34) and is_right(fused, 35)
        fused.model.up.weight.data = torch.randn(64, 32)
        assert is_right(fused, 36) and is_right(fused, 37)
        assert recorder.recorded == 2 and fused.fallbacks == {}


@needs_compiler
def test_a_key_without_the_sizes_is_caught_by_what_the_graph_takes_for_granted(monkeypatch):
    with torch.no_grad():
        fused, recorder = ranged()
        (piece,) = [piece for piece in fused.shapes[0].pieces if piece.padding is not None]
        assert all(is_right(fused, rows) for rows in (33, 34, 35))
        before = recorder.replayed
        ((module, region),) = [(module, region) for (key, module), region in piece._graphed.items() if key == (40,)]
        monkeypatch.setitem(piece._graphed, ((56,), module), region)
        assert is_right(fused, 52)  # the graph of 40 rows was recorded for another number
        assert recorder.replayed == before + 1 and recorder.recorded == 2


@needs_compiler
def test_a_graph_for_which_nothing_was_shown_is_not_padded():
    with torch.no_grad():
        fused, recorder = ranged()
        (piece,) = [piece for piece in fused.shapes[0].pieces if piece.padding is not None]
        piece.padding = replace(piece.padding, modules=())
        assert all(is_right(fused, rows) for rows in (33, 34, 35))
        assert recorder.recorded == fused.graphs.padded == 0


class Writes(Mlp):
    """Adds what it makes to a tensor of the caller's, as a step on a static cache does."""

    def forward(self, x, kept):
        found = super().forward(x)
        kept.add_(found)
        return found * 2.0


@needs_compiler
def test_a_call_that_writes_to_what_it_is_given_is_not_padded():
    with torch.no_grad():
        fused, _ = ranged(Writes, shapes="batch=2..64", args=(torch.randn(5, 32), torch.zeros(5, 32)))
        (row,) = [row for row in fused.found.pieces if row.points]
        assert row.padded == () and "writes to its arguments" in dict(row.not_padded)["batch"]
        for rows in (33, 34, 35):
            x, kept, other = torch.randn(rows, 32), torch.zeros(rows, 32), torch.zeros(rows, 32)
            assert torch.allclose(fused(x, kept), fused._original(x, other), rtol=1e-5, atol=1e-5)
            assert torch.allclose(kept, other, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("is_paying", [True, False])
def test_only_points_near_which_it_pays_are_padded(is_paying):
    torch.compiler.reset()
    model, args = Mlp().eval(), (torch.randn(5, 32),)
    with torch.no_grad():
        loaded = describe_live(model, args)
        (call,) = check_ranges(loaded, ApplyOptions(shapes=read_shapes("batch=2..64")))
        args, kwargs = call.at({"batch": 5})
        opened = capture_open(model, args, kwargs, call.dims)
        point = Served(sizes={"batch": 33}, module=opened.region.graph)
        asked, compared = [], []
        given, judge = trial_of(call, opened)

        def pays(module, inputs, form, sizes, larger):
            asked.append((module is point.module, sizes, larger))
            compared.clear()
            return "" if is_paying else "it is slower"

        def noted(sizes):
            compared.append(sizes)
            return given(sizes)

        box = (SizeRange(name="batch", least=2, most=64),)
        shown = show_padding(opened, box, [point], prove_sizes(opened, box), noted, judge, pays)
    assert bool(compared) is is_paying  # results of what does not pay are not compared
    assert asked == [(True, {"batch": 33}, {"batch": 40})]
    assert shown.serves(point) is is_paying
    assert shown.refused == (() if is_paying else (("batch near batch=33", "it is slower"),))


@needs_compiler
def test_what_a_kernel_writes_beside_an_open_size_can_be_recorded():
    """A kernel of a range takes sizes beside tensors, and one that writes to a cache is looked through for counts."""

    class Appends(torch.nn.Module):
        def forward(self, x, kept):
            kept.mul_(x.shape[0]).add_(x)
            return x * 2.0

    torch.compiler.reset()
    with torch.no_grad():
        opened = capture_open(Appends(), (torch.randn(5, 8), torch.zeros(5, 8)), {}, {"args.0": ("b", ""), "args.1": ("b", "")})
    graph = opened.region.graph
    written = next(node for node in graph.graph.nodes if str(node.target) == "aten.add_.Tensor")
    size = opened.places()["b"]
    written.args = (*written.args, size)
    written.meta["fusion_id"] = "F1"
    assert saved_inputs(graph) is None  # it writes to what no count says the place of


@needs_compiler
def test_a_saved_plan_shows_its_padding_again_where_it_is_put_in(tmp_path):
    model, args = Mlp().eval(), (torch.randn(5, 32),)
    options = {"shapes": "batch=2..64", "keep": "verified", "compile": False, "run_dir": tmp_path}
    with torch.no_grad():
        torch.compiler.reset()
        fa.apply(model, args, **options).revert()
        plan = fa.load_plan(tmp_path)
        (row,) = plan.report.shapes.pieces
        assert row.padded == () and not any(point.pads for point in row.points)  # a CPU has no graphs
        known = replace(row, padded=("batch",), points=tuple(replace(point, pads=not at) for at, point in enumerate(row.points)))
        plan = replace(plan, report=replace(plan.report, shapes=replace(plan.report.shapes, pieces=(known,))))
        torch.compiler.reset()
        live = capture_regions(model, args, {})
        graphs = Graphs(FakeRecorder())
        fused = FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, {}, graphs=graphs)
        restore_shapes(fused, describe_live(model, args), plan)
    (piece,) = fused.shapes[0].pieces
    assert piece.padding.names == ("batch",)
    assert [any(map(piece.padding.serves, point.modules)) for point in piece.points] == [
        point.pads for point in known.points
    ]  # fmt: skip


@pytest.mark.gpu
def test_real_graphs_of_a_capacity_give_what_the_original_ops_give():
    torch.manual_seed(0)
    model = Causal().eval().cuda()
    loaded_args = (torch.randint(0, 50, (3, 7), device="cuda"),)
    with torch.no_grad():
        live = capture_regions(model, loaded_args, {})
        graphs = Graphs(CudaRecorder())
        fused = FusedModel(model, live.regions, Bench(live, on_cuda=True).build((), ()).modules, loaded_args, {}, graphs=graphs)
        loaded = describe_live(model, loaded_args)
        options = ApplyOptions(shapes=read_shapes("batch=2..16,seq=2..256"), keep="verified", compile=False)
        found, _ = serve_shapes(
            fused, loaded, options, check_ranges(loaded, options), measure_bandwidth(torch.device("cuda")), Progress()
        )  # fmt: skip
        fused.apply()
        assert {name for row in found.pieces for name in row.padded} == {"batch", "seq"}, found.pieces
        for batch, seq in ((9, 33), (10, 34), (9, 37), (10, 39), (9, 40), (9, 35)):
            ids = torch.randint(0, 50, (batch, seq), device="cuda")
            for ours, expected in zip(fused(ids), fused._original(ids), strict=True):
                assert (ours.shape, ours.stride()) == (expected.shape, expected.stride())
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        assert len(graphs.recordings) == 1 and graphs.padded >= 4 and fused.fallbacks == {}
        assert graphs.pool_bytes() > 0


@pytest.mark.gpu
def test_the_trial_of_the_clock_records_and_times_a_larger_graph():
    model = Causal().eval().cuda()
    args = (torch.randint(0, 50, (3, 7), device="cuda"),)
    with torch.no_grad():
        loaded = describe_live(model, args)
        (call,) = check_ranges(loaded, ApplyOptions(shapes=read_shapes("batch=2..16,seq=2..64")))
        given, kwargs = call.at({"batch": 3, "seq": 7})
        opened = capture_open(model, given, kwargs, call.dims)
        point = Served(sizes={"batch": 9, "seq": 9}, module=opened.region.graph)
        box = (SizeRange(name="batch", least=2, most=16), SizeRange(name="seq", least=2, most=64))
        shown = show_padding(
            opened, box, [point], prove_sizes(opened, box), *trial_of(call, opened), faster_than_launches(MEASURED)
        )
    assert shown.padding is not None or any("the larger graph" in reason for _, reason in shown.refused), shown.refused
