"""From a chain of captured ops to one :class:`Program`: the same road for a model's chain and for a kernel's reference.

Every value is a function of an index, in the manner of Inductor's define-by-run: asking an output for its element at
``(i0, i1, …)`` asks its producers for theirs, views only rewrite the index, and whatever comes from outside the chain becomes a
load whose address is read off the captured strides. Nothing is materialised on the way, so a ``cat`` of two halves is two
guarded loads and a transpose costs nothing.

Casts between floating types inside a chain are dropped: intermediate maths is fp32 (fp64 for fp64), which is nearer to the
truth than the original ops, and ``verify`` shows by how much.

A chain that cannot be one kernel raises :class:`CannotLower` with the sentence that the report shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fusion_advisor.library.program import ADDRESSED, COMMUTATIVE, REDUCTIONS, Operand, Program, Store, Value
from fusion_advisor.library.rules import DTYPES, POINTWISE, SPECIAL, VIEWS, CannotLower, Index, compute_dtype, piece_rule
from fusion_advisor.records import Arg, OpClass, OpNode, Ref, TensorMeta

_BITS = {"int32": 32, "int16": 16, "int8": 8, "uint8": 8}
_STAYS_IN_RANGE = frozenset(
    ["where", "masked_fill", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "relu", "sign", "remainder", "cat",
     "amax", "amin", "max", "min", "floor", "ceil", "trunc", "round"]
)  # fmt: skip
"""Ops whose integer results are never wider than their arguments."""
_MAKES_BOOL = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "__xor__", "logical_and", "logical_or", "logical_not",
     "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "isnan", "isinf", "isfinite", "where",
     "masked_fill", "to", "_to_copy", "type_as", "cat", "add", "mul", "maximum", "minimum"]
)  # fmt: skip
"""Ops that mean something on booleans."""
_PARAMETER_NAMES = frozenset({"weight", "bias", "gamma", "beta", "scale", "inv_freq"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A chain as a Program, and which captured values its operands are."""

    program: Program
    inputs: tuple[int, ...]
    """Op index of each input operand: always the owner of its storage, so that views before the chain cost nothing."""
    outputs: tuple[int, ...]
    """Op index of each output operand."""


def lower(ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], outputs: Sequence[int]) -> Lowered:
    """Lower the ops with indices ``members`` to one Program that writes ``outputs``.

    Args:
        ops: the captured ops by index.
        members: indices of the chain's ops, in order; views inside the chain included.
        outputs: the members whose values are needed outside, in order.

    Raises:
        CannotLower: no single kernel of ours computes this.
    """
    return Lowering(ops, members, outputs).run()


