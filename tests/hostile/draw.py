"""Random programs: from a seed to lines that run.

A line is proposed as text, run on the real values, and kept if it runs; so no rule of shapes or dtypes is written twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.hostile.programs import LAYOUTS, SUMMED, VALUES, Input, Line, Program, evaluate
from tests.hostile.proposals import proposals, weights
from tests.hostile.proposals_base import FLOATS, INTEGERS, Nothing

_SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 65, 130)
_MOST_ELEMENTS = 5000
_SCALARS = ("0.5", "2", "-1.25", "3", "0.0", "-0.0", "1e-3", "100.0", "7", "-1", "1", "float('inf')")
_SCALAR_WEIGHTS = (6, 6, 6, 4, 2, 1, 3, 1, 2, 3, 3, 0.3)


class Draw:
    """A program that grows."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.seed, self.device = seed, device
        self.random = random.Random(seed)
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.values: dict[str, torch.Tensor] = {}
        self.is_special = self.random.random() < 0.15
        self.dtype = self.random.choices(FLOATS, (6, 2, 3, 1))[0]
        rank = self.random.choices((0, 1, 2, 3, 4), (0.3, 1, 5, 4, 1.5))[0]
        self.shape = self._shape(rank)

    def _shape(self, rank: int) -> tuple[int, ...]:
        while True:
            shape = tuple(self.random.choice(_SIZES) for _ in range(rank))
            if rank and self.random.random() < 0.03:
                place = self.random.randrange(rank)
                shape = (*shape[:place], 0, *shape[place + 1 :])
            if torch.Size(shape).numel() <= _MOST_ELEMENTS:
                return shape

    # ------------------------------------------------------------------ operands

    def input(self, shape: tuple[int, ...], dtype: torch.dtype, *, below: int = 0, values: str = "", layout: str = "") -> str:
        """Add an input and return its name."""
        name = f"x{len(self.inputs)}"
        values = values or ("special" if self.is_special else self.random.choices(VALUES, (8, 1, 1, 3, 0, 0.3))[0])
        layout = layout or self.random.choices(LAYOUTS, (6, 1, 1, 1, 0.7, 0.7))[0]
        made = Input(
            name=name, shape=shape, dtype=dtype, layout=layout, values=values, below=below, seed=self.random.randrange(10**6)
        )
        self._add_input(made)
        return name

    def _add_input(self, made: Input) -> None:
        alone = Program(inputs=(*self.inputs, made), lines=(), outputs=())
        self.values[made.name] = alone.make_inputs(self.device)[-1] if not made.shows else evaluate(made.shows, self.values)
        self.inputs.append(made)

    def any(self, fits: Callable[[torch.Tensor], bool] = lambda _: True) -> str:
        """Return a value that fits, most often a late one."""
        names = [name for name, value in self.values.items() if fits(value)]
        if not names:
            raise Nothing
        back = min(int(self.random.expovariate(0.5)), len(names) - 1)
        return names[-1 - back]

    def float(self, least_rank: int = 0) -> str:
        """Return a floating value."""
        return self.any(lambda value: value.is_floating_point() and value.dim() >= least_rank)

    def number(self, least_rank: int = 0) -> str:
        """Return a value that is no boolean."""
        return self.any(lambda value: value.dtype != torch.bool and not value.is_complex() and value.dim() >= least_rank)

    def integer(self) -> str:
        """Return an integer value, made as an input where there is none."""
        if self.random.random() < 0.3:
            return self.input(self.shape, self.random.choice(INTEGERS))
        return self.any(lambda value: value.dtype in INTEGERS)

    def bool(self) -> str:
        """Return a boolean value, made as an input where there is none."""
        try:
            return self.any(lambda value: value.dtype == torch.bool)
        except Nothing:
            return self.input(self.shape, torch.bool)

    def rank(self, least: int) -> str:
        """Return a value of at least so many dims."""
        return self.any(lambda value: value.dim() >= least)

    def partner(self, name: str, *, dtype: torch.dtype | None = None) -> str:
        """Return a value that broadcasts with another one, or an input made for that."""
        value = self.values[name]
        others = [
            other for other, its in self.values.items()
            if _broadcasts(value.shape, its.shape) and (dtype is None or its.dtype == dtype) and not its.is_complex()
        ]  # fmt: skip
        if others and self.random.random() < 0.75:
            return self.random.choice(others)
        shape = tuple(1 if self.random.random() < 0.2 else size for size in value.shape)
        shape = shape[self.random.randrange(len(shape) + 1) :] if self.random.random() < 0.3 else shape
        wanted = dtype or (value.dtype if self.random.random() < 0.8 else self.random.choice((*FLOATS, *INTEGERS)))
        return self.input(shape, wanted)

    def partner_or_scalar(self, name: str) -> str:
        """Return an operand for a binary op."""
        return self.scalar(name) if self.random.random() < 0.35 else self.partner(name)

    def scalar(self, name: str = "") -> str:
        """Return a Python number; whole where the value is an integer, most often."""
        if name and not self.values[name].is_floating_point() and self.random.random() < 0.8:
            return str(self.random.choice((-3, -1, 0, 1, 2, 5)))
        return self.random.choices(_SCALARS, _SCALAR_WEIGHTS)[0]

    def dim(self, name: str) -> int:
        """Return a dim, negative or not."""
        rank = self.values[name].dim()
        return self.random.randrange(-rank, rank)

    def dims(self, name: str) -> str:
        """Return the dims of a reduction: most often the last ones."""
        rank = self.values[name].dim()
        chance = self.random.random()
        if chance < 0.5:
            return "-1"
        if chance < 0.65:
            return str(tuple(range(-self.random.randint(1, rank), 0)))
        return str(tuple(sorted(self.random.sample(range(rank), self.random.randint(1, rank)))))

    def chance(self, share: float) -> bool:
        """Whether something of this probability happens."""
        return self.random.random() < share

    def pick(self, *choices: str) -> str:
        """Return one of several."""
        return self.random.choice(choices)

    # ------------------------------------------------------------------ growing

    def grow(self, most_lines: int) -> Program:
        """Draw a whole program."""
        for _ in range(self.random.choices((1, 2, 3), (3, 3, 1))[0]):
            self.input(self.shape, self.dtype if self.chance(0.85) else self.random.choice((*FLOATS, *INTEGERS, torch.bool)))
        if self.chance(0.04):
            shown = self.rank(2) if len(self.shape) > 1 else "x0"
            text = f"{shown}.transpose(-1, -2)" if len(self.shape) > 1 else f"{shown}.detach()"
            first = self.values[shown]
            self._add_input(Input(name=f"x{len(self.inputs)}", shape=tuple(first.shape), dtype=first.dtype, shows=text))
        wanted = self.random.randint(2, most_lines)
        for _ in range(wanted * 4):
            if len(self.lines) >= wanted:
                break
            self.step()
        return self._finished()

    def step(self, op: str = "") -> bool:
        """Propose one line and keep it if it runs."""
        table = proposals()
        op = op or self.random.choices(list(table), weights())[0]
        kept = len(self.inputs)
        try:
            text = table[op](self)
        except (Nothing, IndexError, ValueError):
            self._forget(kept)
            return False
        name = f"v{len(self.lines)}"
        line = Line(name=name, text=text, op=op)
        try:
            if line.writes:  # tried on copies: a write that fails halfway must not stay
                evaluate(text, {one: value.clone(memory_format=torch.preserve_format) for one, value in self.values.items()})
            result = evaluate(text, self.values)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            self._forget(kept)
            return False
        if not isinstance(result, torch.Tensor) or result.numel() > 2 * _MOST_ELEMENTS or self._is_waste(result, line):
            self._forget(kept)
            return False
        self.lines.append(line)
        self.values[name] = result
        return True

    def _forget(self, kept: int) -> None:
        for one in self.inputs[kept:]:
            del self.values[one.name]
        del self.inputs[kept:]

    def _is_waste(self, result: torch.Tensor, line: Line) -> bool:
        """Whether nearly nothing finite is left, after which every op gives NaN."""
        if line.writes or self.is_special or not result.is_floating_point() or result.numel() == 0:
            return False
        return float(torch.isfinite(result).double().mean()) < 0.9 and self.chance(0.9)

    def _finished(self) -> Program:
        read = {name for line in self.lines for name in line.reads}
        leaves = [line.name for line in self.lines if line.name not in read]
        outputs = leaves[-4:]
        names = list(self.values)
        if self.chance(0.35):
            outputs.append(self.random.choice(names[len(self.inputs) :] or names))
        if self.chance(0.05):
            outputs.append(self.random.choice(names))
        self.random.shuffle(outputs)
        inputs = self.inputs
        if any(line.sums for line in self.lines):
            inputs = [replace(one, values=SUMMED) if one.values == "special" else one for one in inputs]
        return Program(inputs=tuple(inputs), lines=tuple(self.lines), outputs=tuple(outputs), seed=self.seed)


def draw(seed: int, *, most_lines: int = 12, device: str = "cpu") -> Program:
    """Return the program of a seed."""
    made = Draw(seed, device)
    program = made.grow(most_lines)
    while not program.outputs or not program.lines:
        program = made.grow(most_lines)
    return program


def _broadcasts(one: torch.Size, other: torch.Size) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))
