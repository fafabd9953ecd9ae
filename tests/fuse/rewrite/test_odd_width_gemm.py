"""Odd rows stored where they belong: every element, by an aligned batch that writes to no place twice; and as a rewrite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.baselines.inductor_hybrid import compile_rest
from fusion_advisor.fuse.decide.predict import price_passes
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.pad_gemm import pad_linears, store_odd_rows
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.rewrite import odd_width_gemm
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged, rewrite_region
from fusion_advisor.fuse.rewrite.odd_rows import period_of
from fusion_advisor.fuse.rewrite.odd_width_gemm import LEAST_ROWS, OddRows, packing_bytes
from fusion_advisor.records import GraphRewrite, Status
from fusion_advisor.workload.weight_packing import leave_room, roomy_rows
from tests.fuse.passes.test_pad_gemm import Head
from tests.tiny import profile_live

COLUMNS = [65, 66, 67, 68, 69, 70, 71, 73, 106]
ROWS = [1, 2, 3, 5, 7, 8, 9, 16, 21, 37]
MANY = torch.randn(2, LEAST_ROWS * 4, 16, dtype=torch.bfloat16)


def roomy(columns, dtype, width=24):
    """A weight with rows behind it that must leave no trace."""
    memory = torch.full((roomy_rows(columns), width), float("nan"), dtype=dtype)
    memory[:columns] = torch.randn(columns, width, dtype=torch.float64).to(dtype)
    return memory[:columns]


def bias_of(columns, dtype, has_bias):
    """Numbers as large as the products' sums, in memory that ends with them; or none."""
    return torch.randn(columns, dtype=torch.float64).mul(5).to(dtype) if has_bias else None


def truth(x, weight, bias):
    exact = x.double() @ weight.double().t()
    return exact if bias is None else exact + bias.double()


@pytest.fixture
def memories(monkeypatch):
    """What OddRows allocates, its result last: NaN, with more of it behind."""
    allocated = []

    def new_empty(self, size):
        around = torch.full((math.prod(size) + 64,), float("nan"), dtype=self.dtype)
        allocated.append(around)
        return around[:-64].view(size)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return allocated


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "a bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_element_is_as_right_as_eagers_and_nothing_else_is_written(dtype, has_bias, memories):
    torch.manual_seed(0)
    for columns in COLUMNS:
        weight, bias = roomy(columns, dtype), bias_of(columns, dtype, has_bias)
        parameters = (weight, bias) if has_bias else (weight,)
        stored = OddRows("odd_rows", columns, has_bias=has_bias)
        for rows in ROWS:
            x = torch.randn(rows, 24, dtype=torch.float64).to(dtype)
            found, eager = stored(x, *parameters), torch.nn.functional.linear(x, *parameters)
            assert found.shape == eager.shape and found.stride() == eager.stride() and found.dtype == dtype
            exact = truth(x, weight, bias)
            error, own = (found.double() - exact).norm(), (eager.double() - exact).norm()
            assert error <= 1.1 * own + 1e-12, (columns, rows)
            around = memories[-1]
            assert found.data_ptr() == around.data_ptr() and around[rows * columns :].isnan().all()


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "a bias"])
def test_outer_dims_and_gaps_between_rows_are_kept(has_bias):
    weight, bias = roomy(77, torch.bfloat16), bias_of(77, torch.bfloat16, has_bias)
    x = torch.randn(3, 10, 24, dtype=torch.bfloat16)[:, ::2]
    found = OddRows("odd_rows", 77, has_bias=has_bias)(x, weight, bias)
    torch.testing.assert_close(found.double(), truth(x, weight, bias), rtol=1e-2, atol=1e-2)
    assert found.shape == (3, 5, 77) and found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_biases_at_the_ends_of_the_range_are_added_as_they_are(dtype):
    limits = torch.finfo(dtype)
    bias = torch.zeros(77, dtype=dtype)
    bias[::8], bias[1::8], bias[2::8], bias[3::8] = -torch.inf, torch.nan, limits.max, limits.smallest_normal
    weight, x = roomy(77, dtype) * 0, torch.zeros(9, 24, dtype=dtype)
    found = OddRows("odd_rows", 77, has_bias=True)(x, weight, bias)
    torch.testing.assert_close(found, bias.expand(9, 77), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "a bias"])
@pytest.mark.parametrize("rows", [16, 19])
@pytest.mark.parametrize("columns", COLUMNS)
def test_batches_are_aligned_and_write_to_no_place_twice(columns, rows, has_bias, monkeypatch):
    batches = []
    real = torch.bmm

    def bmm(a, b, *, out):
        batches.append((a, b, out))
        return real(a, b, out=out)

    monkeypatch.setattr(odd_width_gemm.torch, "bmm", bmm)
    bias = bias_of(columns, torch.bfloat16, has_bias)
    stored = OddRows("odd_rows", columns, has_bias=has_bias)
    stored(torch.randn(rows, 24, dtype=torch.bfloat16), roomy(columns, torch.bfloat16), bias)
    period = period_of(columns)
    assert len(batches) == (1 if rows % period == 0 else 2) and sum(len(out) for _, _, out in batches) == period
    counts = torch.zeros(rows, columns)
    for x, weight, out in batches:
        assert out.shape[2] % 8 == 0 and out.stride(2) == weight.stride(1) == x.stride(2) == 1
        for operand in (x, weight.mT, out):
            assert operand.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in operand.stride()[:2])
        counts.as_strided(out.shape, out.stride(), out.storage_offset()).add_(1)
    assert counts.max() == 1 and (counts.sum(1) == batches[0][2].shape[2]).all()
    assert counts.sum() >= (columns - 49 - 7) * rows


