"""Which rewrites without a kernel of the library may have sites in a capture. Needs no GPU and no torch.

A capture holds ops and layouts, not values. So a count here is an upper bound: ``apply`` also looks at the values of a mask, the
storage of a weight and the other readers of a result before it changes a site. Rewrites whose sites depend on more than ops and
layouts (``narrow-rows``, ``batch-counters``, ``split-biases``, ``linear-kernels``) are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fusion_advisor.chains.op_inputs import depends_on_inputs, inputs_of
from fusion_advisor.records import Arg, Capture, OpClass, OpNode, Ref

ALIGNED_COLUMNS = 8
"""16-bit GEMMs whose width is no multiple of this run on a kernel for unaligned operands."""
_LINEARS = ("aten.linear.default", "aten.addmm.default")
_ACTIVATIONS = ("aten.gelu.default", "aten.relu.default")
_HALF = ("float16", "bfloat16")
_MASK = 3
"""Position of the mask among the arguments of attention."""


def candidate_sites(capture: Capture) -> dict[str, int]:
    """Count the places whose ops a rewrite looks for, by the rewrite's id; rewrites without any are left out."""
    counted = {name: count(capture.ops) for name, count in _COUNTS.items()}
    counted["cuda-graph"] = int(capture.environment.device_kind == "cuda")
    return {name: sites for name, sites in counted.items() if sites}


def _attention(ops: Sequence[OpNode]) -> list[OpNode]:
    return [op for op in ops if op.op_class is OpClass.ATTENTION]


def _mask_of(op: OpNode) -> Ref | None:
    named: Arg = dict(op.kwargs).get("attn_mask")
    mask = op.args[_MASK] if len(op.args) > _MASK else named
    return mask if isinstance(mask, Ref) else None


def _masked(ops: Sequence[OpNode]) -> int:
    return sum(_mask_of(op) is not None for op in _attention(ops))


def _shared_masks(ops: Sequence[OpNode]) -> int:
    read = Counter(mask.index for op in _attention(ops) if (mask := _mask_of(op)) is not None)
    return sum(count for index, count in read.items() if count > 1 and _dtype(ops[index]) == "bool")


def _repeated_heads(ops: Sequence[OpNode]) -> int:
    """Attention whose keys are an expanded view, or a copy of such a view."""
    return sum(len(op.args) > 1 and isinstance(op.args[1], Ref) and _is_expanded(ops, op.args[1].index) for op in _attention(ops))


def _is_expanded(ops: Sequence[OpNode], index: int) -> bool:
    while ops[index].op_class in (OpClass.VIEW, OpClass.MEMORY) and inputs_of(ops[index]):
        if ops[index].target.startswith("aten.expand."):
            return True
        index = inputs_of(ops[index])[0]
    return False


def _equal_values(ops: Sequence[OpNode]) -> int:
    """Ops that compute what an earlier op computed from the same values."""
    first: dict[object, int] = {}
    same: dict[int, int] = {}
    repeated = 0
    for op in ops:
        if op.role != "op" or op.mutates:
            continue
        key = (op.region, op.target, _renamed(op.args, same), _renamed(tuple(value for _, value in op.kwargs), same))
        earlier = first.setdefault(key, op.index)
        same[op.index] = earlier
        repeated += earlier != op.index and op.op_class is not OpClass.VIEW
    return repeated


def _renamed(argument: Arg, same: Mapping[int, int]) -> object:
    if isinstance(argument, Ref):
        return "value", same.get(argument.index, argument.index)
    if isinstance(argument, tuple):
        return tuple(_renamed(item, same) for item in argument)
    return type(argument).__name__, argument  # 1, 1.0 and True are three arguments


def _constants(ops: Sequence[OpNode]) -> int:
    """Ops that run a kernel although they depend on no input, no parameter and no buffer."""
    depends = depends_on_inputs(ops)
    return sum(op.role == "op" and op.op_class is not OpClass.VIEW and not depends[op.index] for op in ops)


def _odd_linears(ops: Sequence[OpNode]) -> int:
    linears = [op for op in ops if op.target == _LINEARS[0] and _dtype(op) in _HALF]
    return sum(op.outputs[0].shape[-1] % ALIGNED_COLUMNS != 0 for op in linears)


def _patches(ops: Sequence[OpNode]) -> int:
    """Convolutions whose stride is their window."""
    found = 0
    for op in ops:
        if op.op_class is OpClass.CONVOLUTION and len(op.args) > 3 and isinstance(op.args[1], Ref):
            window = ops[op.args[1].index].outputs[0].shape[2:]
            found += op.args[3] == window and any(size > 1 for size in window)
    return found


def _merged(ops: Sequence[OpNode]) -> int:
    """Linears that read one value: all but the first of each group can go."""
    read = Counter(inputs_of(op)[0] for op in ops if op.target == _LINEARS[0])
    return sum(count - 1 for count in read.values())


def _epilogues(ops: Sequence[OpNode]) -> int:
    """Activations that read the result of a linear."""
    return sum(
        op.target in _ACTIVATIONS and (source := _computed(ops, inputs_of(op)[0])).target in _LINEARS and _dtype(source) in _HALF
        for op in ops
    )


def _computed(ops: Sequence[OpNode], index: int) -> OpNode:
    while ops[index].op_class is OpClass.VIEW and inputs_of(ops[index]):
        index = inputs_of(ops[index])[0]
    return ops[index]


def _dtype(op: OpNode) -> str:
    return op.outputs[0].dtype if op.outputs else ""


_COUNTS: Mapping[str, Callable[[Sequence[OpNode]], int]] = {
    "drop-masks": _masked,
    "group-heads": _repeated_heads,
    "share-masks": _shared_masks,
    "share-values": _equal_values,
    "pad-gemm": _odd_linears,
    "patch-gemm": _patches,
    "fold-constants": _constants,
    "merge-gemms": _merged,
    "gemm-epilogue": _epilogues,
}
"""In the order in which ``apply`` tries the rewrites."""