class Lowering:
    """One chain on its way to a Program; the rules ask it for elements and append values to it."""

    def __init__(self, ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], outputs: Sequence[int]) -> None:
        self.ops = ops
        self.members = frozenset(members)
        self.outputs = tuple(outputs)
        self.values: list[Value] = []
        self._number_of: dict[Value, int] = {}
        self._memo: dict[tuple[int, Index, int | None], int] = {}
        self._guard: int | None = None
        self._input_of: dict[int, int] = {}
        self.reduced: frozenset[int] = frozenset()
        self.domain = self._find_domain()

    # ------------------------------------------------------------------ the loop nest

    def _find_domain(self) -> tuple[int, ...]:
        """The iteration shape: the widest of the outputs and of what is reduced."""
        shapes = [self.ops[index].outputs[0].shape for index in self.outputs]
        for index in self.members:
            op = self.ops[index]
            if op.op_class is OpClass.REDUCTION and op.args and isinstance(op.args[0], Ref):
                shapes.append(self.meta(op.args[0].index).shape)
        if not shapes or not any(shapes):
            raise CannotLower("FA603", "the chain computes a single number")
        widest = max(shapes, key=lambda shape: (math.prod(shape), len(shape)))
        if any(op.outputs and op.outputs[0].dtype.startswith("complex") for op in map(self.op, self.members)):
            raise CannotLower("FA606", "complex numbers are not supported")
        return widest

    def op(self, index: int) -> OpNode:
        """Return a captured op."""
        return self.ops[index]

    def meta(self, index: int) -> TensorMeta:
        """Return the layout of an op's one output."""
        outputs = self.op(index).outputs
        if len(outputs) != 1:
            raise CannotLower("FA601", f"{self.op(index).target} has {len(outputs)} outputs")
        return outputs[0]

    def run(self) -> Lowered:
        """Ask every output for its element and assemble what was appended on the way."""
        for index in self.members:
            meta = self.op(index).outputs
            if meta and meta[0].dtype not in DTYPES:
                raise CannotLower("FA606", f"dtype {meta[0].dtype} is not supported")
        results = []
        for index in self.outputs:
            where = self._output_index(self.meta(index))
            results.append((index, where, self.at(index, where)))
        return self._assemble(results)

    def _output_index(self, meta: TensorMeta) -> Index:
        """The index of an output as a function of the loop variables; a reduced output is indexed by its rows."""
        shape = meta.shape
        if len(shape) > len(self.domain):
            raise CannotLower("FA603", f"an output of shape {shape} does not lie in the loop nest {self.domain}")
        if shape == self.domain:
            return tuple((dim, 0) for dim in range(len(shape)))
        if math.prod(shape) == math.prod(self.domain):
            return _same_elements(shape, self.domain)
        rows = len(self.domain) - len(shape)
        if shape == self.domain[: len(shape)] and rows:  # keepdim=False over the trailing dims
            return tuple((dim, 0) for dim in range(len(shape)))
        padded = (1,) * rows + shape
        if all(size in (1, full) for size, full in zip(padded, self.domain, strict=True)):
            return tuple((dim if self.domain[dim] == padded[dim] else None, 0) for dim in range(rows, len(self.domain)))
        raise CannotLower("FA603", f"an output of shape {shape} does not lie in the loop nest {self.domain}")

    # ------------------------------------------------------------------ values

    def emit(self, value: Value) -> int:
        """Append a value, or return the number it already has."""
        number = self._number_of.get(value)
        if number is None:
            number = len(self.values)
            self.values.append(value)
            self._number_of[value] = number
        return number

    def const(self, constant: float | int | bool, dtype: str) -> int:
        """Append a constant of a compute dtype."""
        typed = bool(constant) if dtype == "bool" else int(constant) if dtype == "int64" else float(constant)
        return self.emit(Value(op="const", constant=typed, dtype=dtype))

    def constant_of(self, number: int) -> float | int | bool | None:
        """Return a value's constant, or None when it is not one."""
        value = self.values[number]
        return value.constant if value.op == "const" else None

    def make(self, op: str, *args: int, dtype: str | None = None) -> int:
        """Append an operation, folding what is known now; identities that change no bits are dropped."""
        constants = [self.constant_of(arg) for arg in args]
        if op in ("mul", "div") and len(args) == 2 and _is_number(constants[1], 1.0):
            return args[0]
        if op == "mul" and _is_number(constants[0], 1.0):
            return args[1]
        if op in ("add", "sub") and _is_number(constants[1], 0.0):
            return args[0]
        if op == "add" and _is_number(constants[0], 0.0):
            return args[1]
        if op in ("add", "mul", "sub") and all(constant is not None for constant in constants):
            left, right = constants
            assert left is not None and right is not None
            folded = {"add": left + right, "mul": left * right, "sub": left - right}[op]
            return self.const(folded, self.values[args[0]].dtype)
        if op == "add":
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                # 1 + tanh(u) = 2·sigmoid(2u): one op fewer, and exact where 1 + tanh cancels.
                if _is_number(self.constant_of(one), 1.0) and self.values[other].op == "tanh":
                    inner = self.values[other].args[0]
                    dtype_inner = self.values[inner].dtype
                    doubled = self.make("mul", inner, self.const(2.0, dtype_inner))
                    return self.make("mul", self.make("sigmoid", doubled), self.const(2.0, dtype_inner))
        if op == "mul":
            # (a·c)·d = a·(c·d) when one of the constants is a power of two: no rounding moves.
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                outer = self.constant_of(one)
                inner_value = self.values[other]
                if isinstance(outer, float) and inner_value.op == "mul" and inner_value.dtype == self.values[one].dtype:
                    for kept, scaled in (inner_value.args, inner_value.args[::-1]):
                        factor = self.constant_of(scaled)
                        if isinstance(factor, float) and (_is_power_of_two(outer) or _is_power_of_two(factor)):
                            return self.make("mul", kept, self.const(outer * factor, self.values[one].dtype))
            pulled = self._pull_power_of_two(args)
            if pulled is not None:
                return pulled
        result = dtype or self.values[args[0]].dtype
        if op in COMMUTATIVE:
            args = tuple(sorted(args))
        return self.emit(Value(op=op, args=args, dtype=result))

    def _pull_power_of_two(self, args: Sequence[int]) -> int | None:
        """(x·2ⁿ)·(y·2ᵐ) = x·y·2ⁿ⁺ᵐ, so that GELU's 0.5·x·(2·sigmoid) loses both factors."""
        factors, rest = 1.0, []
        for arg in args:
            value = self.values[arg]
            found = None
            if value.op == "mul" and value.dtype in ("float32", "float64"):
                for kept, scaled in (value.args, value.args[::-1]):
                    factor = self.constant_of(scaled)
                    if isinstance(factor, float) and _is_power_of_two(factor):
                        found = (kept, factor)
            rest.append(found[0] if found else arg)
            factors *= found[1] if found else 1.0
        if rest == list(args) or len([1 for before, after in zip(args, rest, strict=True) if before != after]) < 2:
            return None
        product = self.make("mul", *rest)
        return self.make("mul", product, self.const(factors, self.values[product].dtype))

    # ------------------------------------------------------------------ elements

    def at(self, index: int, where: Index) -> int:
        """Return the number of the SSA value that is element ``where`` of op ``index``'s result."""
        key = (index, where, self._guard)
        if key not in self._memo:
            self._memo[key] = self._inside(index, where) if index in self.members else self._load(index, where)
        return self._memo[key]

    def guarded(self, index: int, where: Index, guard: int, dtype: str) -> int:
        """An element that is only wanted where ``guard`` holds: its loads read nothing elsewhere."""
        outer = self._guard
        with self._guarding(guard if outer is None else self.make("and", outer, guard, dtype="bool")):
            return self.cast(self.at(index, where), dtype)

    def row_element(self, index: int, where: Index, op: OpNode) -> int:
        """An element under a reduction: every column of the row counts, so no guard of the reader applies."""
        with self._guarding(None):
            return self.cast(self.at(index, where), compute_dtype(op.outputs[0].dtype))

    def the_number(self, index: int, dtype: str) -> int:
        """The one element of a tensor that every reader may read, such as a seed: no guard applies."""
        with self._guarding(None):
            return self.cast(self.at(index, ((None, 0),) * len(self.meta(index).shape)), dtype)

    @contextmanager
    def _guarding(self, guard: int | None) -> Iterator[None]:
        outer, self._guard = self._guard, guard
        try:
            yield
        finally:
            self._guard = outer

    def _load(self, index: int, where: Index) -> int:
        """Read a value from outside the chain through the storage that owns it."""
        meta = self.meta(index)
        if meta.dtype not in DTYPES:
            raise CannotLower("FA606", f"dtype {meta.dtype} is not supported")
        if meta.device != self.ops[self.outputs[0]].outputs[0].device:
            raise CannotLower("FA601", f"{self.op(index).target} lies on another device than the chain's result")
        owner = self.op(index).alias_of
        root = index if owner is None else owner
        while (above := self.op(root).alias_of) is not None:
            root = above
        if root in self.members:
            raise CannotLower("FA603", f"{self.op(index).target} of a value inside the chain cannot be folded into an address")
        if len(self.op(root).outputs) != 1 or self.meta(root).dtype != meta.dtype:
            root = index
        strides = [0] * len(self.domain)
        offset = meta.offset - self.meta(root).offset
        for stride, size, (variable, shift) in zip(meta.stride, meta.shape, where, strict=True):
            if size == 1:  # its one element, wherever a cat or a slice says that it begins
                continue
            if variable is not None:
                strides[variable] += stride
            offset += stride * shift
        self._input_of.setdefault(root, len(self._input_of))
        return self.emit(
            Value(
                op="load", operand=root, strides=tuple(strides), offset=offset, guard=self._guard, dtype=compute_dtype(meta.dtype)
            )
        )

    def _inside(self, index: int, where: Index) -> int:
        op = self.op(index)
        name = op.target.removeprefix("aten.").removeprefix("fusion_advisor.").split(".")[0]
        if op.op_class is OpClass.VIEW or (name in VIEWS and name not in POINTWISE):
            return self._through_view(op, name, where)
        rule = SPECIAL.get(name) or POINTWISE.get(name)
        if rule is None:
            raise CannotLower("FA601", f"{op.target} has no lowering")
        if op.outputs[0].dtype == "bool" and name not in _MAKES_BOOL:
            raise CannotLower("FA601", f"{op.target} on booleans has no lowering")
        return self._wrapped(rule(self, op, where), op.outputs[0].dtype, name)

    def _wrapped(self, number: int, dtype: str, name: str) -> int:
        """Integers are computed in 64 bits; a result that overflows a narrower dtype wraps around, as torch's does."""
        if dtype not in _BITS or name in _STAYS_IN_RANGE:
            return number
        low = 0 if dtype == "uint8" else -(2 ** (_BITS[dtype] - 1))
        shifted = self.make("sub", number, self.const(low, "int64"))
        wrapped = self.make("remainder", shifted, self.const(2 ** _BITS[dtype], "int64"))
        return self.make("add", wrapped, self.const(low, "int64"))

    def _through_view(self, op: OpNode, name: str, where: Index) -> int:
        source = op.args[0]
        if not isinstance(source, Ref):
            raise CannotLower("FA601", f"{op.target} has no lowering")
        if name == "getitem":
            splitter = self.op(source.index)
            taken, number = (splitter.args or (None,))[0], op.args[1]
            if not isinstance(taken, Ref) or not isinstance(number, int):
                raise CannotLower("FA601", f"{splitter.target} has several outputs")
            return self.at(taken.index, piece_rule(splitter, self.meta(taken.index), number, where))
        before = self.meta(source.index)
        rule = VIEWS.get(name)
        if rule is None:
            raise CannotLower("FA603", f"{op.target} inside a chain cannot be folded into an address")
        if before.dtype != op.outputs[0].dtype:
            raise CannotLower("FA603", f"{op.target} reads the bits of {before.dtype} as {op.outputs[0].dtype}")
        return self.at(source.index, rule(op, before, where))

    def argument(self, op: OpNode, position: int, where: Index, *, name: str = "", dtype: str | None = None) -> int:
        """Element ``where`` (broadcast) of an op's argument, converted to ``dtype`` where it differs."""
        value = op.args[position] if position < len(op.args) else dict(op.kwargs).get(name)
        return self.element(value, where, op, dtype)

    def element(self, value: Arg, where: Index, op: OpNode, dtype: str | None = None) -> int:
        """Element of a tensor argument, or a constant."""
        wanted = dtype or compute_dtype(op.outputs[0].dtype)
        if isinstance(value, Ref):
            shape = self.meta(value.index).shape
            aligned = where[len(where) - len(shape) :] if len(shape) <= len(where) else None
            if aligned is None:
                raise CannotLower("FA603", f"{op.target} reads a value with more dims than its result")
            inner = tuple((None, 0) if size == 1 else position for size, position in zip(shape, aligned, strict=True))
            number = self.at(value.index, inner)
        elif isinstance(value, bool | int | float):
            return self.const(value, wanted)
        else:
            raise CannotLower("FA601", f"{op.target} has an argument {value!r} that no kernel takes")
        return self.cast(number, wanted)

    def cast(self, number: int, dtype: str) -> int:
        """Convert between compute dtypes; fp32 and fp64 mix only when the chain is fp64."""
        have = self.values[number].dtype
        if have == dtype:
            return number
        constant = self.constant_of(number)
        if constant is not None:
            return self.const(constant, dtype)
        return self.emit(Value(op="cast", args=(number,), dtype=dtype))

    # ------------------------------------------------------------------ reductions

    def reduce(self, kind: str, number: int, variables: frozenset[int]) -> int:
        """Reduce an element over the loop variables of the reduced dims; all reductions of a chain share them."""
        if self.reduced and variables != self.reduced:
            raise CannotLower("FA604", "the chain reduces over different dims")
        self.reduced = variables
        return self.emit(Value(op=f"reduce_{kind}", args=(number,), dtype=self.values[number].dtype))

    def reduction_index(
        self, op: OpNode, source: TensorMeta, dims: Sequence[int], where: Index, *, keepdim: bool
    ) -> tuple[Index, frozenset[int]]:
        """The index of a reduction's input: rows from ``where``, reduced dims from the last loop variables."""
        rank = len(source.shape)
        reduced = sorted(dim % rank for dim in dims)
        if reduced != list(range(rank - len(reduced), rank)):
            raise CannotLower(
                "FA604", f"{op.target} reduces dims {tuple(reduced)} of {rank}: only trailing dims are reduced in one kernel"
            )
        variables = range(len(self.domain) - len(reduced), len(self.domain))
        if any(self.domain[variable] != source.shape[dim] for variable, dim in zip(variables, reduced, strict=True)):
            raise CannotLower(
                "FA604", f"{op.target} reduces a shape {source.shape} that is not the chain's loop nest {self.domain}"
            )
        rows = where[: rank - len(reduced)] if keepdim or len(where) >= rank else where
        used = {variable for variable, _ in rows if variable is not None}
        if used & set(variables):
            raise CannotLower("FA604", f"{op.target}: a row index depends on the reduced dim")
        return (*rows, *((variable, 0) for variable in variables)), frozenset(variables)

    # ------------------------------------------------------------------ the finished program

    def _assemble(self, results: Sequence[tuple[int, Index, int]]) -> Lowered:
        reduced = sorted(self.reduced)
        order = [dim for dim in self._by_stride(results) if dim not in self.reduced] + reduced
        order = [dim for dim in order if self.domain[dim] != 1 or dim in reduced[-1:]] or [len(self.domain) - 1] * bool(
            self.domain
        )
        roots = list(self._input_of)
        stores = []
        for index, where, number in results:
            meta = self.meta(index)
            varies = {variable for variable, _ in where}
            repeated = [
                dim for dim, size in enumerate(self.domain) if size != 1 and dim not in varies and dim not in self.reduced
            ]
            if repeated:
                raise CannotLower("FA603", f"a value of shape {meta.shape} would be computed once for each of {self.domain}")
            strides = [0] * len(self.domain)
            for stride, size, (variable, _) in zip(meta.stride, meta.shape, where, strict=True):
                if variable is not None and size != 1:
                    strides[variable] = stride
            stores.append((index, tuple(strides), number))
        addresses = [value.strides for value in self.values if value.op in ADDRESSED] + [strides for _, strides, _ in stores]
        kept = {value.dim for value in self.values if value.op == "index"}
        groups = self._collapse(order, addresses, kept, frozenset(reduced))
        if len(groups) > 5:
            raise CannotLower("FA603", f"the loop nest {tuple(self.domain)} has {len(groups)} dims that do not collapse")
        if reduced and len(groups[-1]) != len([dim for dim in reduced if dim in itertools.chain(*groups)]):
            raise CannotLower("FA603", "the reduced dims do not form one run of memory")
        return self._finish(roots, groups, stores)

    def _by_stride(self, results: Sequence[tuple[int, Index, int]]) -> list[int]:
        """Loop variables outermost first, in the memory order of the widest output."""
        widest, where, _ = max(results, key=lambda result: math.prod(self.meta(result[0]).shape))
        meta = self.meta(widest)
        strides = {variable: stride for stride, (variable, _) in zip(meta.stride, where, strict=True) if variable is not None}
        return sorted(range(len(self.domain)), key=lambda dim: (-strides.get(dim, 0), dim))

    def _collapse(
        self, order: Sequence[int], addresses: Sequence[tuple[int, ...]], kept: set[int], reduced: frozenset[int]
    ) -> list[list[int]]:
        groups: list[list[int]] = []
        for dim in order:
            if groups:
                last = groups[-1][-1]
                joins = all(address[last] == address[dim] * self.domain[dim] for address in addresses)
                if joins and (last in reduced) == (dim in reduced) and not {last, dim} & kept:
                    groups[-1].append(dim)
                    continue
            groups.append([dim])
        return groups

    def _finish(self, roots: list[int], groups: list[list[int]], stores: Sequence[tuple[int, tuple[int, ...], int]]) -> Lowered:
        position = {dim: number for number, group in enumerate(groups) for dim in group}
        inputs = {root: number for number, root in enumerate(roots)}

        def collapse(strides: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(strides[group[-1]] if self.domain[group[-1]] != 1 else 0 for group in groups)

        live = self._live([number for _, _, number in stores])
        renumber: dict[int, int] = {}
        values: list[Value] = []
        for number in live:
            value = self.values[number]
            renumber[number] = len(values)
            values.append(
                Value(
                    op=value.op,
                    args=tuple(renumber[arg] for arg in value.args),
                    dtype=value.dtype,
                    constant=value.constant,
                    operand=inputs[value.operand] if value.op == "load" else -1,
                    strides=collapse(value.strides) if value.op in ADDRESSED else (),
                    offset=value.offset,
                    guard=None if value.guard is None else renumber[value.guard],
                    dim=position[value.dim] if value.op == "index" else len(groups) - 1 if value.op == "size" else -1,
                )
            )
        dims = tuple(math.prod(self.domain[dim] for dim in group) for group in groups)
        names = self._operand_names(roots, len(stores))
        operands = [
            Operand(name=names[number], dtype=self.meta(root).dtype, element_count=self._touched(number, values, dims))
            for number, root in enumerate(roots)
        ]
        written = []
        for number, (index, strides, value_number) in enumerate(stores):
            meta = self.meta(index)
            operands.append(
                Operand(name=names[len(roots) + number], dtype=meta.dtype, is_output=True, element_count=math.prod(meta.shape))
            )
            written.append(Store(operand=len(roots) + number, value=renumber[value_number], strides=collapse(strides)))
        program = Program(
            dims=dims, operands=tuple(operands), values=tuple(values), stores=tuple(written), is_reduced=bool(self.reduced)
        )
        if dims[-1] == 1:
            program = _with_columns(program)
        return Lowered(program=program, inputs=tuple(roots), outputs=tuple(index for index, _, _ in stores))

    def _operand_names(self, roots: Sequence[int], stores: int) -> list[str]:
        """Parameters keep their own last name (``weight``), all else is x, x2, …: no other text of a model enters a kernel."""
        names: list[str] = []
        for root in roots:
            op = self.op(root)
            last = op.target.rpartition(".")[2]
            name = last if op.role in ("parameter", "buffer") and last in _PARAMETER_NAMES else "x"
            taken = sum(1 for other in names if other.rstrip("0123456789") == name)
            names.append(f"{name}{taken + 1}" if taken else name)
        return names + (["out"] if stores == 1 else [f"out{number + 1}" for number in range(stores)])

    def _live(self, results: Sequence[int]) -> list[int]:
        wanted: set[int] = set()
        stack = list(results)
        while stack:
            number = stack.pop()
            if number in wanted:
                continue
            wanted.add(number)
            value = self.values[number]
            stack += [*value.args, *(() if value.guard is None else (value.guard,))]
        return sorted(wanted)

    @staticmethod
    def _touched(operand: int, values: Sequence[Value], dims: tuple[int, ...]) -> int:
        """Distinct elements read of an operand: the widest of its loads (guarded loads of one operand together cover no more)."""
        counts = [
            math.prod(size for size, stride in zip(dims, value.strides, strict=True) if stride != 0)
            for value in values
            if value.op == "load" and value.operand == operand
        ]
        return max(counts, default=0)


def _with_columns(program: Program) -> Program:
    """Let one column be walked like many: its stride may be any number, and 1 says that there are columns."""
    values: list[Value] = []
    has_col: list[bool] = []
    seeds = {arg for value in program.values if value.op == "dropout" for arg in value.args}  # one number, however many columns
    for number, value in enumerate(program.values):
        if number in seeds:
            values.append(value)
            has_col.append(False)
            continue
        needs = (*value.args, *(() if value.guard is None else (value.guard,)))
        is_index = value.op == "index" and value.dim == len(program.dims) - 1
        has_col.append(value.op in ADDRESSED or is_index or (value.op not in REDUCTIONS and any(has_col[n] for n in needs)))
        values.append(replace(value, strides=(*value.strides[:-1], 1)) if value.op in ADDRESSED else value)
    stores = tuple(
        replace(store, strides=(*store.strides[:-1], 1)) if has_col[store.value] or not program.is_reduced else store
        for store in program.stores
    )
    return replace(program, values=tuple(values), stores=stores)


def _is_number(constant: float | int | bool | None, wanted: float) -> bool:
    return constant is not None and not isinstance(constant, bool) and constant == wanted


def _is_power_of_two(number: float) -> bool:
    return number != 0 and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def _same_elements(shape: tuple[int, ...], domain: tuple[int, ...]) -> Index:
    """Index of a shape that differs from the loop nest only by dims of size 1."""
    variables = [dim for dim, size in enumerate(domain) if size != 1]
    if [size for size in shape if size != 1] != [domain[dim] for dim in variables]:
        raise CannotLower("FA603", f"a reshape from {domain} to {shape} cannot be folded into an address")
    remaining = iter(variables)
    return tuple((None, 0) if size == 1 else (next(remaining), 0) for size in shape)
