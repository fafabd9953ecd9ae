"""From a capture to a plan: every ranked chain gets a kernel or a reason, and the plan needs no model."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

import pytest
import torch

from fusion_advisor.fuse.plan.plan import generated_name, judge_with, make_plan, module_title
from fusion_advisor.lowering.lower import lower
from fusion_advisor.records import Bandwidth, Match, NoMatch
from fusion_advisor.records.serialize import dump_capture, load_capture
from tests.tiny import launches, patterns, planned, profile_live, profiled, region_of


def kernels(plan):
    return {answer.kernel: answer for answer in plan.answers if isinstance(answer, Match)}


def sites(plan, kernel):
    return sum(len(fusion.chain.sites) for fusion in plan.fusions if fusion.match.kernel == kernel)


def test_gpt2_gets_the_librarys_kernels():
    plan = planned("gpt2")
    found = kernels(plan)
    assert found["gelu_tanh"].is_library and found["gelu_tanh"].variant == "written_out"
    assert sites(plan, "gelu_tanh") == 2
    assert sites(plan, "add_layernorm") == 4
    assert dict(found["add_layernorm"].constants) == {"eps": 1e-5}


def test_qwen2_gets_the_librarys_kernels_with_its_own_eps():
    plan = planned("qwen2")
    found = kernels(plan)
    assert {"add_rmsnorm", "embedding_rmsnorm", "swiglu", "rope_qk"} <= set(found)
    assert sites(plan, "swiglu") == 2
    assert sites(plan, "rope_qk") == 2  # q and k of a layer in one launch
    assert "rope" not in found
    assert sites(plan, "add_rmsnorm") == 2 * 2
    assert sites(plan, "embedding_rmsnorm") == 1
    for name in ("add_rmsnorm", "embedding_rmsnorm"):
        assert dict(found[name].constants) == {"eps": 3e-6}
    rope = [fusion for fusion in plan.fusions if fusion.match.kernel == "rope_qk"]
    assert {site.module_path for fusion in rope for site in fusion.chain.sites} == {
        "model.layers.0.self_attn", "model.layers.1.self_attn",
    }  # fmt: skip


@pytest.mark.parametrize("left_out", [{"skip": ("rope_qk",)}, {"only": ("rope",)}])
def test_what_a_skipped_kernel_would_take_together_is_offered_to_the_kernel_for_one(left_out):
    plan = make_plan(profiled("qwen2")[1], patterns(), min_share=0.0, **left_out)
    assert sites(plan, "rope") == 2 * 2 and "rope_qk" not in kernels(plan)
    assert not [answer for answer in plan.answers if "rope_qk" in getattr(answer, "reason", "")]


@pytest.mark.parametrize("left_out", [{"skip": ("add_rmsnorm",)}, {"only": ("rmsnorm",)}])
def test_a_norm_is_offered_alone_where_the_kernel_with_the_residual_is_left_out(left_out):
    plan = make_plan(profiled("qwen2")[1], patterns(), min_share=0.0, **left_out)
    expected = 2 * 2 if "skip" in left_out else 2 * 2 + 1  # the first one stands with the embedding, unless that is left out too
    assert sites(plan, "rmsnorm") == expected and "add_rmsnorm" not in kernels(plan)
    assert dict(kernels(plan)["rmsnorm"].constants) == {"eps": 3e-6}
    assert not [answer for answer in plan.answers if "add_rmsnorm" in getattr(answer, "reason", "")]
    taken = [index for chain in plan.chains for site in chain.sites for index in site.op_indices]
    assert len(taken) == len(set(taken))
    if "skip" in left_out:
        assert sites(plan, "swiglu") == 2 and sites(plan, "embedding_rmsnorm") == 1


def test_skipping_the_norm_too_leaves_it_with_a_reason():
    plan = make_plan(profiled("qwen2")[1], patterns(), min_share=0.0, skip=("*rmsnorm",))
    reasons = [answer.reason for answer in plan.answers if isinstance(answer, NoMatch)]
    assert "add_rmsnorm was left out by --skip" in reasons and not {"rmsnorm", "add_rmsnorm"} & set(kernels(plan))


def test_skipping_both_rotations_leaves_them_unfused():
    plan = make_plan(profiled("qwen2")[1], patterns(), min_share=0.0, skip=("rope*",))
    reasons = [answer.reason for answer in plan.answers if isinstance(answer, NoMatch)]
    assert "rope was left out by --skip" in reasons and not {"rope", "rope_qk"} & set(kernels(plan))


@pytest.mark.parametrize("name", ["toy", "gpt2", "qwen2"])
def test_every_row_has_an_answer_and_every_site_its_operands(name):
    plan = planned(name)
    assert len(plan.answers) == len(plan.chains)
    assert [answer.chain_id for answer in plan.answers] == [chain.id for chain in plan.chains]
    assert [fusion.id for fusion in plan.fusions] == [f"F{number}" for number in range(1, len(plan.fusions) + 1)]
    for fusion in plan.fusions:
        assert len(fusion.sites) == len(fusion.chain.sites)
        for lowered in fusion.sites:
            assert lowered.program.dims == fusion.program.dims
            assert len(lowered.inputs) + len(lowered.outputs) == len(fusion.program.operands)
        own = fusion.match.kernel if fusion.match.is_library else module_title(fusion.chain) or fusion.match.kernel
        assert fusion.header.title == own


def test_a_plan_is_the_same_from_the_written_capture():
    _, capture, _ = profiled("qwen2")
    again = make_plan(load_capture(dump_capture(capture)), patterns(), min_share=0.0)
    assert again == planned("qwen2")


def plan_of(function, *inputs, **options):
    _, ops, _ = region_of(function, *inputs)
    bandwidth = options.pop("bandwidth", profiled("toy")[1].bandwidth)
    capture = replace(profiled("toy")[1], ops=tuple(ops), launches=launches(ops), bandwidth=bandwidth)
    return make_plan(capture, patterns(), **options)


X = torch.randn(8, 8)


def two(x, w):
    return torch.exp(torch.nn.functional.silu(x) * x @ w) * 2.0 + 1.0


def test_only_and_skip_choose_by_kernel_name():
    names = [fusion.match.kernel for fusion in plan_of(two, X, X).fusions]
    assert len(names) == 2
    only = plan_of(two, X, X, only=(names[0],))
    assert [fusion.match.kernel for fusion in only.fusions] == [names[0]]
    assert [answer.code for answer in only.answers if isinstance(answer, NoMatch)] == ["FA607"]
    skipped = plan_of(two, X, X, skip=(names[0][:3] + "*",))
    assert names[0] not in [fusion.match.kernel for fusion in skipped.fusions]
    assert only.unused == skipped.unused == ()


def test_a_pattern_that_fits_no_kernel_is_named():
    mistyped = plan_of(two, X, X, only=("silu_*", "nosuch*"), skip=("rope",))
    assert mistyped.unused == ("nosuch*", "rope")
    # A kernel that --skip leaves out names no chain, and was found all the same.
    assert plan_of(lambda x, w: torch.nn.functional.silu(x @ w), X, X, skip=("silu",), min_share=0.0).unused == ()


def test_a_small_share_is_listed_but_not_tried():
    plan = plan_of(two, X, X, min_share=0.45)
    assert len(plan.chains) == 2 and len(plan.fusions) == 1
    (refusal,) = [answer for answer in plan.answers if isinstance(answer, NoMatch)]
    assert refusal.code == "FA605" and "below" in refusal.reason


def test_where_no_time_decides_neither_a_share_nor_a_bound_leaves_a_chain_out():
    slow = Bandwidth(copy_bytes_per_s=1, launch_ns=1)
    assert len(plan_of(two, X, X, bandwidth=slow, min_share=1.0, is_timed=False).fusions) == 2


def test_what_cannot_be_faster_is_not_tried():
    plan = plan_of(two, X, X, bandwidth=Bandwidth(copy_bytes_per_s=1, launch_ns=1))
    assert plan.fusions == ()
    assert all("no longer than one kernel must" in answer.reason for answer in plan.answers)


def test_top_bounds_the_rows():
    assert len(plan_of(two, X, X, top=1).chains) == 1


def test_what_has_no_lowering_says_so():
    plan = plan_of(lambda x: torch.cumsum(x, -1), X)
    assert isinstance(plan.answers[0], NoMatch)
    assert plan.answers[0].code == "FA601"
    assert "cumsum" in plan.answers[0].reason


def program(function):
    _, ops, _ = region_of(function, X)
    members = [op.index for op in ops if op.role == "op"]
    return lower(ops, members, members[-1:]).program


def test_a_generated_name_is_an_identifier_and_tells_variants_apart():
    ops = ["mul"] * 9 + ["we;ird"]
    one = generated_name(ops, program(lambda x: x * 2 + 1))
    assert one.isidentifier() and one.startswith("mul_mul_") and len(one.split("_")) == 7
    assert one != generated_name(ops, program(lambda x: torch.tanh(x * 2 + 1)))
    assert generated_name(["we;ird"], program(lambda x: x * 2)).isidentifier()


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (["upsample_bilinear2d"] * 5 + ["cat"], ["upsample_bilinear2d"] * 3),
        (["a" * 100, "cat"], ["a" * 59]),
        (["native_batch_norm_legit", "leaky_relu", "add", "mul"], ["native_batch_norm_legit", "leaky_relu", "add", "mul"]),
    ],
)
def test_a_long_chain_s_name_is_cut_at_a_word(ops, words):
    name = generated_name(ops, program(lambda x: x * 2))
    assert name.rpartition("_")[0] == "_".join(words) and len(name) <= 64


@pytest.mark.parametrize(
    ("paths", "title"),
    [
        (["bert.embeddings"], "bert_embeddings"),
        (["model.layers.0.mlp", "model.layers.1.mlp"], "model_layers_mlp"),
        (["model.layers.0.mlp", "model.norm"], ""),
        ([""], ""),
        (["0"], ""),
        (["a-b.c"], "ab_c"),
        (["x" * 30 + "." + "y" * 30], "y" * 30),
        (["x" * 50], ""),
    ],
)
def test_a_generated_kernel_is_named_after_the_one_module_of_its_sites(paths, title):
    chain = planned("gpt2").fusions[0].chain
    sites = tuple(replace(chain.sites[0], module_path=path) for path in paths)
    assert module_title(replace(chain, sites=sites)) == title


def test_the_judges_key_is_equal_for_equal_layouts_alone():
    _, ops, _ = region_of(lambda x, y: (torch.tanh(x) * 2, torch.tanh(y) * 2), X, torch.randn(8, 9))
    tanh = [op.index for op in ops if "tanh" in op.target]
    one, two_ = (judge_with(ops, (index, index + 1), (index + 1,)) for index in tanh)
    assert one.is_fusible and one.floor_bytes == 2 * 64 * 4
    assert one.key != two_.key
    assert one.key == judge_with(ops, (tanh[0], tanh[0] + 1), (tanh[0] + 1,)).key


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rotations(batch=2, heads=4, key_heads=2, seq=3, dim=8):
    """Queries, keys, and two pairs of tables."""
    made = [torch.randn(batch, seq, count, dim).transpose(1, 2) for count in (heads, key_heads)]
    return *made, *(torch.randn(batch, 1, seq, dim) for _ in range(4))


@pytest.mark.parametrize("sizes", [{}, {"key_heads": 4}, {"key_heads": 1}, {"batch": 1}, {"seq": 1}])
def test_queries_and_keys_that_turn_by_the_same_tables_share_a_launch(sizes):
    plan = plan_of(lambda q, k, cos, sin, *_: rotated(q, cos, sin) @ rotated(k, cos, sin)[:, :1].mT, *rotations(**sizes))
    assert "rope_qk" in kernels(plan) and "rope" not in kernels(plan)
    (fusion,) = [fusion for fusion in plan.fusions if fusion.match.kernel == "rope_qk"]
    assert {operand.name for operand in fusion.program.operands} == {"q", "k", "cos", "sin", "q_out", "k_out"}


@pytest.mark.parametrize("tables", [(2, 3), (0, 3), (2, 1)])
def test_queries_and_keys_that_turn_by_other_tables_do_not(tables):
    """A cosine or a sine in common is not enough."""

    def scores(q, k, *table):
        return rotated(q, *table[:2]) @ rotated(k, *(table[number] for number in tables)).mT

    plan = plan_of(scores, *rotations(heads=2))
    assert "rope_qk" not in kernels(plan) and sites(plan, "rope") == 2


def test_gpt2_begins_with_one_kernel():
    plan = planned("gpt2")
    (first,) = [fusion for fusion in plan.fusions if "embedding" in fusion.chain.ops]
    assert first.chain.ops == ("embedding", "embedding", "add", "layer_norm")
    assert len(first.chain.sites) == 1
    tokens = [operand.element_count for operand in first.program.operands if operand.dtype == "int64"]
    tables = [
        o.element_count for o in first.program.operands if not o.is_output and o.dtype == "float32" and o.element_count > 64
    ]
    assert tokens == [2 * 16, 16]
    assert tables == [2 * 16 * 64, 16 * 64]  # the rows that are read, not the tables


def test_berts_embeddings_are_the_librarys_kernel():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=200,
        max_position_embeddings=64,
    )
    inputs = {"input_ids": torch.randint(1, 200, (2, 16)), "token_type_ids": torch.randint(0, 2, (2, 16))}
    capture, _ = profile_live(BertModel(config, add_pooling_layer=False).eval(), (), inputs)
    found = kernels(make_plan(capture, patterns(), min_share=0.0))
    assert found["embedding_add_layernorm"].is_library
    assert dict(found["embedding_add_layernorm"].constants) == {"eps": 1e-12}


def test_a_lookup_alone_gets_no_row():
    plan = plan_of(
        lambda w, ids: torch.nn.functional.embedding(ids, w) @ w, torch.randn(8, 8), torch.tensor([1, 2, 3]), min_share=0.0
    )
    assert plan.chains == ()


LONE = {"gelu_erf": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "tanh_????": torch.tanh}


@pytest.mark.parametrize("kernel", LONE)
def test_a_lone_pointwise_op_that_is_slow_gets_a_kernel(kernel):
    plan = plan_of(lambda x, w: LONE[kernel](x @ w) @ w, X, X)
    ((chain, answer),) = zip(plan.chains, plan.answers, strict=True)
    assert isinstance(answer, Match) and fnmatch.fnmatchcase(answer.kernel, kernel)
    assert answer.is_library == (kernel in {"gelu_erf", "silu"})
    (fusion,) = plan.fusions
    assert (chain.launches, len(fusion.sites)) == (1, 1)


def test_a_lone_pointwise_op_of_little_time_is_refused_for_its_share():
    plan = plan_of(lambda x, w: torch.tanh(x @ w) @ w, X, X, min_share=0.5)
    (answer,) = plan.answers
    assert isinstance(answer, NoMatch)
    assert (answer.code, answer.reason) == ("FA605", "33.33% of device time is below the 50.00% that is tried")


def test_a_lone_op_that_no_kernel_computes_gets_no_row():
    plan = plan_of(lambda x, w: torch.nn.functional.dropout(x @ w, 0.5, True) @ w, X, X, min_share=0.0)
    assert plan.chains == ()


def test_a_lookup_and_its_scale_become_one_kernel():
    ids = torch.tensor([[1, 2, 3], [0, 7, 7]])
    plan = plan_of(lambda w, ids: torch.nn.functional.embedding(ids, w) * 8.0, torch.randn(8, 64), ids, min_share=0.0)
    assert [answer.kernel for answer in plan.answers if isinstance(answer, Match)] == ["embedding_scale"]
    (chain,) = plan.chains
    assert chain.moved_bytes == 2 * 3 * 8 + 4 * (6 * 64) * 4  # ids; rows read and written by the lookup, then by the product
