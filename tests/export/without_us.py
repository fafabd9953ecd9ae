"""Runs exported packages' tests, and compares them with the fused models, where ``fusion_advisor`` cannot be imported.

Called as ``python -I without_us.py FOLDER NAME...`` in an environment with the packages installed; FOLDER has for each NAME a
folder ``NAME`` with its tests and ``NAME.pt`` with what the fused model returned. Prints a line of JSON at the end. Each package
has a process of its own. Without a GPU it is forked: the packages share one import of torch, of its compilers and of
transformers, which takes longer than their tests. With a GPU it is spawned: CUDA cannot be used in a forked process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
import transformers


class Blocked:
    """An import hook that has no fusion_advisor."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fusion_advisor":
            raise ImportError("fusion_advisor is blocked")


def checked(folder, name):
    """Compare the package's model with the fused one, and run the package's own tests."""
    package, example = importlib.import_module(name), importlib.import_module(f"{name}.example")
    then = torch.load(folder / f"{name}.pt", weights_only=True)
    model = example.make_model()
    model.load_state_dict(then["state"])
    package.apply(model)
    with torch.no_grad():
        found = model(**then["inputs"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tests = pytest.main(
            ["-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", str(folder / name), str(folder / name / "tests")]
        )
    return {
        "equal": [torch.equal(found[key], value) for key, value in then["outputs"].items()],
        "fallbacks": package.fallbacks(model),
        "is_installed": Path(package.__file__).is_relative_to(sys.prefix),
        "tests": int(tests),
        "printed": printed.getvalue(),
        "loaded": sorted(one for one in sys.modules if one.startswith("fusion_advisor")),
    }


def import_compilers():
    """Import what the compilers import at their first use."""
    layer, x = torch.nn.Linear(1, 1), torch.ones(1, 1)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        torch.export.export(layer, (x,))
    assert transformers.GenerationMixin, transformers.PreTrainedModel


def block_us():
    """Let no later import of this process find fusion_advisor.

    Raises:
        RuntimeError: it can be imported all the same.
    """
    sys.meta_path.insert(0, Blocked())
    try:
        importlib.import_module("fusion_advisor")
    except ImportError:
        return
    raise RuntimeError("fusion_advisor can be imported")


def main(folder, *names):
    block_us()
    method = "spawn" if torch.cuda.is_available() else "fork"
    if method == "fork":
        import_compilers()
    with multiprocessing.get_context(method).Pool(len(names), initializer=block_us, maxtasksperchild=1) as pool:
        shown = pool.starmap(checked, [(Path(folder), name) for name in names], chunksize=1)
    sys.stdout.write("\n" + json.dumps(dict(zip(names, shown, strict=True))) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
