"""The builder of a chain's program: elements, indices and loops, asked for by the rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fusion_advisor.chains.op_inputs import inputs_of
from fusion_advisor.ir.affine_index import ORIGIN, CutLoop, Index, Place, reshaped, undivided
from fusion_advisor.ir.dtypes import DTYPES, CannotLower, compute_dtype
from fusion_advisor.ir.loop_nest import Nest
from fusion_advisor.ir.program import Value
from fusion_advisor.lowering.builder.collapse_loops import assemble
from fusion_advisor.lowering.builder.columns import has_columns
from fusion_advisor.lowering.builder.guards import decided_by, guard_of_rows
from fusion_advisor.lowering.builder.integers import argument_in_range, refuse_too_wide, wrapped
from fusion_advisor.lowering.builder.lowered import Lowered, Result
from fusion_advisor.lowering.builder.rounding import before_store, narrows, rounded, rounded_ops
from fusion_advisor.lowering.builder.values import Values
from fusion_advisor.records import Arg, OpClass, OpNode, Ref, TensorMeta
from fusion_advisor.records.op_facts import overload_free

Ops = Mapping[int, OpNode] | Sequence[OpNode]
Rule = Callable[["Lowering", OpNode, Index], int]
"""Returns the number of the SSA value that is the wanted element of an op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTables:
    """How single ops are lowered, by base name; ``lowering.rules`` fills it."""

    pointwise: Mapping[str, Rule]
    special: Mapping[str, Rule]
    """Reductions, gathers and other ops with an index of their own."""
    results: Mapping[str, Callable[[Lowering, OpNode, int, Index], int]]
    """Of ops that return several tensors: given which one is asked for."""
    views: Mapping[str, Callable[[OpNode, TensorMeta, Index], Index]]
    reshapes: Collection[str]
    views_too: Collection[str]
    """Ops that only say where an element lies, even where torch copies."""
    piece: Callable[[OpNode, TensorMeta, int, Index], Index]
    """Of a split or chunk: the index of one of its pieces' elements."""
    repeat: Callable[..., Index]
    scattered: Callable[..., tuple[Index, int | None]]
    """Where an op that writes rows by number writes, and under which guard."""
    rows_of: Callable[[OpNode], int]
    written_shape: Callable[[Ops, int], tuple[int, ...]]


_BY_ELEMENT = frozenset(["add", "sub", "mul", "div", "to", "_to_copy"])
"""Ops that use an index only to ask for their arguments' elements at it."""

_MAKES_BOOL = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "__xor__", "logical_and", "logical_or", "logical_not",
     "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "isnan", "isinf", "isfinite", "where",
     "masked_fill", "to", "_to_copy", "type_as", "cat", "add", "mul", "maximum", "minimum", "ones", "zeros",
     "full", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "tril", "triu"]
)  # fmt: skip
"""Ops that mean something on booleans."""


