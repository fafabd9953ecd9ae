"""A Program as plain PyTorch: the reference that a Triton kernel file checks itself against.

It is printed from the kernel IR and not from the kernel, walks no blocks and uses no approximation. Run in float64 it is the
truth; run in float32 it has the error that an op-by-op computation has.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fusion_advisor.codegen.common.site import SiteTensor, is_empty
from fusion_advisor.codegen.common.value_names import LONGEST, ValueNames, is_named_always
from fusion_advisor.ir.program import Program, Store, Value, depends_on, dropout_constants, nests, with_dims

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "^", "quotient": "//",
}  # fmt: skip
_CALLS = {
    "maximum": "torch.maximum", "minimum": "torch.minimum", "pow": "torch.pow", "remainder": "torch.remainder",
    "abs": "torch.abs",
    "exp": "torch.exp", "exp2": "torch.exp2", "expm1": "torch.expm1", "log": "torch.log", "log1p": "torch.log1p",
    "sqrt": "torch.sqrt", "rsqrt": "torch.rsqrt", "reciprocal": "torch.reciprocal", "sigmoid": "torch.sigmoid",
    "tanh": "torch.tanh", "erf": "torch.erf", "erfc": "torch.erfc", "sin": "torch.sin", "cos": "torch.cos",
    "floor": "torch.floor", "ceil": "torch.ceil", "trunc": "torch.trunc", "round": "torch.round", "sign": "torch.sign",
    "isnan": "torch.isnan", "where": "torch.where",
}  # fmt: skip
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin"}
RESERVED = frozenset(
    {*keyword.kwlist, "torch", "tl", "triton", "at", "take", "put", "number", "rounded", "is_kept", "dtype", "device", "launch"}
)
"""Names that no value of a reference may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchReference:
    """Printed lines, and the helpers that they call."""

    lines: tuple[str, ...]
    helpers: frozenset[str] = field(default_factory=frozenset)
    """Of ``at``, ``take``, ``put``, ``rounded``, ``is_kept``."""


def torch_reference(program: Program, tensors: Sequence[SiteTensor]) -> TorchReference:
    """Print the body of ``reference(inputs…, outputs…, *, dtype)``, which writes into its outputs.

    Args:
        program: what the kernel computes.
        tensors: of its site, in the order of the operands.
    """
    names = ValueNames({*RESERVED, *(tensor.name for tensor in tensors)})
    lines: list[str] = []
    helpers: set[str] = set()
    for part in nests(program):
        if is_empty(part.program):
            continue
        writer = ReferenceWriter(with_dims(part.program, 1), [tensors[operand].name for operand in part.operands], names)
        lines += writer.written()
        helpers |= writer.helpers
    return TorchReference(lines=tuple(lines), helpers=frozenset(helpers))


