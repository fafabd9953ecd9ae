"""Which ops may become one kernel: merging, convexity, writes, views, several readers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_advisor.capture.graph.op_classes import class_of
from fusion_advisor.chains.find import MOST_MEMBERS, find_groups
from fusion_advisor.chains.group import Verdict
from fusion_advisor.chains.op_inputs import depends_on_inputs, inputs_of, is_candidate, references
from fusion_advisor.lowering.rules.tables import POINTWISE, SPECIAL
from fusion_advisor.records import OpClass, OpNode, Ref, TensorMeta
from tests.tiny import groups_of, names, planned

MATRIX = TensorMeta(shape=(4, 8), stride=(8, 1), dtype="float32")


class Graph:
    """Writes op records by hand."""

    def __init__(self):
        self.ops = []

    def add(self, target, op_class, *args, meta=MATRIX, **fields):
        index = len(self.ops)
        arguments = tuple(Ref(index=arg) for arg in args)
        self.ops.append(
            OpNode(index=index, region=0, target=target, op_class=OpClass(op_class), args=arguments, outputs=(meta,), **fields)
        )
        return index

    def input(self, name="x"):
        return self.add(name, "input", role="input")

    def pointwise(self, *args):
        return self.add("aten.add.Tensor", "pointwise", *args)

    def gemm(self, *args):
        return self.add("aten.mm.default", "gemm", *args)

    def storage(self, index):
        """Who owns the storage of a value; an op that writes in place returns what it wrote to."""
        while self.ops[index].alias_of is not None:
            index = self.ops[index].alias_of
        return self.ops[index].mutates[0] if self.ops[index].mutates else index

    def view(self, arg):
        return self.add("aten.view.default", "view", arg, alias_of=self.storage(arg))

    def write(self, arg, *args):
        return self.add("aten.copy_.default", "memory", arg, *args, mutates=(self.storage(arg),))

    def copy_rows(self, into, at, rows):
        """An ``index_copy_``: rows of ``into``, where ``at`` says, become those of ``rows``."""
        owner = self.storage(into)
        index = self.add("aten.index_copy_.default", "memory", into, at, rows, mutates=(owner,), alias_of=owner)
        target, places, source = self.ops[index].args
        self.ops[index] = replace(self.ops[index], args=(target, 0, places, source))
        return index

    def output(self, *args):
        index = len(self.ops)
        returned = (tuple(Ref(index=arg) for arg in args),)
        self.ops.append(OpNode(index=index, region=0, target="output", op_class=OpClass.OTHER, role="output", args=returned))
        return self

    def groups(self, judge=lambda members, outputs: Verdict(is_fusible=True), has_kernel=None, is_left_out=None):
        return sorted((group.members, group.outputs) for group in find_groups(self.ops, judge, has_kernel, is_left_out))


def test_a_line_of_ops_is_one_chain_with_one_output():
    g = Graph()
    x = g.input()
    a = g.pointwise(x)
    b = g.pointwise(a, x)
    c = g.pointwise(b)
    assert g.output(c).groups() == [((a, b, c), (c,))]


def test_a_value_read_by_several_is_computed_once_and_written_if_read_outside():
    g = Graph()
    x = g.input()
    a = g.pointwise(x)
    b, c = g.pointwise(a), g.pointwise(a)
    d = g.pointwise(b, c)
    m = g.gemm(a, d)
    assert g.output(m).groups() == [((a, b, c, d), (a, d))]


def test_a_chain_never_goes_around_through_a_gemm():
    g = Graph()
    x = g.input()
    a = g.pointwise(x)
    m = g.gemm(a, x)
    b = g.pointwise(a, m)
    assert g.output(b).groups() == [((a,), (a,)), ((b,), (b,))]


def test_nor_around_through_two_steps():
    g = Graph()
    x = g.input()
    a = g.pointwise(x)
    m = g.gemm(a, x)
    inner = g.pointwise(m)
    n = g.gemm(inner, x)
    b = g.pointwise(a, n)
    groups = g.output(b).groups()
    assert not any(a in members and b in members for members, _ in groups)


def test_an_input_that_is_ready_after_an_output_is_read_keeps_ops_apart():
    g = Graph()
    x, y = g.input(), g.input("y")
    a = g.pointwise(x)
    first = g.gemm(a, x)
    late = g.gemm(y, y)  # depends on nothing of a
    b = g.pointwise(a, late)
    groups = g.output(first, b).groups()
    assert ((a,), (a,)) in groups and ((b,), (b,)) in groups


def test_views_in_between_are_glue_and_views_behind_stand_for_what_they_show():
    g = Graph()
    x = g.input()
    a = g.pointwise(x)
    v = g.view(g.view(a))
    b = g.pointwise(v)
    shown = g.view(b)
    m = g.gemm(shown, x)
    assert g.output(m).groups() == [((a, v - 1, v, b), (b,))]


def test_a_view_inside_that_is_read_outside_makes_its_value_an_output():
    g = Graph()
    x = g.input()
    a = g.pointwise(x)
    v = g.view(a)
    b = g.pointwise(v)
    m = g.gemm(v, x)
    assert g.output(b, m).groups() == [((a, v, b), (a, b))]


def test_a_write_to_what_the_chain_reads_keeps_ops_apart():
    g = Graph()
    x, cache = g.input(), g.input("cache")
    a = g.pointwise(x, cache)
    g.write(cache, x)
    b = g.pointwise(a)
    assert g.output(b).groups() == [((a,), (a,)), ((b,), (b,))]


def test_a_write_that_follows_the_first_reader_but_precedes_a_later_member_keeps_ops_apart():
    g = Graph()
    x, cache = g.input(), g.input("cache")
    seen = g.view(cache)
    a = g.pointwise(x)
    m = g.gemm(a, x)
    g.write(seen, x)
    b = g.pointwise(a, cache)  # reads what was written, though it names the tensor of before
    groups = g.output(m, b).groups()
    assert not any(a in members and b in members for members, _ in groups)


def test_a_write_through_a_view_into_a_value_of_the_chain_keeps_ops_apart():
    g = Graph()
    x = g.input()
    a = g.pointwise(x)
    g.write(g.view(a), x)
    b = g.pointwise(a)
    groups = g.output(b).groups()
    assert not any(a in members and b in members for members, _ in groups)


def test_a_second_write_to_the_result_of_a_first_is_seen():
    g = Graph()
    x, cache = g.input(), g.input("cache")
    written = g.write(cache, x)
    a = g.pointwise(written)
    g.write(cache, a)
    b = g.pointwise(a, written)
    groups = g.output(b).groups()
    assert not any(a in members and b in members for members, _ in groups)


def test_a_write_elsewhere_or_before_is_no_obstacle():
    g = Graph()
    x, cache = g.input(), g.input("cache")
    first = g.write(cache, x)
    a = g.pointwise(x, first)
    other = g.write(g.add("y", "input", role="input"), x)
    b = g.pointwise(a)
    assert ((a, b), (b,)) in g.output(b, other).groups()


def test_what_depends_on_no_input_is_folded_not_fused():
    g = Graph()
    constant = g.add("c", "input", role="constant")
    folded = g.pointwise(constant)
    live = g.pointwise(g.input(), folded)
    assert g.output(live).groups() == [((live,), (live,))]
    assert depends_on_inputs(g.ops) == [False, False, True, True, True]


def test_a_value_that_nobody_reads_is_no_chain():
    g = Graph()
    g.pointwise(g.input())
    found = find_groups(g.ops, lambda *_: Verdict(is_fusible=True))
    assert [group.verdict.code for group in found] == ["FA601"]


def test_what_the_judge_refuses_stays_apart_and_keeps_its_reason():
    g = Graph()
    a = g.pointwise(g.input())
    b = g.pointwise(a)
    g.output(b)

    def judge(members, outputs):
        return Verdict(is_fusible=len(members) < 2, code="FA603", reason="too long")

    assert g.groups(judge) == [((a,), (a,)), ((b,), (b,))]
    refused = find_groups(g.ops, lambda *_: Verdict(is_fusible=False, code="FA606", reason="no"))
    assert {group.verdict.reason for group in refused} == {"no"}


def rotations(count, table=lambda g, number: 0):
    """GEMMs whose results are changed by what one input holds, each read by a GEMM of its own after all of them."""
    g = Graph()
    tables, x = [g.input("table"), g.input("another")], g.input()
    changed = [g.pointwise(g.gemm(x), tables[table(g, number)]) for number in range(count)]
    return g.output(*[g.gemm(one) for one in changed]), changed


def test_two_chains_that_read_one_value_share_a_launch_where_there_is_a_kernel():
    g, (one, two) = rotations(2)
    assert g.groups() == [((one,), (one,)), ((two,), (two,))]
    assert g.groups(has_kernel=lambda *_: False) == g.groups()
    assert g.groups(has_kernel=lambda *_: True) == [((one, two), (one, two))]


def residual_and_norm():
    """The sum is read by the norm's ops and by the next residual."""
    g = Graph()
    x, y = g.input(), g.input()
    a = g.pointwise(x, y)
    v = g.view(a)
    b = g.pointwise(v)
    c = g.pointwise(v, b)
    m = g.gemm(c)
    g.output(g.gemm(m, a))
    return g, a, v, b, c


