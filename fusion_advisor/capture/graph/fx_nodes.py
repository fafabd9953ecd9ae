"""Questions to a node of a traced graph: its tensors and their memory, the module and the line that it comes from."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.runtime.torch_internals import tensor_memory

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
"""The flash kernel on its own; dropout comes after query, key and value."""
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""In order; the others are given by name."""
_MODEL = re.compile(r"^L\['(self'\]|\w+'\]\.__self__|\w+'\]\[0\])")
"""How dynamo calls the model in the frame that it captured: forward's own, torch's around it, or a decorator's ``*args``."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an op's result, one or several."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, tuple | list) else []


def storages(node: Node) -> list[int]:
    """Return a key for the storage of each tensor that a node returns; views of one tensor share theirs."""
    return [tensor_memory.storage_key(value) for value in tensors_of(node.meta.get("val"))]


def written_storages(node: Node) -> list[int]:
    """Return the storages that a node writes into, as keys of :func:`storages`; a fused call carries them as ``written``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.meta.get("written", ()))
    if not node.target._schema.is_mutable:
        return []
    written: list[int] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for item in value if isinstance(value, tuple | list) else [value]:
            if isinstance(item, Node):
                written += storages(item)
    return written


def written_inputs(graph_module: GraphModule) -> frozenset[int]:
    """Return the places of the inputs that a graph writes to, through whatever view."""
    nodes = graph_module.graph.nodes
    written = {key for node in nodes if node.op == "call_function" for key in written_storages(node)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    return frozenset(place for place, node in enumerate(inputs) if not written.isdisjoint(storages(node)))


def attention_argument(call: Node, name: str) -> Any:
    """Return an argument of an attention call; None where it is left out.

    Args:
        call: of ``scaled_dot_product_attention``.
        name: one of :data:`ATTENTION_ARGUMENTS`.
    """
    position = ATTENTION_ARGUMENTS.index(name)
    return call.args[position] if position < len(call.args) else call.kwargs.get(name)


def is_idle_dropout(node: Node) -> bool:
    """Whether a node is a dropout that drops nothing."""
    return node.target is torch.ops.aten.dropout.default and drops_nothing(node)


def drops_nothing(dropout: Node) -> bool:
    """Whether a dropout, in place or not, returns its input as it is."""
    given = dict(zip(("input", "p", "train"), dropout.args, strict=False)) | dropout.kwargs
    return not (given["train"] and given["p"])


def draws_numbers(node: Node) -> bool:
    """Whether a node takes random numbers: an attention or a dropout that drops nothing does not, whatever its tag says."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) or is_idle_dropout(node):
        return False
    if node.target is FLASH_ATTENTION:
        return len(node.args) < 4 or bool(node.args[3])
    return node.target is not ATTENTION or bool(attention_argument(node, "dropout_p"))


def first_reader(node: Node) -> Node:
    """Return the first op that reads a node: a call that replaces the node is written before it."""
    at = node.next
    while at not in node.users and at.op != "output":
        at = at.next
    return at


def is_written_between(nodes: Iterable[Node], first: Node, last: Node) -> bool:
    """Whether any of these is written to between two nodes: then what is read at the first might not be the same at the last."""
    memory = {key for node in nodes for key in storages(node)}
    at = first.next
    while at is not last:
        if memory.intersection(written_storages(at)):
            return True
        at = at.next
    return False


def is_in_autocast(node: Node) -> bool:
    """Whether an op lies between the node that enters autocast and the one that leaves it: elsewhere it means another op."""
    nodes = list(node.graph.nodes)
    before = set(nodes[: nodes.index(node)])
    entered = (other for other in before if getattr(other.target, "__name__", "") == "_enter_autocast")
    return any(not before.issuperset(other.users) for other in entered)


def code_digests(graph_module: GraphModule) -> tuple[str, ...]:
    """Return digests of the code of a graph and of the graphs inside it: branches of ``torch.cond`` have code of their own."""
    codes = (module.code for module in graph_module.modules() if isinstance(module, GraphModule))
    return tuple(hashlib.sha256(code.encode()).hexdigest() for code in codes)


def module_path(node: Node) -> str:
    """Return the path of the module an op belongs to (``h.0.mlp.act``), empty at the top level.

    An op of a backward pass belongs to the module of the forward op that it differentiates.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _MODEL.sub("", str(next(reversed(stack.values()))[0]))
    return path.replace("['", ".").replace("']", "").lstrip(".")


def source_of(node: Node) -> tuple[str, int, str]:
    """Return the file, the line and the text of the model's source that an op comes from; empty where it is unknown."""
    trace = str(node.meta.get("stack_trace") or "")
    # To ask where we are takes longer than all else here, and a capture without lines has none to make relative.
    return ("", 0, "") if not trace or trace.isspace() else _innermost(trace, str(Path.cwd()), tuple(sys.path))


@functools.lru_cache(maxsize=1024)
def _innermost(stack_trace: str, here: str, import_path: tuple[str, ...]) -> tuple[str, int, str]:
    """Read the last frame of a stack trace; every layer of a model comes from the same lines."""
    lines = stack_trace.strip().splitlines()
    for position in range(len(lines) - 1, -1, -1):
        line = lines[position].strip()
        if line.startswith('File "'):
            file, _, rest = line.removeprefix('File "').partition('", line ')
            text = lines[position + 1].strip() if position + 1 < len(lines) else ""
            return _below(file, _roots(import_path, here)), int(rest.split(",")[0]), text
    return "", 0, ""


def relative_path(path: str) -> str:
    """Return a path relative to an import root or the working directory where it is inside one: reports name no folders."""
    return _below(path, _roots(tuple(sys.path), str(Path.cwd())))


def _below(path: str, roots: Iterable[str]) -> str:
    for root in roots:
        if path.startswith(root + "/"):
            return path[len(root) + 1 :]
    return path


@functools.lru_cache(maxsize=4)
def _roots(import_path: tuple[str, ...], here: str) -> tuple[str, ...]:
    """Return the resolved roots, the longest first; asking the disk for them at every op took 0.8 s for Qwen2's 28 layers."""
    return tuple(sorted({str(Path(here, root).resolve()) for root in [*import_path, "."]}, key=len, reverse=True))


def source_path(relative: str) -> Path | None:
    """Return where a ``relative_path`` lies on this machine, or None when it is not here."""
    candidates = [Path(relative), *(Path(root or ".") / relative for root in sys.path)]
    return next((path for path in candidates if relative and path.is_file()), None)
