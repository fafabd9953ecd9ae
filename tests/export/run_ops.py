"""Runs the ops of an exported package in Triton's interpreter or on the CPU: python run_ops.py FOLDER NAME.

Prints each op's error and limit, against float64 and the same computation in the kernel's own dtype.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch


def error(found, right):
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def main(folder, name):
    sys.path[:0] = [folder, f"{folder}/tests"]
    ops, shown = importlib.import_module(f"{name}.ops"), {}
    for op in ops.ALL:
        reference = importlib.import_module(f"references.{op}")
        tensors = reference.make_inputs("cpu")
        inputs, out = tensors[: reference.INPUT_COUNT], tensors[-1]
        truth, plain = torch.zeros_like(out, dtype=torch.float64), torch.zeros_like(out, dtype=reference.OWN_DTYPE)
        reference.reference(*inputs, truth, dtype=torch.float64)
        reference.reference(*inputs, plain, dtype=reference.OWN_DTYPE)
        found = getattr(ops, op)(*inputs)
        assert found.shape == out.shape and found.dtype == out.dtype
        shown[op] = (error(found, truth), 1.5 * error(plain.to(out.dtype), truth) + reference.FLOOR)
    sys.stdout.write("\n" + json.dumps(shown) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