def by_members(members, outputs):
    return Verdict(is_fusible=True, key=repr(members))


def by_bytes(g):
    """A judge that counts what a group reads and writes; of any group there is a kernel."""

    def judge(members, outputs):
        read = {source for member in members for source in inputs_of(g.ops[member])} - set(members)
        return Verdict(is_fusible=True, floor_bytes=128 * (len(read) + len(outputs)), key=repr(members))

    return judge


def test_a_chain_that_is_left_out_comes_apart_at_the_largest_part_with_a_kernel():
    g, a, v, b, c = residual_and_norm()
    whole = ((a, v, b, c), (a, c))
    assert g.groups(by_members) == [whole]
    with_kernel = {(b, c), (c,)}
    parts = g.groups(by_members, lambda members, _: members in with_kernel, lambda members, _: members == whole[0])
    assert parts == [((a,), (a,)), ((b, c), (c,))]
    with_kernel = {(a, v, b)}
    parts = g.groups(by_members, lambda members, _: members in with_kernel, lambda members, _: members == whole[0])
    assert parts == [((a, v, b), (a, b)), ((c,), (c,))]


def test_a_chain_that_is_left_out_stays_whole_where_no_part_has_a_kernel():
    g, a, v, b, c = residual_and_norm()
    whole = [((a, v, b, c), (a, c))]
    assert g.groups(by_members, lambda *_: False, lambda *_: True) == whole
    assert g.groups(by_members, lambda *_: True, lambda *_: False) == whole