def test_a_result_may_be_written_to_where_gradients_are_on():
    weight, x = roomy(77, torch.bfloat16), torch.randn(9, 24, dtype=torch.bfloat16)
    with torch.no_grad():
        found = OddRows("odd", 77)(x, weight)
        expected = torch.nn.functional.linear(x, weight)
    assert found._base is None
    added = torch.ones(77, dtype=torch.bfloat16, requires_grad=True)
    found += added  # an error for a view that was made without gradients
    torch.testing.assert_close(found, expected + added, rtol=1e-2, atol=5e-2)


def rewritten(model, x=MANY, passes=(pad_linears, store_odd_rows)):
    """Return the rewritten module, its region and how many linears each pass changed, after comparing it with the model."""
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (x,), {}).regions
        _, index_of = describe(region, first_index=0)
        module, counts = rewrite_region(region, index_of, [], passes)
        (ours,), (theirs,) = module(*region.example_args), region.graph(*region.example_args)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert ours.stride() == theirs.stride() and ours.shape == theirs.shape
    return module, region, counts


@pytest.fixture(params=[False, True], ids=["no bias", "a bias"])
def model(request):
    model = Head(bias=request.param, rows=77)
    leave_room(model)
    return model


@pytest.mark.parametrize(("passes", "counts"), [((pad_linears, store_odd_rows), [1, 1]), ((store_odd_rows,), [1])])
def test_it_takes_the_place_of_a_padded_linear_and_of_an_odd_one(model, passes, counts):
    module, _, found = rewritten(model, passes=passes)
    assert found == counts
    assert [node.name for node in module.graph.nodes if isinstance(node.target, OddRows)]
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert not any("slice" in name or "clone" in name or "padded" in name for name in names)


def short_of_room():
    model = Head(rows=75, bias=False)
    memory = torch.randn(80, 16, dtype=torch.bfloat16)  # the five rows that padding reads, not seven
    model.head.weight = torch.nn.Parameter(memory[:75])
    return model


class InAutocast(Head):
    """A head by itself, whose operands autocast may convert."""

    computes_in = torch.bfloat16

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.computes_in):
            return self.head(torch.tanh(x))


class InHalfAutocast(InAutocast):
    computes_in = torch.float16


def bias_in_fp32():
    model = InAutocast(rows=77)
    model.head.bias = torch.nn.Parameter(torch.randn(80)[:77])  # with room, which leave_room gives to 16 bits alone
    return model


@pytest.mark.parametrize(
    ("make", "x", "padded"),
    [
        (lambda: Head(rows=77, columns=64), MANY, 1),
        (lambda: Head(rows=77), MANY[:1], 1),
        (lambda: Head(bias=False, rows=77), MANY[:1], 1),
        (lambda: Head(bias=False, rows=61), MANY, 1),
        (short_of_room, MANY, 1),
        (lambda: Head(bias=False, rows=16), MANY, 0),
    ],
    ids=[
        "a bias, operands larger than the result", "a bias, few rows", "few rows", "nothing left for a batch", "no room", "even",
    ],
)  # fmt: skip
def test_what_stays_padded(make, x, padded):
    model = make()
    if make is not short_of_room:
        leave_room(model)
    assert rewritten(model, x)[2] == [padded, 0]


@pytest.mark.parametrize(
    ("make", "x", "counts"),
    [
        (lambda: InAutocast(rows=77), MANY.float(), [1, 1]),
        (lambda: InAutocast(rows=77), MANY, [1, 1]),
        (lambda: InAutocast(bias=False, rows=77), MANY.float(), [1, 1]),
        (lambda: InHalfAutocast(rows=77), MANY, [0, 0]),
        (lambda: InHalfAutocast(bias=False, rows=77), MANY, [0, 0]),
        (bias_in_fp32, MANY, [0, 0]),
    ],
    ids=["a bias, from fp32", "a bias", "from fp32", "a bias, weights are cast", "weights are cast", "the bias is cast"],
)
def test_in_autocast_odd_rows_are_stored_in_place_unless_parameters_are_cast(make, x, counts):
    model = make()
    leave_room(model)
    assert rewritten(model, x)[2] == counts


