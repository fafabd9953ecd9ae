"""The check of a step's gradients, on errors that are planted."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.fuse.train.judge.gradients import LostGradient, TrainingStep, WideWithSameNumbers, check_gradients, wide_run
from fusion_advisor.runtime.torch_internals.fx_trace import draws_numbers

COUNT = 30


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def rows(scale, seed):
    drawn = seeded(seed)
    return [(f"gradient {n}", TRUTH[n][1].float() * (1 + scale * torch.randn(500, generator=drawn))) for n in range(COUNT)]


TRUTH = [(f"gradient {n}", torch.randn(500, generator=seeded(n), dtype=torch.float64)) for n in range(COUNT)]


@pytest.mark.parametrize(("scale", "is_passed"), [(1e-5, True), (1.9e-5, True), (2.1e-5, False)])
def test_all_gradients_together_keep_to_twice_eagers_error(scale, is_passed):
    found = check_gradients(rows(scale, 1), rows(1e-5, 2), lambda _: TRUTH)
    assert found.is_passed is is_passed and found.oracle == "float64"
    assert is_passed or "all gradients together" in found.limit


@pytest.mark.parametrize(("times", "is_passed"), [(3, True), (5, False)])
def test_one_gradient_keeps_to_four_times(times, is_passed):
    ours = rows(1e-5, 1)
    ours[7] = rows(times * 1e-5, 1)[7]
    assert check_gradients(ours, rows(1e-5, 2), lambda _: TRUTH).is_passed is is_passed


def bias_rows(size, noise, dtype=torch.float32):
    """The gradients of a key's weight and bias: the bias's true one has ``size``, of the weight's 1, and is ``noise`` off."""
    weight, bias, off = (torch.randn(n, generator=seeded(n), dtype=torch.float64) for n in (4000, 500, 501))
    return [("gradient of k.weight", weight.to(dtype)), ("gradient of k.bias", (size * bias + noise * off[:500]).to(dtype))]


@pytest.mark.parametrize(
    ("size", "noise", "is_passed"),
    [(1e-18, 3.5e-7, True), (1e-18, 6.5e-7, False), (1e-6, 3.5e-7, False)],
    ids=["rounding", "more-than-rounding", "eager-has-digits"],
)
def test_what_vanishes_may_be_what_rounding_leaves_of_the_weight_beside_it(size, noise, is_passed):
    truth = bias_rows(size, 0.0, torch.float64)
    found = check_gradients(bias_rows(size, noise), bias_rows(size, 1e-8), lambda _: truth)
    assert found.is_passed is is_passed and found.worst == "gradient of k.bias"
    assert not is_passed or "is rounding alone" in found.limit


def only_rounded(size, off):
    """No memory for a truth; eager's ops rounded otherwise change the gradient of the bias by ``off``."""

    def wide(dtype, seed=None):
        if dtype is not None:
            raise RuntimeError("no memory for one")
        (weight, bias), other = bias_rows(size, 0.0), torch.randn(500, generator=seeded(seed + 700))
        return [weight, (bias[0], bias[1] + off * other)]

    return wide


@pytest.mark.parametrize(("noise", "is_passed"), [(3.5e-7, True), (1e-6, False)])
def test_what_vanishes_is_compared_with_eagers_rounding_where_there_is_no_truth(noise, is_passed):
    found = check_gradients(bias_rows(0.0, noise), bias_rows(0.0, 1e-7), only_rounded(0.0, 1e-7))
    assert found.is_passed is is_passed and found.oracle == "eager"


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0])
def test_a_small_gradient_of_which_rounding_leaves_digits_has_no_floor_where_there_is_no_truth(factor):
    """A bias beside a weight that large activations go into: 3e-7 of the weight's gradient, less than four units of fp32."""
    theirs = bias_rows(3e-7, 0.0)
    ours = [theirs[0], (theirs[1][0], factor * theirs[1][1])]
    assert not check_gradients(ours, theirs, only_rounded(3e-7, 1e-9)).is_passed


def test_a_gradient_that_is_missing_is_said():
    with pytest.raises(LostGradient, match="gradient 29"):
        check_gradients(rows(1e-5, 1)[:-1], rows(1e-5, 2), lambda _: TRUTH)


def test_without_a_truth_both_sides_are_compared():
    def none(dtype, seed=None):
        if dtype is not None:
            raise RuntimeError(f"no kernel for {dtype}")
        return rows(1e-6, seed)

    assert check_gradients(rows(0.0, 1), rows(0.0, 1), none).oracle == "eager"
    assert not check_gradients(rows(1e-3, 1), rows(0.0, 1), none).is_passed


