"""Sites that are equal in all that lowering looks at are lowered once, and every other by itself."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

import fusion_advisor.lowering.memo as alike
from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.op_inputs import inputs_of
from fusion_advisor.fuse.plan.plan import judge_with, make_plan
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.lowering.lower import Lowered, lower
from fusion_advisor.lowering.memo import asked_once, lower_sites
from fusion_advisor.records import OpClass
from tests.tiny import LAYERS, decode_step, llama, patterns, planned, profile_live, profiled, region_of


def sites_of(name):
    return [
        [(site.op_indices, lowered.outputs) for site, lowered in zip(fusion.chain.sites, fusion.sites, strict=True)]
        for fusion in planned(name).fusions
    ]


def counted(monkeypatch):
    calls = []
    monkeypatch.setattr(alike, "lower", lambda *site, **how: calls.append(1) or lower(*site, **how))
    return calls


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "toy"])
def test_each_site_is_what_lowering_it_gives(name, monkeypatch):
    ops, calls = profiled(name)[1].ops, counted(monkeypatch)
    for sites in sites_of(name):
        calls.clear()
        assert lower_sites(ops, sites) == [lower(ops, *site) for site in sites]
        assert len(calls) == 1 or name != "qwen2"


def test_sites_that_write_to_caches_are_each_given_their_own(monkeypatch):
    model = llama()[0]
    capture = profile_live(model, kwargs=decode_step(model))[0]
    found = [fusion for fusion in make_plan(capture, patterns(), min_share=0.0).fusions if fusion.sites[0].written]
    assert found
    calls = counted(monkeypatch)
    for fusion in found:
        calls.clear()
        sites = [(site.op_indices, lowered.outputs) for site, lowered in zip(fusion.chain.sites, fusion.sites, strict=True)]
        lowered = lower_sites(capture.ops, sites)
        assert lowered == [lower(capture.ops, *site) for site in sites]
        assert len(calls) == 1 and len({one.written for one in lowered}) == len(sites) == LAYERS


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "toy"])
def test_equal_groups_are_asked_about_once_and_get_the_answer_that_each_of_them_has(name):
    ops, asked, answered = profiled(name)[1].ops, [], []

    def judge(members, outputs):
        asked.append(members)
        return judge_with(ops, members, outputs)

    once = asked_once(ops, judge)

    def compared(members, outputs):
        answered.append(members)
        verdict = once(members, outputs)
        assert verdict == judge_with(ops, members, outputs), members
        return verdict

    assert find_groups(ops, compared) == find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
    assert len(asked) < len(answered)


def test_groups_that_differ_in_what_made_a_value_are_asked_about_by_themselves():
    ops = list(profiled("qwen2")[1].ops)
    reader = next(op for op in ops if op.role == "op" and any(ops[source].role == "op" for source in inputs_of(op)))
    source = next(source for source in inputs_of(reader) if ops[source].role == "op")
    once = asked_once(ops, lambda members, _outputs: ops[source].target)
    first = once((reader.index,), (reader.index,))
    ops[source] = replace(ops[source], target="aten.other.default")
    assert once((reader.index,), (reader.index,)) == "aten.other.default" != first


def readings(ops, members):
    """What a site reads and the owners of that memory, and the site's own ops."""
    near, waiting = set(), list(members)
    while waiting:
        index = waiting.pop()
        if index not in near:
            near.add(index)
            op = ops[index]
            waiting += [] if op.alias_of is None else [op.alias_of]
            waiting += inputs_of(op) if index in members or op.op_class is OpClass.VIEW else []
    return sorted(near)


def changed(op, random):
    """The same op with one thing about it told otherwise."""
    first = op.outputs[0]
    shuffled = random.sample(first.stride, len(first.stride))
    metas = [
        replace(first, offset=first.offset + 8), replace(first, stride=tuple(shuffled)), replace(first, device="cuda"),
        replace(first, dtype=random.choice(["float32", "bfloat16", "float64", "int64", "bool"])),
    ]  # fmt: skip
    others = [replace(op, outputs=(meta, *op.outputs[1:])) for meta in metas]
    others += [replace(op, role=role, target=f"h.{random.choice(['weight', 'bias'])}") for role in ("parameter", "input")]
    others += [replace(op, alias_of=None), replace(op, mutates=()), replace(op, kwargs=op.kwargs[1:])]
    for place, value in enumerate(op.args):
        if isinstance(value, int | float):
            other = random.choice([value + 1, float(value), -value, -0.0, bool(value)])
            others.append(replace(op, args=(*op.args[:place], other, *op.args[place + 1 :])))
    return random.choice(others)


