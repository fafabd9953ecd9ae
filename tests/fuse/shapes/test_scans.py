"""Recurrences over an open length: a graph for each of a few lengths, and the original ops with a reason for many."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.errors import CannotCapture
from fusion_advisor.fuse.points.decide import RangeWork, wrong_elsewhere
from fusion_advisor.fuse.shapes.pieces import Served, find_pieces
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.records import SizeRange
from tools.zoo.plain import SelectiveScan

BATCH = SizeRange(name="batch", least=1, most=4)
MANY, FEW = SizeRange(name="seq", least=2, most=24), SizeRange(name="seq", least=4, most=6)
DIMS = {"x": ("batch", "seq", "")}


class Scanned(torch.nn.Module):
    """A linear recurrence as torch's associative scan, which Mamba of transformers uses under dynamo."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 8)

    def forward(self, x):
        from torch._higher_order_ops.associative_scan import associative_scan

        decay = torch.sigmoid(self.gate(x))
        both = associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), dim=1, combine_mode="generic")
        return x + torch.nn.functional.silu(both[1]) * 0.5


class Looped(SelectiveScan):
    """The zoo's scan with a loop over as many steps as it is given."""

    def forward(self, x):
        self.steps = x.shape[1]
        return super().forward(x)


def scanned():
    torch.manual_seed(0)
    return Scanned().eval()


def step_by_step(model, x):
    """What the scan is, without torch's scan."""
    decay, states = torch.sigmoid(model.gate(x)), [torch.zeros_like(x[:, 0])]
    for step in range(x.shape[1]):
        states.append(decay[:, step] * states[-1] + x[:, step])
    return x + torch.nn.functional.silu(torch.stack(states[1:], 1)) * 0.5


def pieces_of(model, *ranges, **limits):
    def capture(sizes):
        return capture_open(model, (), {"x": torch.randn(sizes["batch"], sizes["seq"], 8)}, DIMS)

    return find_pieces(ranges, capture, **limits)


def test_a_scan_has_a_graph_for_each_of_a_few_lengths():
    found = pieces_of(scanned(), BATCH, FEW)
    assert sorted(piece.box[1].text for piece in found) == ["seq=4", "seq=5", "seq=6"]
    assert {piece.box[0].text for piece in found} == {"batch=1..4"}
    assert all(piece.opened is not None for piece in found)


def test_a_scan_of_many_lengths_is_left_with_one_reason_after_three_captures():
    (piece,) = pieces_of(scanned(), BATCH, MANY)
    assert piece.box == (BATCH, MANY)
    assert piece.refusal == "the model makes another graph for each size of seq"


def test_sizes_of_one_graph_each_do_not_hide_that_others_share_one():
    def look(x):
        return x.relu() if x.shape[1] in (2, 3, 4) else x

    class Branches(torch.nn.Module):
        def forward(self, x):
            return look(x) + 1

    found = pieces_of(Branches().eval(), BATCH, MANY)
    assert any(piece.opened is not None and piece.box[1].most == 24 for piece in found)


def test_a_loop_of_python_over_the_length_fixes_it():
    torch.manual_seed(0)
    model = Looped(width=8, states=2, layers=1, steps=0).eval()
    (piece,) = pieces_of(model, BATCH, MANY)
    assert "for a constant" in piece.refusal


def test_what_dynamo_cannot_capture_at_other_sizes_is_a_reason():
    def capture(sizes):
        raise CannotCapture(model_id="model", detail="tracing ended")

    (piece,) = find_pieces((BATCH, MANY), capture)
    assert (piece.box, piece.refusal) == ((BATCH, MANY), "tracing ended")


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_mambas_of_transformers_run_the_original_ops_with_a_reason(kind):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "use_cache": False}
    more = {"num_heads": 2, "head_dim": 8, "n_groups": 1, "chunk_size": 8} if kind == "Mamba2" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()

    def capture(at):
        ids = torch.randint(0, 32, (at["batch"], at["seq"]))
        return capture_open(model, (), {"input_ids": ids}, {"input_ids": ("batch", "seq")})

    found = find_pieces((BATCH, MANY), capture, most=12 if kind == "Mamba" else 3)
    assert all(piece.refusal or piece.opened for piece in found)
    served = [piece for piece in found if piece.opened is not None]
    assert bool(served) == (kind == "Mamba2")  # whose chunks are padded: up to a chunk more, lengths share a graph


@pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")
def test_a_scan_served_at_few_lengths_is_the_models_own():
    model = scanned()
    shapes = {"x": ("batch=1..4", "seq=4..6", None)}
    with fa.apply(model, {"x": torch.randn(2, 5, 8)}, shapes=shapes, effort="quick", min_share=0.0) as fused, torch.no_grad():
        for batch, seq in ((1, 4), (3, 5), (4, 6), (2, 6)):
            x = torch.randn(batch, seq, 8)
            torch.testing.assert_close(model(x=x), step_by_step(model, x))
        assert fused.fallbacks == {}
        assert model(x=torch.randn(2, 7, 8)).shape == (2, 7, 8)
        assert [*fused.fallbacks] == ["seq is outside of seq=4..6"]


def test_what_is_wrong_at_other_sizes_than_it_was_decided_at_is_found():
    (piece,) = pieces_of(scanned(), BATCH, SizeRange(name="seq", least=5, most=5))
    ranged = SimpleNamespace(at=lambda sizes: ((), {"x": torch.randn(sizes["batch"], sizes["seq"], 8)}))
    work = SimpleNamespace(graph_call=functools.partial(RangeWork.graph_call, SimpleNamespace(ranged=ranged)))
    right = copy.deepcopy(piece.opened.region.graph)
    turned = copy.deepcopy(right)  # its rows are in another order, which at a batch of one is the same
    (end,) = (node for node in turned.graph.nodes if node.op == "output")
    with turned.graph.inserting_before(end):
        end.args = ((turned.graph.call_function(torch.ops.aten.flip.default, (end.args[0][0], [0])),),)
    turned.recompile()
    at = {"batch": 1, "seq": 5}

    def said(module):
        return wrong_elsewhere(work, Workpiece(piece), Served(sizes=at, module=module))

    assert said(right) == ""
    assert said(turned).startswith("all rewrites together, at batch=3, seq=5: relative error")
