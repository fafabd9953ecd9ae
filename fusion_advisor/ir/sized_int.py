"""Whole numbers that remember how they follow from sizes, so that what was computed for one size can be had for another.

A :class:`SizedInt` is an ``int`` with a form: the arithmetic that made it, over leaves that stand for sizes of the graph.
Lowering computes with it as with any number and compares by its value. The forms of a program's extents, strides and offsets
then give them at other sizes (:mod:`fusion_advisor.ir.sized_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Form = int | tuple[Any, ...]
"""A number, ``("size", place)`` or ``(operator, form, form)``."""


class SizedInt(int):
    """A number with its form."""

    form: Form

    def __new__(cls, value: int, form: Form) -> SizedInt:
        """Make one.

        Args:
            value: at the sizes at hand.
            form: of sizes.
        """
        made = super().__new__(cls, value)
        made.form = form
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it with its form."""
        return SizedInt, (int(self), self.form)

    def __add__(self, other: Any) -> Any:
        return _made("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return _made("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return _made("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _made("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return _made("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _made("*", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _made("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _made("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return _made("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _made("%", other, self)

    def __divmod__(self, other: Any) -> Any:
        return _made("//", self, other), _made("%", self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _made("//", other, self), _made("%", other, self)

    def __neg__(self) -> Any:
        return _made("-", 0, self)

    def __pos__(self) -> SizedInt:
        return self


_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "//": int.__floordiv__,
    "%": int.__mod__,
}


def _made(operator: str, left: Any, right: Any) -> Any:
    """Return the number and its form; of what is no integer, Python's own answer."""
    if not isinstance(left, int) or not isinstance(right, int):
        return NotImplemented
    value = _COMPUTE[operator](int(left), int(right))
    form = _simple(operator, form_of(left), form_of(right))
    return value if isinstance(form, int) else SizedInt(value, form)


def _simple(operator: str, left: Form, right: Form) -> Form:
    if isinstance(left, int) and isinstance(right, int):
        return _COMPUTE[operator](left, right)
    if operator == "*" and 0 in (left, right):
        return 0
    if (operator in "+-" and right == 0) or (operator in ("*", "//") and right == 1):
        return left
    if (operator == "+" and left == 0) or (operator == "*" and left == 1):
        return right
    if left == right and operator in ("-", "//"):
        return 0 if operator == "-" else 1
    return (operator, left, right)


def form_of(number: int) -> Form:
    """Return the form of a number; itself where it has none."""
    return number.form if isinstance(number, SizedInt) else int(number)


def places_in(form: Form) -> set[int]:
    """Return the places of the sizes that a form is computed from."""
    if isinstance(form, int):
        return set()
    if form[0] == "size":
        return {int(form[1])}
    return places_in(form[1]) | places_in(form[2])


def compiled(forms: Sequence[Form]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function of sizes that computes forms, in order.

    Args:
        forms: over places of the sizes.
    """
    text = ", ".join(map(_text, forms))
    made: Callable[[Sequence[int]], tuple[int, ...]] = eval(f"lambda sizes: ({text}{',' if forms else ''})", {"__builtins__": {}})
    return made


def _text(form: Form) -> str:
    """Python for a form: numbers, operators and places, all of them our own."""
    if isinstance(form, int):
        return str(int(form)) if form >= 0 else f"({int(form)})"
    if form[0] == "size":
        return f"sizes[{int(form[1])}]"
    operator, left, right = form
    assert operator in _COMPUTE
    return f"({_text(left)} {operator} {_text(right)})"
