"""What is known of dtypes and ATen ops by name: sizes of elements, base names, and which operand an op reads by number."""

from __future__ import annotations

from collections.abc import Mapping

ITEM_BYTES: Mapping[str, int] = {
    "complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "uint64": 8,
    "complex32": 4, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of one element, by dtype without ``torch.``."""

ROWS_OPERAND: Mapping[str, int] = {"embedding": 0, "index_select": 0, "gather": 0, "index": 0}
"""Ops that read a tensor where another tensor says, and that tensor's position. They move what they return, not all of it."""

SEVERAL_RESULTS = frozenset(["native_layer_norm", "native_layer_norm_backward"])
"""Ops that return several tensors and are lowered tensor by tensor."""

RESAMPLES = frozenset(
    ["upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"]
)
"""Ops that read images at another resolution, each result from one to four neighbours."""

SHIFTS = frozenset(["constant_pad_nd", "pad", "repeat", "roll", "select_backward", "slice_backward"])
"""Ops that return their argument's elements at other positions, once or more often, and numbers where there are none."""

PRODUCT_OPERANDS: Mapping[str, tuple[int, ...]] = {"linear": (0, 1, 2), "mm": (0, 1), "addmm": (1, 2, 0)}
"""Matrix products of a matrix that a model computes: positions of that matrix, of the weight, and of the bias if there is one."""

PRODUCTS: Mapping[str, int] = {name: places[0] for name, places in PRODUCT_OPERANDS.items()}
"""The position of the matrix whose rows are the result's."""

LOOP_PREFIX = "unrolled_loop_of_"
"""How the name of an op begins that stands for a loop of Python's; the number of steps follows."""

PLAIN_VIEWS = ("view", "reshape", "_unsafe_view")
"""Views that only regroup dims."""


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; 1, the least that it can be, of a dtype that torch added since."""
    return ITEM_BYTES.get(dtype, 1)


def overload_free(target: str) -> str:
    """Return ``mul_`` for ``aten.mul_.Tensor``: the name without namespace and overload, in-place ops with their underscore."""
    return target.removeprefix("aten.").removeprefix("fusion_advisor.").split(".")[0]


def reads_elsewhere(target: str) -> bool:
    """Whether an ATen op, named with its namespace, reads an argument at positions that follow from the result's."""
    return target.startswith("aten.") and overload_free(target) in RESAMPLES | SHIFTS


def reads_by_number(target: str) -> bool:
    """Whether an ATen op, named with its namespace, reads a tensor where another tensor says."""
    return target.startswith("aten.") and overload_free(target) in ROWS_OPERAND
