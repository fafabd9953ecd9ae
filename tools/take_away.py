"""Render ten kernels into an empty folder and run each there by itself: ``python -m tools.take_away OUT_DIR``.

Each file runs in a process of its own with nothing of this package on its path: Triton kernels with ``python``, CUDA C++ with
``nvcc``, C++ with ``c++``. Without a GPU the sizes are small, Triton kernels are interpreted, and CUDA kernels are only compiled.
The exit code is 1 where a file fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.codegen.common.interface import Header, Rendered, Tuning
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.codegen.cuda.nvrtc import find_nvcc
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.evaluate.render import render_kernel
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.patterns import lower_graph

LIBRARY = (
    ("add_rmsnorm", "triton"), ("rope_qk", "triton"), ("softmax", "cuda"), ("swiglu", "cuda"), ("groupnorm_silu", "cpp"),
    ("embedding_scale", "cpp"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one file came to."""

    file: str
    is_right: bool
    said: str


def gated_norm(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """A chain that the library has no kernel for: a gate, a norm without a weight, and a clamp."""
    return functional.layer_norm(torch.tanh(gate) * x, x.shape[-1:]).clamp(-3, 3)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A reduction with a mask."""
    return torch.where(mask, x.float(), 0.0).mean(-1).to(x.dtype)


def rows_of_two_tables(ids: torch.Tensor, other: torch.Tensor, words: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Rows of two tables, added and scaled."""
    return (functional.embedding(ids, words) + functional.embedding(other, kinds)) * 0.5


def generated(rows: int, cols: int) -> list[tuple[str, str, Callable[..., torch.Tensor], list[torch.Tensor]]]:
    """Title, backend, function and example inputs of the kernels that are generated from a chain."""
    x = torch.empty(rows, cols, dtype=torch.bfloat16)
    ids = torch.empty(rows, dtype=torch.int64)
    tables = [torch.empty(1000, cols, dtype=torch.bfloat16), torch.empty(16, cols, dtype=torch.bfloat16)]
    return [
        ("gated_norm", "triton", gated_norm, [x, x.clone()]),
        ("gated_norm", "cuda", gated_norm, [x, x.clone()]),
        ("masked_mean", "cpp", masked_mean, [x, torch.empty(rows, cols, dtype=torch.bool)]),
        ("rows_of_two_tables", "triton", rows_of_two_tables, [ids, ids.clone(), *tables]),
    ]


def render_all(*, is_small: bool) -> list[Rendered]:
    """Render the ten kernels."""
    found = []
    for name, backend in LIBRARY:
        kernel = load_kernel(name)
        found.append(render_kernel(kernel, backend, "bfloat16", case=kernel.spec.check[0] if is_small else None))
    for title, backend, function, inputs in generated(*((96, 256) if is_small else (8192, 4096))):
        names = tuple(function.__code__.co_varnames[: len(inputs)])
        lowered = next(lower_graph(trace(function, inputs), names))
        header = Header(title=title, summary=str(function.__doc__), origin="generated from the chain")
        rendered = backend_of(backend).render(lowered.program, header, tuning=Tuning(), fast_math=False)
        found.append(with_launcher(rendered, lowered.program))
    return found


def run_alone(rendered: Rendered, folder: Path, *, is_on_gpu: bool) -> Ran:
    """Write a kernel's file and run it in a process of its own.

    Args:
        rendered: a kernel with its launcher.
        folder: where the file goes; the process starts there.
        is_on_gpu: whether there is a CUDA device.
    """
    path = folder / f"{rendered.entry}{rendered.suffix}"
    path.write_text(rendered.file_text, encoding="utf-8")
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS") if name in os.environ}
    command = [f"./{rendered.entry}"]
    if rendered.suffix == ".py":
        command = [sys.executable, "-P", path.name]
        clean |= {} if is_on_gpu else {"TRITON_INTERPRET": "1"}
    else:
        if rendered.suffix == ".cpp":
            flags = [flag for flag in rendered.flags if flag not in ("-shared", "-fPIC")]
            compiler = [*(find_compiler() or ("c++",)), *flags, "-DFUSION_ADVISOR_MAIN"]
        else:
            compiler = [str(find_nvcc() or "nvcc"), "-O3", "-std=c++17", f"-arch={'native' if is_on_gpu else 'sm_90'}"]
        built = _call([*compiler, path.name, "-o", rendered.entry], folder, clean)
        if built.returncode:
            return Ran(file=path.name, is_right=False, said=f"does not compile: {built.stderr.strip()[:300]}")
        if rendered.suffix == ".cu" and not is_on_gpu:
            return Ran(file=path.name, is_right=True, said="compiled for sm_90, not run: no GPU is here")
    done = _call(command, folder, clean)
    said = "; ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
    return Ran(file=path.name, is_right=done.returncode == 0, said=said)


def _call(command: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False, timeout=600)


def main(arguments: list[str] | None = None) -> int:
    """Render, run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR", help="an empty folder, or one that is made")
    asked: Any = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    if any(asked.folder.iterdir()):
        parser.error(f"{asked.folder} is not empty")
    is_on_gpu = torch.cuda.is_available()
    ran = [run_alone(rendered, asked.folder, is_on_gpu=is_on_gpu) for rendered in render_all(is_small=not is_on_gpu)]
    print("| File | Result | It says |\n|--|--|--|")
    for one in ran:
        print(f"| {one.file} | {'ok' if one.is_right else 'FAILED'} | {one.said} |")
    return 0 if all(one.is_right for one in ran) else 1


if __name__ == "__main__":
    raise SystemExit(main())
