"""GEGLU with GELU (tanh) over one packed projection: which half is the gate, and how it is cut, differs between models."""

from __future__ import annotations

import torch


def reference_chunk(packed: torch.Tensor) -> torch.Tensor:
    gate, up = packed.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def reference_chunk_gate_last(packed: torch.Tensor) -> torch.Tensor:
    up, gate = packed.chunk(2, dim=-1)
    return up * torch.nn.functional.gelu(gate, approximate="tanh")


def reference_sliced(packed: torch.Tensor) -> torch.Tensor:
    half = packed.shape[-1] // 2
    gate, up = packed[..., :half], packed[..., half:]
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