@pytest.mark.parametrize(
    ("scale", "one", "is_passed"),
    [(1.4e-5, 1.0, True), (1.4e-5, 3.5, True), (1.4e-5, 6.0, False), (2.6e-5, 1.0, False)],
    ids=["as-rounding", "one-gradient", "one-too-far", "all-too-far"],
)
def test_without_a_truth_gradients_may_be_as_far_as_other_rounding_moves_them(scale, one, is_passed):
    """Eight units of fp32 are 9.5e-7, and eager's ops rounded otherwise move each gradient by 1e-5."""

    def wide(dtype, seed=None):
        if dtype is not None:
            raise torch.OutOfMemoryError("of activations")
        return rows(1e-5, seed + 100)

    ours = rows(scale, 1)
    ours[7] = rows(one * 1e-5, 1)[7]
    found = check_gradients(ours, rows(0.0, 2), wide)
    assert found.is_passed is is_passed and found.oracle == "eager"
    assert "other ways to round" in found.limit or "all gradients together ≤ 2 × what other rounding changes" in found.limit


def test_without_a_truth_and_without_other_rounding_eight_units_are_the_limit():
    def wide(dtype, seed=None):
        raise torch.OutOfMemoryError("of activations")

    assert not check_gradients(rows(1e-5, 1), rows(0.0, 2), wide).is_passed


@pytest.mark.parametrize(("dtype", "oracle"), [(torch.bfloat16, "float32"), (torch.float32, "eager")])
def test_where_fp64_does_not_fit_fp32_is_the_truth_of_16_bits(dtype, oracle):
    def narrower(wide, seed=None):
        if wide == torch.float64:
            raise torch.OutOfMemoryError("of activations")
        return rows(1e-2, seed + 100) if wide is None else [(name, row.to(wide)) for name, row in TRUTH]

    ours, theirs = ([(name, row.to(dtype)) for name, row in rows(1e-2, seed)] for seed in (1, 2))
    assert check_gradients(ours, theirs, narrower).oracle == oracle
    spoilt = [*ours[:-1], (ours[-1][0], 2 * ours[-1][1])]
    assert not check_gradients(spoilt, theirs, narrower).is_passed


def test_a_step_leaves_weights_and_random_numbers_alone():
    weight = torch.randn(4, 4, requires_grad=True)
    count = torch.zeros(())

    def call(x, weight, count):
        count.add_(1)
        return torch.nn.functional.dropout(x @ weight, 0.5), count

    x = torch.randn(3, 4)
    step = TrainingStep.of(call, ("x", "weight", "count"), (x, weight, count))
    before = torch.random.get_rng_state()
    first, again = step.run(call), step.run(call)
    assert [name for name, _ in first] == ["output 0", "output 1", "gradient of weight"]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(first, again, strict=True))
    assert weight.grad is None and count == 0 and torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(step.run(call, seed=7)[0][1], first[0][1])


def test_random_ops_draw_the_same_in_float64():
    def drop(x):
        return torch.ops.aten.native_dropout.default(x, 0.5, True)

    graph = torch.fx.symbolic_trace(drop)
    x = torch.randn(64)
    for node in graph.graph.nodes:
        node.meta["val"] = x
    assert draws_numbers(graph)
    torch.manual_seed(0)
    narrow, mask = drop(x)
    torch.manual_seed(0)
    wide, same = WideWithSameNumbers(graph).run(x.double())
    assert torch.equal(mask, same) and wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), narrow)


@pytest.mark.parametrize(("error", "is_passed"), [(4e-6, True), (1e-4, False)])
def test_a_loss_that_eager_hit_by_luck_is_judged_with_other_rounding(error, is_passed):
    """Eager is 1e-9 away; its ops rounded otherwise are about 2e-6 away."""
    asked = []

    def wide(dtype, seed=None):
        if seed is None:
            return [("loss", torch.tensor(10.9, dtype=dtype)), *TRUTH]
        asked.append(seed)
        return [("loss", torch.tensor(10.9 * (1 + 2e-6 * (-1) ** seed), dtype=dtype)), *TRUTH]

    def losses(times, seed):
        return [("loss", torch.tensor(10.9 * (1 + times), dtype=torch.float64)), *rows(1e-5, seed)]

    found = check_gradients(losses(error, 1), losses(1e-9, 2), wide)
    assert found.is_passed is is_passed and asked == [0, 1, 2, 3]
    assert "with 4 other ways to round, eager's is 1.8e-06" in found.limit or found.worst != "loss"


def test_errors_of_many_numbers_are_not_drawn_again():
    ours = rows(1e-5, 1)
    ours[7] = rows(1e-3, 1)[7]

    def wide(dtype, seed=None):
        assert seed is None
        return TRUTH

    assert not check_gradients(ours, rows(1e-5, 2), wide).is_passed


