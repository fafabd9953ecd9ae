"""Dropout that is a function of its seed: the random numbers, and the torch op whose decisions every backend's kernels repeat.

Numbers come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11), the
generator of cuRAND and of Triton's ``tl.rand``. It keeps no state: a 64-bit key (the seed) and a 128-bit counter give four 32-bit
words. Seven rounds already pass BigCrush; ten are what everybody ships, and at a call for four elements they fit next to the
memory traffic.

The element with row-major number ``n`` takes word ``n % 4`` of counter ``n // 4``: strides, block sizes, tuning and backend
cannot change what is dropped. It is dropped where that word is below ``p * 2**32``, an integer comparison, so all agree exactly.
"""

from __future__ import annotations

import torch

from fusion_advisor.ir.program import dropout_constants

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
"""What the two halves of the key grow by each round."""
ROUNDS = 10

_Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: _Words, key: tuple[torch.Tensor, torch.Tensor]) -> _Words:
    """Philox4x32-10.

    Args:
        counter: four words of 0 to 2**32 - 1 as int64 tensors, the lowest first.
        key: two such words.

    Returns:
        four random words, as int64.
    """
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(ROUNDS):
        # int64 wraps at 2**64 and >> keeps the sign: the mask makes both halves of the unsigned product right.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (second >> 32 & _WORD) ^ b ^ low_key, second & _WORD
        c, d = (first >> 32 & _WORD) ^ d ^ high_key, first & _WORD
        low_key, high_key = low_key + _WEYL[0] & _WORD, high_key + _WEYL[1] & _WORD
    return a, b, c, d


def random_words(seed: torch.Tensor, count: int) -> torch.Tensor:
    """The random words of elements 0 to ``count - 1``.

    Args:
        seed: int64, one element, on the device where the words are wanted; negative numbers are seeds like any other.
        count: how many.

    Returns:
        int64 of shape (count,), each 0 to 2**32 - 1.
    """
    number = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    key = seed.reshape(())
    zero = torch.zeros_like(number)
    words = philox4x32((number & _WORD, number >> 32, zero, zero), (key & _WORD, key >> 32 & _WORD))
    return torch.stack(words, dim=-1).reshape(-1)[:count]


@torch.library.custom_op("fusion_advisor::seeded_dropout", mutates_args=())
def seeded_dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Zero each element with probability ``p`` and scale the others by ``1 / (1 - p)``, the same ones for the same seed.

    Like torch's own dropout this multiplies: what is dropped is ``x * 0``, so a NaN or an infinity gives NaN there.

    Args:
        x: floating point, any shape and strides.
        seed: int64, one element, on the device of ``x``. A tensor, so that a captured CUDA graph takes a new seed by a write.
        p: 0 to 1.

    Raises:
        ValueError: ``p`` is no probability, or the seed is not one int64.
    """
    _check(seed, p)
    threshold, scale = dropout_constants(p)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    kept = (random_words(seed, x.numel()) >= threshold).view(x.shape)
    out = torch.empty_like(x)
    return out.copy_(x.to(dtype) * (kept.to(dtype) * scale))


@seeded_dropout.register_fake
def _(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    _check(seed, p)
    return torch.empty_like(x)


def _check(seed: torch.Tensor, p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"p must be between 0 and 1, not {p}")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(f"the seed must be one int64, not {seed.numel()} of {seed.dtype}")
