"""Kernels under sanitizers: ``python -m tools.sanitize cpp|cuda [KERNEL …] [--out RECORD.json]``.

``cpp``: AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, on any machine with g++. ``cuda``: compute-sanitizer's
memcheck, racecheck, initcheck and synccheck, on a machine with a CUDA device and the CUDA toolkit. The exit code is 0 where
nothing was found, 1 where something was, and 2 where the machine cannot run it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tools.machine import here, write_record


def main(arguments: list[str]) -> int:
    """Run one of the two; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description="Run kernels under sanitizers.")
    parser.add_argument("language", choices=("cpp", "cuda"))
    parser.add_argument("kernels", nargs="*", help="manifests; all by default (cuda: `clusters` for shared rows)")
    parser.add_argument("--out", type=Path, help="write a record of what was tried and found")
    parser.add_argument("--only", action="append", default=[], help="cpp: manifests, programs or integers (repeatable)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cpp: compilers at a time")
    parser.add_argument("--all", action="store_true", help="cuda: large cases, all spellings and dtypes too (an hour)")
    asked = parser.parse_args(arguments)
    reason = missing(asked.language)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    record = run(asked)
    record |= here(is_on_gpu=asked.language == "cuda")
    for detail in record["details"]:
        print(detail)
    print(
        f"{record['failed']} failed of {record['tried']} calls of {record['kernels']} kernels and {record['planted']} planted "
        f"faults, in {record['seconds']} s"
    )
    if asked.out:
        write_record(asked.out, record)
    return int(record["failed"] > 0)


def missing(language: str) -> str:
    """Say what this machine lacks; empty where nothing does."""
    from fusion_advisor.codegen.cpp.backend import find_compiler

    if language == "cpp":
        return "" if find_compiler() else "no C++ compiler found; install g++, or set CXX"
    import torch

    from tools.sanitize_cuda import find_sanitizer

    if not torch.cuda.is_available():
        return "there is no CUDA device on this machine"
    return "" if find_sanitizer() else "compute-sanitizer was not found; it is part of the CUDA toolkit"


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for; return a flat record."""
    if asked.language == "cpp":
        from tools import sanitize_cpp

        return sanitize_cpp.record(asked.kernels, asked.only, asked.jobs, lambda text: print(text, flush=True))
    from tools import sanitize_cuda

    return sanitize_cuda.record(asked.kernels, is_small=not asked.all, progress=sanitize_cuda.say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