def loss_of(x, up, down, labels):
    logits = torch.nn.functional.gelu(x @ up) @ down
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def test_random_rounding_errs_as_much_as_eager_does():
    """The root mean square of a loss's error over 16 inputs, in bf16."""
    eager, drawn = [], []
    for seed in range(16):
        generator = seeded(seed)
        values = [torch.randn(shape, generator=generator).bfloat16() for shape in ((256, 32), (32, 64), (64, 97))]
        labels = torch.randint(0, 97, (256,), generator=generator)
        graph = make_fx(loss_of, tracing_mode="fake")(*values, labels)
        truth = float(wide_run(graph, torch.float64)(*(one.double() for one in values), labels))
        rounded = float(wide_run(graph, torch.float64, seed)(*(one.double() for one in values), labels))
        eager.append(float(loss_of(*values, labels)) - truth)
        drawn.append(rounded - truth)
    ratio = torch.tensor(drawn).norm() / torch.tensor(eager).norm()
    assert 0.3 < ratio < 3
    assert float(wide_run(graph, torch.float64, 1)(*(one.double() for one in values), labels)) != rounded


def test_views_and_what_is_written_in_place_are_not_rounded_twice():
    def parts(x):
        y = x + 1
        y.mul_(2)
        return y.view(4, 4), y[0]

    x = torch.randn(16, generator=seeded(0)).bfloat16()
    graph = make_fx(parts, tracing_mode="fake")(x)
    view, first = wide_run(graph, torch.float64, 0)(x.double())
    assert view[0, 0] == first and (view.flatten() != (x.double() + 1) * 2).any()


@pytest.mark.parametrize(("error", "is_passed"), [(1e-5, True), (1e-3, False)])
def test_without_a_truth_a_loss_may_be_as_far_as_other_rounding_moves_it(error, is_passed):
    """Eight units of fp32 are 9.5e-7."""

    def wide(dtype, seed=None):
        if dtype is not None:
            raise RuntimeError(f"no kernel for {dtype}")
        return [("loss", torch.tensor(10.9 * (1 + 4e-6 * (-1) ** seed))), *rows(0.0, 1)]

    ours, theirs = ([("loss", torch.tensor(10.9 * (1 + times))), *rows(0.0, 1)] for times in (error, 0.0))
    found = check_gradients(ours, theirs, wide)
    assert found.oracle == "eager" and found.is_passed is is_passed
    assert "what 4 other ways to round eager's ops change" in found.limit


def test_memory_that_ends_while_errors_are_drawn_leaves_those_that_there_are():
    def wide(dtype, seed=None):
        if seed == 1:
            raise torch.OutOfMemoryError("of one more step")
        return [("loss", torch.tensor(10.9 * (1 + 2e-6 * (seed is not None)), dtype=dtype)), *TRUTH]

    ours, theirs = ([("loss", torch.tensor(10.9 * (1 + times)).double()), *rows(1e-5, 1)] for times in (4e-6, 1e-9))
    found = check_gradients(ours, theirs, wide)
    assert found.is_passed, found


def test_ops_keep_their_dtypes_where_rounding_alone_changes():
    generator = seeded(0)
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in ((256, 32), (32, 64), (64, 97))]
    labels = torch.randint(0, 97, (256,), generator=generator)
    graph = make_fx(loss_of, tracing_mode="fake")(*values, labels)
    found = [wide_run(graph, None, seed)(*values, labels) for seed in (0, 0, 1)]
    eager = loss_of(*values, labels)
    assert found[0] == found[1] != found[2] and found[0].dtype == torch.float32
    assert 1e-8 < abs(found[0] - eager) / eager < 1e-3


def test_gradients_of_inputs_that_are_called_alike_are_told_apart():
    one, two = (torch.ones(size, requires_grad=True) for size in (2, 3))

    def call(one, two):
        return one.sum() + two.square().sum()

    found = dict(TrainingStep.of(call, ["bias", "bias"], (one, two)).run(call))
    assert len(found) == 3 and sorted(value.numel() for value in found.values()) == [1, 2, 3]


@pytest.mark.parametrize(("error", "is_passed"), [(4e-16, True), (1e-13, False)])
def test_float64_has_no_wider_truth(error, is_passed):
    theirs = [("loss", torch.tensor(1.0, dtype=torch.float64)), ("gradient", torch.ones(100, dtype=torch.float64))]
    ours = [(name, value * (1 + error)) for name, value in theirs]
    found = check_gradients(ours, theirs, lambda *_: theirs)
    assert found.oracle == "eager" and found.is_passed is is_passed
