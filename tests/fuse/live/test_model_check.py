"""The whole model's check: what its copy in a wider dtype holds, and on which ranks it runs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.live.model_check import check_region, check_whole_model
from fusion_advisor.workload.load import describe_live


class Narrow(torch.nn.Linear):
    """A model that stops in another dtype."""

    def __init__(self, error):
        super().__init__(4, 4)
        self.error = error

    def forward(self, x):
        if x.dtype == torch.float64:
            raise self.error
        return super().forward(x)


def oracle_of(model=None, **more):
    """What a tiny model is compared with."""
    model, x = (model or torch.nn.Linear(4, 4)).eval(), torch.ones(2, 4)
    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x,)), lambda: model(x), lambda: model(x), Written(), **more)
    assert check.is_passed
    return check.oracle


def ranks(asked, other=("", "", "")):
    """Another rank with its own answers: whether it draws random numbers, why it has no copy, why that does not run."""

    def worst(own):
        asked.append(own)
        return other[len(asked) - 1] or own

    return worst


def test_a_copy_is_compared_with_unless_a_rank_has_none():
    asked, again = [], []
    assert oracle_of(worst=ranks(asked)) == "float64 copy"
    assert oracle_of(worst=ranks(again, other=("", "rank 1: no copy"))) == "eager"
    assert asked == ["", "", ""] and again == ["", ""]


def test_a_copy_that_one_rank_cannot_run_is_compared_with_on_none():
    asked = []
    assert oracle_of(Narrow(RuntimeError("another dtype")), worst=ranks(asked)) == "eager"
    assert asked == ["", "", "another dtype"]
    assert oracle_of(worst=ranks([], other=("", "", "rank 1: another dtype"))) == "eager"
    assert oracle_of(Narrow(torch.OutOfMemoryError("no memory"))) == "eager"  # one process goes on
    with pytest.raises(torch.OutOfMemoryError):  # other ranks wait in the copy's collectives
        oracle_of(Narrow(torch.OutOfMemoryError("no memory")), worst=str)


class Refuses(torch.nn.Linear):
    """A model whose own code takes no other dtype than its weights have now."""

    def __init__(self, error):
        super().__init__(4, 4)
        self.error = error

    def forward(self, x):
        if x.dtype != torch.float32:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("error", [AssertionError("fp32 only"), TypeError("fp32"), KeyError(torch.float64), ValueError("no")])
def test_a_model_that_refuses_a_wider_dtype_is_compared_with_eager(error):
    assert oracle_of(Refuses(error)) == "eager"


class Names(torch.nn.Module):
    """A model that names dtypes: a state that it makes, casts, and autocast around a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.beside = 0.0

    def forward(self, x):
        state = torch.zeros(x.shape[0], 64)
        for _ in range(2):
            state = torch.tanh(state @ self.inner.weight + x.float())
        with torch.autocast("cpu", torch.bfloat16):
            half = torch.nn.functional.gelu(self.inner(state))
        return self.outer(half.float()) * (1 + self.beside), half


@pytest.mark.parametrize(("beside", "passes"), [(0.0, True), (1e-4, True), (0.03, False)])
def test_dtypes_that_a_model_names_are_wide_in_its_copy(beside, passes):
    """Eager's result has three digits, as it rounds to bfloat16: a copy that rounds there too would ask for seven."""
    model, other = Names().eval(), Names().eval()
    other.beside = beside
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x,)), lambda: model(x), lambda: other(x), Written())
    assert check.oracle == "float64 copy" and check.is_passed is passes
    assert 1e-4 < check.eager_rel_l2 < 1e-2


class Rounds(torch.nn.Module):
    """Has no weights, and returns a result that it rounds beside one that it does not."""

    def forward(self, x):
        y = torch.softmax(x * 1.1, -1)
        return y, y.bfloat16()


@pytest.mark.parametrize(("dtype", "oracle"), [(torch.float32, "float64 copy"), (torch.bfloat16, "float32 copy")])
def test_a_model_without_weights_computes_in_the_dtype_of_what_it_is_given(dtype, oracle):
    model, x = Rounds().eval(), torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x,)), lambda: model(x), lambda: model(x), Written())
    assert check.is_passed and check.oracle == oracle and check.eager_rel_l2 > 0


class Turned(torch.nn.Module):
    """Turns pairs by complex numbers, as Llama's first code did, mixes them, and counts into a complex buffer."""

    def __init__(self):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat, generator=made))
        self.register_buffer("turns", torch.polar(torch.ones(4, 8), torch.arange(32.0).view(4, 8)))
        self.register_buffer("seen", torch.zeros(8, dtype=torch.cfloat))

    def forward(self, x, phase):
        turned = torch.view_as_complex(x.view(4, 8, 2)) * self.turns * phase
        self.seen.copy_(turned.sum(0))
        return torch.view_as_real(turned @ self.weight)


