"""Calls whose masks hold ones run a graph without masks, all others the one with them: of one plan, made and loaded."""

from __future__ import annotations

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.capture.graph.fx_nodes import ATTENTION, attention_argument
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.points.first_use import may_stay, time_of_a_look
from fusion_advisor.fuse.restore_shapes import restore_shapes
from fusion_advisor.fuse.shapes.pieces import hold_ones
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.workload.load import describe_live
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.tiny import qwen2

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")


def encoder():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        vocab_size=200,
        max_position_embeddings=64,
    )
    return BertModel(config, add_pooling_layer=False).eval(), {}


def decoder():
    return qwen2()[0], {"use_cache": False}


def call(others, batch, seq, *, is_padded, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, seq, dtype=torch.long)
    if is_padded:
        mask[0, seq // 2 :] = 0
    ids = torch.randint(1, 200, (batch, seq), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, **others}


@pytest.fixture(scope="module", params=[encoder, decoder])
def made(request, tmp_path_factory):
    torch.compiler.reset()
    folder = tmp_path_factory.mktemp("masks") / "run"
    model, others = request.param()
    example = call(others, 3, 7, is_padded=False)
    with torch.no_grad():
        fused = fa.apply(model, example, shapes="batch=2..4,seq=2..16", keep="verified", compile=False, run_dir=folder)
    yield fused, others, folder, request.param
    fused.revert()


def first(result):
    return result[0] if isinstance(result, tuple) else next(iter(result.values()))


def masks_in(module):
    calls = [node for node in module.graph.nodes if node.target is ATTENTION]
    return [attention_argument(one, "attn_mask") is not None for one in calls]


def kinds(fused):
    """Which graphs ran, in the order of their first run."""
    (table,) = fused.shapes
    (piece,) = (piece for piece in table.pieces if piece.route is not None)
    return [is_unmasked for _, is_unmasked in piece._runners]


def is_right(fused, kwargs):
    # Eager hides what the padding's own rows see; they are nobody's results.
    found, expected = first(fused(**kwargs)), first(fused._original(**kwargs))
    kept = kwargs["attention_mask"].bool()
    return torch.allclose(found[kept], expected[kept], rtol=1e-4, atol=1e-5)


def test_points_say_so_and_have_a_graph_without_masks(made):
    fused, *_ = made
    (piece,) = (piece for piece in fused.report.shapes.pieces if not piece.refusal)
    assert piece.points and all("skip-masks" in point.passes and "skip-masks" in point.rewrites for point in piece.points)
    (table,) = fused.shapes
    for point in table.pieces[0].points:
        assert set(masks_in(point.unmasked)) == {False} and set(masks_in(point.graph_at((3, 7)))) == {True}
        assert len(point.masks) == 1


def test_each_call_runs_the_graph_of_its_mask(made):
    fused, others, *_ = made
    with torch.no_grad():
        for seed, (batch, seq) in enumerate([(2, 2), (4, 16), (3, 9)]):
            for is_padded in (False, True, False):
                assert is_right(fused, call(others, batch, seq, is_padded=is_padded, seed=seed))
        counted = kinds(fused)
        assert counted.count(False) == counted.count(True) == 3
        outside = call(others, 3, 9, is_padded=False)
        outside["attention_mask"] *= 2  # not zero, and not one either: the model may look at more than that
        assert is_right(fused, outside)
    assert fused.fallbacks == {}


def test_a_loaded_plan_records_a_graph_for_each_kind_of_mask(made):
    fused, others, folder, maker = made
    fused.revert()
    model, recorder, plan = maker()[0], FakeRecorder(), load_plan(folder)
    loaded = describe_live(model, (), call(others, 3, 7, is_padded=False))
    with torch.no_grad():
        again = apply_plan(loaded, plan)
        again.graphs = Graphs(recorder)
        restore_shapes(again, loaded, plan)
        with again:
            for use in range(4):
                for is_padded in (False, True):
                    assert is_right(again, call(others, 2, 5, is_padded=is_padded, seed=use))
            assert recorder.recorded == 2 and recorder.replayed >= 4
            assert sorted(kinds(again)) == [False, True]
            for use in range(3):  # a graph that was launched ahead is of the mask before
                for is_padded in (True, True, False, False):
                    assert is_right(again, call(others, 2, 5, is_padded=is_padded, seed=use))
            assert recorder.recorded == 2 and again.fallbacks == {}
    fused.apply()


def test_ones_are_ones():
    whole = torch.ones(2, 3, dtype=torch.long)
    assert hold_ones([None, whole, whole.bool()], (1, 2)) and hold_ones([], ())
    assert not hold_ones([whole * 2], (0,)) and not hold_ones([whole, whole.triu()], (0, 1))


@pytest.mark.parametrize(
    ("after_ns", "look_ns", "of_generate", "of_others"),
    [
        (900, 50, True, True),
        (900, 100, True, False),
        (1000, 50, True, False),
        (1040, 50, True, False),
        (1080, 50, False, False),
        (1005, None, True, True),
        (1100, None, False, False),
    ],
)
def test_a_look_in_vain_costs_others_nothing_that_these_calls_do_not_gain(after_ns, look_ns, of_generate, of_others):
    before, after = (as_timing(range(ns - 10, ns + 11), "wall") for ns in (1000, after_ns))
    assert may_stay(before, after, look_ns, is_of_generate=True) == of_generate
    assert may_stay(before, after, look_ns, is_of_generate=False) == of_others


def test_a_look_takes_time():
    assert 0 < time_of_a_look([torch.ones(64, 64, dtype=torch.long)], (0,)) < 10**8
