"""Planted mistakes are refused, right kernels pass, and NaN and infinity follow their own rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.records import ULP_ENDS, TensorMeta, Tolerance
from fusion_advisor.verify import special_values
from fusion_advisor.verify.accuracy import error_of
from fusion_advisor.verify.check_chain import (
    check_calls,
    check_chain,
    layout_of,
    why_wrong,
    widest,
    with_special_rows,
)
from fusion_advisor.verify.comparison import count_ulps
from fusion_advisor.verify.subgraph_oracle import OriginalChain, original_chain
from tests.tiny import EvaluatedKernel, planned, profiled, region_of


def chain_of(function, *inputs):
    """The ops of a function as an original chain; returns the chain."""
    _, ops, index_of = region_of(function, *inputs)
    at = {index: node for node, index in index_of.items()}
    members = [op.index for op in ops if op.role == "op"]
    outer = tuple((at[op.index], op.index, op.outputs[0], op.outputs[0]) for op in ops if op.role == "input")
    return OriginalChain(nodes=tuple(at[m] for m in members), outer=outer, outputs=(at[members[-1]],))


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def right(x):
    return gelu(x.double()).to(x.dtype)


def off_everywhere(x):
    return right(x) + 1e-3


def off_at_one_element(x):
    out = right(x)
    out.view(-1)[17] += 1e-3
    return out


def off_by_a_factor(x):
    return right(x) * 1.0001


def nan_at_one_element(x):
    out = right(x)
    out.view(-1)[17] = math.nan
    return out


def wrong_tail(x):
    out = right(x)
    out.view(-1)[-3:] = x.view(-1)[-3:]
    return out


def zero_tail(x):
    out = right(x)
    out.view(-1)[-1:] = 0.0
    return out


def another_formula(x):
    return torch.nn.functional.gelu(x.double()).to(x.dtype)  # erf, not tanh: at most 5e-4 apart


WRONG = [off_everywhere, off_at_one_element, off_by_a_factor, nan_at_one_element, wrong_tail, zero_tail, another_formula]


@pytest.mark.parametrize("kernel", WRONG, ids=lambda kernel: kernel.__name__)
def test_a_planted_mistake_is_refused(kernel):
    x = torch.randn(40, 26)
    assert not check_chain(chain_of(gelu, x), kernel, [x], seed=0).is_passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_right_kernel_passes_in_every_dtype(dtype):
    x = torch.randn(40, 26).to(dtype)
    numerics = check_chain(chain_of(gelu, x), right, [x], seed=0)
    assert numerics.is_passed
    assert numerics.fused_rel_l2 <= numerics.eager_rel_l2 * 1.5
    assert numerics.elements == 5 * x.numel()
    assert "original" in numerics.limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_low_precision_kernel_that_is_ten_units_off_is_refused(dtype):
    x = torch.randn(40, 26).to(dtype)

    def rough(x):
        return right(x) * (1 + 10 * torch.finfo(x.dtype).eps)

    assert not check_chain(chain_of(gelu, x), rough, [x], seed=0).is_passed


def test_a_tolerance_takes_the_place_of_eagers_own_error():
    x = torch.randn(40, 26).to(torch.bfloat16)
    chain = chain_of(gelu, x)

    def rough(x):
        return right(x) * (1 + 3 * torch.finfo(x.dtype).eps)

    wide, narrow = Tolerance(rtol=0.05, atol=1e-3), Tolerance(rtol=1e-3, atol=1e-5)
    loose, strict = (check_chain(chain, call, [x], seed=0, tolerance=one) for call, one in ((rough, wide), (right, narrow)))
    assert not check_chain(chain, rough, [x], seed=0).is_passed and loose.is_passed
    assert check_chain(chain, right, [x], seed=0).is_passed and not strict.is_passed
    assert loose.limit == "|error| ≤ 0.001 + 0.05 × |oracle| for every element (--atol, --rtol)"


@pytest.mark.parametrize("kernel", [off_at_one_element, nan_at_one_element, zero_tail], ids=lambda kernel: kernel.__name__)
def test_every_element_has_to_keep_to_a_tolerance(kernel):
    x = torch.randn(40, 26)
    tolerance = Tolerance(rtol=1e-5, atol=5e-4)
    assert check_chain(chain_of(gelu, x), right, [x], seed=0, tolerance=tolerance).is_passed
    assert not check_chain(chain_of(gelu, x), kernel, [x], seed=0, tolerance=tolerance).is_passed


def test_what_overflows_in_the_original_too_is_within_a_tolerance():
    x = torch.full((4, 8), 60000.0).to(torch.float16)
    chain, tolerance = chain_of(lambda x: x * 2, x), Tolerance(rtol=1e-2, atol=1e-2)
    assert check_chain(chain, lambda x: x * 2, [x], seed=0, tolerance=tolerance).is_passed
    assert not check_chain(chain, lambda x: x.fill_(math.nan), [x * 0.25], seed=0, tolerance=tolerance).is_passed


def test_the_original_passes_against_itself():
    x = torch.randn(40, 26)
    chain = chain_of(gelu, x)
    assert check_chain(chain, lambda x: chain.run([x]), [x], seed=0).is_passed


def test_an_element_that_is_never_written_is_refused_whatever_lay_in_memory():
    x = torch.randn(40, 26)
    meta = layout_of(x)

    def launch(x, out):
        out.view(-1)[:-1] = right(x).view(-1)[:-1]

    call = fused_call("fa_k", launch, [meta], [meta], is_poisoned=True)
    numerics = check_chain(chain_of(gelu, x), call, [x], seed=0)
    assert not numerics.is_passed
    assert numerics.nonfinite_mismatches == 3  # memory holds NaN and a large number by turns, and there are five inputs


def test_a_mistake_that_shows_only_on_large_inputs_is_refused():
    x = torch.randn(40, 26)

    def overflows(x):
        out = right(x)
        return torch.where(x.abs() > 60, torch.full_like(out, math.inf), out)

    assert not check_chain(chain_of(gelu, x), overflows, [x], seed=0).is_passed


def test_a_mistake_on_the_sites_own_tensors_alone_is_refused():
    x = torch.randn(40, 26)
    x[0, 0] = 12345.0

    def special(x):
        out = right(x)
        return out + 1 if x[0, 0] == 12345.0 else out

    assert not check_chain(chain_of(gelu, x), special, [x], seed=0).is_passed


def in_cache(x, at, cache):
    return cache.index_copy_(0, at, x * 2)


def spoilt_cache(change):
    def fused(x, at, cache):
        result = in_cache(x, at, cache)
        change(result, at, x)
        return result

    return fused


def _small_error(cache, at, x):
    cache[at] *= 1.0002  # of the whole cache it would be a fiftieth of that


def _neighbour(cache, at, x):
    cache[(at[0] + 1) % len(cache), 3] += 1e-6


def _half_a_row(cache, at, x):
    cache[at, 8:] = x[:, 8:]


WRONG_WRITES = {
    "small error": spoilt_cache(_small_error),
    "neighbour": spoilt_cache(_neighbour),
    "half a row": spoilt_cache(_half_a_row),
    "nothing": lambda x, at, cache: cache,
    "other rows": lambda x, at, cache: in_cache(x, (at + 1) % len(cache), cache),
}


def cache_chain():
    """A chain that writes into its last root; returns (chain, roots)."""
    roots = [torch.randn(2, 16), torch.tensor([5, 800]), torch.randn(1000, 16)]
    _, ops, index_of = region_of(in_cache, *roots)
    members = [op.index for op in ops if op.role == "op"]
    return original_chain(ops, index_of, members, (0, 1, 2), members[-1:]), roots


def test_what_is_written_in_place_is_judged_where_it_is_written_and_the_roots_stay():
    chain, roots = cache_chain()
    before = [root.clone() for root in roots]
    assert chain.written == (2,) and chain.in_place == (0,)
    assert [int(mask.sum()) for mask in chain.reach(roots)] == [32]
    numerics = check_chain(chain, in_cache, roots, seed=0)
    assert numerics.is_passed and numerics.elements == 5 * 32
    assert all(map(torch.equal, roots, before))


def test_a_kernel_that_writes_nothing_fails_where_an_earlier_run_has_written():
    chain, roots = cache_chain()
    chain.run(roots)
    for fused, expected in ((in_cache, True), (WRONG_WRITES["nothing"], False)):
        assert check_calls([(chain, fused, roots)], inputs="its own").is_passed is expected


@pytest.mark.parametrize("wrong", WRONG_WRITES)
def test_wrong_writes_are_refused(wrong):
    chain, roots = cache_chain()
    assert not check_chain(chain, WRONG_WRITES[wrong], roots, seed=0).is_passed


def test_booleans_must_be_equal():
    x = torch.randn(40, 26)
    chain = chain_of(lambda x: x > 0.5, x)
    assert check_chain(chain, lambda x: x > 0.5, [x], seed=0).is_passed
    assert not check_chain(chain, lambda x: x >= x.max() - 1e-6, [x], seed=0).is_passed
    wide = Tolerance(rtol=10.0, atol=10.0)
    assert not check_chain(chain, lambda x: x >= x.max() - 1e-6, [x], seed=0, tolerance=wide).is_passed


def test_infinities_that_the_original_has_too_are_no_mistake():
    x = torch.randn(40, 26)
    chain = chain_of(lambda x: torch.where(x > 0, x, float("-inf")), x)
    assert check_chain(chain, lambda x: torch.where(x > 0, x, float("-inf")), [x], seed=0).is_passed
    assert not check_chain(chain, lambda x: torch.where(x > 0, x, -3e38), [x], seed=0).is_passed
    assert not check_chain(chain, lambda x: torch.where(x > 0, x, float("inf")), [x], seed=0).is_passed
    assert not check_chain(chain, lambda x: torch.where(x > 0, x, float("nan")), [x], seed=0).is_passed


def test_error_of():
    nan, inf = math.nan, math.inf
    found = error_of(torch.tensor([1.0, nan, inf, -inf, nan, 2.0]), torch.tensor([1.5, nan, inf, inf, 0.0, nan]))
    assert (found.max_abs, found.nonfinite, found.elements) == (0.5, 3, 6)
    assert found.rel_l2 == pytest.approx(0.5 / 1.5)
    nothing = error_of(torch.empty(0), torch.empty(0))
    assert (nothing.max_abs, nothing.rel_l2, nothing.nonfinite) == (0.0, 0.0, 0)
    assert error_of(torch.tensor([0.25]), torch.tensor([0.0])).rel_l2 == 0.25
    # Beyond float16's largest number, 65504, infinity is what the truth rounds to; the largest number itself is near, too.
    wide = error_of(torch.tensor([inf, -inf, inf, 65504, inf], dtype=torch.float16), torch.tensor([7e4, -7e4, 6e4, 7e4, -7e4]))
    assert (wide.nonfinite, wide.max_abs) == (2, 7e4 - 65504)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_every_planned_chain_of_a_real_model_passes_as_evaluated_and_fails_when_spoiled(name):
    _, _, live = profiled(name)
    plan = planned(name)
    bench = Bench(live, on_cuda=False)
    bench.observe(plan.fusions)
    for fusion in plan.fusions:
        chain, roots = bench.first_site(fusion)
        inputs = [layout_of(root) for root in roots]
        outputs = [bench.ops[index].outputs[0] for index in fusion.sites[0].outputs]
        for spoil, expected in ((0.0, True), (1e-3, False)):
            call = fused_call("fa_k", EvaluatedKernel(spoil).bind(fusion.program), inputs, outputs, is_poisoned=True)
            numerics = check_chain(chain, call, roots, seed=1)
            assert numerics.is_passed is expected, fusion.match
            assert numerics.oracle == "float64"


def test_layout_of():
    assert layout_of(torch.randn(3, 4)[:, 1:].t()) == TensorMeta(shape=(3, 3), stride=(1, 4), dtype="float32", offset=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_distances_are_counted_in_numbers_of_the_results_own_dtype(dtype):
    start = torch.tensor([1.0, -1.0, 0.0, 65504.0 if dtype is torch.float16 else 3.0e38, -0.0, 2.0], dtype=dtype)
    far = start.clone()
    for _ in range(3):  # towards zero, and from zero across it
        far = torch.nextafter(far, torch.where(start == 0, torch.ones_like(far), torch.zeros_like(far)))
    assert count_ulps(start, start.double()) == (6, 0, 0, 0, 0, 0, 0)
    assert count_ulps(far, start.double()) == (0, 0, 0, 6, 0, 0, 0)  # 3 lies in the bin that ends at 4
    one = torch.ones(4, dtype=dtype)
    steps = torch.tensor([1, 2, 16, 1000], dtype=torch.float64) * torch.finfo(dtype).eps
    assert count_ulps(one, one.double() + steps) == (0, 1, 1, 0, 1, 0, 1)
    below_half = one.double() + 0.49 * torch.finfo(dtype).eps
    assert count_ulps(one, below_half) == (4, 0, 0, 0, 0, 0, 0)  # the oracle is rounded first


def test_what_is_not_finite_or_not_a_float_is_in_no_bin():
    x = torch.tensor([1.0, math.nan, math.inf, 2.0])
    assert sum(count_ulps(x, torch.tensor([1.0, 1.0, math.inf, math.nan]).double())) == 1
    assert sum(count_ulps(torch.ones(3, dtype=torch.int64), torch.ones(3).double())) == 0
    assert sum(count_ulps(torch.ones(3).double(), torch.ones(3).double())) == 0


def test_a_checked_chain_counts_its_elements_on_both_sides():
    x = torch.randn(6, 32)
    checked = check_chain(chain_of(gelu, x), right, [x], seed=1)
    assert sum(checked.fused_ulps) == sum(checked.eager_ulps) == checked.elements
    assert len(checked.fused_ulps) == len(ULP_ENDS) + 1
    assert checked.fused_ulps[0] > checked.eager_ulps[0]  # rounded once, against once after each op
    worse = check_chain(chain_of(gelu, x), off_by_a_factor, [x], seed=1)
    assert worse.fused_ulps[-1] > 0 == checked.fused_ulps[-1]


def cut_off(values, bits):
    """fp32 numbers without their last bits."""
    return (values.view(torch.int32) >> bits << bits).view(torch.float32)


def test_in_fp32_a_right_order_leans_as_far_as_a_result_that_is_cut_off_and_three_bits_are_refused():
    x = torch.randn(64, 512)
    thirds = chain_of(lambda x: x / 3, x)
    exact = x.double() / 3
    by_product, count = special_values.bias_of(x * torch.tensor(1 / 3), exact)
    cut, _ = special_values.bias_of(cut_off(x / 3, 1), exact)
    assert count == x.numel() and abs(by_product) > special_values.BIAS_UNITS and abs(cut) > special_values.BIAS_UNITS
    assert check_chain(thirds, lambda x: x * torch.tensor(1 / 3), [x], seed=0).is_passed
    assert check_chain(thirds, lambda x: cut_off(x / 3, 1), [x], seed=0).is_passed
    assert not check_chain(thirds, lambda x: cut_off(x / 3, 3), [x], seed=0).is_passed


def test_a_zero_of_the_other_sign_is_refused_and_behind_a_sum_declared():
    x = torch.randn(40, 26)

    def positive(result):
        return torch.where(result == 0, 0.0, result)

    refused = check_chain(chain_of(lambda x: x * 2, x), lambda x: positive(x * 2), [x], seed=0)
    assert not refused.is_passed and "zeros of the other sign" in why_wrong(refused)
    summed = check_chain(chain_of(lambda x: x - x.sum(-1, True) * 0, x), lambda x: positive(x - x.sum(-1, True) * 0), [x], seed=0)
    assert summed.is_passed and any("zeros have the other sign" in words for words in summed.declared)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("most_runs", [1, 4])
def test_special_rows_find_what_random_activations_do_not(rows, most_runs):
    x, weight = torch.randn(rows, 64), torch.randn(32, 64)
    chain = chain_of(lambda x, weight: torch.nn.functional.gelu(x @ weight.t()), x, weight)

    def call(x, weight):
        return torch.nn.functional.gelu(x @ weight.t())

    def swallowing(x, weight):
        return call(x, weight).nan_to_num_(0.0)

    given = []

    def recorded(x, weight):
        given.append((x, weight))
        return call(x, weight)

    numerics = check_calls([(chain, call, [x, weight])], inputs="own")
    found = with_special_rows(numerics, chain, recorded, [x, weight], rows=(0,), most_runs=most_runs)
    assert found.is_passed and special_values.ROWS in found.inputs
    assert len(given) <= most_runs and all(torch.equal(one, weight) for _, one in given)
    spoilt = with_special_rows(numerics, chain, swallowing, [x, weight], rows=(0,), most_runs=most_runs)
    assert not spoilt.is_passed and spoilt.faults
    assert with_special_rows(numerics, chain, swallowing, [x, weight], rows=(0,), fast_math=True) is numerics


def test_the_widest_tensors_that_are_read_get_the_special_rows():
    x, other, small = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    chain = chain_of(lambda x, other, small: x * other + small, x, other, small)
    assert widest([x, other, small], chain) == (0, 1)


def test_where_a_norm_overflows_in_eager_and_not_in_fp64_another_overflow_is_declared():
    found = special_values.Findings()
    eager, oracle = torch.tensor([[math.nan, 1.0]]), torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    results = special_values.Results(fused=torch.tensor([[0.0, 1.0]]), eager=eager, oracle=oracle)
    special_values.compare("rows", results, found, has_sums=True)
    assert not found.faults and found.declared == {special_values.ON_THE_WAY: 1}
    pointwise, swallowed = special_values.Findings(), special_values.Findings()
    special_values.compare("rows", results, pointwise)
    nan = torch.tensor([[math.nan, 1.0]], dtype=torch.float64)
    special_values.compare("rows", replace(results, oracle=nan), swallowed, has_sums=True)
    assert pointwise.faults and swallowed.faults


@pytest.mark.parametrize(("limit", "is_passed"), [(torch.finfo(torch.float32).max, True), (1e30, False)])
def test_a_sum_that_overflows_in_another_order_is_declared(limit, is_passed):
    x = torch.randn(20, 40)

    def other_order(x):
        overflows = (x.abs().double().sum(-1) > limit) & x.isfinite().all(-1)
        return torch.where(overflows, math.inf, x.double().sum(-1)).float()

    found = check_chain(chain_of(lambda x: x.sum(-1), x), other_order, [x], seed=0)
    assert found.is_passed == is_passed
    assert any(special_values.ORDER in words for words in found.declared) == is_passed


def exact_mean(x):
    """A mean that the original adds up in fp64, as the moments of a norm's row nearly are on a GPU."""
    return x.double().mean(-1, keepdim=True).float()


def mean_in_another_order(x):
    parts = x.view(*x.shape[:-1], 24, -1).unbind(-2)
    return torch.stack(parts).cumsum(0)[-1].cumsum(-1)[..., -1:] / x.shape[-1]


def mean_with_one_row_off(x):
    found = mean_in_another_order(x)
    found.view(-1)[7] += 1e-6
    return found


def mean_of_all_but_one(x):
    return mean_in_another_order(x) - x[..., -1:] / x.shape[-1]


@pytest.mark.parametrize("count", [1024, 8192])
def test_a_row_of_one_element_is_not_wrong_because_its_oracle_lies_near_by_luck(count):
    """A mean of 768 numbers may be near 0: of 8,192 such some had another right order outside of a limit from one oracle."""
    x = torch.randn(count, 768, generator=torch.Generator().manual_seed(count))
    chain = chain_of(exact_mean, x)

    def checked(kernel):
        return with_special_rows(check_chain(chain, kernel, [x], seed=1), chain, kernel, [x], rows=(0,))

    right = checked(mean_in_another_order)
    assert right.is_passed, right.faults
    assert not checked(mean_with_one_row_off).is_passed
    assert not checked(mean_of_all_but_one).is_passed
