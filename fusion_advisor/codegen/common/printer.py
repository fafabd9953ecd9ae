"""SSA values as the lines a person would write: what is used once and short is folded, the rest gets a name.

The rules are the same for every language. How an op is printed is a row of the language's table (``op_rows`` in
``codegen.triton`` and ``codegen.cuda``; the rows that both have are in ``printer_rows``). Floating point is not associative: an
expression keeps the order of the IR, and an operand of equal precedence on the right keeps its parentheses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.codegen.common.arguments import Access, Numbering, Schedule
from fusion_advisor.codegen.common.value_names import nouns_of
from fusion_advisor.ir.program import REDUCTIONS, Value, divides_index

ATOM, UNARY, PRODUCT, SUM, LOOSE = 9, 8, 7, 6, 0
"""How tightly an expression holds together. Comparisons and logic are LOOSE: Python and C disagree about them."""

_MAX_FOLDED = 44
"""Longest expression that is folded into another one."""

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
ROUNDERS = {"round_float16": "round_fp16", "round_bfloat16": "round_bf16"}
"""The helper that rounds to a 16-bit dtype and widens again, in Triton and in CUDA C++."""
LOGIC = {"and": "&", "or": "|", "xor": "^"}


class Unsupported(Exception):
    """An op, dtype or address that the language cannot express; becomes a KernelBuildFailed with the kernel's name."""


@dataclass(frozen=True, slots=True)
class Text:
    """An expression and how tightly it holds together."""

    code: str
    rank: int = ATOM

    def at(self, rank: int) -> str:
        """The code, in parentheses where an operator of ``rank`` would bind tighter."""
        return self.code if self.rank >= rank else f"({self.code})"


Row = Callable[[Any, int, Value, Sequence[Text]], Text]
"""How a language prints one op: from its writer, the value's number, the value, and the texts of the value's arguments."""


