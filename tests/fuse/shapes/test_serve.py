"""A call is served if all but its open sizes is as in the example; each shape runs what stays near it."""

from __future__ import annotations

import pytest
import torch
from torch.fx import symbolic_trace

from fusion_advisor.fuse.live.call_signature import parts_of, signature
from fusion_advisor.fuse.shapes.pieces import Served
from fusion_advisor.fuse.shapes.serve import ServedPiece, ShapeTable, VerifiedCall
from fusion_advisor.records import SizeRange

IDENTITY = symbolic_trace(torch.nn.Identity())
DIMS = {"x": ("batch", "seq")}
RANGES = (SizeRange(name="batch", least=1, most=8), SizeRange(name="seq", least=1, most=64))


def piece(*points, box=RANGES, **given):
    return ServedPiece(box=box, compiled=None, route=None, slots={}, points=points, **given)


def point(batch, seq, module=IDENTITY, reason=""):
    return Served(sizes={"batch": batch, "seq": seq}, module=module, reason=reason)


def table(*pieces):
    return ShapeTable(RANGES, DIMS, pieces, ((), {"x": torch.zeros(2, 4), "flag": True, "y": torch.zeros(3)}))


def call(x, **other):
    return {"x": x, "flag": True, "y": torch.zeros(3), **other}


def look_up(found, kwargs):
    """What a table answers for a call, whose form it may know."""
    leaves, objects = [], []
    key = signature((), kwargs, leaves, {}, objects)
    return found.look_up(key, (), kwargs, lambda: parts_of(key, leaves, objects))


class Held:
    def __init__(self, batch, seq, count=0, name="a"):
        self.keys, self.fixed, self.count, self.name = torch.zeros(batch, seq), torch.zeros(3), count, name


def test_calls_of_one_form_get_what_looking_through_them_gives():
    dims = {"x": ("batch", ""), "held.keys": ("batch", "seq"), "mask": ("batch", "seq+1")}

    def given(batch=2, seq=4, *, more=0, x=5, count=0, name="a", keys=None, fixed=None, same=False):
        held = Held(batch, seq, count, name)
        held.keys, held.fixed = held.keys if keys is None else keys, held.fixed if fixed is None else fixed
        made = {"x": torch.zeros(batch, x), "held": held, "mask": torch.zeros(batch, seq + 1 + more)}
        return {**made, "mask": held.keys} if same else made

    calls = [
        *(given(batch, seq) for batch, seq in ((2, 4), (1, 1), (8, 64), (8, 65), (9, 3), (3, 3), (0, 3), (3, 6), (2, 1))),
        *(given(3, 7, count=count) for count in (1, 2)), given(3, 7, name="b"), given(3, 7, more=1), given(3, 7, x=6),
        given(3, 7, keys=torch.zeros(7, 3).T), given(3, 7, keys=torch.zeros(4, 7)), given(3, 7, keys=torch.zeros(3, 7, 1)),
        given(3, 7, keys=torch.zeros(3, 7).double()), given(3, 7, fixed=torch.zeros(4)), given(3, 7, fixed=torch.zeros(6)[::2]),
        given(3, 7, same=True), given(1, 7, keys=torch.zeros(2, 7)[:1]), given(3, 1, keys=torch.zeros(3, 4)[:, :1]),
    ]  # fmt: skip
    holes = piece(point(1, 1), holds=lambda sizes: sizes["batch"] * sizes["seq"] != 18)
    answers = set()
    for order in (calls, calls[::-1]):
        found = ShapeTable(RANGES, dims, [holes], ((), given(2, 4)))
        for kwargs in order:
            answer = look_up(found, kwargs)
            answer = answer if isinstance(answer, str) else answer.piece
            assert answer == found.find((), kwargs)
            answers.add(answer)
        assert len(found._forms) == 4  # the counts and the name
    assert len(answers) == 5


def test_a_tensor_that_is_negated_when_it_is_read_is_another_call():
    served = table(piece(point(1, 1)))
    for x, y in ((torch.zeros(3, 7), torch.zeros(3)), (torch._neg_view(torch.zeros(3, 7)), torch.zeros(3))):
        for other in (y, torch._neg_view(y)):
            kwargs = {**call(x), "y": other}
            is_served = not x.is_neg() and not other.is_neg()
            assert isinstance(look_up(served, kwargs), VerifiedCall) is is_served
            assert isinstance(served.find((), kwargs), ServedPiece) is is_served


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*:UserWarning")
def test_tensors_without_strides_are_another_call():
    served = table(piece(point(1, 1)))
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(7)])
    for other in (nested, torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse()):
        for kwargs in (call(other), {**call(torch.zeros(3, 7)), "y": other}, {**call(other), "y": other}, call(Held(2, 4))):
            assert look_up(served, kwargs) == served.find((), kwargs) == ""


