"""Ranges of a tiny Qwen2's decode steps with Triton's kernels in its interpreter: what a GPU's ranges go through, on a CPU.

Run as a program it prints a line of JSON for each point: the call, its sizes, its kernels, and why it runs the original ops.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import fusion_advisor


def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48
    )
    model = Qwen2ForCausalLM(config).eval()
    fused = fusion_advisor.apply(
        model, {"input_ids": torch.randint(3, 99, (1, 5))}, shapes="cached=1..4", keep="verified", effort="quick",
        compile=False, backend="triton",
    )  # fmt: skip
    for piece in fused.report.shapes.pieces:
        for point in piece.points:
            kernels = [fusion.kernel for fusion in point.fusions]
            row = {"call": piece.call, "sizes": point.sizes, "kernels": kernels, "reason": point.reason}
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
