"""A model whose trace reads all sorts of things: a configuration, attributes, a global, functions, a list."""

from __future__ import annotations

import torch

SCALE = 2.0


def activated(x, factor):
    """GELU times a factor."""
    return torch.nn.functional.gelu(x) * factor


class Config:
    """Plain values."""

    def __init__(self):
        self.factor, self.is_gated = 1.5, True


class Block(torch.nn.Module):
    """A linear layer, an activation and a norm."""

    def __init__(self, config):
        super().__init__()
        self.lin, self.norm, self.drop = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Dropout(0.1)
        self.config, self.shift, self.weights = config, 0.25, [1.0, 0.5]

    def mixed(self, u):
        """Apply what the configuration says."""
        return activated(u, self.config.factor) + self.shift

    def forward(self, x):
        """Run it."""
        u = self.lin(x)
        if self.config.is_gated:
            u = self.mixed(u)
        return self.norm(self.drop(u) * SCALE * self.weights[1] + x)


class Net(torch.nn.Module):
    """Two blocks; returns a dict."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.blocks = torch.nn.ModuleList([Block(self.config) for _ in range(2)])
        self.register_buffer("bias", torch.full((64,), 0.5))

    def forward(self, x, *, gain=None):
        """Run it."""
        for block in self.blocks:
            x = block(x)
        return {"hidden": x, "sum": (x + self.bias).sum(-1), "gain": gain}


def made(kind=None, seed=0, length=48):
    """A network and the inputs of a call."""
    torch.manual_seed(seed)
    return (kind or Net)().eval(), (torch.randn(2, length, 64),)