def test_what_remains_of_a_chain_is_offered_too():
    g, a, _, b, c = residual_and_norm()
    parts = g.groups(by_members, lambda members, _: len(members) == 1, lambda *_: True)
    assert parts == [((a,), (a,)), ((b,), (b,)), ((c,), (c,))]


def test_no_part_stands_by_itself_that_would_be_launched_too_late():
    g = Graph()
    x, y = g.input(), g.input()
    a, b = g.pointwise(x), g.pointwise(y)
    early = g.gemm(b)  # what holds b is launched ahead of this, and what holds a alone behind it
    c = g.pointwise(a, b)
    g.output(early, g.gemm(c))
    whole = [((a, b, c), (b, c))]
    assert g.groups(by_members) == whole
    assert g.groups(by_members, lambda members, _: members == (a,), lambda *_: True) == whole
    apart = [((a, b), (a, b)), ((c,), (c,))]
    assert g.groups(by_members, lambda members, _: members == (a, b), lambda *_: True) == apart


def test_chains_that_read_nothing_in_common_do_not():
    g, _ = rotations(2, lambda _, number: number)
    assert g.groups(has_kernel=lambda *_: True) == g.groups()


def test_chains_of_other_ops_do_not():
    g = Graph()
    x = g.input()
    one = g.pointwise(x)
    two = g.add("aten.mul.Tensor", "pointwise", x, x)
    g.output(g.gemm(one), g.gemm(two))
    assert g.groups(has_kernel=lambda *_: True) == [((one,), (one,)), ((two,), (two,))]