class Lowering(Values):
    """Builds the program of one chain: rules ask it for elements and append values to it."""

    def __init__(
        self, ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], outputs: Sequence[int], nest: Nest,
        rules: RuleTables, *, is_exact: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(is_exact=is_exact)
        self.rules = rules
        self._rounded = rounded_ops(ops, members, is_exact=is_exact)
        self.ops = ops
        self.members = frozenset(members)
        self.outputs = tuple(outputs)
        self.nest = nest
        self._memo: dict[tuple[int, Index, int | None], int] = {}
        self._guard: int | None = None
        self._input_of: dict[int, int] = {}
        self.reduced: frozenset[int] = frozenset()
        self.ids_are_all_read: dict[int, bool] = {}
        """By the op that reads at them."""
        self.has_columns = has_columns(ops, members)
        """Whether leading dims are reduced: what is smaller than the nest lies along its last dims."""
        self.unrolled: dict[int, None] = {}
        """Loops that are written out: their body is known to differ from turn to turn."""
        self.has_groups = False
        """Whether rows are groups of channels: of an image in channels last they are no run of memory."""

    # ------------------------------------------------------------------ the loop nest

    @property
    def roots(self) -> tuple[int, ...]:
        """Op indices of what is read from outside, in the order of the first read."""
        return tuple(self._input_of)

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
        """Ask every output for its element and assemble the values that this appended."""
        for index in self.members:
            meta = self.op(index).outputs
            if meta and meta[0].dtype not in DTYPES:
                raise CannotLower("FA606", f"dtype {meta[0].dtype} is not supported")
        return assemble(self, [self._result(index) for index in self.outputs])

    def written_shape(self, index: int) -> tuple[int, ...]:
        """The shape of what an output writes: its own, or that of the rows which an ``index_copy_`` copies."""
        return self.rules.written_shape(self.ops, index)

    def _result(self, index: int) -> Result:
        where, op = self._output_index(self.written_shape(index)), self.op(index)
        if not op.mutates:
            return Result(index=index, where=where, value=before_store(self, self.at(index, where), op.outputs[0].dtype))
        into, guard = self.rules.scattered(self, op, where)
        value = before_store(self, self.at(self.rules.rows_of(op), where), op.outputs[0].dtype)
        return Result(index=index, where=into, value=value, guard=guard)

    def _output_index(self, shape: tuple[int, ...]) -> Index:
        """The index of an output as a function of the loop variables; a reduced output is indexed by its rows."""
        nest = self.nest
        whole = nest.index()
        is_rows = shape == nest.shape[: len(shape)]
        if math.prod(shape) == math.prod(nest.shape) and not (is_rows and 0 in shape):
            return reshaped(whole, nest.shape, shape, nest.extents)
        if len(shape) > len(nest.shape):
            raise CannotLower("FA603", f"an output of shape {shape} does not lie in the loop nest {nest.shape}")
        rows = len(nest.shape) - len(shape)
        if is_rows and rows and not self.has_columns:  # keepdim=False over the trailing dims
            return whole[: len(shape)]
        padded = (1,) * rows + shape
        if all(size in (1, full) for size, full in zip(padded, nest.shape, strict=True)):
            places = zip(whole, padded, nest.shape, strict=True)
            return tuple(place if size == full else ORIGIN for place, size, full in places)[rows:]
        raise CannotLower("FA603", f"an output of shape {shape} does not lie in the loop nest {nest.shape}")

    def range_of(self, place: Place) -> tuple[float, float]:
        """The least and the greatest position that a place takes."""
        if place.gathered:
            return -math.inf, math.inf
        reach = [step * (self.nest.extents[variable] - 1) for variable, step in place.terms]
        return place.shift + sum(min(0, step) for step in reach), place.shift + sum(max(0, step) for step in reach)

    def place_value(self, place: Place) -> int:
        """A place as an int64 value."""
        result = None
        for variable, step in place.terms:
            if self.nest.extents[variable] == 1:
                continue
            turn = self.make("mul", self.emit(Value(op="index", dim=variable, dtype="int64")), self.const(step, "int64"))
            result = turn if result is None else self.make("add", result, turn)
        for number, step in place.gathered:
            read = self.make("mul", number, self.const(step, "int64"))
            result = read if result is None else self.make("add", result, read)
        shift = self.const(place.shift, "int64")
        return shift if result is None else self.make("add", result, shift)

    def piece_loop(self, place: Place, size: int, count: int) -> int | None:
        """Return the loop whose turn says which of ``count`` pieces of ``size`` a place lies in; it will be written out.

        Returns:
            None where no single loop says so.

        Raises:
            CutLoop: one loop runs over several pieces and can be cut between them.
        """
        if place.shift or self.range_of(place) != (0, size * count - 1):
            return None
        over = [(variable, step) for variable, step in place.terms if step * (self.nest.extents[variable] - 1) >= size]
        if len(over) != 1:
            return None
        variable, step = over[0]
        if step == size:
            self.unrolled[variable] = None
            return variable
        if size % step == 0:
            raise CutLoop(variable, size // step)
        return None

    # ------------------------------------------------------------------ elements

    @property
    def guard(self) -> int | None:
        """Number of the boolean value that says where what is read now is wanted; None where that is everywhere."""
        return self._guard

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

    def row_element(self, index: int, where: Index, op: OpNode, reduced: frozenset[int]) -> int:
        """An element under a reduction over some loop variables: of the reader's guard it has what says which rows are wanted."""
        with self._guarding(guard_of_rows(self, self._guard, reduced)):
            return self._asked(self.cast(self.at(index, where), compute_dtype(op.outputs[0].dtype)), op)

    def the_number(self, index: int, dtype: str) -> int:
        """The one element of a tensor that every reader may read, such as a seed: no guard applies."""
        with self._guarding(None):
            return self.cast(self.at(index, (ORIGIN,) * len(self.meta(index).shape)), dtype)

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
        address = Place().moved(meta.offset - self.meta(root).offset)
        for stride, size, place in zip(meta.stride, meta.shape, where, strict=True):
            if size != 1:  # else its one element, wherever a cat or a slice says that it begins
                address = address.plus(place.scaled(stride))
        strides = dict(address.terms)
        self._input_of.setdefault(root, len(self._input_of))
        return self.emit(
            Value(
                op="load", operand=root, strides=tuple(strides.get(variable, 0) for variable in range(len(self.nest.extents))),
                args=tuple(number for number, _ in address.gathered), steps=tuple(step for _, step in address.gathered),
                offset=address.shift, guard=self._guard_of(address, where, meta.shape), dtype=compute_dtype(meta.dtype),
            )
        )  # fmt: skip

    def _guard_of(self, address: Place, where: Index, shape: Sequence[int]) -> int | None:
        """The guard that a load needs: none where it reads inside its tensor whatever the loops are at that decide on the guard.

        A channel's weight is then read once for all rows of a padded image, not once more for each.
        """
        if self._guard is None or address.gathered:
            return self._guard
        ranges = [(*self.range_of(place), size) for place, size in zip(where, shape, strict=True) if size != 1]
        deciding = decided_by(self, self._guard)
        is_apart = deciding is not None and deciding.isdisjoint(variable for variable, step in address.terms if step)
        return None if is_apart and all(low >= 0 and high < size for low, high, size in ranges) else self._guard

    def _inside(self, index: int, where: Index) -> int:
        op = self.op(index)
        name = overload_free(op.target)
        if op.op_class is OpClass.VIEW or (name in self.rules.views_too and name not in self.rules.pointwise):
            return self._through_view(op, name, where)
        rule = self.rules.special.get(name) or self.rules.pointwise.get(name)
        if rule is None:
            raise CannotLower("FA601", f"{op.target} has no lowering")
        if op.outputs[0].dtype == "bool" and name not in _MAKES_BOOL:
            raise CannotLower("FA601", f"{op.target} on booleans has no lowering")
        number = wrapped(self, rule(self, op, where), op.outputs[0].dtype, name)
        return self.rounded(number, op.outputs[0].dtype) if index in self._rounded else number

    def rounded(self, number: int, dtype: str) -> int:
        """A value rounded to a 16-bit dtype; the value itself where ``dtype`` is none or holds it already."""
        return rounded(self, number, dtype)

    def _through_view(self, op: OpNode, name: str, where: Index) -> int:
        source = op.args[0]
        if not isinstance(source, Ref):
            raise CannotLower("FA601", f"{op.target} has no lowering")
        if name == "getitem":
            splitter = self.op(source.index)
            taken, number = (splitter.args or (None,))[0], op.args[1]
            if not isinstance(taken, Ref) or not isinstance(number, int):
                raise CannotLower("FA601", f"{splitter.target} has several outputs")
            if (one := self.rules.results.get(overload_free(splitter.target))) is not None:
                result = one(self, splitter, number, where)
                return self.rounded(result, op.outputs[0].dtype) if op.index in self._rounded else result
            return self.at(taken.index, self.rules.piece(splitter, self.meta(taken.index), number, where))
        before = self.meta(source.index)
        if name == "repeat_interleave":
            return self.at(source.index, self.rules.repeat(op, before, where, self.nest.extents))
        rule = self.rules.views.get(name)
        if rule is None and name not in self.rules.reshapes:
            raise CannotLower("FA603", f"{op.target} inside a chain cannot be folded into an address")
        if before.dtype != op.outputs[0].dtype:
            raise CannotLower("FA603", f"{op.target} reads the bits of {before.dtype} as {op.outputs[0].dtype}")
        if rule is None:
            return self.at(source.index, self._before_reshape(source.index, where, op.outputs[0].shape, before.shape))
        return self.at(source.index, rule(op, before, where))

    def _before_reshape(self, index: int, where: Index, shape: Sequence[int], source: Sequence[int]) -> Index:
        try:
            return reshaped(where, shape, source, self.nest.extents)
        except CannotLower:
            # After a class token patches begin at position 1 of the merged dim, and no split of its loop begins there.
            whole, runs = undivided(where, shape, source)
            if not all(self._is_read_by_strides(index, run) for run in runs):
                raise
            return whole

    def _is_read_by_strides(self, index: int, run: Sequence[int]) -> bool:
        """Whether every load of an element takes a run of its dims as one: dense in memory, or not read at all."""
        meta = self.meta(index)
        if index not in self.members:
            sizes, strides = [meta.shape[dim] for dim in run], [meta.stride[dim] for dim in run]
            return all(strides[n] == strides[n + 1] * sizes[n + 1] for n in range(len(run) - 1))
        op = self.op(index)
        if overload_free(op.target) not in _BY_ELEMENT:
            return False
        for source in inputs_of(op):
            shape = self.meta(source).shape
            ahead = len(meta.shape) - len(shape)
            sizes = [shape[dim - ahead] if dim >= ahead else 1 for dim in run]
            if any(size != 1 for size in sizes):
                is_whole = sizes == [meta.shape[dim] for dim in run]
                if not is_whole or not self._is_read_by_strides(source, [dim - ahead for dim in run]):
                    return False
        return True

    def argument(self, op: OpNode, position: int, where: Index, *, name: str = "", dtype: str | None = None) -> int:
        """Element ``where`` (broadcast) of an op's argument, converted to ``dtype`` where it differs."""
        value = op.args[position] if position < len(op.args) else dict(op.kwargs).get(name)
        number = self.element(value, where, op, dtype)
        return self._asked(number, op) if position == 0 else number

    def _asked(self, number: int, op: OpNode) -> int:
        """The argument of an op that is asked by name for a narrower dtype: torch converts it first."""
        return self.rounded(number, op.outputs[0].dtype) if narrows(self.ops, op) else number

    def element(self, value: Arg, where: Index, op: OpNode, dtype: str | None = None) -> int:
        """Element of a tensor argument, or a constant."""
        wanted = dtype or compute_dtype(op.outputs[0].dtype)
        if isinstance(value, Ref):
            shape = self.meta(value.index).shape
            aligned = where[len(where) - len(shape) :] if len(shape) <= len(where) else None
            if aligned is None:
                raise CannotLower("FA603", f"{op.target} reads a value with more dims than its result")
            inner = tuple(ORIGIN if size == 1 else place for size, place in zip(shape, aligned, strict=True))
            number = argument_in_range(self, self.at(value.index, inner), self.meta(value.index).dtype, op)
        elif isinstance(value, bool | int | float):
            refuse_too_wide(value, op, [self.meta(arg.index).dtype for arg in op.args if isinstance(arg, Ref)])
            return self.const(value, wanted)
        else:
            raise CannotLower("FA601", f"{op.target} has an argument {value!r} that no kernel takes")
        return self.cast(number, wanted)

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
        nest = self.nest
        if source.shape[rank - len(reduced) :] == nest.shape[len(nest.shape) - len(reduced) :]:
            trailing = nest.index()[len(nest.shape) - len(reduced) :]
        elif math.prod(source.shape) == math.prod(nest.shape) and math.prod(source.shape[rank - len(reduced) :]) > 1:
            trailing = reshaped(nest.index(), nest.shape, source.shape, nest.extents)[rank - len(reduced) :]
        else:
            raise CannotLower(
                "FA604", f"{op.target} reduces a shape {source.shape} that is not the chain's loop nest {nest.shape}"
            )
        variables = {variable for place in trailing for variable, _ in place.terms}
        rows = where[: rank - len(reduced)] if keepdim or len(where) >= rank else where
        if variables & {variable for place in rows for variable, _ in place.terms if nest.extents[variable] != 1}:
            raise CannotLower("FA604", f"{op.target}: a row index depends on the reduced dim")
        return (*rows, *trailing), frozenset(variables)
