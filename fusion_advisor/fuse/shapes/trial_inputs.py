"""What the inputs of a trial of padding show, and more inputs where the example shows too little.

A mask of ones alone, or token types of zeros alone, hide what a model does with other numbers: a sum over zeros is the same for
any number of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.shapes.padding import PadForm
from fusion_advisor.records import OpClass


def without_evidence(opened: OpenCapture, form: PadForm, args: Sequence[Any], names: Collection[str]) -> str:
    """Say of which input of a trial padding shows nothing; empty where there is none.

    Whole numbers cannot be made up: each may be a place in a table. An input that does no more than look up rows of one needs no
    evidence.

    Args:
        opened: the piece's graph.
        form: where its sizes stand.
        args: of a trial.
        names: of the sizes that are padded.
    """
    places = [node for node in opened.region.graph.graph.nodes if node.op == "placeholder"]
    for slot, dims in form.inputs.items():
        value = args[slot]
        is_whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or slot in form.masks)
        if not is_whole or not set(names).intersection(dims) or _looks_up(places[slot]):
            continue
        if value.numel() and bool((value == value.flatten()[0]).all()):
            return f"`{opened.region.names[slot]}` holds one number alone in the example, which shows nothing of others"
    return ""


def _looks_up(node: Node) -> bool:
    """Whether whole numbers are places in tables of rows and nothing else."""
    for user in node.users:
        if user.target is torch.ops.aten.embedding.default and user.args[1] is node and user.args[0] is not node:
            continue
        is_view = isinstance(user.target, torch._ops.OpOverload) and class_of(base_name(str(user.target))) is OpClass.VIEW
        if not is_view or not _looks_up(user):
            return False
    return True


def with_turned_ends(form: PadForm, args: Sequence[Any]) -> list[Any] | None:
    """Return inputs whose masks and flags end in the other value: padding repeats what stands there; None where none is turned.

    Only what still occurs elsewhere in its row is turned: a row of which nothing counts may give NaN.

    Args:
        form: where the sizes stand.
        args: of a trial.
    """
    given, is_turned = list(args), False
    made: dict[int, torch.Tensor] = {}
    for slot in form.inputs:
        value = args[slot]
        if value.dim() == 0 or value.shape[-1] < 2 or not (value.dtype == torch.bool or slot in form.masks):
            continue
        if value.dtype != torch.bool and not bool(((value == 0) | (value == 1)).all()):
            continue
        if id(value) not in made:
            last = value[..., -1:]
            occurs = (value[..., :-1] == last).any(-1, keepdim=True)
            is_turned = is_turned or bool(occurs.any())
            made[id(value)] = torch.cat([value[..., :-1], torch.where(occurs, 1 - last.long(), last.long()).to(value.dtype)], -1)
        given[slot] = made[id(value)]
    return given if is_turned else None
