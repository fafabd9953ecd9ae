"""Program -> the parts of a C++ kernel: parameters, loops, row-level lines and the passes over a row.

Values fall into two levels. One that varies over the last dim lives in the inner loop; any other is computed once per row, before
the loop that uses it. A reduction ends a *pass* over the row and what depends on it belongs to a later one: layernorm takes
three passes, softmax three. A later pass computes again what an earlier one had (the row is in cache by then) unless that costs
more than reading it back from a per-thread buffer, which is the case for exponentials.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from fusion_advisor.library.cpp_expr import (
    C_TYPES,
    COST,
    TERNARY,
    Expr,
    Prelude,
    computed_in,
    convert,
    literal,
    operation,
)
from fusion_advisor.library.cpp_names import Names, describe
from fusion_advisor.library.program import REDUCTIONS, Program, Store, Value

FOLDED = 44
"""A value used once is written inside its user's expression up to this length; longer ones get a line and a name."""
ARGUMENTS = 72
"""An op's arguments together may be this long."""
CACHED_FROM = 10
"""Cost of a value from which a later pass reads it from a buffer instead of computing it again (see ``COST``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An integer argument of the kernel and its value for the Program it was made from."""

    name: str
    value: int


@dataclass(slots=True, kw_only=True)
class View:
    """How one load or store addresses its tensor."""

    name: str
    operand: int
    terms: list[tuple[int, str]]
    """(dim, stride parameter or "") for each dim with a stride other than 0."""
    offset: str


@dataclass(slots=True, kw_only=True)
class Pass:
    """One loop over the last dim."""

    lines: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    clauses: list[str] = field(default_factory=list)
    is_simd: bool = True


@dataclass(slots=True, kw_only=True)
class Section:
    """Row-level lines and the loop that follows them."""

    lines: list[str]
    loop: Pass | None