def test_a_call_of_any_size_inside_is_served():
    one = piece(point(1, 1), point(8, 64))
    for batch, seq in ((1, 1), (8, 64), (3, 7)):
        assert table(one).find((), call(torch.zeros(batch, seq))) is one


@pytest.mark.parametrize(
    "other",
    [
        call(torch.zeros(2, 4, dtype=torch.float64)),
        call(torch.zeros(2, 4, 1)),
        call(torch.zeros(4, 2).T),
        call(torch.zeros(2, 4), flag=False),
        call(torch.zeros(2, 4), flag=1),
        call(torch.zeros(2, 4), y=torch.zeros(4)),
        call(torch.zeros(2, 4), z=None),
        {"x": torch.zeros(2, 4), "flag": True},
    ],
)
def test_a_call_that_differs_in_anything_else_is_not(other):
    found = table(piece(point(1, 1)))
    assert found.find((), other) == ""
    for first in (call(torch.zeros(2, 4)), other):  # whichever call of a form is looked at first
        look_up(found, first)
        assert look_up(found, other) == ""


def test_why_a_size_is_not_served_is_said():
    small = (SizeRange(name="batch", least=1, most=8), SizeRange(name="seq", least=1, most=8))
    large = (SizeRange(name="batch", least=1, most=8), SizeRange(name="seq", least=9, most=64))
    holes = piece(point(1, 1), box=small, holds=lambda sizes: sizes["batch"] * sizes["seq"] != 6)
    found = table(holes, piece(box=large, refusal="it branches"))
    assert found.find((), call(torch.zeros(9, 2))) == "batch is outside of batch=1..8"
    assert found.find((), call(torch.zeros(2, 9))) == "it branches"
    assert "at exactly these sizes" in found.find((), call(torch.zeros(2, 3)))
    assert found.find((), call(torch.zeros(2, 4))) is holes
    slower = table(piece(point(1, 1, module=None, reason="the original ops are faster"), point(8, 64)))
    assert slower.find((), call(torch.zeros(1, 2))) == "the original ops are faster"


def test_a_shape_runs_what_stays_near_it():
    few, many = point(1, 4), point(8, 64)
    one = piece(few, many)
    assert one.at({"batch": 1, "seq": 8}) is few
    assert one.at({"batch": 8, "seq": 32}) is many
    assert one.at({"batch": 1, "seq": 64}) is many
    wide, tall = point(1, 64), point(8, 8)
    assert piece(wide, tall).at({"batch": 1, "seq": 63}) is wide


def test_each_signature_is_looked_at_once():
    found = table(piece(point(1, 1)))
    first = found.look_up("a", (), call(torch.zeros(2, 4)))
    assert isinstance(first, VerifiedCall)
    assert found.look_up("a", (), {"another": "call"}) is first
    assert found.look_up("b", (), call(torch.zeros(99, 4))) == "batch is outside of batch=1..8"


@pytest.mark.parametrize("knows_parts", [True, False])
def test_strides_that_nobody_steps_by_are_replaced_where_the_tensor_is_passed_and_refused_inside_an_object(knows_parts):
    def given(x, keys):
        held = Held(1, 1)
        held.keys = keys
        return {"x": x, "held": held}

    usual, odd = torch.zeros(1, 4), torch.zeros(1, 9)[:, :4]
    dims = {"x": ("batch", "seq"), "held.keys": ("batch", "seq")}
    found = ShapeTable(RANGES, dims, [piece(point(1, 1))], ((), given(torch.zeros(2, 4), torch.zeros(2, 4))))

    def answer(kwargs):
        return look_up(found, kwargs) if knows_parts else found.look_up(object(), (), kwargs)

    assert answer(given(usual, usual.clone())).lays_out is False
    assert answer(given(odd, usual)).lays_out is True
    for x in (usual, odd):
        assert answer(given(x, odd[:, :])) == "the strides of `held.keys` are not those of a new tensor"


def test_the_graph_with_masks_runs_where_flags_would_say_less():
    plain = symbolic_trace(torch.nn.ReLU())
    one = Served(sizes={"seq": 4}, module=IDENTITY, plain=plain, says_flags=lambda seq: seq < 10)
    assert one.graph_at((9,)) is IDENTITY
    assert one.graph_at((10,)) is plain
    assert one.modules == [IDENTITY, plain]