def answer(function):
    try:
        return function()
    except CannotLower as error:
        return str(error)
    except (ValueError, TypeError, IndexError, AssertionError, KeyError) as error:  # no capture holds such an op
        return type(error)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "decode"])
def test_sites_of_which_one_differs_in_one_thing_are_each_lowered_as_by_themselves(name):
    random, model = Random(0), llama()[0]
    capture = profile_live(model, kwargs=decode_step(model))[0] if name == "decode" else profiled(name)[1]
    plan, shared = make_plan(capture, patterns(), min_share=0.0) if name == "decode" else planned(name), 0
    for _ in range(200):
        fusion = random.choice(plan.fusions)
        sites = [(site.op_indices, low.outputs) for site, low in zip(fusion.chain.sites, fusion.sites, strict=True)]
        ops = list(capture.ops)
        index = random.choice(readings(ops, random.choice(sites)[0]))
        ops[index] = changed(ops[index], random)
        expected = [answer(lambda site=site, ops=ops: lower(ops, *site)) for site in sites]
        good = [number for number, one in enumerate(expected) if isinstance(one, Lowered)]
        assert lower_sites(ops, [sites[number] for number in good]) == [expected[number] for number in good]
        shared += len(good) - len({expected[number].program for number in good})
    assert shared > 60


def scaled(x, factor, other=None):
    return torch.exp(x) * (factor if other is None else other)


PAIRS = {
    "equal": (lambda a, b: (scaled(a, 2.0), scaled(b, 2.0)), 1),
    "another constant": (lambda a, b: (scaled(a, 2.0), scaled(b, 3.0)), 2),
    "an integer": (lambda a, b: (scaled(a, 2.0), scaled(b, 2)), 2),
    "the sign of zero": (lambda a, b: (scaled(a, 0.0), scaled(b, -0.0)), 2),
    "one value read twice": (lambda a, b: (scaled(a, 0, b), scaled(a, 0, a)), 2),
    "another op": (lambda a, b: (torch.exp(a) * 2.0, torch.sin(b) * 2.0), 2),
    "other strides": (lambda a, b: (scaled(a, 2.0), scaled(b.transpose(0, 1), 2.0)), 2),
    "another place in its memory": (lambda a, b: (scaled(a[:4], 2.0), scaled(b[4:], 2.0)), 2),
    "another dtype": (lambda a, b: (scaled(a, 2.0), scaled(b.double(), 2.0)), 2),
}


@pytest.mark.parametrize("name", PAIRS)
def test_sites_that_differ_are_lowered_apart(name, monkeypatch):
    function, programs = PAIRS[name]
    _, ops, _ = region_of(function, torch.randn(8, 8), torch.randn(8, 8))
    ends = [op.index for op in ops if op.target.startswith("aten.mul.")]
    sites = [((end - 1, end), (end,)) for end in ends]
    calls = counted(monkeypatch)
    assert lower_sites(ops, sites) == [lower(ops, *site) for site in sites]
    assert len(calls) == programs


def test_a_weight_s_own_name_counts_and_the_path_to_it_does_not(monkeypatch):
    _, ops, _ = region_of(lambda a, b: (scaled(a, 2.0), scaled(b, 2.0)), torch.randn(8, 8), torch.randn(8, 8))
    ends = [op.index for op in ops if op.target.startswith("aten.mul.")]
    sites, calls = [((end - 1, end), (end,)) for end in ends], counted(monkeypatch)
    for names, programs in ((("h.0.weight", "h.1.weight"), 1), (("h.0.weight", "h.0.bias"), 2)):
        calls.clear()
        own = [replace(op, target=name, role="parameter") for op, name in zip(ops, names, strict=False)]
        named = [*own, *ops[2:]]
        assert lower_sites(named, sites) == [lower(named, *site) for site in sites]
        assert len(calls) == programs


def test_pieces_are_told_by_the_op_that_splits_outside_of_the_site(monkeypatch):
    def function(a, b, c):
        # The bits of another dtype: what is read is the view, not the tensor that owns its memory.
        return [torch.exp(x.view(torch.float32).split(size, -1)[1]) * 2.0 for x, size in ((a, 2), (b, 2), (c, 4))]

    _, ops, _ = region_of(function, *[torch.randn(8, 8, dtype=torch.float64) for _ in range(3)])
    ends = [op.index for op in ops if op.target.startswith("aten.mul.")]
    sites = [((ops[end - 1].args[0].index, end - 1, end), (end,)) for end in ends]
    assert {ops[members[0]].target for members, _ in sites} == {"getitem"}
    calls = counted(monkeypatch)
    assert lower_sites(ops, sites) == [lower(ops, *site) for site in sites]
    assert len(calls) == 2
