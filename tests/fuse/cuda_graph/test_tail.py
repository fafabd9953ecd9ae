"""Last products behind a graph: right results in memory of the caller's own, and what must stay inside."""

from __future__ import annotations

import warnings

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph import replay, tail
from fusion_advisor.fuse.cuda_graph.recording import Recording
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.direct.direct_call import Shortcut
from fusion_advisor.fuse.live.cuda_graph_choice import choose_graph
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.rewrite.odd_width_gemm import LEAST_ROWS, OddRows
from fusion_advisor.workload.weight_packing import leave_room
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.cuda_graph.test_replay import graphed_model
from tests.fuse.passes.test_pad_gemm import Head
from tests.tiny import gpt2


class Words(torch.nn.Module):
    """A hidden state and its logits, as a language model's head makes them."""

    def __init__(self, words=40):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, words, bias=False)
        self.factor = 1.0

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)) * self.factor)


def values(count, rows=6):
    return [torch.randn(rows, 16) for _ in range(count)]


def names(fused):
    """Of the products behind each graph."""
    return [[memory.name for memory in recording.memories if memory.name] for recording in fused.graphs.recordings]


@pytest.fixture
def small(monkeypatch):
    """Results of any size count as large."""
    monkeypatch.setattr(tail, "LEAST_BYTES", 1)


@pytest.fixture
def recorder():
    return FakeRecorder()


@pytest.fixture
def fused(small, recorder):
    with torch.no_grad():
        yield graphed_model(Words().eval(), (values(1)[0],), recorder=recorder)


def check(fused, count=3):
    for value in values(count):
        torch.testing.assert_close(fused(value), fused._original(value))


def test_each_call_gets_new_memory_that_later_calls_leave_alone(fused, recorder):
    given = values(6)
    results = [fused(value) for value in given]
    for value, result in zip(given, results, strict=True):
        assert torch.equal(result, fused._original(value)) and not result.requires_grad
    assert len({result.untyped_storage().data_ptr() for result in results}) == 6
    assert names(fused) == [["head"]] and (recorder.recorded, recorder.replayed) == (1, 5)
    assert fused.fallbacks == {} and fused.graphs.refusals == {}


def test_no_copy_is_made_and_the_graph_does_not_hold_the_logits(fused, monkeypatch):
    check(fused)
    (recording,) = fused.graphs.recordings
    (memory,) = recording.memories
    assert memory.tensor.shape == (6, 16)  # the hidden state; the logits are 40 wide
    clones = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **_: clones.append(self))
    fused(values(1)[0])
    assert clones == []


def test_static_outputs_are_computed_inside(small):
    with torch.no_grad():
        fused = graphed_model(Words().eval(), (values(1)[0],), outputs="static")
        fused(values(1)[0])
        same = [fused(value) for value in values(3)]
        torch.testing.assert_close(same[-1], same[0])
    assert len({result.data_ptr() for result in same}) == 1 and names(fused) == [[]]


def test_other_outputs_are_recorded_anew(fused):
    for outputs, behind_it in (("clone", ["head"]), ("static", []), ("clone", ["head"])):
        fused.graphs.outputs = outputs
        check(fused)
        assert names(fused) == [behind_it]


def test_it_is_launched_with_the_graph_before_the_guards(fused, recorder, monkeypatch):
    check(fused)
    launched, at = [], []
    real, hand_out = Shortcut.__call__, Recording.hand_out
    monkeypatch.setattr(Recording, "hand_out", lambda *args: (launched.append(recorder.replayed), hand_out(*args))[1])
    monkeypatch.setattr(Shortcut, "__call__", lambda *args: (at.append(len(launched)), real(*args))[1])
    before = recorder.replayed
    check(fused, 1)
    assert launched == [before + 1] and at[0] == 1


def scaled(model):
    model.head.weight.data.mul_(-2)


def new_data(model):
    model.head.weight.data = model.head.weight.data * 3


def new_parameter(model):
    model.head.weight = torch.nn.Parameter(model.head.weight * 4)


def over_the_same_memory(model):
    model.head.weight = torch.nn.Parameter(model.head.weight.detach())


def fewer_words(model):
    model.head.weight.data = model.head.weight.data[:7]


def other_factor(model):
    model.factor = 3.0


CHANGES = [scaled, new_data, new_parameter, over_the_same_memory, fewer_words, other_factor]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_is_seen(fused, change):
    check(fused)
    old = fused.model.head.weight.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            change(fused.model)
            check(fused, 4)
    assert old is not None


