"""Numbers of Python's in an output: one that follows from sizes is right at all of them in a start without a trace."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace

import pytest
import sympy
import torch

import fusion_advisor as fa
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.restore_shapes import restore_shapes
from fusion_advisor.fuse.start.record import piece_of
from fusion_advisor.records import SizeRange
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.start.saved import assert_no_frame, edit, frames
from tests.fuse.start.test_ranges import put_in
from tests.tiny import Calling

pytestmark = test_pipeline.pytestmark

WINDOW = 8
NOT_SERVED = {WINDOW - 1} if torch.__version__ < "2.12" else set()
"""Torch 2.11 takes the one length for a constant at which all that is kept is all that there is."""
DIMS = {"args.0": ("batch=2..9", "seq=2..12", None)}


class Counted(torch.nn.Module):
    """Returns numbers that follow from sizes, and such that do not; at four rows some are equal."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)
        self.rows = 4

    def forward(self, x):
        """Run it."""
        rows, length = x.shape[0], x.shape[1]
        kept = {"window": min(length, 6), "above": max(length - 6, 0), "both": rows * length + 1, "three": 3, "half": 0.5}
        return torch.nn.functional.gelu(self.lin(x)) * 2.0 + x, rows, self.rows, [length // 2], kept


def counted():
    torch.manual_seed(0)
    return Counted().eval(), (torch.randn(4, 6, 64),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("counted") / "run"
    model, args = counted()
    fa.apply(model, args, shapes=DIMS, keep="verified", compile=False, run_dir=found).revert()
    pieces = load_plan(found).start["pieces"]
    assert pieces and all("why" not in row for row in pieces), [row.get("why") for row in pieces]
    return found


def assert_equal(found, expected):
    """Numbers are the same, of the same kinds; tensors are close."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert repr(found[1:]) == repr(expected[1:])
    assert type(found[1]) is type(found[3][0]) is int


SIZES = ((2, 2), (4, 6), (4, 7), (6, 4), (9, 12), (2, 12), (9, 2), (3, 5))


def assert_right(loaded):
    for rows, length in SIZES:
        x = torch.randn(rows, length, 64)
        assert_equal(loaded.model(x), loaded.model._call_impl(x))


def test_numbers_that_follow_from_sizes_are_computed_at_each_call(folder):
    loaded, before = describe_live(*counted()), frames()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        assert_right(loaded)
        assert fused.traced_because == "" and fused.fallbacks == {} and frames() == before


def test_a_replayed_graph_gives_the_numbers_of_its_shape(folder):
    loaded, recorder, plan = describe_live(*counted()), FakeRecorder(), load_plan(folder)
    fused = apply_plan(loaded, plan)
    fused.graphs = Graphs(recorder)
    restore_shapes(fused, loaded, plan)
    with torch.no_grad(), fused:
        for _ in range(3):
            assert_right(loaded)
        assert recorder.recorded == len(SIZES) - 1 and recorder.replayed > 0  # the example's own call is none of the ranges
        assert fused.traced_because == "" and fused.fallbacks == {}


def output_of(start):
    return start["pieces"][0]["output"]["tuple"]


def other_number(start):
    rows, length = output_of(start)[1], output_of(start)[3]["list"][0]
    rows["number"], length["number"] = length["number"], rows["number"]


def constant(start):
    output_of(start)[1] = start["pieces"][0]["sizes"]["batch"]


def maximum(start):
    """The least of two sizes becomes the largest: in the op and in what the file says of its value."""
    (row,) = (row for row in start["pieces"][0]["graph"]["nodes"] if row[2] == "size.sym_min")
    row[2] = "size.sym_max"
    row[5]["size"][0] = row[5]["size"][0].replace("Min", "Max")


def other_op(start):
    (row,) = (row for row in start["pieces"][0]["graph"]["nodes"] if row[2] == "size.floordiv")
    row[2] = "size.mul"


DAMAGES = {
    "another number": other_number,
    "a constant": constant,
    "the largest for the least": maximum,
    "another op of sizes": other_op,
    "no result": lambda start: output_of(start)[1].update(number=99),
    "a tensor": lambda start: output_of(start)[1].update(number=output_of(start)[0]["result"]),
    "a number for a tensor": lambda start: output_of(start)[0].update(result=output_of(start)[1]["number"]),
    "another constant": lambda start: output_of(start).__setitem__(2, 5),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_number_is_not_used(name, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    edit(tmp_path / "run", DAMAGES[name])
    loaded, before = describe_live(*counted()), frames()
    with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused:
        assert fused.traced_because and frames() != before
        assert_right(loaded)
        assert fused.fallbacks == {} and fused.launches > 0


# -- what is not written down --------------------------------------------------------------------------------------------------


BOX = (SizeRange(name="batch", least=2, most=9), SizeRange(name="seq", least=2, most=12))


def at(sizes):
    return (torch.zeros(sizes["batch"], sizes["seq"], 64),), {}


def row_of(model, change=lambda opened: opened, *, box=BOX):
    opened = capture_open(model, (torch.randn(4, 6, 64),), {}, {"args.0": ("batch", "seq", "")})
    return piece_of(model, change(opened), "", at, box)


def test_a_size_that_python_reads_is_not_taken_for_a_constant():
    def reading(opened):
        """Dynamo's code, as if it read a size off a tensor of the call."""
        compiled = opened.live.compiled

        def call(x):
            return compiled.call(x)[0], x.shape[0]

        return replace(opened, live=replace(opened.live, compiled=replace(compiled, call=call)))

    model = counted()[0]
    assert row_of(model, reading)["why"] == "its output holds a number, which may follow from a size"
    assert row_of(model)["output"]["tuple"][2] == 4  # which no size is


def test_constants_need_other_sizes_to_be_shown():
    def of_one_size(opened):
        return replace(opened, guards=(*opened.guards, sympy.Eq(next(iter(opened.names)), 4)))

    assert row_of(counted()[0], of_one_size)["why"] == "its output holds a number, which may follow from a size"


def distance(x):
    return x * 2.0, abs(x.shape[0] - x.shape[1])


def half(x):
    return x * 2.0, x.shape[0] / 2


def is_larger(x):
    return x * 2.0, x.shape[0] > x.shape[1]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (distance, "a number is computed from sizes by `abs`"),
        (half, "a number is computed from sizes by `truediv`"),
        (is_larger, "its output holds a float or a truth value that the graph computes"),
    ],
)
def test_what_no_file_holds_is_said(function, why):
    assert row_of(Calling(function))["why"] == why