class Kernel:
    """The parts of one kernel, for the templates to arrange."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.prelude = Prelude()
        self.reducers: dict[str, list[str]] = {"max": [], "min": []}
        self.last = len(program.dims) - 1
        self.names = Names()
        self.operands = [self.names.take(o.name) for o in program.operands]
        self.loops = {0: ["i"], 1: ["row", "col"]}.get(self.last, [*(f"i{d}" for d in range(self.last)), "col"])
        self.sizes = {0: ["n"], 1: ["rows", "cols"]}.get(self.last, [*(f"n{d}" for d in range(self.last)), "cols"])
        for name in (*self.loops, *self.sizes, "start", "stop", "threads"):
            self.names.reserve(name)
        self.parameters = [Parameter(name=n, value=size) for n, size in zip(self.sizes, program.dims, strict=True)]
        loads = {v.operand for v in program.values if v.op == "load"}
        repeated = {o for o in loads if sum(v.op == "load" and v.operand == o for v in program.values) > 1}
        repeated |= {s.operand for s in program.stores if sum(t.operand == s.operand for t in program.stores) > 1}
        self.load_views = {i: self._view(v, v.operand in repeated) for i, v in enumerate(program.values) if v.op == "load"}
        self.store_views = [self._view(s, s.operand in repeated) for s in program.stores]
        self.inner, self.stage, self.cost = self._analyse()
        self.caches: dict[int, str] = {}
        self.constants: list[str] = []
        self.row_pointers: list[str] = []
        self.names.mark()
        self._named: dict[int, Expr] = {}
        self.sections = self._sections()

    # What the templates read.

    @cached_property
    def signature(self) -> list[str]:
        """The kernel's parameters as C++ declarations."""
        pointers = [
            f"{'' if o.is_output else 'const '}{C_TYPES[o.dtype]} *__restrict {name}"
            for o, name in zip(self.program.operands, self.operands, strict=True)
        ]
        return [*pointers, *(f"int64_t {p.name}" for p in self.parameters), "int threads"]

    @cached_property
    def work(self) -> int:
        """Cost of one element, next to an addition."""
        return sum(COST.get(v.op, 1) for i, v in enumerate(self.program.values) if self.inner[i])

    # Analysis.

    def _view(self, access: Value | Store, is_repeated: bool) -> View:
        operand = self.operands[access.operand]
        name = self.names.view(operand) if is_repeated else operand
        terms = []
        for dim, stride in enumerate(access.strides):
            if stride == 1:
                terms.append((dim, ""))
            elif stride != 0:
                terms.append((dim, self._parameter(f"{name}_{self.loops[dim]}_stride", stride)))
        offset = self._parameter(f"{name}_offset", access.offset) if access.offset else ""
        return View(name=name, operand=access.operand, terms=terms, offset=offset)

    def _parameter(self, name: str, value: int) -> str:
        taken = self.names.take(name)
        self.parameters.append(Parameter(name=taken, value=value))
        return taken

    def _analyse(self) -> tuple[list[bool], list[int], list[int]]:
        # Not Program.depends_on(): that looks at sizes, and one compiled kernel serves every size.
        inner: list[bool] = []
        stage: list[int] = []
        cost: list[int] = []
        for i, value in enumerate(self.program.values):
            needs = self._needs(i)
            own = COST.get(value.op, 1)
            if value.op in REDUCTIONS:
                inner.append(False)
                stage.append(stage[value.args[0]] + 1)
            else:
                varies = value.op == "load" and value.strides[self.last] != 0
                varies |= value.op == "index" and value.dim == self.last
                inner.append(varies or any(inner[n] for n in needs))
                stage.append(max((stage[n] for n in needs), default=0))
                if value.op == "load":
                    own += (3 if value.strides[self.last] != 1 else 0) + (3 if value.guard is not None else 0)
            cost.append(own + sum(cost[n] for n in needs if inner[n]) if inner[-1] else 0)
        return inner, stage, cost

    def _needs(self, number: int) -> tuple[int, ...]:
        value = self.program.values[number]
        return value.args if value.guard is None else (*value.args, value.guard)

    # Planning: which inner values each pass computes and which come from a buffer.

    def _sections(self) -> list[Section]:
        program = self.program
        reduced = [i for i, v in enumerate(program.values) if v.op in REDUCTIONS and i in self._live]
        count = max([self.stage[i] for i in reduced] + [self.stage[s.value] for s in program.stores], default=0) + 1
        roots: list[list[int]] = [[] for _ in range(count)]
        for i in reduced:
            roots[self.stage[i] - 1].append(program.values[i].args[0])
        for store in program.stores:
            if self._is_inner(store):
                roots[self.stage[store.value]].append(store.value)
        computed: list[set[int]] = []
        for of_pass in roots:
            computed.append(self._closure(of_pass, computed))
        for i, value in enumerate(program.values):
            if value.op == "const" and value.constant_name and i in self._live:
                name = self.names.take(value.constant_name, is_kept=True)
                held = computed_in(value.dtype)
                self.constants.append(f"const {C_TYPES[held]} {name} = {literal(value.constant, held).text};")
                self._named[i] = Expr(name)
        for i in self.caches:
            self.caches[i] = self.names.take(f"{describe(program, i)}_buffer", is_kept=True)
        in_loops = {n for of_pass, done in zip(roots, computed, strict=True) for i in done for n in (*self._needs(i), *of_pass)}
        in_loops |= {n for of_pass in roots for n in of_pass}
        sections = []
        for stage in range(count):
            lines = self._row_lines(stage, in_loops)
            loop = self._loop(stage, reduced, computed[stage]) if roots[stage] else None
            lines += loop.starts if loop else []
            sections.append(Section(lines=lines, loop=loop))
        return sections

    @cached_property
    def _live(self) -> set[int]:
        live: set[int] = set()
        todo = [s.value for s in self.program.stores]
        while todo:
            number = todo.pop()
            if number not in live:
                live.add(number)
                todo.extend(self._needs(number))
        return live

    def _is_inner(self, store: Store) -> bool:
        return self.inner[store.value] or store.strides[self.last] != 0

    def _closure(self, roots: list[int], earlier: list[set[int]]) -> set[int]:
        found: set[int] = set()
        todo = [r for r in roots if self.inner[r]]
        while todo:
            number = todo.pop()
            if number in found:
                continue
            found.add(number)
            if self.cost[number] >= CACHED_FROM and any(number in done for done in earlier):
                self.caches.setdefault(number, "")
                continue
            todo.extend(n for n in self._needs(number) if self.inner[n])
        return found

    # Printing.

    def _row_lines(self, stage: int, in_loops: set[int]) -> list[str]:
        scope = _Scope(self, self._named, in_loops)
        mine = [i for i in sorted(self._live) if not self.inner[i] and self.stage[i] == stage]
        scope.count(
            n
            for i in sorted(self._live)
            if not self.inner[i] and self.program.values[i].op not in REDUCTIONS
            for n in self._needs(i)
        )
        stores = [(s, v) for s, v in zip(self.program.stores, self.store_views, strict=True) if not self._is_inner(s)]
        scope.count_last(s.value for s, _ in stores)
        for i in mine:
            if i not in self._named:
                scope.define(i)
            elif self._named[i].text.startswith("static_cast") and (i in in_loops or scope.uses[i] > 1):
                scope.name(i, self._named[i], prefix="row_")
        for store, view in stores:
            if self.stage[store.value] == stage:
                scope.store(store, view, is_inner=False)
        return scope.lines

    def _loop(self, stage: int, reduced: list[int], computed: set[int]) -> Pass:
        self.names.reset()
        ends = [i for i in reduced if self.stage[i] == stage + 1]
        stores = [(s, v) for s, v in zip(self.program.stores, self.store_views, strict=True)]
        stores = [(s, v) for s, v in stores if self._is_inner(s) and self.stage[s.value] == stage]
        scope = _Scope(self, dict(self._named), set(), is_inner=True)
        from_buffer = {i for i in self.caches if i in computed and i in self._done}
        scope.count(n for i in computed - from_buffer for n in self._needs(i) if self.inner[n])
        scope.count_last(self.program.values[i].args[0] for i in ends)
        scope.count_last(s.value for s, _ in stores)
        loop = Pass()
        for i in sorted(computed):
            if i in from_buffer:
                scope.known[i] = Expr(f"{self.caches[i]}[{self.loops[-1]}]")
                if scope.uses[i] > 1:
                    scope.name(i, scope.known[i])
                continue
            scope.define(i, must_name=i in self.caches)
            if i in self.caches:
                scope.lines.append(f"{self.caches[i]}[{self.loops[-1]}] = {scope.known[i].text};")
        self._done |= computed
        for store, view in stores:
            scope.store(store, view, is_inner=True)
            loop.is_simd &= store.strides[self.last] != 0
        for i in ends:
            self._reduce(i, loop, scope)
        loop.lines = scope.lines
        return loop

    @cached_property
    def _done(self) -> set[int]:
        """Inner values that some pass so far has computed."""
        return set()

    def _reduce(self, number: int, loop: Pass, scope: _Scope) -> None:
        value = self.program.values[number]
        held = computed_in(value.dtype)
        argument = value.args[0]
        expr = convert(scope.value(argument), computed_in(self.program.values[argument].dtype), held, self.prelude)
        kind = value.op.removeprefix("reduce_")
        name = self.names.take(describe(self.program, number), is_kept=True)
        if kind == "sum":
            # Measured as fast as a float accumulator, and rows of any length stay exact to an ulp.
            wide = "double" if held == "float32" else C_TYPES[held]
            loop.starts.append(f"{wide} {name} = 0;")
            loop.clauses.append(f"reduction(+ : {name})")
            scope.lines.append(f"{name} += {expr.text};")
            self._named[number] = convert(Expr(name), "float64", held, self.prelude) if held == "float32" else Expr(name)
            return
        c_type = C_TYPES[held]
        lowest = {"float32": "-INFINITY", "float64": "-INFINITY", "bool": "false"}.get(held, f"{held.upper()}_MIN")
        highest = {"float32": "INFINITY", "float64": "INFINITY", "bool": "true"}.get(held, f"{held.upper()}_MAX")
        self.prelude.need(f"fa_{kind}")
        if c_type not in self.reducers[kind]:
            self.reducers[kind].append(c_type)
        loop.starts.append(f"{c_type} {name} = {lowest if kind == 'max' else highest};")
        loop.clauses.append(f"reduction(fa_{kind} : {name})")
        scope.lines.append(f"{name} = fa_{kind}({name}, {expr.text});")
        self._named[number] = Expr(name)

    def address(self, view: View, *, is_inner: bool) -> str:
        """Where a load or store goes; a loop over the last dim goes through a pointer to its row."""
        if is_inner and self.last and view.terms and view.terms[-1][0] == self.last:
            pointer = self._row_pointer(view)
            terms = view.terms[-1:]
        else:
            pointer, terms = self.operands[view.operand], view.terms
        parts = [f"{self.loops[d]} * {s}" if s else self.loops[d] for d, s in terms]
        if view.offset and pointer == self.operands[view.operand]:
            parts.insert(0, view.offset)
        return f"{pointer}[{' + '.join(parts) or '0'}]"

    def _row_pointer(self, view: View) -> str:
        outer = [f"{self.loops[d]} * {s}" if s else self.loops[d] for d, s in view.terms[:-1]]
        parts = ([view.offset] if view.offset else []) + outer
        if not parts:
            return self.operands[view.operand]
        name = self.names.row(view.name)
        operand = self.program.operands[view.operand]
        const = "" if operand.is_output else "const "
        line = f"{const}{C_TYPES[operand.dtype]} *{name} = {' + '.join([self.operands[view.operand], *parts])};"
        if line not in self.row_pointers:
            self.row_pointers.append(line)
        return name


