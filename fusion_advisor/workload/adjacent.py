"""Lay out the weights of sibling linears one after the other in memory, while a model is being loaded.

Linears that read one input (q/k/v, gate/up) can then run as one GEMM on a view of their weights, with no second copy of them. The
model is the same otherwise: names, values, dtypes and the state_dict do not change, and no weight is laid out twice. This is done
to models that we make or load, before anybody holds their parameters; a user's live model is never touched.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

_ALIGNMENT_BYTES = 16
"""What cuBLAS asks of an operand's address to load 128 bits at once: a weight that starts elsewhere would slow its own GEMM."""


def lay_out_siblings(model: nn.Module) -> int:
    """Give the weights (and the biases) of sibling linears one storage each group.

    Siblings are ``nn.Linear`` children of one module with equal ``in_features``, dtype and device, in the order in which the
    module holds them. Tied weights stay where they are.

    Args:
        model: owned by the caller; its linears get new parameter objects over the same values.

    Returns:
        How many groups were laid out.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    groups = 0
    for parent in model.modules():
        families: dict[tuple[object, ...], list[nn.Linear]] = {}
        for child in parent.children():
            if type(child) is nn.Linear and all(uses[id(parameter)] == 1 for parameter in child.parameters()):
                weight = child.weight
                key = (child.in_features, child.bias is None, weight.dtype, weight.device)
                families.setdefault(key, []).append(child)
        for linears in families.values():
            if len(linears) < 2 or not all(_is_aligned(parameter) for linear in linears for parameter in linear.parameters()):
                continue
            _join(linears, "weight")
            if linears[0].bias is not None:
                _join(linears, "bias")
            groups += 1
            if linears[0].weight.is_cuda:
                torch.cuda.empty_cache()  # what they left fits nothing that comes after, and would stay reserved
    return groups


def _is_aligned(parameter: nn.Parameter) -> bool:
    return parameter.is_contiguous() and parameter.numel() * parameter.element_size() % _ALIGNMENT_BYTES == 0


def _join(linears: list[nn.Linear], name: str) -> None:
    parameters = [linear.get_parameter(name) for linear in linears]
    memory = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for linear, parameter in zip(linears, parameters, strict=True):
        end = start + parameter.shape[0]
        moved = nn.Parameter(memory[start:end], requires_grad=parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        setattr(linear, name, moved)
        start = end
