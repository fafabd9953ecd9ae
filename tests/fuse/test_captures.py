"""Ranking, matching and planning on captures of real H200 runs: no GPU, and no torch, is needed to think about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.records import Match
from fusion_advisor.records.serialize import read_capture
from tests.tiny import patterns

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
GPT2, QWEN = "gpt2-fp32-1x1024-h200", "qwen2.5-7b-bf16-1x512-h200"


@pytest.fixture(scope="module", params=[GPT2, QWEN])
def capture(request):
    return read_capture(CAPTURES / f"{request.param}.json.gz")


def plan_of(name):
    return make_plan(read_capture(CAPTURES / f"{name}.json.gz"), patterns(), min_share=0.005)


def kernels(plan):
    return {
        (answer.kernel, len(chain.sites), chain.launches)
        for chain, answer in zip(plan.chains, plan.answers, strict=True)
        if isinstance(answer, Match)
    }


def test_nearly_all_device_time_is_joined_to_an_op_a_module_and_a_line(capture):
    assert capture.environment.device_name == "NVIDIA H200"
    assert capture.quality.joined_share >= 0.99
    joined = [launch for launch in capture.launches if launch.op_index is not None]
    at_home = [launch for launch in joined if capture.ops[launch.op_index].source_line > 0]
    assert sum(one.duration_ns for one in at_home) >= 0.99 * sum(one.duration_ns for one in capture.launches)


def test_every_launch_has_its_kernel(capture):
    assert capture.quality.launches == capture.quality.kernels == len(capture.eager_launches)
    assert sum(launch.duration_ns for launch in capture.eager_launches) == capture.quality.eager_device_ns
    assert "attention" in capture.quality.reconciliation


def test_gpt2_s_gelu_is_one_chain_of_eight_kernels_at_twelve_sites():
    plan = plan_of(GPT2)
    assert kernels(plan) == {("gelu_tanh", 12, 96), ("add_layernorm", 23, 46)}  # the first layer's stands with its embeddings
    gelu = plan.chains[0]
    assert gelu.ops == ("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul")
    assert [site.module_path for site in gelu.sites] == [f"transformer.h.{layer}.mlp.act" for layer in range(12)]
    assert {(site.source_file, site.source_line > 0) for site in gelu.sites} == {("transformers/activations.py", True)}
    assert 0.05 < gelu.share < 0.07
    assert gelu.floor_ns < gelu.device_ns / 4


def test_small_chains_get_kernels_too_down_to_a_thousandth_of_the_step():
    """What they save is of the step that is left when the passes and the large chains are done."""
    for name, small in (
        (GPT2, {("embedding_embedding_add_layer_norm_321a", 1, 4)}),
        (QWEN, {("add_rmsnorm", 1, 9), ("embedding_rmsnorm", 1, 9)}),
    ):
        plan = make_plan(read_capture(CAPTURES / f"{name}.json.gz"), patterns())
        assert kernels(plan) - kernels(plan_of(name)) == small
        assert {fusion.match.kernel for fusion in plan.fusions} >= {kernel for kernel, _, _ in small}
        (left,) = [answer for answer in plan.answers if not isinstance(answer, Match)]
        assert left.code == "FA605" and "below the 0.10% that is tried" in left.reason


def test_qwen_s_chains_match_the_library_at_every_layer():
    assert kernels(plan_of(QWEN)) == {("add_rmsnorm", 55, 495), ("rope_qk", 28, 280), ("swiglu", 28, 56)}


@pytest.mark.parametrize("name", [GPT2, QWEN])
def test_a_chain_without_a_kernel_says_why(name):
    plan = plan_of(name)
    refused = [answer for answer in plan.answers if not isinstance(answer, Match)]
    assert refused
    assert all(answer.code.startswith("FA6") and len(answer.reason) > 20 for answer in refused)
