"""The random numbers of dropout: published answers, what a good generator must show, and the torch op around them."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.library.philox_dropout import philox4x32, random_words, seeded_dropout

# "philox4x32 10" in Random123's tests/kat_vectors: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
COUNT = 1 << 20


def words(text):
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


def seed(number):
    return torch.tensor([number])


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_published_answers(counter, key, answer):
    assert " ".join(f"{int(word):08x}" for word in philox4x32(words(counter), words(key))) == answer


def test_four_neighbours_take_the_words_of_one_counter():
    zero = torch.tensor(0)
    for number in (0, 5):
        block = philox4x32((torch.tensor(number), zero, zero, zero), (torch.tensor(0xFFFFFFFF), torch.tensor(0xFFFFFFFE)))
        assert random_words(seed(-(2**32) - 1), 25)[4 * number : 4 * number + 4].tolist() == [int(word) for word in block]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 1001])
def test_any_count_is_a_prefix_of_a_longer_one(count):
    assert torch.equal(random_words(seed(3), count), random_words(seed(3), 2000)[:count])


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_kept_share_is_the_wanted_one(p):
    kept = seeded_dropout(torch.ones(COUNT), seed(11), p) != 0
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / COUNT)


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 8, 1024])
def test_neighbours_and_rows_do_not_know_of_each_other(distance):
    word = random_words(seed(12), COUNT + distance).double() / 2**32 - 0.5
    # The product of two independent uniforms of variance 1/12 has mean 0 and standard deviation 1/12.
    assert abs(float((word[:COUNT] * word[distance : COUNT + distance]).mean())) < 5 / 12 / math.sqrt(COUNT)


@pytest.mark.parametrize("other", [1, 2**32, 2**63 - 1, -1])
def test_seeds_that_differ_in_any_bit_are_independent(other):
    one, two = (random_words(seed(number), COUNT).double() / 2**32 - 0.5 for number in (0, other))
    assert abs(float((one * two).mean())) < 5 / 12 / math.sqrt(COUNT)


def test_every_bit_is_fair():
    word = random_words(seed(13), COUNT)
    shares = torch.stack([(word >> bit & 1).double().mean() for bit in range(32)])
    assert float((shares - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(COUNT)


def test_the_seed_alone_decides():
    x = torch.randn(64, 33)
    assert torch.equal(seeded_dropout(x, seed(1), 0.5), seeded_dropout(x, seed(1), 0.5))
    assert not torch.equal(seeded_dropout(x, seed(1), 0.5), seeded_dropout(x, seed(2), 0.5))


def test_elements_are_numbered_by_rows_whatever_the_strides():
    x = torch.randn(40, 24)
    dropped = seeded_dropout(x, seed(5), 0.5)
    laid_out = seeded_dropout(x.t().contiguous().t(), seed(5), 0.5)
    assert torch.equal(dropped, laid_out) and laid_out.stride() == (1, 40)
    assert torch.equal(seeded_dropout(x[:, ::2], seed(5), 0.5), seeded_dropout(x[:, ::2].contiguous(), seed(5), 0.5))


def test_survivors_are_scaled_and_the_dropped_are_multiplied_by_zero():
    x = torch.tensor([2.0, float("inf"), float("nan"), -3.0]).repeat(64)
    kept = seeded_dropout(torch.ones_like(x), seed(7), 0.25) != 0
    dropped = seeded_dropout(x, seed(7), 0.25)
    torch.testing.assert_close(dropped[kept], x[kept] / 0.75, equal_nan=True)
    finite = ~kept & x.isfinite()
    assert not dropped[finite].any()
    assert dropped[~kept & ~x.isfinite()].isnan().all()


def test_torchs_own_dropout_multiplies_too():
    dropped = torch.nn.functional.dropout(torch.full((4096,), float("inf")), 0.5)
    assert 1000 < int(dropped.isnan().sum()) < 3000
    assert torch.nn.functional.dropout(torch.tensor([float("inf")]), 1.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_chance_and_certainty(dtype):
    x = torch.randn(100, dtype=dtype)
    assert torch.equal(seeded_dropout(x, seed(1), 0.0), x)
    assert torch.equal(seeded_dropout(x, seed(1), 1.0).abs(), torch.zeros_like(x))


def test_what_is_no_probability_or_no_seed_is_refused():
    x = torch.ones(3)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            seeded_dropout(x, seed(1), p)
    for wrong in (torch.tensor([1, 2]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(ValueError, match="one int64"):
            seeded_dropout(x, wrong, 0.5)


@pytest.mark.parametrize("x", [torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(0, 4), torch.randn(9)[::2]])
def test_torch_accepts_the_op(x):
    torch.library.opcheck(seeded_dropout, (x, seed(3), 0.5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares devices, and this machine has no CUDA device")
def test_devices_agree():
    assert torch.equal(random_words(seed(-9), 10001), random_words(seed(-9).cuda(), 10001).cpu())
