"""Lay out weights for the GEMMs that can run on them, while a model is being loaded.

Linears that read one input (q/k/v, gate/up) can run as one GEMM on a view of their weights, with no second copy of them, when
those lie one after the other. A weight of an odd number of rows (a vocabulary of 50,257) gets room for a few more after it, so
that its GEMM can run on a rounded size. The model is the same otherwise: names, values, dtypes, ties and the state_dict do not
change, and no weight is laid out twice. This is done to models that we load or that a factory makes for us, before anybody holds
their parameters; a user's live model is never touched.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

_ALIGNMENT_BYTES = 16
"""Alignment of an operand for cuBLAS's 128-bit loads: a weight at another address would slow its GEMM."""
GEMM_MULTIPLE = _ALIGNMENT_BYTES // 2
"""Elements of 16 bits in that: widths that are no multiple of it get a GEMM for operands aligned to nothing."""


def lay_out_siblings(model: nn.Module) -> int:
    """Give the weights (and the biases) of sibling linears one storage each group.

    Siblings are ``nn.Linear`` children of one module with equal ``in_features``, dtype and device, in the order in which the
    module holds them. Tied weights stay where they are, also those that are tied by their memory alone.

    Args:
        model: owned by the caller; its linears get new parameter objects over the same values.

    Returns:
        How many groups were laid out.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = _tied_by_memory(model)
    groups = 0
    for parent in model.modules():
        families: dict[tuple[object, ...], list[nn.Linear]] = {}
        for child in parent.children():
            if type(child) is nn.Linear and all(
                _is_plain(p) and uses[id(p)] == 1 and id(p) not in tied for p in child.parameters()
            ):
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


def leave_room(model: nn.Module) -> int:
    """Give 16-bit weights and biases of linears, where their rows are no multiple of eight, memory for seven more of them.

    A padded GEMM reads the rows up to the next multiple; one that stores odd rows in place (``odd_width_gemm``) all seven.
    Tied weights stay tied: every module with the old one gets the new parameter, and parameters that share their memory stay
    where they are. The further rows are zeros.

    Args:
        model: owned by the caller; its linears get new parameter objects over the same values.

    Returns:
        How many parameters were moved.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, name))
    tied = _tied_by_memory(model)
    moved = 0
    for linear in [module for module in model.modules() if type(module) is nn.Linear]:
        for parameter in list(linear.parameters(recurse=False)):
            if not parameter.dim() or id(parameter) in tied or not _is_plain(parameter):
                continue
            rows = roomy_rows(parameter.shape[0])
            fills_storage = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            if parameter.element_size() != 2 or has_room(parameter, rows) or not (parameter.is_contiguous() and fills_storage):
                continue
            memory = parameter.detach().new_zeros((rows, *parameter.shape[1:]))
            memory[: parameter.shape[0]] = parameter.detach()
            replacement = nn.Parameter(memory[: parameter.shape[0]], requires_grad=parameter.requires_grad)
            replacement.__dict__.update(parameter.__dict__)
            for module, name in holders[id(parameter)]:
                setattr(module, name, replacement)
            moved += 1
    return moved


def padded_rows(rows: int) -> int:
    """Round a width up to what a GEMM of 16-bit elements runs well on."""
    return -(-rows // GEMM_MULTIPLE) * GEMM_MULTIPLE


def roomy_rows(rows: int) -> int:
    """Return how many rows a weight of so many has memory for once :func:`leave_room` was there."""
    return rows + GEMM_MULTIPLE - 1 if rows % GEMM_MULTIPLE else rows


def has_room(tensor: torch.Tensor, rows: int) -> bool:
    """Whether a contiguous tensor's storage holds this many rows from where it starts."""
    each = tensor.stride(0) if tensor.dim() > 1 else 1
    end = (tensor.storage_offset() + rows * each) * tensor.element_size()
    return tensor.is_contiguous() and end <= tensor.untyped_storage().nbytes()


def _tied_by_memory(model: nn.Module) -> set[int]:
    """Return the ids of the parameters and buffers in whose memory another one lies, wholly or in part.

    A common storage alone ties nothing: weights may be parts of one mapped file.
    """
    spans = []
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), id(tensor)))
    tied: set[int] = set()
    reach, holder = 0, 0
    for start, end, tensor_id in sorted(spans):
        if start < reach:
            tied |= {holder, tensor_id}
        if end > reach:
            reach, holder = end, tensor_id
    return tied


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a new parameter over the same values is the same: no subclass's tensor, and nobody waits for its gradient."""
    return type(parameter.data) is torch.Tensor and not parameter._backward_hooks and not parameter.is_meta


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