def test_a_third_chain_stays_alone():
    g, (one, two, three) = rotations(3)
    assert g.groups(has_kernel=lambda *_: True) == [((one, two), (one, two)), ((three,), (three,))]


def test_a_chain_does_not_share_the_launch_of_one_that_it_needs():
    g = Graph()
    x = g.input()
    one = g.pointwise(x, x)
    two = g.pointwise(g.gemm(one), x)
    g.output(g.gemm(two))
    assert g.groups(has_kernel=lambda *_: True) == [((one,), (one,)), ((two,), (two,))]


def test_a_chain_whose_result_is_read_before_the_other_s_input_is_there_does_not():
    g = Graph()
    x = g.input()
    one = g.pointwise(x, x)
    read = g.gemm(one)
    two = g.pointwise(g.gemm(x), x)
    g.output(read, g.gemm(two))
    assert g.groups(has_kernel=lambda *_: True) == [((one,), (one,)), ((two,), (two,))]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ({}, True), ({"op_class": OpClass.REDUCTION}, True), ({"op_class": OpClass.GEMM}, False), ({"mutates": (0,)}, False),
        ({"op_class": OpClass.MEMORY, "target": "aten.cat.default"}, True), ({"op_class": OpClass.MEMORY}, False),
        ({"outputs": (MATRIX, MATRIX)}, False), ({"outputs": (TensorMeta(shape=(), stride=(), dtype="float32"),)}, False),
    ],
)  # fmt: skip
def test_is_candidate(op, expected):
    fields = {"target": "aten.add.Tensor", "op_class": OpClass.POINTWISE, "outputs": (MATRIX,)} | op
    assert is_candidate(OpNode(index=0, region=0, **fields)) is expected


def test_references_are_found_in_nested_arguments_and_keywords():
    assert list(references((Ref(index=1), (2, Ref(index=3)), None))) == [1, 3]
    op = OpNode(
        index=9,
        region=0,
        target="t",
        op_class=OpClass.POINTWISE,
        args=(Ref(index=4), (Ref(index=4),)),
        kwargs=(("o", Ref(index=5)),),
    )
    assert inputs_of(op) == (4, 5)


