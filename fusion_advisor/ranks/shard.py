"""Splits a model over ranks by its own plan: each rank keeps its part of a weight as a plain tensor.

A plan names a style for modules (``colwise``, ``rowwise``), as transformers' models carry one. torch and transformers carry it
out with DTensors, a tensor class whose ops no graph of plain ops can hold. Here each linear holds its part as an ordinary
parameter, and sums over ranks are functional collectives, which a graph holds as ops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fusion_advisor.errors import UnsupportedPlan

_COLUMNS, _ROWS = "colwise", "rowwise"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "replicate")
"""Stay whole on each rank: an embedding reads a row of its table, and norms over a head read what the rank has."""
_HEADS = ("num_attention_heads", "num_key_value_heads")


class RowSplitLinear(nn.Linear):
    """A linear whose input is split: each rank multiplies its part, and the products are summed over the ranks.

    Attributes:
        group_name: name of the process group.
    """

    group_name: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole result, on all ranks."""
        partial = nn.functional.linear(x, self.weight)
        total = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(partial, "sum", self.group_name))
        return total if self.bias is None else total + self.bias


class GatheredLinear(nn.Linear):
    """A linear whose output is split over the ranks and gathered.

    Attributes:
        group_name: name of the process group.
        world_size: number of its ranks.
    """

    group_name: str
    world_size: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole result, on all ranks."""
        own = nn.functional.linear(x, self.weight, self.bias).contiguous()
        every = torch.ops._c10d_functional.all_gather_into_tensor(own, self.world_size, self.group_name)
        return torch.cat(torch.ops._c10d_functional.wait_tensor(every).chunk(self.world_size), -1)


def plan_of(model: nn.Module, model_id: str, world_size: int) -> Mapping[str, str]:
    """Return the plan that a model carries.

    Args:
        model: any module.
        model_id: for the message.
        world_size: number of ranks, for the message.

    Raises:
        UnsupportedPlan: it carries none.
    """
    plan = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not plan:
        raise UnsupportedPlan(model_id=model_id, ranks=world_size, detail=f"{type(model).__name__} has no plan for it")
    return dict(plan)


def shard(model: nn.Module, plan: Mapping[str, str], rank: int, world_size: int, group_name: str, *, model_id: str) -> int:
    """Give each linear that a plan names this rank's part of its weight.

    Args:
        model: changed in place; every rank has loaded the same whole model.
        plan: style by module path, in which ``*`` stands for a number.
        rank: of this process.
        world_size: number of ranks.
        group_name: of their process group.
        model_id: for messages.

    Returns:
        How many linears were split.

    Raises:
        UnsupportedPlan: a size is no multiple of the ranks, or a style is not known here; the model is as it was then.
    """
    styles = {re.compile(re.escape(path).replace(r"\*", r"\d+")): style for path, style in plan.items()}
    tied = _tied(model)
    chosen = []
    for path, module in model.named_modules():
        style = next((style for pattern, style in styles.items() if pattern.fullmatch(path)), None)
        if style is None or style in _WHOLE or (style in _GATHERED and id(getattr(module, "weight", None)) in tied):
            continue
        if style not in (_COLUMNS, _ROWS, *_GATHERED) or type(module) is not nn.Linear:
            raise UnsupportedPlan(
                model_id=model_id, ranks=world_size, detail=f"`{path}` ({type(module).__name__}) has the style `{style}`"
            )
        size = module.in_features if style == _ROWS else module.out_features
        if size % world_size:
            if style in _GATHERED:
                continue
            raise UnsupportedPlan(model_id=model_id, ranks=world_size, detail=f"`{path}` has {size} features to split")
        chosen.append((path, module, style))
    _refuse_split_heads(model, world_size, model_id)
    for path, module, style in chosen:
        parent = model.get_submodule(path.rpartition(".")[0])
        setattr(parent, path.rpartition(".")[2], _part(module, style, rank, world_size, group_name))
    return len(chosen)


def _refuse_split_heads(model: nn.Module, world_size: int, model_id: str) -> None:
    config: Any = getattr(model, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % world_size:
            raise UnsupportedPlan(model_id=model_id, ranks=world_size, detail=f"{name} is {heads}")


def _tied(model: nn.Module) -> set[int]:
    """Parameters that two modules hold."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _part(whole: nn.Linear, style: str, rank: int, world_size: int, group_name: str) -> nn.Linear:
    """Return a linear that holds one rank's part of another one's weight."""
    dim = 1 if style == _ROWS else 0
    cls = {_ROWS: RowSplitLinear, _COLUMNS: nn.Linear}.get(style, GatheredLinear)
    made = cls(1, 1, bias=False, device="meta")
    size = whole.weight.shape[dim] // world_size

    def own(tensor: torch.Tensor) -> nn.Parameter:
        # a copy of its own: a view would keep the whole weight in memory
        return nn.Parameter(tensor.detach().narrow(dim, rank * size, size).clone(), requires_grad=tensor.requires_grad)

    made.weight = own(whole.weight)
    if whole.bias is not None:
        made.bias = whole.bias if style == _ROWS else own(whole.bias)
    made.out_features, made.in_features = made.weight.shape
    if isinstance(made, RowSplitLinear | GatheredLinear):
        made.group_name = group_name
    if isinstance(made, GatheredLinear):
        made.world_size = world_size
    return made.train(whole.training)