class _Scope:
    """Lines of one block: a value used once is folded into its user, any other gets a name."""

    def __init__(self, kernel: Kernel, known: dict[int, Expr], must_name: set[int], is_inner: bool = False) -> None:
        self.kernel = kernel
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
        value = self.kernel.program.values[number]
        expr = self._express(number, value)
        if value.op in ("const", "size", "index"):
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
        value = self.kernel.program.values[number]
        c_type = C_TYPES[computed_in(value.dtype)]
        name = self.kernel.names.take(prefix + describe(self.kernel.program, number), is_kept=not self._is_inner)
        self.lines.append(f"const {c_type} {name} = {expr.text};")
        self.known[number] = Expr(name)

    def store(self, store: Store, view: View, *, is_inner: bool) -> None:
        """Print a store."""
        kernel = self.kernel
        held = computed_in(kernel.program.values[store.value].dtype)
        expr = convert(self.known[store.value], held, kernel.program.operands[store.operand].dtype, kernel.prelude)
        self.lines.append(f"{kernel.address(view, is_inner=is_inner)} = {expr.text};")

    def _express(self, number: int, value: Value) -> Expr:
        kernel = self.kernel
        held = computed_in(value.dtype)
        if value.op == "const":
            return literal(value.constant, value.dtype)
        if value.op == "index":
            return convert(Expr(kernel.loops[value.dim]), "int64", held, kernel.prelude)
        if value.op == "size":
            return convert(Expr(kernel.sizes[value.dim]), "int64", held, kernel.prelude)
        if value.op == "load":
            return self._load(number, value, held)
        args = [self.known[a] for a in value.args]
        while sum(len(a.text) for a in args) > ARGUMENTS:
            longest = max(value.args, key=lambda a: 0 if self.known[a].text.isidentifier() else len(self.known[a].text))
            if self.known[longest].text.isidentifier():
                break
            self.name(longest, self.known[longest])
            args = [self.known[a] for a in value.args]
        values = kernel.program.values
        dtypes = [computed_in(values[a].dtype) for a in value.args]
        return operation(value, args, dtypes, [values[a] for a in value.args], kernel.prelude)

    def _load(self, number: int, value: Value, held: str) -> Expr:
        kernel = self.kernel
        text = kernel.address(kernel.load_views[number], is_inner=kernel.inner[number])
        dtype = kernel.program.operands[value.operand].dtype
        if value.guard is None:
            return convert(Expr(text), dtype, held, kernel.prelude)
        # Not read where the guard is false: the compiler makes it a masked load or a branch.
        zero = "0" if dtype not in ("float32", "float64") else literal(0.0, dtype).text
        guard = self.known[value.guard].at(TERNARY + 1)
        chosen = Expr(f"{guard} ? {text} : {C_TYPES[dtype]}{{{zero}}}" if zero == "0" else f"{guard} ? {text} : {zero}", TERNARY)
        return convert(chosen, dtype, held, kernel.prelude)


def grain(kernel: Kernel) -> int:
    """Elements from which threads pay: a fork and join costs what some 2^15 additions do."""
    return 8192 if kernel.work >= 24 else 16384 if kernel.work >= 8 else 32768
