"""Three models in plain PyTorch, as people write them by hand: a Llama, a diffusion transformer, a selective scan."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Root mean square norm in fp32, as in Llama's published code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm the last dim."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    """Attention with rotary positions as complex numbers of real pairs, and a gated feed-forward."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Run the block on (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (_rotated(part, cos, sin) for part in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.ffn_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Llama(nn.Module):
    """A decoder: embedding, blocks, norm, logits."""

    def __init__(self, *, width: int, heads: int, layers: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, 8 * width // 3 // 64 * 64 or 96) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(0, width // heads, 2) / (width // heads)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits for (batch, length) ids."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return self.head(self.norm(x))


class DiTBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by a condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.ffn_norm = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Run the block on (batch, patches, width) under a condition (batch, width)."""
        shift, scale, gate, shift2, scale2, gate2 = self.condition(functional.silu(condition))[:, None].chunk(6, -1)
        batch, length, width = x.shape
        normed = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(normed).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + gate * self.out(mixed)
        normed = self.ffn_norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.outer(functional.gelu(self.inner(normed), approximate="tanh"))


class DiT(nn.Module):
    """A diffusion transformer on latents: patches, sinusoidal time, blocks."""

    def __init__(self, *, width: int, heads: int, layers: int, side: int, channels: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, patch * patch * channels)

    def forward(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return (batch, patches, values of a patch) for latents (batch, channels, side, side) and times (batch,)."""
        frequencies = torch.exp(-math.log(1e4) * torch.arange(128, device=time.device, dtype=torch.float32) / 128)
        angles = time[:, None].float() * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(latents.dtype))
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class SelectiveScan(nn.Module):
    """A state-space block whose recurrence is a loop of Python over chunks, as in teaching code."""

    def __init__(self, *, width: int, states: int, layers: int, steps: int) -> None:
        super().__init__()
        self.states, self.steps = states, steps
        self.into = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.select = nn.ModuleList(nn.Linear(width, width + 2 * states) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(layers))
        self.decay = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers on (batch, steps, width)."""
        for norm, into, select, out in zip(self.norms, self.into, self.select, self.out, strict=True):
            value, gate = into(norm(x)).chunk(2, -1)
            value = functional.silu(value)
            delta, source, read = select(value).split([value.shape[-1], self.states, self.states], -1)
            delta = functional.softplus(delta)
            state = torch.zeros(*value.shape[::2], self.states, dtype=value.dtype, device=value.device)
            rows = []
            for step in range(self.steps):
                kept = torch.exp(delta[:, step, :, None] * -self.decay.exp().to(value.dtype))
                state = state * kept + (delta[:, step] * value[:, step])[..., None] * source[:, step, None]
                rows.append((state * read[:, step, None]).sum(-1))
            x = x + out(torch.stack(rows, 1) * functional.silu(gate))
        return x
