"""What ends a proof: ops without rules, rules that meet what they do not know, sizes of several names."""

from __future__ import annotations

import torch

from fusion_advisor.fuse.dependence import prove
from fusion_advisor.fuse.dependence.kept import Affine, Kept, Long, Where, moved
from fusion_advisor.fuse.shapes.proved_sizes import prove_sizes
from fusion_advisor.records import SizeRange
from tests.fuse.dependence.padded_runs import opened, reason
from tests.fuse.dependence.test_hostile import INPUTS, ids, rows

BOX = (SizeRange(name="batch", least=2, most=16), SizeRange(name="seq", least=2, most=64))


def test_a_rule_that_meets_what_it_does_not_know_ends_the_proof_alone():
    found = opened(lambda x: x.softmax(-1) + 1, rows, INPUTS[rows])
    (node,) = (node for node in found.region.graph.graph.nodes if "softmax" in node.name)
    assert reason(found, "batch") == ""
    for dim in ("last", None):
        node.args = (node.args[0], dim)
        assert "calls an op in a form that no rule covers, in `softmax`" in reason(found, "batch")


def test_an_op_without_a_rule_is_named_where_what_is_padded_reaches_it_and_nowhere_else():
    found = opened(lambda x: x + torch.linalg.inv(torch.eye(8) * 2)[0], rows, INPUTS[rows])
    assert reason(found, "batch") == ""
    other = opened(lambda x: torch.linalg.matrix_exp(x @ x.transpose(1, 2)), rows, INPUTS[rows])
    assert "the model calls an op that no rule is for, in `linalg_matrix_exp` at tests/fuse/dependence/test_prove.py:" in reason(
        other, "batch"
    )


def test_what_no_result_reads_ends_no_proof():
    found = opened(lambda x: (x * 2, x.sum(0))[0], rows, INPUTS[rows])
    assert reason(found, "batch") == ""


def test_sizes_are_proved_one_by_one():
    proved = prove_sizes(opened(lambda x: x - x.mean(1, keepdim=True), rows, INPUTS[rows]), BOX)
    assert proved.names == ["batch"] and list(proved.refused) == ["seq"]
    assert proved.form.masked == frozenset()
    nothing = prove_sizes(opened(lambda x: x.flatten() * 2, ids, INPUTS[ids]), BOX)
    assert nothing.names == () and nothing.form is None
    assert all("a dim of a result is computed from sizes" in text for text in nothing.refused.values())


def test_a_size_that_is_fixed_in_the_piece_is_not_asked_for():
    box = (BOX[0], SizeRange(name="seq", least=7, most=7))
    assert prove_sizes(opened(lambda x: x.flip(1) * 2, rows, INPUTS[rows]), box).names == ["batch"]


def test_what_is_known_goes_with_the_axes_that_stay():
    value = Kept(
        axes=((Long(5),), (Long(6),), (Long(7),)), facts={Where(0, 2): 0, Where(None, 1): 1, Where(1, 2, True): 2},
        live=frozenset({(0, 2), (1, 2)}), affine=Affine({0: 1, 2: -1}, 3),
    )  # fmt: skip
    turned = moved(value, value.axes[::-1], {0: 2, 1: 1, 2: 0})
    assert turned.facts == {Where(2, 0): 0, Where(None, 1): 1, Where(1, 0, True): 2}
    assert turned.live == {(2, 0), (1, 0)} and turned.affine == Affine({2: 1, 0: -1}, 3)
    less = moved(value, value.axes[1:], {1: 0, 2: 1})
    assert less.facts == {Where(None, 0): 1, Where(0, 1, True): 2} and less.live == {(0, 1)} and less.affine is None
    assert Affine({0: 1}, 2).plus(Affine({0: 1, 1: 1}, 1), -1) == Affine({1: -1}, 1)


def test_every_rule_is_for_an_op_that_torch_has():
    assert [name for name in prove._RULES if not hasattr(torch.ops.aten, name)] == []
