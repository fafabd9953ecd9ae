"""Runs the ops of an exported package in Triton's interpreter or on the CPU: python run_ops.py FOLDER NAME.

Prints error and limit of each op's results, against float64 and the same computation in the kernel's own dtype.
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
        inputs, outputs = tensors[: reference.INPUT_COUNT], tensors[reference.INPUT_COUNT :]
        truth, plain = ([torch.zeros_like(one, dtype=kind) for one in outputs] for kind in (torch.float64, reference.OWN_DTYPE))
        reference.reference(*inputs, *truth, dtype=torch.float64)
        reference.reference(*inputs, *plain, dtype=reference.OWN_DTYPE)
        found = getattr(ops, op)(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in outputs]
        shown[op] = [
            (error(one, right), 1.5 * error(own.to(one.dtype), right) + reference.FLOOR)
            for one, right, own in zip(found, truth, plain, strict=True)
        ]
    sys.stdout.write("\n" + json.dumps(shown) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
