"""Groups that read the same large values and do not feed each other: when one kernel for both is made."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.group import Verdict
from fusion_advisor.chains.shared_reads import MOST_BETWEEN, MOST_TRIES
from fusion_advisor.lowering.lower import lower
from fusion_advisor.records import TensorMeta
from tests.chains.test_find import MATRIX, Graph, by_bytes
from tests.fuse.plan.test_plan import plan_of
from tests.kernel_cases.lowered import check
from tests.tiny import groups_of, names

_ATEN = torch.ops.aten
ROWS, WIDTH = 6, 16


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gate_backward(gradient, gate, up):
    """The gradients of a gate's two factors, each read by a product."""
    of_up = torch.nn.functional.silu(gate) * gradient
    of_gate = _ATEN.silu_backward(gradient * up, gate)
    return of_up @ of_up.t(), of_gate @ of_gate.t()


def chains(function, *inputs):
    ops, groups = groups_of(function, *inputs)
    return [names(ops, group.members) for group in groups if group.verdict.is_fusible]


def three():
    return [drawn(ROWS, WIDTH, seed=seed) for seed in range(3)]


def test_the_backward_pass_of_a_gate_is_one_kernel_of_five_tensors():
    ops, (group,) = groups_of(gate_backward, *three())
    assert names(ops, group.members) == ["silu", "mul", "mul", "silu_backward"] and len(group.outputs) == 2
    program = lower(ops, group.members, group.outputs).program
    assert not program.siblings and group.verdict.floor_bytes == program.moved_bytes == 5 * ROWS * WIDTH * 4


def test_a_gate_of_one_product_with_its_other_factor_shares_strided_rows():
    def step(gradient, both, weight):
        gate, up = both.chunk(2, -1)
        of_up = torch.nn.functional.silu(gate) * gradient
        again = of_up + up
        of_gate = _ATEN.silu_backward(up, gate)
        return again @ weight, of_gate @ weight

    inputs = drawn(ROWS, WIDTH), drawn(ROWS, 2 * WIDTH, seed=1), drawn(WIDTH, 2, seed=2)
    assert chains(step, *inputs) == [["silu", "mul", "add", "silu_backward"]]


def test_its_numbers_are_right():
    def factors(gradient, gate, up):
        return torch.nn.functional.silu(gate) * gradient, _ATEN.silu_backward(gradient * up, gate)

    check(factors, *three())


def test_a_value_computed_again_is_one_write_more():
    def again(gradient, gate, up, out):
        active = torch.nn.functional.silu(gate)
        weight = out @ (active * up)
        return weight, *gate_backward(gradient, gate, up)

    ops, groups = groups_of(again, *three(), drawn(ROWS, ROWS, seed=3))
    (group,) = groups
    assert sorted(names(ops, group.members)) == ["mul", "mul", "mul", "silu", "silu", "silu_backward"]
    assert group.verdict.floor_bytes == 6 * ROWS * WIDTH * 4


def test_chains_of_three_readers_are_one():
    def step(x):
        return torch.exp(x) @ x.t(), torch.sin(x) @ x.t(), torch.tanh(x) @ x.t()

    assert chains(step, drawn(ROWS, WIDTH)) == [["exp", "sin", "tanh"]]


@pytest.mark.parametrize("shape", [(ROWS, 1, WIDTH), (1, ROWS * WIDTH), (ROWS * WIDTH,)], ids=str)
def test_other_shapes_of_the_same_elements_are_the_same(shape):
    def step(x, y):
        return torch.exp(x) @ y, torch.sin(x.view(shape))

    assert chains(step, drawn(ROWS, WIDTH), drawn(WIDTH, 2)) == [["exp", "sin"]]


def halves(x):
    first, second = x.chunk(2, -1)
    return torch.exp(first) @ first.t(), torch.sin(second) @ second.t()


def slices_at_one_place(x):
    wide, narrow = x[:, :12], x[:, :10]
    return torch.exp(wide) @ wide.t(), torch.sin(narrow) @ narrow.t()


def other_order(x):
    return torch.exp(x) @ x, torch.sin(x.t()).contiguous() @ x


def a_little_in_common(x):
    a, b, c, d = (x @ x for _ in range(4))
    table = (x @ x)[:1]
    return torch.exp(a * b * table) @ x, torch.sin(c * d * table) @ x


def one_of_many(x):
    values = [x @ x for _ in range(10)]
    return functools.reduce(torch.add, [x, *values[:5]]) @ x, functools.reduce(torch.maximum, [x, *values[5:]]) @ x


def rows_and_elements(x):
    return torch.softmax(x, -1) @ x, torch.sin(x) @ x


def waits_for_itself(x):
    first = torch.exp(x)
    return torch.sin(x) * (first @ x)


