"""A Program as scalar C++: the reference that C++ and CUDA C++ kernel files check themselves against, and its tensors.

It is printed from the kernel IR and not from the kernel: one loop for each dim, one pass over a row for each reduction that waits
for another. Its numbers are of a template type ``T``: in double it is the truth, in float it has the error that an op-by-op
computation has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.codegen.common.site import SiteTensor, is_empty, tensors_of
from fusion_advisor.codegen.common.value_names import LONGEST, ValueNames, is_named_always
from fusion_advisor.ir.program import REDUCTIONS, Program, Store, Value, depends_on, dropout_constants, nests, with_dims

STORED = {
    "float64": "double", "float32": "float", "float16": "unsigned short", "bfloat16": "unsigned short", "int64": "int64_t",
    "int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
}  # fmt: skip
"""How the check's own buffers hold an element; the two half floats as their bits."""
HALVES = {"float16": "fp16", "bfloat16": "bf16"}
_TYPES = {"float32": "T", "float64": "T", "int64": "int64_t", "bool": "bool"}
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "^", "quotient": "/",
}  # fmt: skip
_STD = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log1p": "log1p", "sqrt": "sqrt", "tanh": "tanh", "erf": "erf",
    "erfc": "erfc", "sin": "sin", "cos": "cos", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "nearbyint",
    "abs": "abs",
}  # fmt: skip
_OWN = {"maximum": "larger_of", "minimum": "smaller_of", "remainder": "remainder_of", "sign": "sign_of", "sigmoid": "sigmoid_of"}
_STARTS = {"reduce_sum": "0", "reduce_max": "-INFINITY", "reduce_min": "INFINITY"}
FLOORS = {"float": 5e-7, "double": 1e-14}
"""Relative error that is allowed even where the op-by-op computation has none: four units in the last place of the maths."""
FAST_MATH_FLOOR = 1e-4
_RESERVED = frozenset({"T", "std", "main", "reference", "launch", "check"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CppReference:
    """Printed lines of the function's body, and the helpers that they call."""

    lines: tuple[str, ...]
    helpers: frozenset[str]


def cpp_reference(program: Program, tensors: Sequence[SiteTensor]) -> CppReference:
    """Print the body of ``template <typename T> void reference(inputs…, outputs…)``.

    Args:
        program: what the kernel computes.
        tensors: of its site, in the order of the operands.
    """
    lines: list[str] = []
    helpers: set[str] = set()
    for part in nests(program):
        if not is_empty(part.program):
            writer = _Writer(with_dims(part.program, 1), [tensors[operand] for operand in part.operands])
            lines += writer.written()
            helpers |= writer.helpers
    return CppReference(lines=tuple(lines), helpers=frozenset(helpers))


class _Writer:
    def __init__(self, program: Program, tensors: Sequence[SiteTensor]) -> None:
        self.helpers: set[str] = set()
        self._program, self._tensors = program, tensors
        self._last = len(program.dims) - 1
        varies = depends_on(program.values, program.dims)
        self._by_column = [self._last in dims and program.dims[self._last] != 1 for dims in varies]
        names = ValueNames({*_RESERVED, *(tensor.name for tensor in tensors)})
        self._texts: list[str] = []
        self._lines: dict[int, str] = {}
        """The declaration of each value that has a name."""
        self._parts: dict[int, str] = {}
        """The term that each reduction accumulates."""
        for number, value in enumerate(program.values):
            text = self._printed(value)
            if is_named_always(program, number) or len(text) > LONGEST:
                name = names.take(program, number)
                if value.op in REDUCTIONS:
                    self._parts[number] = self._texts[value.args[0]]
                else:
                    self._lines[number] = f"const {_TYPES[value.dtype]} {name} = {_bare(text)};"
                text = name
            self._texts.append(text)

    def written(self) -> list[str]:
        dims = self._program.dims
        outer = range(self._last) if self._program.is_reduced else range(self._last + 1)
        body = self._row() if self._program.is_reduced else self._body()
        lines = [f"{'  ' * d}for (long long i{d} = 0; i{d} < {dims[d]}; ++i{d}) {{" for d in outer]
        lines += [f"{'  ' * len(outer)}{line}" for line in body]
        return [*lines, *(f"{'  ' * d}}}" for d in reversed(outer))]

    def _body(self) -> list[str]:
        return [*self._lines.values(), *map(self._stored, self._program.stores)]

    def _row(self) -> list[str]:
        """One row: a loop over its columns for each depth of reductions, then one that stores."""
        values, depth = self._program.values, self._depths()
        lines: list[str] = []
        written: set[int] = set()

        def by_row(most: int) -> None:
            for number, line in self._lines.items():
                if not self._by_column[number] and depth[number] <= most and number not in written:
                    lines.append(line)
                    written.add(number)

        by_row(0)
        for level in range(1, max(depth) + 1):
            reductions = [number for number in self._parts if depth[number] == level]
            lines += [f"{_TYPES[values[n].dtype]} {self._texts[n]} = {_start(values[n])};" for n in reductions]
            lines += self._loop([values[n].args[0] for n in reductions], [self._accumulated(n) for n in reductions])
            by_row(level)
        along = [s for s in self._program.stores if s.strides[-1] or any(self._by_column[need] for need in s.needs)]
        if along:
            lines += self._loop([need for store in along for need in store.needs], list(map(self._stored, along)))
        return lines + [self._stored(store) for store in self._program.stores if store not in along]

    def _loop(self, needs: Iterable[int], last: Sequence[str]) -> list[str]:
        """A loop over the columns that computes what varies by column, then does ``last``."""
        wanted, waiting = set[int](), list(needs)
        while waiting:
            number = waiting.pop()
            if number not in wanted and self._by_column[number]:
                wanted.add(number)
                value = self._program.values[number]
                waiting += [*value.args, *(() if value.guard is None else (value.guard,))]
        inner = [line for number, line in self._lines.items() if number in wanted]
        d = self._last
        start = f"for (long long i{d} = 0; i{d} < {self._program.dims[d]}; ++i{d}) {{"
        return [start, *(f"  {line}" for line in (*inner, *last)), "}"]

    def _depths(self) -> list[int]:
        """How many reductions wait for one another before each value."""
        found: list[int] = []
        for value in self._program.values:
            needs = (*value.args, *(() if value.guard is None else (value.guard,)))
            found.append(max((found[need] for need in needs), default=0) + (value.op in REDUCTIONS))
        return found

    def _accumulated(self, number: int) -> str:
        name, part, op = self._texts[number], self._parts[number], self._program.values[number].op
        if op == "reduce_sum":
            return f"{name} += {_bare(part)};"
        helper = "larger_of" if op == "reduce_max" else "smaller_of"
        self.helpers.add(helper)
        return f"{name} = {helper}<{_TYPES[self._program.values[number].dtype]}>({name}, {_bare(part)});"

    def _printed(self, value: Value) -> str:
        args, op = [self._texts[arg] for arg in value.args], value.op
        if op == "load":
            return self._loaded(value)
        if op == "const":
            return _literal(value.constant, value.dtype)
        if op == "size":
            return _literal(self._program.dims[value.dim], value.dtype)
        if op == "extent":
            return f"{int(value.constant or 0)}LL"
        if op == "index":
            return f"i{value.dim}"
        if op == "inside":
            guard = "" if value.guard is None else f" && {self._texts[value.guard]}"
            return f"({args[0]} >= 0 && {args[0]} < {args[1]}{guard})"
        if op == "cast":
            return f"({args[0]} != 0)" if value.dtype == "bool" else f"({_TYPES[value.dtype]})({_bare(args[0])})"
        if op in ("round_float16", "round_bfloat16"):
            kind = HALVES[op.removeprefix("round_")]
            self.helpers |= {f"rounded_{kind}", kind}
            return f"rounded_{kind}<T>({_bare(args[0])})"
        if op == "dropout":
            self.helpers.add("is_kept")
            threshold, scale = dropout_constants(float(value.constant or 0))
            return f"(is_kept({args[0]}, {self._address(value)}, {threshold}ULL) ? T({scale!r}) : T(0))"
        if op in REDUCTIONS:
            return ""
        return self._computed(value, args)

    def _computed(self, value: Value, args: Sequence[str]) -> str:
        op, kind = value.op, _TYPES[value.dtype]
        if op in _INFIX:
            return f"({args[0]} {_INFIX[op]} {args[1]})"
        if op == "neg":
            return f"(-{args[0]})"
        if op == "not":
            return f"({'!' if value.dtype == 'bool' else '~'}{args[0]})"
        if op == "where":
            return f"({args[0]} ? {kind}({_bare(args[1])}) : {kind}({_bare(args[2])}))"
        bare = list(map(_bare, args))
        if op == "isnan":
            return f"std::isnan((double)({bare[0]}))"
        if op == "rsqrt":
            return f"(T(1) / std::sqrt({bare[0]}))"
        if op == "reciprocal":
            return f"(T(1) / {args[0]})"
        if op == "pow":
            return f"{kind}(std::pow({kind}({bare[0]}), {kind}({bare[1]})))"
        if op in _OWN:
            self.helpers.add(_OWN[op])
            return f"{_OWN[op]}<{kind}>({', '.join(bare)})"
        if op in _STD and not (value.dtype == "int64" and op in ("floor", "ceil", "trunc", "round")):
            return f"std::{_STD[op]}({bare[0]})"
        if op in _STD:
            return args[0]
        raise ValueError(f"the C++ reference has no word for the op {op!r}")

    def _loaded(self, value: Value) -> str:
        tensor = self._tensors[value.operand]
        text = f"{tensor.name}[{self._address(value)}]"
        if tensor.dtype in HALVES:
            self.helpers.add(HALVES[tensor.dtype])
            text = f"from_{HALVES[tensor.dtype]}({text})"
        own = f"({text} != 0)" if value.dtype == "bool" and tensor.dtype != "bool" else f"{_TYPES[value.dtype]}({text})"
        own = text if tensor.dtype == value.dtype and value.dtype in ("bool", "int64") else own
        return own if value.guard is None else f"({self._texts[value.guard]} ? {own} : {_TYPES[value.dtype]}(0))"

    def _address(self, access: Value | Store) -> str:
        terms = [f"{access.offset}LL"] if access.offset else []
        for dim, (size, stride) in enumerate(zip(self._program.dims, access.strides, strict=True)):
            if stride and size != 1:
                terms.append(f"i{dim}{f' * {stride}LL' if stride != 1 else ''}")
        moved = () if isinstance(access, Value) and access.op == "dropout" else access.args
        terms += [f"{self._texts[arg]} * {step}LL" for arg, step in zip(moved, access.steps, strict=bool(moved))]
        return " + ".join(terms) or "0"

    def _stored(self, store: Store) -> str:
        tensor = self._tensors[store.operand]
        kind = "T" if "float" in tensor.dtype else STORED[tensor.dtype]
        text = f"{tensor.name}[{self._address(store)}] = {kind}({_bare(self._texts[store.value])});"
        return text if store.guard is None else f"if ({_bare(self._texts[store.guard])}) {text}"


def _start(value: Value) -> str:
    return _STARTS[value.op] if _TYPES[value.dtype] == "T" else {"reduce_sum": "0", "reduce_max": "LLONG_MIN"}.get(
        value.op, "LLONG_MAX"
    )  # fmt: skip


def _bare(text: str) -> str:
    """A text without the parentheses that hold all of it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 and text.startswith("(") else text
    return text


def _literal(constant: float | int | bool | None, dtype: str) -> str:
    if dtype == "bool":
        return "true" if constant else "false"
    if not dtype.startswith("float"):
        number = int(constant or 0)
        return "(-9223372036854775807LL - 1)" if number == -(2**63) else f"{number}LL"
    real = float(constant or 0.0)
    if math.isnan(real):
        return "T(NAN)"
    return f"T({repr(real) if math.isfinite(real) else '-INFINITY' if real < 0 else 'INFINITY'})"


# The check around the reference.


def check_context(program: Program, *, fast_math: bool) -> dict[str, Any]:
    """What ``cpp/check.cpp.jinja`` needs, but for ``run``, ``entry`` and ``note``.

    Args:
        program: of the kernel's site.
        fast_math: whether the kernel approximates.
    """
    tensors = tensors_of(program)
    reference = cpp_reference(program, tensors)
    own = "double" if any(tensor.dtype == "float64" for tensor in tensors) else "float"
    helpers = reference.helpers | {HALVES[tensor.dtype] for tensor in tensors if tensor.dtype in HALVES}
    inputs = [f"{tensor.name}_host.data()" for tensor in tensors if not tensor.is_output]

    def arguments(suffix: str) -> str:
        # A vector of bool has no data: outputs that are bool are kept as bytes.
        return ", ".join([*inputs, *(f"{tensor.name}_{suffix}.data()" for tensor in tensors if tensor.is_output)])

    return {
        "tensors": [_tensor(tensor, own) for tensor in tensors], "reference": reference.lines, "helpers": helpers, "own": own,
        "truth_arguments": arguments("truth"), "plain_arguments": arguments("plain"), "moved_bytes": program.moved_bytes,
        "floor": FAST_MATH_FLOOR if fast_math else FLOORS[own],
    }  # fmt: skip


def stored_type(dtype: str) -> str:
    """The element type of the check's own buffers; bool is a byte there, because a vector of bool has no array."""
    return "unsigned char" if dtype == "bool" else STORED[dtype]


def _tensor(tensor: SiteTensor, own: str) -> dict[str, Any]:
    stored, is_real = stored_type(tensor.dtype), "float" in tensor.dtype
    half = HALVES.get(tensor.dtype)
    kind = "T" if is_real else stored
    made = f"({tensor.element_count})"
    if not tensor.is_output:
        limit = 2 if tensor.dtype == "bool" else tensor.below
        convert = f"to_{half}" if half else f"[](double number) {{ return static_cast<{stored}>(number); }}"
        made = f" = normal<{stored}>({tensor.element_count}, {convert})" if is_real else (
            f" = below<{stored}>({tensor.element_count}, {limit})"
        )  # fmt: skip
    return {
        "name": tensor.name, "host": f"{tensor.name}_host", "stored": stored, "is_output": tensor.is_output, "made": made,
        "count": tensor.element_count, "dtype": tensor.dtype,
        "parameter": f"{kind} *{tensor.name}" if tensor.is_output else f"const {stored} *{tensor.name}",
        "truth": "double" if is_real else stored, "plain": own if is_real else stored,
        "read": f"from_{half}(element)" if half else "element",
        "rounded": f"from_{half}(to_{half}(number))" if half else f"static_cast<{stored}>(number)",
    }  # fmt: skip
