"""Compiles every kernel for this machine into the package, so that a machine like it compiles nothing: python -m gpt2_fused.prebuild.

Files are named after source, options, versions and instruction set or GPU: on any other machine they are passed over.
"""

from __future__ import annotations

import os
from pathlib import Path


def main() -> int:
    """Launch each op once on zeros, with the package's folder in place of the caches."""
    built = Path(__file__).parent / "built"
    built.mkdir(exist_ok=True)
    os.environ["FUSED_KERNELS_INTO"] = str(built)
    os.environ["TRITON_CACHE_DIR"] = str(built / "triton")  # before triton is imported
    import torch

    from . import ops

    ops.prepare()
    for name, (inputs, outputs, in_place, device) in ops.LAYOUTS.items():
        given = [*inputs, *(outputs[place] for place in in_place)]
        getattr(ops, name)(*(one.empty(torch.device(device)).zero_() for one in given))
    print(f"{sum(path.is_file() for path in built.rglob('*'))} files in {built}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