@pytest.mark.parametrize(("scale", "shift", "passes"), [(1.0, 0.0, True), (1.001, 0.0, False), (1.0, 1e-3, False)])
@pytest.mark.filterwarnings("error:Casting complex values")
def test_complex_numbers_keep_their_imaginary_parts_in_the_copy(scale, shift, passes):
    model, x = Turned().eval(), torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    phase = torch.polar(torch.ones(8), torch.arange(8.0))
    written = Written()
    written.tensors, written.before = {"seen": model.seen}, {"seen": model.seen.clone()}

    def fused():
        found = model(x, phase) * scale
        model.seen += 1j * shift * model.seen.abs().max()
        return found

    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x, phase)), lambda: model(x, phase), fused, written)
    assert check.oracle == "float64 copy" and 0 < check.eager_rel_l2 < 1e-6
    assert check.is_passed is passes


def test_the_least_memory_of_all_ranks_decides():
    assert oracle_of(memory_bytes=lambda _: (100, 10**9)) == "eager"
    assert oracle_of(memory_bytes=lambda _: (10**9, 10**9)) == "float64 copy"


class Masked(torch.nn.Linear):
    """Returns scores, and its dtype's least number where there is nothing to score."""

    def forward(self, x):
        scores = super().forward(x)
        return scores.masked_fill(x < 0, torch.finfo(scores.dtype).min)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.01, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mask_of_the_least_number_hides_no_error(dtype, factor, passes):
    torch.manual_seed(0)
    model, x = Masked(16, 16).to(dtype).eval(), torch.randn(8, 16).to(dtype)

    def fused():
        return torch.where(x < 0, model(x), (torch.nn.functional.linear(x, model.weight, model.bias) * factor))

    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x,)), lambda: model(x), fused, Written())
    assert check.oracle != "eager" and check.is_passed is passes


class Samples(torch.nn.Module):
    """Draws in all sorts of ways: by torch, by a generator of its own, by Python."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16, dtype=dtype)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        mean = self.layer(x)
        noise = torch.randn(x.shape, generator=self.generator) + torch.rand_like(mean, dtype=torch.float16)
        waits = torch.empty_like(mean).exponential_()
        dropped = torch.nn.functional.dropout(mean, 0.5) * random.random() + np.random.rand()
        return torch.normal(mean, 0.1) + noise.to(mean.dtype) * waits + dropped + torch.bernoulli(mean.sigmoid())


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.05, False)])
@pytest.mark.parametrize(("dtype", "oracle"), [(torch.float32, "float64 copy"), (torch.bfloat16, "float32 copy")])
def test_all_three_draw_the_same_random_numbers(dtype, oracle, factor, passes):
    """With other numbers both errors were as large as the noise: nothing was refused, or what was right."""
    torch.manual_seed(0)
    model, x = Samples(dtype).eval(), torch.randn(8, 16).to(dtype)
    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x,)), lambda: model(x), lambda: model(x) * factor, Written())
    assert check.oracle == oracle and check.is_passed is passes
    assert 0 < check.eager_rel_l2 < 4 * torch.finfo(dtype).eps


class DrawsByDtype(torch.nn.Linear):
    """Draws once more in fp64: nobody knows the numbers of its copy."""

    def forward(self, x):
        if x.dtype == torch.float64:
            torch.rand(1)
        return super().forward(x) + torch.randn(4)


def test_a_copy_that_draws_otherwise_is_not_compared_with():
    assert oracle_of(DrawsByDtype(4, 4)) == "eager"


def test_all_ranks_watch_what_one_draws():
    asked = []
    assert oracle_of(worst=ranks(asked, other=("rank 1: it draws random numbers", "", "", ""))) == "float64 copy"
    assert len(asked) == 4  # the second is of the watched run
    assert oracle_of(worst=ranks([], other=("rank 1: it draws random numbers", "rank 1: cannot be watched"))) == "eager"


class Attends(torch.nn.Module):
    """Attention and a dropout, which torch calls random."""

    def __init__(self, drops):
        super().__init__()
        self.drops = drops

    def forward(self, x):
        return torch.nn.functional.dropout(torch.nn.functional.scaled_dot_product_attention(x, x, x), self.drops) * 2


@pytest.mark.parametrize(
    ("drops", "dtype", "oracle"),
    [(0.0, torch.float32, "float64"), (0.0, torch.bfloat16, "float32"), (0.5, torch.float32, "float64")],
)
def test_a_graph_is_compared_with_a_wider_one_that_draws_the_same_numbers(drops, dtype, oracle):
    """With eager alone to compare with, eight units in the last place refused right numbers of large weights."""
    region = capture_regions(Attends(drops), (torch.randn(2, 8, 16, dtype=dtype),), {}).regions[0]
    check = check_region(region, region.graph.forward)
    assert check.oracle == oracle and check.is_passed and check.eager_rel_l2 < 1e-2


@pytest.mark.parametrize(("factor", "oracle"), [(1.0, "eager"), (1.01, "float64")])
def test_a_graph_that_passed_before_has_a_wider_run_only_where_it_is_far_from_eager(factor, oracle):
    region = capture_regions(Attends(0.0), (torch.randn(2, 8, 16),), {}).regions[0]
    check = check_region(region, lambda *args: [one * factor for one in region.graph(*args)], was_passed=True)
    assert check.oracle == oracle and check.is_passed is (factor == 1.0)
