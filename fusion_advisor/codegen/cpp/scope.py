"""Lines of one block of a C++ kernel: a value used once is folded into its user, any other gets a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fusion_advisor.codegen.cpp.arguments import Layout, View
from fusion_advisor.codegen.cpp.names import describe
from fusion_advisor.codegen.cpp.op_rows import Call, operation
from fusion_advisor.codegen.cpp.ops import C_TYPES, COMPARE, PRODUCT, TERNARY, Expr, Prelude, computed_in, convert, literal
from fusion_advisor.ir.integer_range import WORD
from fusion_advisor.ir.program import Store, Value, dropout_constants

FOLDED = 44
"""A value used once is written inside its user's expression up to this length; longer ones get a line and a name."""
ARGUMENTS = 72
"""An op's arguments together may be this long."""
ADDRESSED = 100
"""A guarded store's address and value together may be this long on one line."""


class Scope:
    """A block under construction: a row, or the inner loop of one pass."""

    def __init__(
        self, layout: Layout, prelude: Prelude, known: dict[int, Expr], must_name: set[int], is_inner: bool = False
    ) -> None:
        self.layout = layout
        self.prelude = prelude
        self.known = known
        self.lines: list[str] = []
        self.uses: dict[int, int] = {}
        self.last_uses: set[int] = set()
        """Values that are stored or summed: nothing grows around them, so they may be longer."""
        self._must_name = must_name
        self._is_inner = is_inner

    def count(self, numbers: Iterable[int]) -> None:
        """Take note of uses."""
        for number in numbers:
            self.uses[number] = self.uses.get(number, 0) + 1

    def count_last(self, numbers: Iterable[int]) -> None:
        """Take note of uses by a store or a reduction."""
        found = list(numbers)
        self.count(found)
        self.last_uses.update(found)

    def value(self, number: int) -> Expr:
        """The text for a value defined before."""
        return self.known[number]

    def define(self, number: int, must_name: bool = False) -> None:
        """Print a value: as part of what uses it, or as a line of its own."""
        value = self.layout.program.values[number]
        expr = self._express(number, value)
        if value.op in ("const", "size", "index", "extent"):
            self.known[number] = expr
            return
        wants_name = self.uses.get(number, 0) > 1 or number in self._must_name or must_name
        limit = ARGUMENTS if number in self.last_uses else FOLDED
        if wants_name or len(expr.text) > limit or (value.guard is not None and number not in self.last_uses):
            self.name(number, expr)
        else:
            self.known[number] = expr

    def name(self, number: int, expr: Expr, prefix: str = "") -> None:
        """Give a value a line and a name."""
        value = self.layout.program.values[number]
        c_type = C_TYPES[computed_in(value.dtype)]
        name = self.layout.names.take(prefix + describe(self.layout.program, number), is_kept=not self._is_inner)
        self.lines.append(f"const {c_type} {name} = {expr.text};")
        self.known[number] = Expr(name)

    def store(self, store: Store, view: View, *, is_inner: bool) -> None:
        """Print a store."""
        layout = self.layout
        compute_dtype = computed_in(layout.program.values[store.value].dtype)
        expr = convert(self.known[store.value], compute_dtype, layout.program.operands[store.operand].dtype, self.prelude)
        moved = [self.known[arg].at(PRODUCT) for arg in store.args]
        address = layout.address(view, is_inner=is_inner, moved=moved)
        if store.guard is None:
            self.lines.append(f"{address} = {expr.text};")
            return
        lines = [f"{address} = {expr.text};"] if len(address + expr.text) <= ADDRESSED else [f"{address} =", f"    {expr.text};"]
        branch = f"if ({self.known[store.guard].text}) {{"
        if branch in self.lines and self.lines[-1] == "}":
            self.lines.pop()
        else:
            self.lines.append(branch)
        self.lines += [*(f"  {line}" for line in lines), "}"]

    def _express(self, number: int, value: Value) -> Expr:
        row = PLACED.get(value.op)
        return row(self, number, value) if row is not None else self._operation(number, value)

    def _index(self, _number: int, value: Value) -> Expr:
        return convert(Expr(self.layout.loops[value.dim]), "int64", computed_in(value.dtype), self.prelude)

    def _size(self, _number: int, value: Value) -> Expr:
        return convert(Expr(self.layout.sizes[value.dim]), "int64", computed_in(value.dtype), self.prelude)

    def _dropout(self, number: int, value: Value) -> Expr:
        compute_dtype, (threshold, scale) = computed_in(value.dtype), dropout_constants(float(value.constant or 0))
        element = Expr(self.layout.numbers[number])
        kept = self.prelude.call("fa_is_kept", self.known[value.args[0]], element, Expr(f"{threshold}u"))
        return Expr(f"{kept.text} ? {literal(scale, compute_dtype).text} : {literal(0.0, compute_dtype).text}", TERNARY)

    def _inside(self, number: int, value: Value) -> Expr:
        check = Expr(str(self.layout.checks.index(number) + 1))
        call = self.prelude.call("fa_inside", *(self.known[a] for a in value.args), check, Expr("wrong"))
        return call if value.guard is None else Expr(f"{self.known[value.guard].at(COMPARE)} && {call.text}", TERNARY + 1)

    def _operation(self, number: int, value: Value) -> Expr:
        args = [self.known[a] for a in value.args]
        while sum(len(a.text) for a in args) > ARGUMENTS:
            longest = max(value.args, key=lambda a: 0 if self.known[a].text.isidentifier() else len(self.known[a].text))
            if self.known[longest].text.isidentifier():
                break
            self.name(longest, self.known[longest])
            args = [self.known[a] for a in value.args]
        sources = [self.layout.program.values[a] for a in value.args]
        return operation(
            Call(
                value=value,
                args=args,
                dtypes=[computed_in(source.dtype) for source in sources],
                sources=sources,
                prelude=self.prelude,
                may_wrap=value.dtype == "int64" and self.layout.bits[number] >= WORD,
            )
        )

    def _load(self, number: int, value: Value) -> Expr:
        layout, compute_dtype = self.layout, computed_in(value.dtype)
        moved = [self.known[arg].at(PRODUCT) for arg in value.args]
        text = layout.address(layout.load_views[number], is_inner=self._is_inner, moved=moved)
        dtype = layout.program.operands[value.operand].dtype
        if value.guard is None:
            return convert(Expr(text), dtype, compute_dtype, self.prelude)
        # Not read where the guard is false: the compiler makes it a masked load or a branch.
        zero = "0" if dtype not in ("float32", "float64") else literal(0.0, dtype).text
        guard = self.known[value.guard].at(TERNARY + 1)
        chosen = Expr(f"{guard} ? {text} : {C_TYPES[dtype]}{{{zero}}}" if zero == "0" else f"{guard} ? {text} : {zero}", TERNARY)
        return convert(chosen, dtype, compute_dtype, self.prelude)

    def _const(self, _number: int, value: Value) -> Expr:
        return literal(value.constant, value.dtype)

    def _extent(self, number: int, _value: Value) -> Expr:
        return Expr(self.layout.extents[number])


PLACED: Mapping[str, Callable[[Scope, int, Value], Expr]] = {
    "const": Scope._const,
    "index": Scope._index,
    "size": Scope._size,
    "extent": Scope._extent,
    "load": Scope._load,
    "dropout": Scope._dropout,
    "inside": Scope._inside,
}
"""How C++ prints each op that stands for a constant, a loop, or a place in memory."""
