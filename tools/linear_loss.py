"""Times a linear layer with its cross-entropy, both passes: ``python -m tools.linear_loss [--rows N …] --to FILE.json``.

Contenders: eager, torch.compile, Liger's fused loss and ours, as ``fa.apply(phase="train")`` chooses it. Each runs forward and
backward over the same hidden states, weight and labels. Times are medians by the wall clock. Memory is what a step
takes at its peak beside the weight, the hidden states and their gradients. Loss and gradients are compared with fp64's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

import fusion_advisor as fa
from tools.machine import here

Step = Callable[[], torch.Tensor]
Truth = tuple[float, torch.Tensor, torch.Tensor]
"""The loss, and the gradients of the hidden states and of the weight."""
_RUNS, _BLOCK = 20, 512


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the step.

    Attributes:
        name: of the way.
        step_ms: forward and backward; None where it failed.
        peak_bytes: beside what goes in and the two gradients that come out.
        loss_error: of the loss, relative.
        hidden_error: of the hidden states' gradient, relative L2.
        weight_error: of the weight's gradient, relative L2.
        note: why it failed, or what was chosen.
    """

    name: str
    step_ms: float | None = None
    peak_bytes: int | None = None
    loss_error: float | None = None
    hidden_error: float | None = None
    weight_error: float | None = None
    note: str = ""


class Head(torch.nn.Module):
    """The last layer of a language model, and its loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return functional.cross_entropy(self.lm_head(hidden), labels)


def truth_of(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Truth:
    """Return the loss and both gradients in fp64, by the formula ``(softmax - one-hot) / rows``."""
    rows, wide = len(hidden), weight.double()
    loss, for_hidden, for_weight = 0.0, torch.empty_like(hidden, dtype=torch.float64), torch.zeros_like(wide)
    for start in range(0, rows, _BLOCK):
        block, target = hidden[start : start + _BLOCK].detach().double(), labels[start : start + _BLOCK]
        log_shares = torch.log_softmax(block @ wide.T, dim=-1)
        loss -= float(log_shares.gather(1, target[:, None]).sum()) / rows
        gradient = log_shares.exp_()
        gradient[torch.arange(len(block), device=block.device), target] -= 1
        gradient /= rows
        for_hidden[start : start + _BLOCK] = gradient @ wide
        for_weight += gradient.T @ block
    return loss, for_hidden, for_weight


def timed(name: str, step: Step, hidden: torch.Tensor, head: Head, truth: Truth, note: str = "") -> Way:
    """Run a step until it is warm, time it, and compare what it gives."""
    on_gpu = hidden.is_cuda
    weight = head.lm_head.weight

    def run() -> torch.Tensor:
        hidden.grad = weight.grad = None
        loss = step()
        torch.autograd.backward(loss)
        return loss.detach()

    def once() -> float:
        start_ns = time.perf_counter_ns()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter_ns() - start_ns) / 1e6

    loss = run()
    assert hidden.grad is not None and weight.grad is not None
    pairs = zip((hidden.grad, weight.grad), truth[1:], strict=True)
    errors = [float((mine.double() - true).norm() / true.norm()) for mine, true in pairs]
    peak = None
    if on_gpu:
        run()
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    once()
    times = [once() for _ in range(_RUNS)]
    return Way(
        name, step_ms=round(statistics.median(times), 3), peak_bytes=peak, loss_error=abs(float(loss) - truth[0]) / truth[0],
        hidden_error=errors[0], weight_error=errors[1], note=note,
    )  # fmt: skip


def ways(rows: int, width: int, vocabulary: int, dtype: torch.dtype, device: str) -> Iterator[Way]:
    """Time all ways at one size, one after another."""
    torch.manual_seed(0)
    with torch.device(device):
        head = Head(width, vocabulary).to(dtype).train()
        hidden = torch.randn(rows, width).to(dtype).requires_grad_()
        labels = torch.randint(vocabulary, (rows,))
    truth = truth_of(hidden, head.lm_head.weight.detach(), labels)
    yield timed("eager", lambda: head(hidden, labels), hidden, head, truth)
    compiled = torch.compile(head)
    yield timed("torch.compile", lambda: compiled(hidden, labels), hidden, head, truth)
    torch.compiler.reset()
    if importlib.util.find_spec("liger_kernel") is None or not hidden.is_cuda:
        yield Way("Liger", note="needs liger-kernel and a GPU")
    else:
        liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        yield timed("Liger", lambda: liger(head.lm_head.weight, hidden, labels), hidden, head, truth)
    fused = fa.apply(head, (hidden, labels), phase="train", effort="quick", compile=False)
    report = fused.report
    assert report is not None
    rows_of_report = [(one.id, one.status) for one in report.rewrites] + [(one.id, one.status) for one in report.fusions]
    kept = ", ".join(name for name, status in rows_of_report if status == "kept")
    note = f"kept: {kept}; own ops: {dict(fused.fallbacks)}"
    yield timed("ours", lambda: head(hidden, labels), hidden, head, truth, note)
    fused.revert()


def main(argv: Sequence[str] | None = None) -> None:
    """Time the sizes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    found = []
    for rows in given.rows:
        for way in ways(rows, given.width, given.vocabulary, getattr(torch, given.dtype), "cuda" if on_gpu else "cpu"):
            found.append({"rows": rows, "width": given.width, "vocabulary": given.vocabulary, **asdict(way)})
            print(json.dumps(found[-1]), flush=True)
    given.to.write_text(
        json.dumps({"machine": here(is_on_gpu=on_gpu), "dtype": given.dtype, "ways": found}) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
