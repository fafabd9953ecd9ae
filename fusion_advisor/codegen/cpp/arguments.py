"""The arguments of a C++ kernel and where its loads and stores go.

Sizes, offsets, and strides other than 0 and 1 are arguments, in an order that depends only on the layout key: whoever binds a
compiled kernel to another Program of the same layout finds the values in :attr:`Layout.parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.codegen.common.position_checks import checks_of
from fusion_advisor.codegen.cpp.names import Names
from fusion_advisor.codegen.cpp.ops import C_TYPES
from fusion_advisor.ir.integer_range import bits_of
from fusion_advisor.ir.program import Program, Store, Value, find_pairs, reader_of


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
    """(dim, stride parameter, digit, or "") for each dim with a stride other than 0."""
    offset: str
    gathered: tuple[tuple[int, str], ...]
    """(value number, step parameter or "") for each value that moves the address."""
    shift: str = ""
    """Known distance from ``offset``: 1 for the odd element of a pair."""


class Layout:
    """Loops, parameters and addresses of one kernel."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.last = len(program.dims) - 1
        self.names = Names()
        self.operands = [self.names.take(o.name) for o in program.operands]
        self.loops = {0: ["i"], 1: ["row", "col"]}.get(self.last, [*(f"i{d}" for d in range(self.last)), "col"])
        self.sizes = {0: ["n"], 1: ["rows", "cols"]}.get(self.last, [*(f"n{d}" for d in range(self.last)), "cols"])
        self.loops = [self.names.take(name) for name in self.loops]
        self.sizes = [self.names.take(name) for name in self.sizes]
        self.checks = checks_of(program)
        for name in ("start", "stop", "threads", "wrong"):
            self.names.reserve(name)
        self.parameters = [Parameter(name=n, value=size) for n, size in zip(self.sizes, program.dims, strict=True)]
        loads = [v.operand for v in program.values if v.op == "load"]
        stores = [t.operand for t in program.stores]
        self._pairs = find_pairs(program)
        for _, odd in self._pairs.loads:
            loads.remove(program.values[odd].operand)
        for _, odd in self._pairs.stores:
            stores.remove(program.stores[odd].operand)
        repeated = {o for o in loads if loads.count(o) > 1} | {o for o in stores if stores.count(o) > 1}
        repeated |= set(loads) & set(stores)  # a recurrence's state
        reads = {i: v for i, v in enumerate(program.values) if v.op == "load"}
        self.load_views = self._views(reads, self._pairs.loads, repeated)
        written = self._views(dict(enumerate(program.stores)), self._pairs.stores, repeated)
        self.store_views = [written[position] for position in range(len(program.stores))]
        self.extents = {
            i: self._parameter(f"{self.operands[reader_of(program, i)]}_extent", int(v.constant or 0))
            for i, v in enumerate(program.values)
            if v.op == "extent"
        }
        self.numbers = {i: self._number(v) for i, v in enumerate(program.values) if v.op == "dropout"}
        self.row_pointers: list[str] = []
        self.bits = bits_of(program.values, [o.dtype for o in program.operands])
        """Of integer values: how wide they may become."""

    @property
    def signature(self) -> list[str]:
        """The kernel's parameters as C++ declarations."""
        pointers = [
            f"{'' if o.is_output else 'const '}{C_TYPES[o.dtype]} *__restrict {name}"
            for o, name in zip(self.program.operands, self.operands, strict=True)
        ]
        wrong = ["int64_t *__restrict wrong"] if self.checks else []
        return [*pointers, *(f"int64_t {p.name}" for p in self.parameters), *wrong, "int threads"]

    def _views(
        self, accesses: Mapping[int, Value | Store], pairs: Sequence[tuple[int, int]], repeated: set[int]
    ) -> dict[int, View]:
        """The odd one of a pair is addressed from the even one: compilers then see that the two interleave."""
        even_of, odd_of = {odd: even for even, odd in pairs}, dict(pairs)
        views: dict[int, View] = {}
        for number in accesses:
            even = even_of.get(number, number)
            if even not in views:
                views[even] = self._view(accesses[even], accesses[even].operand in repeated)
                if even in odd_of:
                    views[odd_of[even]] = replace(views[even], shift="1")
        return views

    def _view(self, access: Value | Store, is_repeated: bool) -> View:
        operand = self.operands[access.operand]
        name = self.names.view(operand) if is_repeated else operand
        terms = []
        for dim, stride in enumerate(access.strides):
            if stride == 1:
                terms.append((dim, ""))
            elif dim == self.last and (access.operand, access.strides) in self._pairs.places:
                terms.append((dim, str(stride)))
            elif stride != 0:
                terms.append((dim, self._parameter(f"{name}_{self.loops[dim]}_stride", stride)))
        offset = self._parameter(f"{name}_offset", access.offset) if access.offset else ""
        moved = zip(access.args, access.steps, strict=True)
        gathered = tuple((number, "" if step == 1 else self._parameter(f"{name}_step", step)) for number, step in moved)
        return View(name=name, operand=access.operand, terms=terms, offset=offset, gathered=gathered)

    def _number(self, value: Value) -> str:
        """The row-major number of the element that a dropout decides on."""
        terms = [self._parameter("element_offset", value.offset)] if value.offset else []
        for loop, stride in zip(self.loops, value.strides, strict=True):
            if stride == 1:
                terms.append(loop)
            elif stride != 0:
                terms.append(f"{loop} * {self._parameter(f'element_{loop}_stride', stride)}")
        return " + ".join(terms) or "0"

    def _parameter(self, name: str, value: int) -> str:
        taken = self.names.take(name)
        self.parameters.append(Parameter(name=taken, value=value))
        return taken

    def address(self, view: View, *, is_inner: bool, moved: Sequence[str] = ()) -> str:
        """Where a load or store goes; a loop over the last dim goes through a pointer to its row.

        Args:
            view: the load or store.
            is_inner: whether it stands in the loop over the last dim.
            moved: the values that move the address, as factors.
        """
        if is_inner and self.last and view.terms and view.terms[-1][0] == self.last and not view.gathered:
            pointer = self._row_pointer(view)
            terms = view.terms[-1:]
        else:
            pointer, terms = self.operands[view.operand], view.terms
        parts = [f"{self.loops[d]} * {s}" if s else self.loops[d] for d, s in terms]
        steps = (step for _, step in view.gathered)
        parts = [f"{code} * {step}" if step else code for code, step in zip(moved, steps, strict=True)] + parts
        if view.offset and pointer == self.operands[view.operand]:
            parts.insert(0, view.offset)
        parts += [view.shift] if view.shift else []
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
