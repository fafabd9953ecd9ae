"""Says which share of a training step's bytes its chains take: ``python -m tools.training_chains [MODEL …]``.

Each model is tiny and has its own ops: dropout, grouped heads, batch norms. Counted is what each op of both passes reads and
writes, a broadcast dim once. Products of matrices, convolutions and attention are left out. ``nll_loss_forward`` reads one number
a row, so that is what it counts for. The largest ops that no chain takes follow, with their share.
"""

from __future__ import annotations

import argparse
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.op_inputs import inputs_of
from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.records import OpClass, OpNode, TensorMeta
from fusion_advisor.records.op_facts import item_bytes, overload_free

_LEFT_OUT = (OpClass.GEMM, OpClass.ATTENTION, OpClass.CONVOLUTION, OpClass.INPUT, OpClass.VIEW)
_OPTIONS = ApplyOptions(keep="verified", compile=False, min_share=0.0, skip=("linear-cross-entropy",))
_SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_TEXT = {**_SMALL, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
_ROWS, _TOKENS = 4, 64


@dataclass(frozen=True, slots=True)
class Share:
    """What chains take of one pass.

    Attributes:
        training_pass: ``forward`` or ``backward``.
        chained_bytes: of ops in chains.
        all_bytes: of all ops that count.
        outside_bytes: of each op that no chain takes, by base name.
    """

    training_pass: str
    chained_bytes: int
    all_bytes: int
    outside_bytes: Counter[str]


def shares(model: torch.nn.Module, **inputs: Any) -> list[Share]:
    """Return what chains take of each pass of a step; a model whose graph breaks has several pairs of passes.

    Args:
        model: with a ``loss`` among its outputs.
        inputs: of one step.
    """
    found: list[Share] = []

    def count(region: Region, options: ApplyOptions, check: object = None) -> Callable[..., Any]:
        del options, check
        found.append(share_of(describe(region)[0], region.training_pass))
        return region.original.forward

    torch.compiler.reset()
    compiled = torch.compile(model.train(), backend=lambda graph, given: fuse_graph(graph, given, _OPTIONS, count), dynamic=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fusion-advisor runs the original ops")
        compiled(**inputs).loss.backward()
    torch.compiler.reset()
    return found


def share_of(ops: Sequence[OpNode], training_pass: str) -> Share:
    """Return what chains take of one pass.

    Args:
        ops: of the pass.
        training_pass: its name.
    """
    groups = find_groups(ops, functools.partial(judge_with, ops))
    members = {member for group in groups if group.verdict.is_fusible for member in group.members}
    moved = {op.index: _moved_bytes(op, ops) for op in ops if op.role == "op" and op.op_class not in _LEFT_OUT}
    outside: Counter[str] = Counter()
    for index, count in moved.items():
        if index not in members:
            outside[overload_free(ops[index].target)] += count
    total = sum(moved.values())
    return Share(training_pass, total - sum(outside.values()), total, outside)


def _moved_bytes(op: OpNode, ops: Sequence[OpNode]) -> int:
    if op.target == "getitem":
        return 0
    read = [meta for source in inputs_of(op) if len(ops[source].outputs) == 1 for meta in ops[source].outputs]
    if overload_free(op.target) == "nll_loss_forward":
        return sum(2 * _bytes(meta) for meta in read if meta.dtype == "int64")
    return sum(map(_bytes, (*read, *op.outputs)))


def _bytes(meta: TensorMeta) -> int:
    return math.prod(size for size, stride in zip(meta.shape, meta.stride, strict=True) if stride) * item_bytes(meta.dtype)


def _text(model: torch.nn.Module, **more: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    ids = torch.randint(0, 256, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "labels": ids, **more}


def _images(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]]:
    drawn = torch.Generator().manual_seed(0)
    return model, {"pixel_values": torch.randn(_ROWS, 3, 32, 32, generator=drawn), "labels": torch.arange(_ROWS)}


def _llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    return _text(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT)), use_cache=False)


def _qwen2() -> tuple[torch.nn.Module, dict[str, Any]]:
    return _text(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_TEXT, num_key_value_heads=2)), use_cache=False)


def _gpt2() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=_TOKENS, bos_token_id=0, eos_token_id=0
    )
    return _text(transformers.GPT2LMHeadModel(config), use_cache=False)


def _bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    return _text(transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL, vocab_size=512)))


def _vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    return _images(
        transformers.ViTForImageClassification(transformers.ViTConfig(**_SMALL, image_size=32, patch_size=4, num_labels=8))
    )


def _resnet() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_labels=8, layer_type="basic")
    return _images(transformers.ResNetForImageClassification(config))


def _convnext() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.ConvNextConfig(
        hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, image_size=32, num_labels=8, patch_size=2
    )
    return _images(transformers.ConvNextForImageClassification(config))


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
    "llama": _llama, "qwen2": _qwen2, "gpt2": _gpt2, "bert": _bert, "vit": _vit, "resnet": _resnet, "convnext": _convnext,
}  # fmt: skip
"""Makes each model, and the inputs of one step."""


def whole(found: Sequence[Share]) -> tuple[float, dict[str, float]]:
    """Return the share of all passes together that is in chains, and the shares of the ops outside, largest first.

    Args:
        found: of all passes.
    """
    total = max(sum(one.all_bytes for one in found), 1)
    outside = sum((one.outside_bytes for one in found), Counter[str]())
    return sum(one.chained_bytes for one in found) / total, {name: count / total for name, count in outside.most_common()}


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    for name in parser.parse_args().models:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        inside, outside = whole(shares(model, **inputs))
        rest = ", ".join(f"{op} {share:.1%}" for op, share in list(outside.items())[:6] if share >= 0.001)
        print(f"{name}: {inside:.1%} of the bytes in chains; outside: {rest or 'nothing'}")


if __name__ == "__main__":
    main()
