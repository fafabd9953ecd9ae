"""Lay out weights in memory for the GEMMs that can run on them.

Linears that read one input (q/k/v, gate/up) can run as one GEMM on a view of their weights, with no second copy of them, when
those lie one after the other. A weight of an odd number of rows (a vocabulary of 50,257) gets room for a few more after it, so
that its GEMM can run on a rounded size. The model is the same otherwise: parameters, names, values, dtypes, ties and the
state_dict do not change. This is done to models that we load or that a factory makes for us. A user's live model is laid out
only where the user asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

_ALIGNMENT_BYTES = 16
"""Alignment of an operand for cuBLAS's 128-bit loads: a weight at another address would slow its GEMM."""
GEMM_MULTIPLE = _ALIGNMENT_BYTES // 2
"""Elements of 16 bits in that: widths that are no multiple of it get a GEMM for operands aligned to nothing."""


def lay_out_weights(model: nn.Module) -> int:
    """Do both of what follows; see :func:`fusion_advisor.lay_out_weights`.

    Returns:
        How many parameters were moved.
    """
    return lay_out_siblings(model) + leave_room(model)


def lies_laid_out(model: nn.Module) -> bool:
    """Whether :func:`lay_out_weights` would move nothing."""
    return not any(True for _ in _groups(model)) and not any(True for _ in _without_room(model))


def lay_out_siblings(model: nn.Module) -> int:
    """Give the weights (and the biases) of sibling linears one storage each group.

    Siblings are ``nn.Linear`` children of one module with equal ``in_features``, dtype and device, in the order in which the
    module holds them. Tied weights stay where they are, also those that are tied by their memory alone.

    Args:
        model: its parameters get other memory with the same values.

    Returns:
        How many parameters were moved.
    """
    moved = 0
    for parameters in list(_groups(model)):
        with torch.inference_mode(False):
            memory = torch.cat([parameter.detach() for parameter in parameters])
            start = 0
            for parameter in parameters:
                parameter.data = memory[start : start + parameter.shape[0]]
                start += parameter.shape[0]
        moved += len(parameters)
        if memory.is_cuda:
            torch.cuda.empty_cache()  # what they left fits nothing that comes after, and would stay reserved
    return moved


def leave_room(model: nn.Module) -> int:
    """Give 16-bit weights and biases of linears, where their rows are no multiple of eight, memory for seven more of them.

    A padded GEMM reads the rows up to the next multiple; one that stores odd rows in place (``odd_width_gemm``) all seven.
    Parameters that share their memory stay where they are. The further rows are zeros.

    Args:
        model: its parameters get other memory with the same values.

    Returns:
        How many parameters were moved.
    """
    found = list(_without_room(model))
    for parameter in found:
        rows = parameter.shape[0]
        with torch.inference_mode(False):
            memory = parameter.detach().new_zeros((roomy_rows(rows), *parameter.shape[1:]))
            memory[:rows] = parameter.detach()
            parameter.data = memory[:rows]
    return len(found)


def _groups(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield weights and biases of siblings that could lie side by side and do not."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = _tied_by_memory(model)
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
            for name, _ in linears[0].named_parameters():
                group = [linear.get_parameter(name) for linear in linears]
                if not lie_together(group):
                    yield group


def _without_room(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield each weight and bias of a linear once that has an odd number of rows and no room after them."""
    tied = _tied_by_memory(model)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    for parameter in {id(own): own for linear in linears for own in linear.parameters(recurse=False)}.values():
        if not parameter.dim() or id(parameter) in tied or not _is_plain(parameter):
            continue
        fills_storage = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        is_plain = parameter.element_size() == 2 and parameter.is_contiguous() and fills_storage
        if is_plain and not has_room(parameter, roomy_rows(parameter.shape[0])):
            yield parameter


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


def lie_together(sources: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors of one dtype lie one after the other in one storage, so that one view covers them."""
    first = sources[0]
    storage = first.untyped_storage().data_ptr()
    place = first.data_ptr()
    for source in sources:
        is_plain = source.is_contiguous() and source.dtype == first.dtype and source.shape[1:] == first.shape[1:]
        if not is_plain or source.untyped_storage().data_ptr() != storage or source.data_ptr() != place:
            return False
        place += source.numel() * source.element_size()
    return True


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
    """Whether other memory with the same values is the same: it is no subclass's tensor."""
    return type(parameter.data) is torch.Tensor and not parameter.is_meta


def _is_aligned(parameter: nn.Parameter) -> bool:
    return parameter.is_contiguous() and parameter.numel() * parameter.element_size() % _ALIGNMENT_BYTES == 0
