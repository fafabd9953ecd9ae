"""The inputs of a rewritten graph: which are the model's tensors, by their names, and which are arguments of its call."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Graph, Node

from fusion_advisor.errors import CannotExport
from fusion_advisor.fuse.passes.merge_gemms import is_merged_operand
from fusion_advisor.fuse.rewrite.derived_tensors import Extended

_LAYER = re.compile(r"(?P<prefix>(?:[^.]+\.)*?[^.\d][^.]*\.)(?P<number>\d+)(?:\.|\Z)")
"""The outermost numbered part of a path: ``transformer.h.3`` of ``transformer.h.3.mlp.c_fc``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One of a row of layers: ``transformer.h.`` and 3."""

    container: str
    number: int

    @property
    def path(self) -> str:
        """Of the layer's module."""
        return f"{self.container}{self.number}"


def layer_of(path: str) -> Layer | None:
    """Return the layer that a module or a parameter belongs to; None where its path has no number.

    Args:
        path: of a module or a parameter.
    """
    found = _LAYER.match(path)
    return Layer(found["prefix"], int(found["number"])) if found else None


def attribute(path: str, root: str = "model") -> str:
    """Return the expression of a module or a tensor inside a module.

    Args:
        path: as in the state_dict.
        root: expression of the outer module.
    """
    text = root
    for part in filter(None, path.split(".")):
        if part.isdigit():
            text += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        else:
            text = f"getattr({text}, {part!r})"
    return text


def place_of(path: str) -> str:
    """Return the expression of what lies at a path of the call's arguments.

    Args:
        path: ``cache.layers.0.keys``.
    """
    root, _, rest = path.partition(".")
    return attribute(rest, root)


def tensor_names(model: nn.Module, placeholders: Sequence[Node], names: Sequence[str]) -> Mapping[Node, str]:
    """Return the name of each placeholder that is a parameter or a buffer of the model.

    Args:
        model: the live model.
        placeholders: of the graph.
        names: of the region's inputs.

    Raises:
        CannotExport: one is a tensor that the model holds outside of its parameters and buffers, or a module that is no list
            numbers its parts.
    """
    _refuse_numbered(model)
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    unnamed = [name for node, name in zip(placeholders, names, strict=True) if node.users and name.startswith("input.")]
    if unnamed:
        detail = f"it reads {len(unnamed)} values that are neither arguments of its call nor parameters or buffers by name"
        raise CannotExport(detail=detail)
    return {node: name for node, name in zip(placeholders, names, strict=True) if name in known}


def _refuse_numbered(model: nn.Module) -> None:
    """Raise CannotExport where a number is the name of a part that no index finds: the forward writes ``layers[3]``."""
    for path, module in model.named_modules():
        names = [*module._modules, *module._parameters, *module._buffers]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ParameterList)
        if not is_list and any(name.isdigit() for name in names):
            raise CannotExport(
                detail=f"`{path or 'the model'}` is a {type(module).__name__} whose parts are named by numbers; use a ModuleList"
            )


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """Parameters that lie one after the other while the package's forward is in place.

    Attributes:
        name: of the view of them all.
        sources: their names.
        rows: of the view; those after theirs hold zeros.
    """

    name: str
    sources: tuple[str, ...]
    rows: int


def is_joined_operand(target: object) -> bool:
    """Whether a node's target views parameters where they lie: several as one, or one with more rows after it.

    Args:
        target: of a node.
    """
    return is_merged_operand(target) or isinstance(target, Extended)


def joined_tensors(graph: Graph, tensors: Mapping[Node, str]) -> Mapping[Node, JoinedTensor]:
    """Return what each merged or padded weight or bias is called in the package, and the parameters that it is made of.

    Args:
        graph: the rewritten graph.
        tensors: names of its placeholders.

    Raises:
        CannotExport: one is made of something else, or a weight is padded in two ways.
    """
    found: dict[Node, JoinedTensor] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_joined_operand(node.target):
            sources = node.all_input_nodes
            if not all(source in tensors for source in sources):
                raise CannotExport(detail="a merged or padded GEMM reads weights that are no parameters")
            names = tuple(tensors[source] for source in sources)
            found[node] = JoinedTensor(_joined_name(names), names, node.meta["val"].shape[0])
    rows = {(one.name, one.rows) for one in found.values()}
    if len({name for name, _ in rows}) < len(rows):
        raise CannotExport(detail="two products read one weight with different numbers of rows after it")
    return found


def _joined_name(names: Sequence[str]) -> str:
    """``layers.0.attn.joined_q_k_v_weight`` of ``layers.0.attn.q.weight`` …; ``lm_head.padded_weight`` of one alone."""
    if len(names) == 1:
        parent, dot, leaf = names[0].rpartition(".")
        return f"{parent}{dot}padded_{leaf}"
    paths = [name.split(".") for name in names]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    own = ["_".join(path[shared:-1]) for path in paths]
    return ".".join([*paths[0][:shared], "_".join(["joined", *filter(None, own), paths[0][-1]])])
