"""Program -> the parts of a C++ kernel: parameters, loops, row-level lines and the passes over a row.

Values fall into two levels. One that varies over the last dim lives in the inner loop; any other is computed once per row, before
the loop that uses it. A reduction ends a *pass* over the row and what depends on it belongs to a later one: layernorm takes
three passes, softmax three. A later pass computes again what an earlier one had (the row is in cache by then) unless that costs
more than reading it back from a per-thread buffer, which is the case for exponentials. Where nothing reads exponentials back
(``logsumexp``, cross-entropy) their sum is accumulated together with their maximum, chunk by chunk, and the row is read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from fusion_advisor.codegen.common.online_softmax import OnlineSum, online_sums
from fusion_advisor.codegen.cpp.arguments import Layout
from fusion_advisor.codegen.cpp.names import describe
from fusion_advisor.codegen.cpp.op_rows import Call, operation
from fusion_advisor.codegen.cpp.ops import C_TYPES, COST, SUM, Expr, Prelude, computed_in, convert, literal
from fusion_advisor.codegen.cpp.scope import Scope
from fusion_advisor.ir.integer_range import WORD
from fusion_advisor.ir.program import ADDRESSED, REDUCTIONS, Program, Store

_ORDERS = frozenset(("lt", "le", "gt", "ge"))
CACHED_FROM = 10
"""Cost of a value from which a later pass reads it from a buffer instead of computing it again (see ``COST``)."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """One loop over the last dim.

    Attributes:
        starts: declarations of the accumulators, before the loop.
        parts: float accumulators of one chunk of columns; without any the loop is not cut into chunks.
        lines: the loop's body.
        adds: after each chunk.
        ends: after the loop.
        clauses: OpenMP reductions of the innermost loop.
        team_clauses: those of the loop over chunks, where threads share one row.
        ahead: a loop over the same chunk that comes before, with ``parts`` and ``adds`` of its own.
    """

    starts: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    adds: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    clauses: list[str] = field(default_factory=list)
    team_clauses: list[str] = field(default_factory=list)
    is_simd: bool = True
    ahead: Pass | None = None


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
        self.layout = Layout(program)
        self.names = self.layout.names
        self.names.mark()
        self.last = self.layout.last
        self.online = self._online_sums()
        self.inner, self.stage, self.cost = self._analyse()
        self.caches: dict[int, str] = {}
        self.constants: list[str] = []
        self._named: dict[int, Expr] = {}
        self._done: set[int] = set()
        self.sections = self._sections()

    @property
    def grain(self) -> int:
        """Elements from which threads pay: a fork and join costs what some 2^15 additions do."""
        work = sum(COST.get(v.op, 1) for i, v in enumerate(self.program.values) if self.inner[i])
        return 8192 if work >= 24 else 16384 if work >= 8 else 32768

    @property
    def compares_indices(self) -> bool:
        """Whether a loop's variable is compared with a number, as rows of a ``cat`` and causal masks are."""
        values = self.program.values
        return any(v.op in _ORDERS and values[v.args[0]].dtype == "int64" for v in values)

    # Analysis.

    def _online_sums(self) -> dict[int, OnlineSum]:
        """Sums of exponentials that nothing else reads, by their number and their maximum's; threads share no row."""
        if self.last == 0:
            return {}
        users = [n for value in self.program.values for n in value.args] + [store.value for store in self.program.stores]
        alone = [pair for pair in online_sums(self.program) if users.count(pair.exponential) == 1]
        return {number: pair for pair in alone for number in (pair.total, pair.highest)}

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
                pair = self.online.get(i)
                stage.append(stage[pair.highest] if pair and i == pair.total else stage[value.args[0]] + 1)
            else:
                varies = value.op in ADDRESSED and value.strides[self.last] != 0
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
        count = max([self.stage[i] for i in reduced] + [self._stage_of(s) for s in program.stores], default=0) + 1
        roots: list[list[int]] = [[] for _ in range(count)]
        for i in reduced:
            roots[self.stage[i] - 1].append(self.online[i].element if i in self.online else program.values[i].args[0])
        for store in program.stores:
            if self._is_inner(store):
                roots[self._stage_of(store)] += store.needs
        computed: list[set[int]] = []
        for of_pass in roots:
            computed.append(self._closure(of_pass, computed))
        for i, value in enumerate(program.values):
            if value.op == "const" and value.constant_name and i in self._live:
                name = self.names.take(value.constant_name, is_kept=True)
                compute_dtype = computed_in(value.dtype)
                self.constants.append(f"const {C_TYPES[compute_dtype]} {name} = {literal(value.constant, compute_dtype).text};")
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
        todo = [number for s in self.program.stores for number in s.needs]
        while todo:
            number = todo.pop()
            if number not in live:
                live.add(number)
                todo.extend(self._needs(number))
        return live

    def _is_inner(self, store: Store) -> bool:
        return any(self.inner[number] for number in store.needs) or store.strides[self.last] != 0

    def _stage_of(self, store: Store) -> int:
        return max(self.stage[number] for number in store.needs)

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
        scope = Scope(self.layout, self.prelude, self._named, in_loops)
        mine = [i for i in sorted(self._live) if not self.inner[i] and self.stage[i] == stage]
        scope.count(
            n
            for i in sorted(self._live)
            if not self.inner[i] and self.program.values[i].op not in REDUCTIONS
            for n in self._needs(i)
        )
        stores = [(s, v) for s, v in zip(self.program.stores, self.layout.store_views, strict=True) if not self._is_inner(s)]
        scope.count_last(s.value for s, _ in stores)
        scope.count(number for s, _ in stores for number in s.needs[1:])
        for i in mine:
            if i not in self._named:
                scope.define(i)
            elif self._named[i].text.startswith("static_cast") and (i in in_loops or scope.uses[i] > 1):
                scope.name(i, self._named[i], prefix="row_")
        for store, view in stores:
            if self._stage_of(store) == stage:
                scope.store(store, view, is_inner=False)
        return scope.lines

    def _loop(self, stage: int, reduced: list[int], computed: set[int]) -> Pass:
        self.names.reset()
        ends = [i for i in reduced if self.stage[i] == stage + 1]
        pairs = [self.online[i] for i in ends if i in self.online and i == self.online[i].total]
        ends = [i for i in ends if i not in self.online]
        stores = [
            (s, v)
            for s, v in zip(self.program.stores, self.layout.store_views, strict=True)
            if self._is_inner(s) and self._stage_of(s) == stage
        ]
        from_buffer = {i for i in self.caches if i in computed and i in self._done}
        scope = self._scope_of(computed - from_buffer, ends, pairs, [store for store, _ in stores])
        for i in sorted(computed):
            self._define(i, scope, is_in_buffer=i in from_buffer)
        self._done |= computed
        loop = Pass()
        for store, view in stores:
            scope.store(store, view, is_inner=True)
            loop.is_simd &= store.strides[self.last] != 0 and not any(self.inner[number] for number in store.needs[1:])
        for i in ends:
            self._reduce(i, loop, scope)
        for pair in pairs:
            self._accumulate(pair, loop, scope)
        loop.lines = scope.lines
        return loop

    def _scope_of(self, computed: set[int], ends: list[int], pairs: list[OnlineSum], stores: list[Store]) -> Scope:
        """The scope of an inner loop, with the uses of each value in it counted."""
        scope = Scope(self.layout, self.prelude, dict(self._named), set(), is_inner=True)
        scope.count(n for i in computed for n in self._needs(i) if self.inner[n])
        scope.count_last(self.program.values[i].args[0] for i in ends)
        scope.count(pair.element for pair in pairs)
        scope.count_last(store.value for store in stores)
        scope.count(number for store in stores for number in store.needs[1:])
        return scope

    def _define(self, number: int, scope: Scope, *, is_in_buffer: bool) -> None:
        """Compute a value in an inner loop, or read it back from its buffer."""
        place = f"{self.caches.get(number)}[{self.layout.loops[-1]}]"
        if is_in_buffer:
            scope.known[number] = Expr(place)
            if scope.uses[number] > 1:
                scope.name(number, scope.known[number])
            return
        scope.define(number, must_name=number in self.caches)
        if number in self.caches:
            scope.lines.append(f"{place} = {scope.known[number].text};")

    def _accumulate(self, pair: OnlineSum, loop: Pass, scope: Scope) -> None:
        """A maximum and its sum of exponentials: each chunk's maximum first, which rescales the sum so far."""
        compute_dtype = computed_in(self.program.values[pair.highest].dtype)
        c_type = C_TYPES[compute_dtype]
        highest = self.names.take(describe(self.program, pair.highest), is_kept=True)
        total = self.names.take(describe(self.program, pair.total), is_kept=True)
        flag = self.names.take(f"{highest}_has_nan", is_kept=True)
        element = scope.value(pair.element).at(SUM)

        def exp(text: str) -> str:
            value = self.program.values[pair.exponential]
            return operation(
                Call(value=value, args=[Expr(text, SUM)], dtypes=[compute_dtype], sources=[], prelude=self.prelude)
            ).text

        loop.starts += [f"{c_type} {highest} = std::numeric_limits<{c_type}>::lowest();", f"double {total} = 0;"]
        loop.starts.append(f"int {flag} = 0;")
        peek = Scope(self.layout, self.prelude, dict(self._named), set(), is_inner=True)
        needed = sorted(self._closure([pair.element], []))
        peek.count(n for i in needed for n in self._needs(i) if self.inner[n])
        peek.count([pair.element] * 2)
        for i in needed:
            peek.define(i)
        seen = peek.value(pair.element).text
        peek.lines += [f"{highest}_part = {seen} > {highest}_part ? {seen} : {highest}_part;", f"{flag} |= {seen} != {seen};"]
        before = loop.ahead or Pass()
        before.parts.append(f"{c_type} {highest}_part = {highest};")
        before.clauses += [f"reduction(max : {highest}_part)", f"reduction(| : {flag})"]
        before.lines += peek.lines
        before.adds += [f"{total} *= {exp(f'{highest} - {highest}_part')};", f"{highest} = {highest}_part;"]
        loop.ahead = before
        loop.parts.append(f"{'double' if self.compares_indices else c_type} {total}_part = 0;")
        loop.clauses.append(f"reduction(+ : {total}_part)")
        loop.adds.append(f"{total} += {total}_part;")
        scope.lines.append(f"{total}_part += {exp(f'{element} - {highest}')};")
        edge, sum_there = (f"{highest} == INFINITY", "INFINITY") if pair.is_finite else (f"{total} == 0", "NAN")
        loop.ends += [f"if ({flag}) {highest} = NAN;", f"if ({total} == 0) {highest} = -INFINITY;  // a row of -Inf alone"]
        loop.ends.append(f"if ({edge}) {total} = {sum_there};")
        self._named[pair.highest] = Expr(highest)
        self._named[pair.total] = convert(Expr(total), "float64", compute_dtype, self.prelude)

    def _reduce(self, number: int, loop: Pass, scope: Scope) -> None:
        value = self.program.values[number]
        compute_dtype = computed_in(value.dtype)
        argument = value.args[0]
        expr = convert(scope.value(argument), computed_in(self.program.values[argument].dtype), compute_dtype, self.prelude)
        kind = value.op.removeprefix("reduce_")
        name = self.names.take(describe(self.program, number), is_kept=True)
        c_type = C_TYPES[compute_dtype]
        if kind == "sum" and compute_dtype == "float32":
            # fp32 within a chunk, fp64 across: a row of any length sums to a few ulp, and the loop runs twice as fast as one
            # that widens every element. A lane of AVX2 adds 32 of 256 numbers: a layer norm of 768 columns of which only the
            # first is not 0 is off by 8 ulp at most, with chunks of 1,024 by 24. In cache, 256 costs a norm 5 % at most.
            # Where GCC makes two loops of one, for rows on either side of a number, it may leave one of them a single lane.
            part = name if self.compares_indices else f"{name}_part"
            loop.starts.append(f"double {name} = 0;")
            loop.clauses.append(f"reduction(+ : {part})")
            loop.team_clauses.append(f"reduction(+ : {name})")
            if part != name:
                loop.parts.append(f"float {part} = 0;")
                loop.adds.append(f"{name} += {part};")
            scope.lines.append(f"{part} += {expr.text};")
            self._named[number] = convert(Expr(name), "float64", compute_dtype, self.prelude)
            return
        self._named[number] = Expr(name)
        if kind == "sum" and compute_dtype == "int64" and self.layout.bits[number] >= WORD:
            starts, clauses = [f"uint64_t {name} = 0;  // wraps around, as torch's sum does"], [f"reduction(+ : {name})"]
            scope.lines.append(f"{name} += static_cast<uint64_t>({expr.text});")
            self._named[number] = Expr(f"static_cast<int64_t>({name})")
        elif kind == "sum":
            starts, clauses = [f"{c_type} {name} = 0;"], [f"reduction(+ : {name})"]
            scope.lines.append(f"{name} += {expr.text};")
        else:
            infinity = "-INFINITY" if kind == "max" else "INFINITY"
            is_float = compute_dtype in ("float32", "float64")
            limit = infinity if is_float else f"std::numeric_limits<{c_type}>::{'lowest' if kind == 'max' else 'max'}()"
            starts, clauses = [f"{c_type} {name} = {limit};"], [f"reduction({kind} : {name})"]
            sign = ">" if kind == "max" else "<"
            if expr.text.isidentifier():
                text = expr.text
            else:
                text = self.names.take("element")
                scope.lines.append(f"const {c_type} {text} = {expr.text};")
            scope.lines.append(f"{name} = {text} {sign} {name} ? {text} : {name};")
            if is_float:
                # Compares drop NaN, torch does not. A separate flag costs a quarter of a NaN-aware reduction.
                flag = self.names.take(f"{name}_has_nan", is_kept=True)
                starts.append(f"int {flag} = 0;")
                clauses.append(f"reduction(| : {flag})")
                scope.lines.append(f"{flag} |= {text} != {text};")
                loop.ends.append(f"if ({flag}) {name} = NAN;")
        loop.starts += starts
        loop.clauses += clauses
        loop.team_clauses += clauses