# -- caches with a sliding window ----------------------------------------------------------------------------------------------


def sliding(kind):
    """A model of two layers, one of which sees a window; a call of it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval(), tokens(3, 11)


def tokens(rows, length):
    ids = torch.randint(2, 99, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def held(cache):
    """What the layers of a cache hold, but for tensors."""
    plain = [{name: one for name, one in vars(layer).items() if isinstance(one, bool | int)} for layer in cache.layers]
    return repr(plain), [one.keys.shape for one in cache.layers]


def assert_serves(model, least):
    """Each length on both sides of the window is served, and its cache counts what the model's own does."""
    for length in {*range(least, 2 * WINDOW), 24} - NOT_SERVED:
        call = tokens(random.Random(length).randint(least, 4), length)
        found, expected = model(**call), model._call_impl(**call)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-4)
        assert held(found.past_key_values) == held(expected.past_key_values)
        for own, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(own.values, other.values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "least", "ranges"), [("Cohere2", 1, "batch=1..4,seq=1..24"), ("Gemma3", 2, "batch=2..4,seq=2..24")]
)
def test_a_cache_with_a_window_starts_in_another_process_without_a_trace(kind, least, ranges, tmp_path):
    model, kwargs = sliding(kind)
    fa.apply(model, kwargs, shapes=ranges, keep="verified", effort="quick", compile=False, run_dir=tmp_path).revert()
    script = f"""
import torch
from pathlib import Path
from fusion_advisor.workload.load import describe_live
from tests.fuse.start.test_output_numbers import assert_serves, sliding
from tests.fuse.start.test_ranges import put_in
model, kwargs = sliding({kind!r})
with torch.no_grad(), put_in(describe_live(model, (), kwargs), Path({str(tmp_path)!r})) as fused:
    assert_serves(model, {least})
"""
    assert_no_frame(script)