def test_a_weight_that_moved_is_recorded_again(fused, recorder):
    check(fused)
    new_data(fused.model)
    check(fused)
    assert recorder.recorded == 2 and names(fused) == [["head"]]


def test_no_product_of_another_layout_is_launched(fused):
    check(fused)
    (recording,) = fused.graphs.recordings
    assert recording.is_in_place()
    kept = fused.model.head.weight.data
    fused.model.head.weight.data = kept.view(16, 40)
    assert not recording.is_in_place()
    fused.model.head.weight.data = kept
    assert recording.is_in_place()


def test_results_of_a_replay_in_vain_are_dropped_before_the_original_ops_run(fused, monkeypatch):
    check(fused)
    seen = []
    real = replay._Call.undo

    def undo(call):
        before = len(call.fresh)
        real(call)
        seen.append((before, len(call.fresh)))

    monkeypatch.setattr(replay._Call, "undo", undo)
    fused.model.factor = 3.0
    with pytest.warns(UserWarning, match="original ops"):
        check(fused, 2)
    assert seen[0] == (1, 0) and all(after == 0 for _, after in seen)


def test_no_memory_for_the_result_is_an_error_and_the_next_call_is_right(fused, monkeypatch):
    check(fused)
    hand_out = Recording.hand_out

    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Recording, "hand_out", fails)
    with pytest.raises(torch.OutOfMemoryError):
        fused(values(1)[0])
    monkeypatch.setattr(Recording, "hand_out", hand_out)
    check(fused)


def test_results_are_of_the_mode_that_the_call_is_made_in(small):
    x = values(1)[0]
    for record_in in (torch.no_grad, torch.inference_mode):
        with torch.no_grad():
            fused = graphed_model(Words().eval(), (x,))
        with record_in():
            check(fused)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert fused(x).is_inference() == (mode is torch.inference_mode)
                check(fused)
        assert names(fused) and all(found == ["head"] for found in names(fused))
        fused.revert()


class Inside(torch.nn.Module):
    """A head that something else depends on."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.head = torch.nn.Linear(16, 16, bias=False)
        self.dropout = torch.nn.Dropout()
        self.register_buffer("table", torch.randn(16, 16))

    def forward(self, x):
        hidden = torch.tanh(x)
        match self.kind:
            case "softmax":
                return torch.softmax(self.head(hidden), -1)
            case "used twice":
                logits = self.head(hidden)
                return logits, logits.max()
            case "returned twice":
                logits = self.head(hidden)
                return logits, logits[:2]
            case "written to":
                return self.head(hidden).mul_(2)
            case "its view is written to":
                logits = self.head(hidden)
                logits[0].mul_(2)
                return logits
            case "its hidden state is written to":
                logits = self.head(hidden)
                hidden[:1].add_(1)
                return logits, hidden
            case "its weight is written to":
                logits = torch.mm(hidden, self.table)
                self.table.add_(1)
                return logits
            case "a copy of what is written to":
                wide = self.head(hidden)
                part = wide[:, :3].clone(memory_format=torch.contiguous_format)
                wide.add_(1)
                return part, wide
            case "of inputs alone":
                return self.head(x), hidden
            case "in autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.head(hidden)
            case "a view of a dropout":
                logits = self.head(self.dropout(hidden).view(3, 2, 16))
                hidden[:1].add_(1)
                return logits, hidden
            case "written to through a dropout":
                logits, same = self.head(hidden), self.dropout(hidden)
                same[:1].add_(1)
                return logits, same
        raise AssertionError(self.kind)


INSIDE = ["softmax", "used twice", "returned twice", "written to", "its view is written to", "its hidden state is written to",
          "its weight is written to", "a copy of what is written to", "of inputs alone", "in autocast", "a view of a dropout",
          "written to through a dropout"]  # fmt: skip


@pytest.mark.parametrize("kind", INSIDE)
def test_what_stays_inside(small, kind):
    model, plain, recorder = Inside(kind).eval(), Inside(kind).eval(), FakeRecorder()
    recorder.protect(model.table)
    with torch.no_grad():
        fused = graphed_model(model, (values(1)[0],), recorder=recorder)
        model.table.copy_(plain.table)  # capturing ran it once
        for value in values(4):
            torch.testing.assert_close(fused(value), plain(value))
    assert names(fused) == [[]] and recorder.replayed == 3


class Given(torch.nn.Module):
    """A product of a tensor that the call passes, which is copied into a static one."""

    def forward(self, x, weight):
        return torch.mm(torch.tanh(x), weight)


def test_a_weight_that_the_call_passes_stays_inside(small):
    with torch.no_grad():
        fused = graphed_model(Given().eval(), (values(1)[0], torch.randn(16, 8)))
        for value in values(4):
            weight = torch.randn(16, 8)
            torch.testing.assert_close(fused(value, weight), fused._original(value, weight))
    assert names(fused) == [[]]


class Forms(torch.nn.Module):
    """Products of each kind, views of them, and the hidden state itself as a result."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(16, 24)
        self.table = torch.nn.Parameter(torch.randn(16, 8))
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        hidden = torch.tanh(x)
        wide = self.head(hidden).view(2, 3, 24)[:, 1:].transpose(0, 1)
        return wide, torch.mm(hidden, self.table), torch.addmm(self.bias, hidden, self.table, beta=0.5), hidden