KINDS = st.sampled_from(["pointwise", "gemm", "view", "write", "copy_rows"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(KINDS, st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=25), st.booleans(), st.booleans())
def test_groups_of_any_graph_can_run_as_one_call_each(steps, are_paired, are_split):
    """Each op in at most one chain; every chain is convex and runs at one place between its inputs and its first reader."""
    g = Graph()
    g.input(), g.input("y")
    for kind, one, two in steps:
        first, second = one % len(g.ops), two % len(g.ops)
        if kind == "view":
            g.view(first)
        elif kind == "write":
            g.write(first, second)
        elif kind == "copy_rows":
            g.copy_rows(two % 2, one % 2, second) if one % 3 else g.copy_rows(first, 1, second)
        else:
            getattr(g, kind)(first, second)
    g.output(*range(2, len(g.ops)))
    ops = g.ops

    def is_even(members, _):
        return sum(members) % 2 == 0

    if are_split:
        groups = find_groups(ops, by_bytes(g), is_even, lambda members, outputs: not is_even(members, outputs))
    else:
        groups = find_groups(ops, by_bytes(g), lambda *_: are_paired)
    groups = [group for group in groups if group.verdict.is_fusible]
    computing = [index for group in groups for index in group.members if ops[index].op_class is OpClass.POINTWISE]
    assert len(computing) == len(set(computing))

    for group in groups:
        members = set(group.members)
        readers = [op.index for op in ops if op.index not in members and members & set(inputs_of(op))]
        outer = {index for member in members for index in inputs_of(ops[member])} - members
        assert all(index < min(readers) or ops[index].alias_of is not None for index in outer)
        reached = set()  # ops outside that depend on the group must feed nothing back
        for op in ops:
            sources = set(inputs_of(op))
            if op.index in members:
                assert not sources & reached
            elif sources & (members | reached):
                reached.add(op.index)
        storages = {g.storage(index) for index in outer | members}
        for op in ops:
            if min(members) < op.index < max(*members, min(readers)) and op.index not in members:
                assert not storages & set(op.mutates)
    assert run(g, groups) == run(g, [])


def run(g, groups):
    """What a graph's results and inputs hold in the end, as terms; groups are launched right before their first reader."""
    memory = {}
    inside = {member for group in groups for member in group.members}
    launches = {}
    for group in groups:
        readers = (op.index for op in g.ops if op.index not in group.members and set(group.members) & set(inputs_of(op)))
        launches.setdefault(min(readers), []).extend(group.members)

    def compute(op):
        read = tuple(memory[g.storage(index)] for index in inputs_of(op))
        if op.role == "input":
            memory[op.index] = ("input", op.index)
        elif op.op_class is not OpClass.VIEW:
            memory[g.storage(op.index)] = (op.target, op.index, read)

    for op in g.ops[:-1]:
        for index in launches.get(op.index, ()):
            compute(g.ops[index])
        if op.index not in inside:
            compute(op)
    for index in launches.get(len(g.ops) - 1, ()):
        compute(g.ops[index])
    return memory


# ---------------------------------------------------------------------- ends in writes


def always(*_):
    return True


def decode(order="kv", reads_early=None, shared=False, reads_own=False):
    """A layer's rope of q and k, the two writes to its cache and what reads it; returns (graph, the writes, the rest)."""
    g = Graph()
    q, k, v, at, keys = (g.input(name) for name in ("q", "k", "v", "at", "keys"))
    values = keys if shared else g.input("values")
    turned_q, turned_k = g.pointwise(q, at), g.pointwise(k, at)
    rows = keys if reads_own else v
    if reads_early == "before":
        g.gemm(keys, q)
    writes = {}
    for one in order:
        writes[one] = g.copy_rows(*((keys, at, turned_k) if one == "k" else (values, at, rows)))
    if reads_early == "between":  # the launch must stand before q's reader
        read = g.gemm(turned_q, q)
        g.output(g.gemm(read, g.view(writes["k"]), g.view(writes["v"])))
    elif reads_early == "old":
        old = g.gemm(keys, q)
        g.output(g.gemm(turned_q, g.view(writes["k"]), g.view(writes["v"]), old))
    else:
        g.output(g.gemm(turned_q, g.view(writes["k"]), g.view(writes["v"])))
    return g, writes, (turned_q, turned_k)


@pytest.mark.parametrize("order", ["kv", "vk"])
def test_a_group_ends_in_the_writes_of_what_it_makes_and_of_the_value_beside_it(order):
    g, writes, both = decode(order)
    members = tuple(sorted((*both, *writes.values())))
    assert g.groups(has_kernel=always) == [(members, (both[0], *sorted(writes.values())))]


def test_without_a_kernel_for_it_no_write_joins():
    g, _, both = decode()
    assert g.groups() == [((both[0],), (both[0],)), ((both[1],), (both[1],))]
    assert g.groups(has_kernel=lambda members, _: len(members) == 2) == [(both, both)]


def test_one_write_joins_alone_where_only_that_has_a_kernel():
    g, writes, both = decode()
    assert g.groups(has_kernel=lambda members, _: len(members) < 4) == [((*both, writes["k"]), (both[0], writes["k"]))]


def test_a_read_of_the_cache_ahead_of_the_group_is_no_obstacle_and_one_inside_is():
    g, writes, both = decode(reads_early="before")  # between the group's first op and the write
    assert [members for members, _ in g.groups(has_kernel=always)] == [both]
    g, writes, both = decode(reads_early="old")  # through the input, after the write and before the launch
    assert all(set(writes.values()).isdisjoint(members) for members, _ in g.groups(has_kernel=always))


def test_the_launch_stands_before_the_first_reader_of_any_result():
    g, writes, both = decode(reads_early="between")
    members = tuple(sorted((*both, *writes.values())))
    assert g.groups(has_kernel=always) == [(members, (both[0], *sorted(writes.values())))]


def test_two_writes_to_one_tensor_keep_their_order():
    g, writes, _ = decode(shared=True)
    assert all(len(set(writes.values()) & set(members)) < 2 for members, _ in g.groups(has_kernel=always))


def test_a_write_of_the_tensor_s_own_rows_stays_torch_s():
    g, writes, _ = decode(reads_own=True)
    assert all(writes["v"] not in members for members, _ in g.groups(has_kernel=always))


def test_a_write_that_nothing_follows_stays_torch_s():
    g = Graph()
    x, at, cache = g.input(), g.input("at"), g.input("cache")
    g.copy_rows(cache, at, g.pointwise(x))
    g.output(x)
    assert all(len(members) == 1 for members, _ in g.groups(has_kernel=always))


# ---------------------------------------------------------------------- on traced code


def test_the_cache_write_between_two_ops_stays_between_them():
    def step(x, cache, at):
        scaled = cache * x
        cache.index_copy_(0, at, x)
        return scaled + 1.0

    ops, groups = groups_of(step, torch.randn(3, 4), torch.randn(3, 4), torch.arange(3))
    assert [names(ops, group.members) for group in groups] == [["mul"], ["add"]]


def test_a_value_changed_in_place_through_a_view_is_not_read_from_before():
    def step(x):
        y = x + 1.0
        y.view(-1).mul_(2.0)
        return y * 3.0

    ops, groups = groups_of(step, torch.randn(3, 4))
    assert [names(ops, group.members) for group in groups] == [["add"], ["mul"]]


def test_a_gemm_splits_what_it_reads_from_what_reads_it():
    ops, groups = groups_of(lambda x: (y := torch.tanh(x) * 2) + y @ y, torch.randn(4, 4))
    assert [names(ops, group.members) for group in groups] == [["tanh", "mul"], ["add"]]


def test_gpt2_gelu_is_one_chain_of_eight_ops_at_every_layer():
    chain = next(chain for chain in planned("gpt2").chains if "tanh" in chain.ops)
    assert chain.ops == ("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul")
    assert [site.module_path for site in chain.sites] == ["transformer.h.0.mlp.act", "transformer.h.1.mlp.act"]
    assert {site.source_file for site in chain.sites} == {"transformers/activations.py"}
    assert all("tanh" in site.source_text for site in chain.sites)
    assert chain.launches == 16


def test_gpt2_residual_adds_join_the_norms_that_follow():
    chains = [chain for chain in planned("gpt2").chains if "layer_norm" in chain.ops]
    assert {chain.ops for chain in chains} == {("add", "layer_norm"), ("embedding", "embedding", "add", "layer_norm")}
    assert sum(len(chain.sites) for chain in chains) == 2 * 2 + 1


def test_qwen2_chains_reach_over_the_casts_and_views():
    found = {chain.ops: len(chain.sites) for chain in planned("qwen2").chains}
    assert found["silu", "mul"] == 2
    assert found[("mul", "neg", "cat", "mul", "add") * 2] == 2  # of queries and of keys
    assert found["embedding", "pow", "mean", "add", "rsqrt", "mul", "mul"] == 1
    assert ("add", "pow", "mean", "add", "rsqrt", "mul", "mul") in found


def test_every_op_with_a_lowering_may_stand_in_a_chain():
    """But for what is made of nothing: a model's graph has it folded."""
    made = {"arange", "tril", "triu", "ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros", "full", "full_like",
            "new_full"}  # fmt: skip
    graph = Graph()
    for name in {*POINTWISE, *SPECIAL} - made:
        index = graph.add(f"aten.{name}.{'Tensor' if name == 'index' else 'default'}", class_of(name))
        assert is_candidate(graph.ops[index]), name


def members_judged(length):
    """Find the chains of a row of ops that read one another; return how many members were judged, and the largest chain."""
    graph = Graph()
    value = graph.input()
    for _ in range(length):
        value = graph.pointwise(value, value)
    judged = []

    def judge(members, _outputs):
        judged.append(len(members))
        return Verdict(is_fusible=True)

    groups = find_groups(graph.ops, judge)
    assert sum(len(group.members) for group in groups) == length
    return sum(judged), max(len(group.members) for group in groups)


def test_a_long_row_of_ops_costs_time_linear_in_its_length():
    few, _ = members_judged(4 * MOST_MEMBERS)
    many, largest = members_judged(16 * MOST_MEMBERS)
    assert largest == MOST_MEMBERS
    assert many < 5 * few
