"""ReLU squared, in the three ways in which models square it."""

from __future__ import annotations

import torch


def reference_square(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def reference_power(x: torch.Tensor) -> torch.Tensor:
    return torch.pow(torch.nn.functional.relu(x), 2)


def reference_product(x: torch.Tensor) -> torch.Tensor:
    positive = torch.relu(x)
    return positive * positive