def test_linears_products_and_views_of_them_run_behind(small):
    with torch.no_grad():
        fused = graphed_model(Forms().eval(), (values(1)[0],))
        kept = []
        for value in values(5):
            found, expected = fused(value), fused._original(value)
            kept += zip(found, expected, strict=True)
        for one, other in kept:
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
    assert [len(found) for found in names(fused)] == [3]


def test_a_language_models_head_runs_behind(small):
    model, inputs = gpt2()
    with torch.no_grad():
        fused = graphed_model(model, (), inputs)
        for _ in range(3):
            inputs = {**inputs, "input_ids": torch.randint(1, 200, (2, 16))}
            torch.testing.assert_close(fused(**inputs).logits, fused._original(**inputs).logits)
    assert names(fused) == [["lm_head"]]


def test_small_results_stay_inside():
    with torch.no_grad():
        small = graphed_model(Words().eval(), (values(1)[0],))
        check(small)
        large = graphed_model(Words(tail.LEAST_BYTES // (64 * 4)).eval(), (values(1, rows=64)[0],))
        for value in values(3, rows=64):
            torch.testing.assert_close(large(value), large._original(value))
    assert (names(small), names(large)) == ([[]], [["head"]])


@pytest.fixture(params=[False, True], ids=["no bias", "a bias"])
def odd(request, small, recorder):
    """A model whose head of 77 words stores odd rows in place."""
    model = Head(bias=request.param, rows=77).eval()
    leave_room(model)
    x = torch.randn(LEAST_ROWS * 8, 16, dtype=torch.bfloat16)
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=False).build((), ("pad-gemm", "odd-width-gemm"))
    assert variant.changed == {"pad-gemm": 1, "odd-width-gemm": 1}
    with torch.no_grad():
        yield FusedModel(model, live.regions, variant.modules, (x,), {}, graphs=Graphs(recorder)).apply(), x


def same_words(fused, x):
    torch.testing.assert_close(fused(x), fused._original(x), rtol=1e-2, atol=1e-2)


def test_odd_rows_are_stored_in_the_callers_memory(odd):
    fused, x = odd
    given = [torch.randn_like(x) for _ in range(4)]
    results = [fused(value) for value in given]
    for value, result in zip(given, results, strict=True):
        torch.testing.assert_close(result, fused._original(value), rtol=1e-2, atol=1e-2)
    assert len({result.data_ptr() for result in results}) == 4 and names(fused) == [["head"]]
    for parameter in fused.model.head.parameters():
        parameter.data.mul_(-2)
        same_words(fused, x)
    assert fused.fallbacks == {}


@pytest.mark.parametrize("odd", [False], indirect=True)
def test_an_odd_weight_without_room_ends_it(odd):
    fused, x = odd
    for _ in range(3):
        same_words(fused, x)
    fused.model.head.weight = torch.nn.Parameter(fused.model.head.weight.detach().clone())
    with pytest.warns(UserWarning, match="room"):
        same_words(fused, x)
    assert fused.fallbacks


def test_the_report_says_what_runs_after_the_graph(fused):
    x = values(1)[0]
    row = choose_graph(
        fused, lambda: fused.dispatch(x), lambda: fused.dispatch(x), min_gain=0.005, confidence=0.95, rounds=4,
        budget_s=0.1, wait=lambda: None, on_cuda=False,
    )  # fmt: skip
    assert "`head` runs after the graph and writes into memory that the caller keeps" in row.reason


def test_where_the_odd_product_stands_in_the_graph(odd):
    fused, x = odd
    for _ in range(2):
        same_words(fused, x)
    ((region, recording),) = fused.graphs._recordings.items()
    assert sum(isinstance(node.target, OddRows) for node in region.module.graph.nodes) == 1
    assert [memory.tensor.shape for memory in recording.memories] == [(LEAST_ROWS * 8, 16)]
