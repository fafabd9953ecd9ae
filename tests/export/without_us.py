"""Runs an exported package's tests, and compares it with the fused model, where ``fusion_advisor`` cannot be imported.

Called as ``python -I without_us.py PACKAGE_FOLDER NAME EXPECTED.pt``; prints a line of JSON at the end.
"""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch


class Blocked:
    """An import hook that has no fusion_advisor."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fusion_advisor":
            raise ImportError("fusion_advisor is blocked")


def main(folder, name, expected):
    sys.meta_path.insert(0, Blocked())
    try:
        importlib.import_module("fusion_advisor")
    except ImportError:
        pass
    else:
        return "fusion_advisor can be imported"
    sys.path.insert(0, folder)
    package, example = importlib.import_module(name), importlib.import_module(f"{name}.example")
    then = torch.load(expected, weights_only=True)
    model = example.make_model()
    model.load_state_dict(then["state"])
    package.apply(model)
    with torch.no_grad():
        found = model(**then["inputs"])
        explained = torch._dynamo.explain(model)(**then["inputs"])
    shown = {
        "equal": [torch.equal(found[key], value) for key, value in then["outputs"].items()],
        "fallbacks": package.fallbacks(model),
        "graphs": explained.graph_count,
        "breaks": explained.graph_break_count,
        "tests": pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", folder, f"{folder}/tests"]),
        "loaded": sorted(one for one in sys.modules if one.startswith("fusion_advisor")),
    }
    sys.stdout.write("\n" + json.dumps(shown) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