@pytest.mark.parametrize("columns", [16, 56])
def test_operands_with_a_bias_may_be_nearly_as_large_as_the_result(columns):
    model = Head(rows=77, columns=columns)
    leave_room(model)
    assert rewritten(model)[2] == [1, 1]
    rows = MANY[..., 0].numel()
    assert packing_bytes(rows, 77, 56) < 2 * rows * 77 * 2 <= packing_bytes(rows, 77, 64)


def test_tied_weights_with_a_bias_are_read_where_they_are():
    class Tied(Head):
        def __init__(self):
            super().__init__(rows=77)
            self.words = torch.nn.Embedding(77, 16, dtype=torch.bfloat16)
            self.words.weight = self.head.weight

        def forward(self, ids):
            return self.head(self.words(ids))

    model = Tied()
    leave_room(model)
    ids = torch.randint(0, 77, MANY.shape[:2])
    module, region, counts = rewritten(model, ids)
    assert counts == [1, 1]
    with torch.no_grad():
        model.words.weight.mul_(-2)
        torch.testing.assert_close(module(*region.example_args)[0], model(ids), rtol=1e-2, atol=1e-2)


def test_what_is_written_to_parameters_is_seen_and_a_weight_without_room_ends_it_but_with_a_bias(model):
    module, region, _ = rewritten(model)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(-3)
            torch.testing.assert_close(module(*region.example_args)[0], model(MANY), rtol=1e-2, atol=1e-2)
        moved = [value.clone() if value is model.head.weight else value for value in region.example_args]
        if model.head.bias is None:
            with pytest.raises(LayoutChanged, match="room"):
                module(*moved)
        else:
            torch.testing.assert_close(module(*moved)[0], model(MANY), rtol=1e-2, atol=1e-2)


def test_inductor_gets_the_linear_back(model):
    module, region, _ = rewritten(model)
    with torch.no_grad():
        (rest,) = compile_rest([region], [module], compiler=lambda graph_module, inputs: graph_module.forward)
        (compiled,) = rest(*region.example_args)
        assert torch.equal(compiled, model(MANY))
    targets = [node.target for node in rest.graph.nodes]
    assert targets.count(torch.ops.aten.linear.default) == 2 and not any(isinstance(target, OddRows) for target in targets)


def test_it_is_expected_to_save_the_copy_for_more_launches(model):
    capture, live = profile_live(model, (MANY,))
    bench = Bench(live, on_cuda=False)
    variant = bench.build((), tuple(PASSES))
    assert variant.changed["pad-gemm"] == variant.changed["odd-width-gemm"] == 1
    capture = replace(capture, launches=(), ops=tuple(bench.ops), bandwidth=replace(capture.bandwidth, copy_bytes_per_s=10**9))
    rows = [
        GraphRewrite(id=name, name=PASSES[name].title, status=Status.KEPT, reason="", sites=1, step_delta_ns=-1)
        for name in ("pad-gemm", "odd-width-gemm")
    ]
    _, priced = price_passes(rows, bench, capture, 100)
    rows = MANY[..., 0].numel()
    saved = 2 * rows * 77 * 2 - 3 * 100
    packed = 0 if model.head.bias is None else (rows + 77) * (16 + 8 + 8 + 16 + 8) * 2 + 4 * 100  # reads, and writes
    assert priced.predicted_saving_ns == saved - packed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs cuBLAS, and this machine has no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "a bias"])
@pytest.mark.parametrize(("rows", "columns", "width"), [(4096, 50257, 768), (2050, 30522, 768), (600, 1001, 256), (37, 77, 64)])
def test_on_a_gpu(rows, columns, width, has_bias, dtype):
    weight = roomy(columns, dtype, width).cuda()
    wide = torch.full((roomy_rows(columns), width), float("nan"), dtype=dtype, device="cuda")
    wide[:columns] = weight
    x = torch.randn(rows, width, dtype=dtype, device="cuda")
    bias = torch.randn(columns, dtype=dtype, device="cuda").mul(5) if has_bias else None
    found = OddRows("odd_rows", columns, has_bias=has_bias)(x, wide[:columns], bias)
    eager = torch.nn.functional.linear(x, weight, bias)
    assert not found.isnan().any()
    for first in range(0, rows, 512):
        part = slice(first, first + 512)
        exact = truth(x[part], weight, bias)
        error, own = (found[part].double() - exact).norm(), (eager[part].double() - exact).norm()
        assert error <= 1.1 * own


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="looks at kernels, and this machine has no CUDA device")
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "a bias"])
def test_all_products_run_on_kernels_for_aligned_operands(has_bias):
    x = torch.randn(4096, 768, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(roomy_rows(50257), 768, dtype=torch.bfloat16, device="cuda")[:50257]
    bias = torch.randn(50257, dtype=torch.bfloat16, device="cuda") if has_bias else None
    stored = OddRows("odd_rows", 50257, has_bias=has_bias)
    stored(x, weight, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        stored(x, weight, bias)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels and not any("align1" in name or "align2" in name for name in kernels), kernels
    joins = [name for name in kernels if "CatArray" in name]
    assert bool(joins) == has_bias and all("_vectorized" in name or "_aligned" in name for name in joins), kernels
