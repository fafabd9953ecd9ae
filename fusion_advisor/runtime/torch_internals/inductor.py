"""Inductor: compiling one graph with it, and its caches on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch


def compile_graph(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a traced graph as torch.compile's default backend does, without dynamo."""
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        return cast("Callable[..., Any]", compile_fx(graph_module, inputs))


def call_without_lowering(op: torch._ops.OpOverload) -> None:
    """Tell Inductor that an op has no lowering, so that it calls it.

    It would find that out by itself, and torch 2.11 then writes the op's arguments out for a log line that nobody asked for:
    expressions in which each residual stands twice, so 2^24 of them for BERT's 12 layers and a compiler that never ends.
    """
    from torch._inductor.lowering import make_fallback

    make_fallback(op, warn=False)


def empty_compile_caches() -> contextlib.AbstractContextManager[Any]:
    """Let torch.compile and Triton begin with empty caches on disk while the context lasts, as on a machine's first run."""
    from torch._inductor.utils import fresh_inductor_cache

    context: contextlib.AbstractContextManager[Any] = fresh_inductor_cache()
    return context