class Writer:
    """Prints the values of one Program in one language.

    Subclasses provide a table of rows and the methods that the shared rows call.

    Attributes:
        rows: how the language prints each op, by the op's name.
        helpers: names of the helper functions that the text calls; the template prints those.
        bases: row pointers that addresses start from: name, expression, and an access that uses it.
    """

    def __init__(self, plan: Schedule, *, fast_math: bool) -> None:
        self.plan = plan
        self.fast_math = fast_math
        self.helpers: set[str] = set()
        self._taken = set(plan.taken) | self.helper_names
        self.bases: list[tuple[str, str, Access]] = []
        self._base_names: dict[str, str] = {}
        self._texts: dict[int, Text] = {}
        self._code: dict[int, str] = {}
        self._live = self._find_live()
        self._users = self._count_users()
        self._nouns = nouns_of(plan)
        for number in sorted(self._live):
            self._write(number)

    helper_names: frozenset[str] = frozenset()
    rows: Mapping[str, Row]

    # What a language provides.

    def literal(self, value: Value) -> str:
        """A constant."""
        raise NotImplementedError

    def load(self, number: int, value: Value, access: Access) -> str:
        """The expression that reads an element, converted to the value's dtype."""
        raise NotImplementedError

    def reduction(self, number: int, value: Value) -> str:
        """The expression of a reduced value; empty where the skeleton accumulates it."""
        raise NotImplementedError

    def dropout(self, number: int, value: Value) -> Text:
        """The factor of a dropout's element."""
        raise NotImplementedError

    def inside(self, number: int, value: Value, args: Sequence[Text]) -> Text:
        """Whether a position lies in its tensor; the kernel stops where it does not."""
        raise NotImplementedError

    @property
    def shared_columns(self) -> Collection[int]:
        """The values that are one number for many neighbouring columns: a product with them may be made once for all of these."""
        return ()

    def rounded_product(self, value: Value, args: Sequence[Text]) -> Text:
        """A product that the compiler must not fold, unrounded, into the sum or difference that uses it."""
        raise NotImplementedError

    # What skeletons use.

    def text(self, number: int) -> Text:
        """A value's name, or the expression that it was folded into."""
        return self._texts[number]

    def is_named(self, number: int) -> bool:
        """Whether the value has a statement of its own."""
        return number in self._code

    def statement(self, number: int) -> tuple[str, str]:
        """Name and expression of a named value."""
        return self._texts[number].code, self._code[number]

    def scaled(self, value: Value) -> Text | None:
        """A normalised element times the weight of its channel as ``element * (inverse_deviation * weight)``; None if it is not.

        What neighbours share is multiplied once for all of them then, which saves one of three instructions of each element. An
        inverse deviation is too small a number to overflow where the element times it does not.

        Args:
            value: a product.
        """
        values, (normed, weight) = self.plan.program.values, value.args
        if values[normed].op != "mul" or self.is_named(normed) or weight not in self.shared_columns:
            return None
        element, scale = values[normed].args
        if not self.plan.has_col(element) or self.plan.has_col(scale) or values[scale].op != "rsqrt":
            return None
        return Text(
            f"{self.text(element).at(PRODUCT)} * ({self.text(scale).at(PRODUCT)} * {self.text(weight).at(UNARY)})", PRODUCT
        )

    def operand_address(self, access: Access, *, col: str = "") -> str:
        """``x_ptr + row * x_stride0 + col``, leaving out what is zero.

        Args:
            access: the load or store.
            col: what stands for the last dim's variable; its own name by default.
        """
        rest = self.element(access, col=col)
        return f"{self.base(access)} + {rest}" if rest != "0" else self.base(access)

    def base(self, access: Access) -> str:
        """The pointer; where several dims move it, the name of its row, which ``bases`` defines once."""
        terms = terms_of(self.plan.indices[:-1], access.strides[:-1])
        if len(terms) < 2 or access.gathered:  # a row's name is defined before any value is
            return access.pointer
        code = " + ".join([access.pointer, *terms])
        if code not in self._base_names:
            self._base_names[code] = self.fresh(f"{access.operand.name}_row")
            self.bases.append((self._base_names[code], code, access))
        return self._base_names[code]

    def element(self, access: Access, *, col: str = "") -> str:
        """What is added to :meth:`base`; ``0`` when that is nothing."""
        indices, strides = (*self.plan.indices[:-1], col or self.plan.indices[-1]), access.strides
        terms = terms_of(indices, strides)
        if self.base(access) != access.pointer:
            terms = terms_of(indices[-1:], strides[-1:])
        moved = [(self._texts[number].at(PRODUCT), step) for number, step in access.gathered]
        terms = [*terms_of(tuple(code for code, _ in moved), tuple(step for _, step in moved)), *terms]
        return " + ".join([*terms, access.offset] if access.offset else terms) or "0"

    def number_base(self, numbering: Numbering) -> str:
        """The part of an element's number that all columns share; ``0`` when that is nothing."""
        terms = terms_of(self.plan.indices[:-1], numbering.strides[:-1])
        return " + ".join([*terms, numbering.offset] if numbering.offset else terms) or "0"

    # Naming and folding.

    def _find_live(self) -> set[int]:
        """What some store is made of: values that a rewriting left unused are not written."""
        live: set[int] = set()
        waiting = [number for store in self.plan.program.stores for number in store.needs]
        while waiting:
            number = waiting.pop()
            if number not in live:
                live.add(number)
                value = self.plan.program.values[number]
                waiting += [*value.args, *(() if value.guard is None else (value.guard,))]
        return live

    def _count_users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in self.plan.program.values]
        for number in sorted(self._live):
            value = self.plan.program.values[number]
            for arg in (*value.args, *(() if value.guard is None else (value.guard,))):
                users[arg].append(number)
        return users

    def _write(self, number: int) -> None:
        value = self.plan.program.values[number]
        text = self.printed(number, value, [self._texts[arg] for arg in value.args])
        if self._is_folded(number, value, text):
            self._texts[number] = text
            return
        name = self.fresh(self._nouns[number])
        self._texts[number] = Text(name)
        self._code[number] = text.code

    def fresh(self, base: str) -> str:
        """A local name that nothing else has."""
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name

    def _is_folded(self, number: int, value: Value, text: Text) -> bool:
        if value.op in ("index", "size", "extent") or (value.op == "const" and not value.constant_name):
            return True
        if value.op == "cast" and text == self._texts[value.args[0]]:
            return True  # a cast to the dtype that it has
        if value.op in REDUCTIONS or value.op in ("load", "const", "dropout", "inside"):
            return False
        if len(self._users[number]) != 1 or any(s.value == number for s in self.plan.program.stores):
            return False
        user = self._users[number][0]
        is_accumulated = self.plan.program.values[user].op in REDUCTIONS
        same_place = self._place(number) == self._place(user)
        return len(text.code) <= _MAX_FOLDED and (same_place or is_accumulated)

    def _place(self, number: int) -> tuple[bool, bool]:
        return self.plan.has_row(number), self.plan.has_col(number)

    def printed(self, number: int, value: Value, args: Sequence[Text]) -> Text:
        """Print an op with these arguments, as the language's table says.

        Raises:
            Unsupported: the language has no row for the op, or not for this dtype.
        """
        row = self.rows.get(value.op)
        if row is None:
            raise Unsupported(f"op {value.op} of {value.dtype}")
        return row(self, number, value, args)

    def is_shared_product(self, number: int, value: Value) -> bool:
        """Whether several users have to see one and the same rounding of a product.

        Compilers contract ``x * c - y`` to one operation that does not round the product. Where y is the maximum of the rounded
        products, as in softmax, the largest difference is then not 0 but their rounding error: e to the power of 1e19 at 1e27.
        """
        if value.op != "mul" or not value.dtype.startswith("float"):
            return False
        if self.plan.program.is_exact:
            return True
        users = self._users_behind_choices(number)
        return len(users) > 1 and any(self.plan.program.values[user].op in ("add", "sub") for user in users)

    def _users_behind_choices(self, number: int) -> set[int]:
        """Users of a value, or of what only chooses it or turns its sign: a compiler may move them after a difference."""
        found: set[int] = set()
        for user in self._users[number]:
            is_choice = self.plan.program.values[user].op in ("where", "neg")
            found |= self._users_behind_choices(user) if is_choice else {user}
        return found

    def index(self, number: int, value: Value) -> Text:
        """The loop variable of a dim, as a 64-bit integer unless it is only compared."""
        name = self.plan.indices[value.dim]
        values, users = self.plan.program.values, self._users[number]
        is_divided = bool(users) and all(divides_index(values, values[user]) for user in users)
        return Text(name) if is_divided or self.is_only_compared(number) else Text(self.widen(name))

    def is_only_compared(self, number: int) -> bool:
        """Whether nothing but comparisons with other places comes of a place: it then needs no more bits than an index."""
        users, value = self._users[number], self.plan.program.values[number]
        return (
            value.dtype == "int64"
            and bool(users)
            and not any(number in store.args for store in self.plan.program.stores)
            and all(
                self._is_place(self.plan.program.values[user])
                and (self.plan.program.values[user].op in COMPARE or self.is_only_compared(user))
                for user in users
            )
        )

    def is_only_addressed(self, number: int) -> bool:
        """Whether a quotient of an index only moves addresses that are read: they fit an index where the schedule says so."""
        values, stores = self.plan.program.values, self.plan.program.stores
        return (
            values[number].op == "quotient"
            and all(values[user].op == "load" and number in values[user].args for user in self._users[number])
            and not any(number in store.needs for store in stores)
        )

    def is_below_maximum(self, number: int) -> bool:
        """Whether a value is a difference from its row's maximum: some exponential is 1 then, and the smallest may be 0."""
        values = self.plan.program.values
        return values[number].op == "sub" and values[values[number].args[1]].op == "reduce_max"

    def _is_place(self, value: Value) -> bool:
        values = self.plan.program.values
        args = [values[arg] for arg in value.args]
        is_sum = value.op in ("add", "sub") and value.dtype == "int64"
        plain = ("const", "index", "size")
        return (is_sum or value.op in COMPARE) and all(
            arg.dtype == "int64" and (arg.op in plain or self._is_place(arg)) for arg in args
        )

    def widen(self, name: str) -> str:
        """An index as int64."""
        raise NotImplementedError


def has_inverse(divisor: Value) -> bool:
    """Whether a constant's float32 reciprocal is a normal number.

    Where results are rounded to 16 bits, a product with it is as good as the quotient, whose IEEE division takes eight
    instructions and a branch.
    """
    constant = divisor.constant
    return divisor.op == "const" and isinstance(constant, float) and 2.0**-126 <= abs(constant) <= 2.0**126


def terms_of(indices: tuple[str, ...], strides: tuple[str, ...]) -> list[str]:
    """``row * x_stride0`` for every dim that moves the address."""
    pairs = zip(indices, strides, strict=True)
    return [index if stride == "1" else f"{index} * {stride}" for index, stride in pairs if stride != "0"]
