"""Inductor: compiling one graph with it, and its caches on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch


def compile_graph(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a traced graph as torch.compile's default backend does, without dynamo."""
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        return cast("Callable[..., Any]", compile_fx(graph_module, inputs))


def compiler_of(mode: str) -> Callable[..., Any]:
    """Return what torch.compile compiles a graph with in one of its modes, so that a backend of ours can call it.

    Args:
        mode: ``default``, ``reduce-overhead`` or ``max-autotune``.
    """
    own: Any = torch
    compiler: Callable[..., Any] = own._TorchCompileInductorWrapper(mode, None, False)
    return compiler


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


def missing_for_packages(inductor: object | None = None, include: Path | None = None) -> str:
    """Return what a torch lacks to compile a model into a package and to register C++ ops by a stable ABI; empty: nothing.

    Args:
        inductor: its module; None: this torch's.
        include: folder of its headers; None: this torch's.
    """
    import torch._inductor

    header = (include or Path(torch.__file__).parent / "include") / "torch/csrc/stable/library.h"
    if not hasattr(inductor or torch._inductor, "aoti_compile_and_package"):
        return "AOTInductor packages (torch 2.6)"
    # 2.10 gave the stable ABI the number of threads and a boxing of functions with several results.
    if not header.is_file() or "TORCH_BOX" not in header.read_text(encoding="utf-8"):
        return "headers of the stable ABI (torch 2.10)"
    return ""


def compile_and_package(program: torch.export.ExportedProgram, path: Path, *, is_on_gpu: bool = False) -> dict[str, float]:
    """Compile an exported program with AOTInductor.

    Headers are not compiled ahead: that takes 6 s on two cores of an AMD EPYC and saves 2 at each later compilation. For a GPU
    the code on the host is not vectorised. To find out which vector instructions there are, torch 2.11 compiles six programs
    and imports torch in as many processes: 29 s on the same two cores.

    Args:
        program: of :func:`torch.export.export`.
        path: of the ``.pt2`` file to write.
        is_on_gpu: whether all that takes time runs on a GPU.

    Returns:
        seconds by part.

    Raises:
        RuntimeError: Inductor has no code for an op.
    """
    import torch._inductor
    from torch._dynamo.utils import compilation_time_metrics
    from torch._inductor import config, cpu_vec_isa

    options = {"aot_inductor.precompile_headers": False} if hasattr(config.aot_inductor, "precompile_headers") else {}
    options |= {"cpp.vec_isa_ok": False} if is_on_gpu else {}
    before = {name: len(compilation_time_metrics.get(name, ())) for name in _PARTS}
    if is_on_gpu:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    finally:
        if is_on_gpu:  # what is compiled for the CPU later asks again
            cpu_vec_isa.valid_vec_isa_list.cache_clear()
    spent = {title: sum(compilation_time_metrics.get(name, [])[before[name] :]) for name, title in _PARTS.items()}
    return {title: seconds for title, seconds in spent.items() if seconds}


_PARTS = {"GraphLowering.run": "lowering", "GraphLowering.codegen": "kernels", "AotCodeCompiler.compile": "C++"}
"""What dynamo's clock calls the parts of a compilation."""
