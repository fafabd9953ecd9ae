"""Sums of columns in chains: rows first, columns last, and ops of several results tensor by tensor."""

from __future__ import annotations

import torch

from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.op_inputs import for_columns_alone, inputs_of, is_candidate, reduces_columns, viewed
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.records import OpClass
from tests.kernel_cases.lowered import records
from tests.lowering.rules.test_backward import drawn

_aten = torch.ops.aten


def chains(ops):
    """Names of each fusible group's computing ops."""
    groups = find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
    return [
        [ops[member].target.split(".")[1] for member in group.members if ops[member].op_class is not OpClass.VIEW]
        for group in groups
        if group.verdict.is_fusible
    ]


def test_a_norm_with_its_statistics_joins_the_residual_and_the_cast():
    def step(x, y, weight, bias):
        out, mean, rstd = _aten.native_layer_norm(x + y, [8], weight, bias, 1e-5)
        return out.to(torch.float32), mean, rstd

    ops = records(step, drawn(4, 8), drawn(4, 8), drawn(8), drawn(8))
    assert chains(ops) == [["add", "native_layer_norm", "to"]] or chains(ops) == [["add", "native_layer_norm", "_to_copy"]]
    (norm,) = (op for op in ops if op.target.startswith("aten.native_layer_norm"))
    results = [op for op in ops if op.target == "getitem"]
    assert is_candidate(norm) and len(results) == 3
    assert all(viewed(op, ops) is None for op in results)


def test_a_cast_of_autograds_is_part_of_a_chain():
    ops = records(lambda x: _aten._to_copy(x * 2, dtype=torch.float32) + 1, drawn(4, 8))
    assert chains(ops) == [["mul", "_to_copy", "add"]]


def test_a_layers_gradient_and_its_biass_are_one_chain():
    def step(gradient, x):
        found = _aten.gelu_backward(gradient, x)
        return found @ found.t(), found.sum(0)

    assert chains(records(step, drawn(8, 8), drawn(8, 8, seed=1))) == [["gelu_backward", "sum"]]


def test_rows_come_before_columns():
    """The norm's own product joins the sum of columns alone, and the input's gradient keeps what both read."""

    def step(gradient, x, scale, weight):
        normalized = x * scale
        of_input = gradient * weight
        rows = (of_input - (of_input * normalized).sum(-1, keepdim=True)) * scale
        return rows, (gradient * normalized).sum(0)

    ops = records(step, drawn(4, 8), drawn(4, 8), drawn(4, 1), drawn(8))
    rows, columns = chains(ops)
    assert rows == ["mul", "mul", "mul", "sum", "sub", "mul"] and columns == ["mul", "sum"]
    late = [ops[index].target.split(".")[1] for index in sorted(for_columns_alone(ops))]
    assert late == ["mul", "sum"]


def test_a_sum_of_columns_is_launched_before_the_group_that_reads_it():
    """Another reader of that group's first op stands ahead of the sum's view: a launch of the sum there would be too late."""

    def step(gradient, table):
        total, wave = gradient.sum((0, 1)), table.cos()
        product = wave @ wave.t()
        return product, total.view(4, 4) * wave

    ops = records(step, drawn(3, 2, 16), drawn(4, 4))
    groups = find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
    launched = {}
    for group in groups:
        if group.verdict.is_fusible:
            readers = [
                op.index for op in ops if op.index not in group.members and not set(group.members).isdisjoint(inputs_of(op))
            ]
            launched |= dict.fromkeys(group.members, min(readers, default=len(ops)))
    for index, place in launched.items():
        for source in inputs_of(ops[index]):
            shown = viewed(ops[source], ops)
            made = source if shown is None else shown
            assert launched.get(made, made) <= place, (ops[index].target, ops[made].target)


def test_which_ops_reduce_columns():
    def step(x):
        return (
            x.sum(0),
            x.sum((0, 1)),
            x.mean((0,), keepdim=True),
            x.amax(0),
            x.sum(-1),
            x.sum(1),
            x.sum((0, 2)),
            x.sum((0, 1, 2)),
        )

    ops = records(step, drawn(2, 3, 4))
    found = [reduces_columns(op, ops) for op in ops if op.op_class is OpClass.REDUCTION]
    assert found == [True, True, True, True, False, False, False, False]


def test_a_norms_gradients_by_what_is_asked_for():
    def step(mask):
        def function(g, x, mean, rstd, weight, bias):
            found = _aten.native_layer_norm_backward(g, x, [8], mean, rstd, weight, bias, mask)
            return tuple(one for one, is_wanted in zip(found, mask, strict=True) if is_wanted)

        given = (drawn(4, 8), drawn(4, 8), drawn(4, 1), drawn(4, 1), drawn(8), drawn(8))
        ops = records(function, *given)
        return next(reduces_columns(op, ops) for op in ops if "native_layer_norm" in op.target), chains(ops)

    assert step([True, False, False]) == (False, [["native_layer_norm_backward"]])
    assert step([False, True, True]) == (True, [["native_layer_norm_backward"]])
    assert step([True, True, True]) == (False, [])
