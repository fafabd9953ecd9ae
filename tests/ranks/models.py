"""Factories of tiny models for runs that torchrun starts."""

from __future__ import annotations

import torch

from tests.tiny import llama, qwen2


def tiny_llama():
    """A Llama of two layers and one step's inputs."""
    model, kwargs = llama()
    return model, {**kwargs, "input_ids": torch.arange(1, 65).view(1, 64)}


def tiny_qwen2():
    """A Qwen2 of two layers and one step's inputs."""
    model, kwargs = qwen2()
    return model, {**kwargs, "input_ids": torch.arange(1, 65).view(1, 64)}