class ReferenceWriter:
    """Prints one loop nest.

    Args:
        program: the nest.
        operands: names of its tensors.
        names: hands out names of values.
    """

    def __init__(self, program: Program, operands: Sequence[str], names: ValueNames) -> None:
        self.helpers: set[str] = set()
        self._program, self._operands, self._names = program, operands, names
        self._varies = depends_on(program.values, program.dims)
        self._texts: list[str] = []

    def written(self) -> list[str]:
        """Return the statements that compute every value and write the outputs."""
        lines = []
        for number, value in enumerate(self._program.values):
            text = self.printed(value)
            is_atom = text.replace("_", "").isalnum()
            if is_named_always(self._program, number) or (len(text) > LONGEST and not is_atom):
                name = self._names.take(self._program, number)
                lines.append(f"{name} = {text.removeprefix('(').removesuffix(')') if _is_wrapped(text) else text}")
                text = name
            self._texts.append(text)
        return [*lines, *map(self._stored, self._program.stores)]

    def printed(self, value: Value) -> str:
        """Return the expression of the next value.

        Args:
            value: all before it are printed.
        """
        args, op = [self._texts[arg] for arg in value.args], value.op
        if op == "load":
            return self._loaded(value, args)
        if op in ("const", "size", "extent"):
            return _literal(self._program.dims[value.dim] if op == "size" else value.constant, value.dtype)
        if op == "index":
            shape = [1] * len(self._program.dims)
            shape[value.dim] = self._program.dims[value.dim]
            return f"torch.arange({self._program.dims[value.dim]}, device=device).reshape({tuple(shape)})"
        if op == "inside":
            guard = "" if value.guard is None else f" & {self._texts[value.guard]}"
            return f"(({args[0]} >= 0) & ({args[0]} < {args[1]}){guard})"
        if op in _REDUCTIONS:
            return self._reduced(value, args[0])
        if op == "cast":
            kind = {"float32": "dtype", "float64": "dtype"}.get(value.dtype, f"torch.{value.dtype}")
            return f"({args[0]} != 0)" if value.dtype == "bool" else f"{self._tensor(value.args[0])}.to({kind})"
        if op in ("round_float16", "round_bfloat16"):
            self.helpers.add("rounded")
            return f"rounded({args[0]}, torch.{op.removeprefix('round_')})"
        if op == "dropout":
            self.helpers.add("is_kept")
            threshold, scale = dropout_constants(float(value.constant or 0))
            return f"is_kept({args[0]}, {self._address(value)}, {threshold}) * {scale!r}"
        return self._computed(value, args)

    def _computed(self, value: Value, args: Sequence[str]) -> str:
        op = value.op
        if op in _INFIX:
            return f"({args[0]} {_INFIX[op]} {args[1]})"
        if op == "neg":
            return f"(-{args[0]})"
        if op == "not":
            return f"(~{args[0]})"
        if op not in _CALLS:
            raise ValueError(f"the PyTorch reference has no word for the op {op!r}")
        if op == "where":
            kind = value.dtype if value.dtype in ("bool", "int64") else "dtype"
            args = [self._tensor(value.args[0]), *(self._tensor(arg, kind) for arg in value.args[1:])]
        elif op == "pow" and self._program.values[value.args[1]].op == "const":
            args = [self._tensor(value.args[0]), args[1]]
        else:
            args = [self._tensor(arg) for arg in value.args]
        return f"{_CALLS[op]}({', '.join(args)})"

    def _tensor(self, number: int, kind: str = "") -> str:
        """A value as a tensor: functions of torch take no Python number."""
        value = self._program.values[number]
        if value.op not in ("const", "size", "extent"):
            return self._texts[number]
        own = kind or ("dtype" if value.dtype.startswith("float") else value.dtype)
        return f"torch.tensor({self._texts[number]}, dtype={own if own == 'dtype' else f'torch.{own}'}, device=device)"

    def _reduced(self, value: Value, text: str) -> str:
        last = len(self._program.dims) - 1
        arg = value.args[0]
        if last not in self._varies[arg] and self._program.dims[last] != 1:
            if value.op != "reduce_sum":
                return text
            return f"({text} * {self._program.dims[last]})"
        return f"{self._tensor(arg)}.{_REDUCTIONS[value.op]}(-1, keepdim=True)"

    def _loaded(self, value: Value, args: Sequence[str]) -> str:
        name = self._operands[value.operand]
        kind = "dtype" if value.dtype.startswith("float") else f"torch.{value.dtype}"
        if value.guard is None and not args:
            self.helpers.add("at")
            sizes = tuple(size if stride else 1 for size, stride in zip(self._program.dims, value.strides, strict=True))
            return f"at({name}, {sizes}, {value.strides}{self._from(value)}).to({kind})"
        self.helpers.add("take")
        wanted = "" if value.guard is None else f", {self._tensor(value.guard)}"
        return f"take({name}, {self._address(value)}{wanted}).to({kind})"

    def _address(self, access: Value | Store) -> str:
        start = self.start(access)
        terms = [start] if start else []
        for dim, (size, stride) in enumerate(zip(self._program.dims, access.strides, strict=True)):
            if stride and size != 1:
                self.helpers.add("number")
                shape = [1] * len(self._program.dims)
                shape[dim] = size
                terms.append(f"number({tuple(shape)}, device){f' * {stride}' if stride != 1 else ''}")
        moved = () if isinstance(access, Value) and access.op == "dropout" else access.args
        terms += [f"{self._tensor(arg)} * {step}" for arg, step in zip(moved, access.steps, strict=bool(moved))]
        return " + ".join(terms) or "0"

    def _stored(self, store: Store) -> str:
        name, text = self._operands[store.operand], self._tensor(store.value)
        dims = self._program.dims
        if store.args or store.guard is not None:
            self.helpers.add("put")
            guard = "True" if store.guard is None else self._tensor(store.guard)
            return f"put({name}, {dims}, {self._address(store)}, {text}, {guard})"
        self.helpers.add("at")
        sizes = tuple(size if stride else 1 for size, stride in zip(dims, store.strides, strict=True))
        cut = [":1" if not stride and dim in self._varies[store.value] else ":" for dim, stride in enumerate(store.strides)]
        if ":1" in cut:
            text = f"{text}[{', '.join(cut)}]"
        text = text[1:-1] if _is_wrapped(text) else text
        return f"at({name}, {sizes}, {store.strides}{self._from(store)}).copy_({text})"

    def _from(self, access: Value | Store) -> str:
        start = self.start(access)
        return f", {start}" if start else ""

    def start(self, access: Value | Store) -> str:
        """Return where an access starts, in elements; empty for a tensor's first one."""
        return str(access.offset) if access.offset else ""


def _is_wrapped(text: str) -> bool:
    """Whether one pair of parentheses holds the whole text."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return place == len(text) - 1 and text.startswith("(")
    return False


def _literal(constant: float | int | bool | None, dtype: str) -> str:
    if dtype.startswith("float"):
        number = float(constant or 0.0)
        return repr(number) if math.isfinite(number) else f'float("{number}")'
    return str(bool(constant)) if dtype == "bool" else str(int(constant or 0))