def written_in_between(x, y):
    first = torch.exp(y) @ x
    y.copy_(first)
    return torch.sin(y) @ x


REFUSED = {
    "halves of one tensor": (halves, 1), "narrower slices": (slices_at_one_place, 1), "another order": (other_order, 1),
    "a row": (a_little_in_common, 1), "one of six": (one_of_many, 1), "reduced rows": (rows_and_elements, 1),
    "waits for itself": (waits_for_itself, 1), "a write in between": (written_in_between, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, count = REFUSED[name]
    ops, groups = groups_of(function, *(drawn(16, 16, seed=seed) for seed in range(count)))
    together = [{"exp", "sin"}, {"_softmax", "sin"}, {"softmax", "sin"}, {"add", "maximum"}]
    for group in groups:
        found = set(names(ops, group.members))
        assert not any(both <= found for both in together), found


# ---------------------------------------------------------------------- by hand


def pair(between=0, meta=MATRIX):
    """Two ops that read one input, each read by a GEMM, with other GEMMs in between."""
    g = Graph()
    x, y = g.input(), g.input("y")
    one = g.pointwise(x)
    read = [g.gemm(one), *(g.gemm(y) for _ in range(between))]
    two = g.pointwise(x)
    g.ops[two] = replace(g.ops[two], outputs=(meta,))
    return g.output(*read, g.gemm(two)), one, two


def test_a_pair_is_one_group_launched_before_the_first_reader_of_either():
    g, one, two = pair()
    assert g.groups(by_bytes(g)) == [((one, two), (one, two))]


def test_groups_far_apart_stay_two_because_a_result_would_be_held_for_long():
    g, one, two = pair(MOST_BETWEEN - 1)
    assert g.groups(by_bytes(g)) == [((one, two), (one, two))]
    g, one, two = pair(MOST_BETWEEN)
    assert g.groups(by_bytes(g)) == [((one,), (one,)), ((two,), (two,))]


def test_a_group_that_needs_what_is_launched_after_the_first_reader_stays_apart():
    g = Graph()
    x, y = g.input(), g.input("y")
    one, late = g.pointwise(x), g.pointwise(y)
    read = g.gemm(one)
    two = g.pointwise(x, late)
    g.output(read, g.gemm(two))

    def judge(members, outputs):
        return replace(by_bytes(g)(members, outputs), is_fusible=not {late, two} <= {*members})

    assert [members for members, _ in g.groups(judge)] == [(one,), (late,), (two,)]


@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta(shape=(4, 4), stride=(4, 1), dtype="float32"), TensorMeta(shape=(4, 8), stride=(1, 4), dtype="float32"),
        TensorMeta(shape=(2, 4, 8), stride=(32, 8, 1), dtype="float32"),
    ],
    ids=["smaller", "another order", "larger"],
)  # fmt: skip
def test_a_result_of_another_size_or_order_keeps_them_apart(meta):
    g, one, two = pair(meta=meta)
    assert g.groups(by_bytes(g)) == [((one,), (one,)), ((two,), (two,))]


def test_what_may_not_join_does_not():
    g, one, two = pair()
    found = find_groups(g.ops, by_bytes(g), may_join=lambda members, outputs: (members, outputs) != ((one, two), (one, two)))
    assert [group.members for group in found] == [(one,), (two,)]


def asked(count):
    """How often a judge is asked about chains that all read one value, and may not be one."""
    g = Graph()
    x = g.input()
    g.output(*(g.gemm(g.pointwise(x)) for _ in range(count)))
    questions = []

    def judge(members, outputs):
        questions.append(members)
        return Verdict(is_fusible=len(members) == 1, floor_bytes=256)

    find_groups(g.ops, judge)
    return len(questions)


def test_the_time_grows_with_the_number_of_chains_and_no_faster():
    assert asked(400) == 2 * asked(200) + MOST_TRIES * (MOST_TRIES + 1) // 2


# ---------------------------------------------------------------------- kernels chosen by name


def test_only_and_skip_name_the_kernel_for_both_or_that_for_one():
    (both,) = plan_of(gate_backward, *three()).fusions
    assert not both.match.is_library and both.chain.ops == ("silu", "mul", "mul", "silu_backward")
    (only,) = plan_of(gate_backward, *three(), only=(both.match.kernel,)).fusions
    assert only.match.kernel == both.match.kernel
    (alone,) = plan_of(gate_backward, *three(), only=("swiglu",)).fusions
    assert alone.match.kernel == "swiglu" and alone.chain.ops == ("silu", "mul")
    apart = plan_of(gate_backward, *three(), skip=(both.match.kernel,))
    assert sorted(fusion.chain.ops for fusion in apart.fusions) == [("mul", "silu_backward"), ("silu", "mul")]
    assert apart.unused == ()
