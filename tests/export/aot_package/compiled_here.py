"""Runs an exported AOTInductor package where ``fusion_advisor`` cannot be imported and where nothing may be traced.

Called as ``python -I compiled_here.py FOLDER RESULTS.pt [graph]``.
"""

from __future__ import annotations

import gc
import importlib.util
import sys

import torch
import torch._dynamo


class Blocked:
    """An import hook that has no fusion_advisor and no transformers."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fusion_advisor", "transformers"):
            raise ImportError(f"{name} is blocked")


def main(folder, results, *graph):
    sys.meta_path.insert(0, Blocked())
    spec = importlib.util.spec_from_file_location("run", f"{folder}/run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    call, inputs = run.load(**({"cuda_graph": True} if graph else {})), torch.load(f"{folder}/example.pt", weights_only=True)
    found = call(**inputs)
    if graph:  # what is recorded follows what it is given, and gives the same for the same
        kept = {name: value.clone() for name, value in found.items()}
        gc.collect()
        torch.cuda.empty_cache()
        taken = torch.full((1 << 28,), float("nan"), device="cuda")  # memory that the model let go would hold this
        others = {name: value.flip(-1) for name, value in inputs.items()}
        assert any(not torch.equal(value, kept[name]) for name, value in call(**others).items())
        found = {name: value.clone() for name, value in call(**inputs).items()}
        assert all(torch.equal(value, kept[name]) for name, value in found.items())
        del taken
    first = next(iter(inputs))
    try:
        call(**{**inputs, first: inputs[first][:1]})
    except ValueError:
        torch.save(found, results)
        return torch._dynamo.utils.counters["frames"].get("total", 0)
    return "other sizes are not refused"


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
