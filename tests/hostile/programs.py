"""Small tensor programs: straight-line Python that runs eagerly, in fp64, with noise, or as a module that a user could paste.

A program is what it prints: each line is one Python expression over the values before it. So the reproduction of a failure is the
program itself.
"""

from __future__ import annotations

import itertools
import linecache
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from fusion_advisor.library.philox_dropout import seeded_dropout

LAYOUTS = ("dense", "transposed", "stepped", "offset", "expanded", "channels_last")
VALUES = ("normal", "large", "small", "whole", "special", "zeros")

_NAMES = {"torch": torch, "functional": functional, "seeded_dropout": seeded_dropout}
_NUMBER = re.compile(r"\b[xv]\d+\b")
_SUMS = re.compile(r"sum\(|mean\(|var\(|std\(|norm\(|matmul\(|linear\(|scatter_add\(|'mean'|'sum'")
_IN_ANY_ORDER = re.compile(r"scatter_add\(|cumsum\(")
_FLOATS = re.compile(r"torch\.(float16|bfloat16|float32|float64)\b")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """How one input is made."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "dense"
    values: str = "normal"
    below: int = 0
    """Integers lie in ``[0, below)``; 0 leaves them to ``values``."""
    shows: str = ""
    """An expression over earlier inputs, in whose memory this one lies; empty for memory of its own."""
    seed: int = 0

    def __str__(self) -> str:
        if self.shows:
            return self.shows
        more = f", below={self.below}" if self.below else f", values={self.values!r}"
        return f"tensor({self.shape}, {self.dtype}, layout={self.layout!r}{more}, seed={self.seed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One value and the expression that makes it; an expression that writes in place has the value it wrote."""

    name: str
    text: str
    op: str
    """What was drawn, for counting."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that the expression takes."""
        return tuple(dict.fromkeys(_NUMBER.findall(self.text)))

    @property
    def sums(self) -> bool:
        """Whether it adds up more than two numbers, in an order that is the kernel's own."""
        return bool(_SUMS.search(self.text))

    @property
    def writes(self) -> bool:
        """Whether it writes into one of them."""
        return bool(re.search(r"\.\w*[a-z]_\(", self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Inputs, lines, and the names of the values that are returned."""

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    seed: int = 0

    def function(self, name: str = "forward") -> str:
        """Return the source of a function of the inputs."""
        body = [f"    {line.name} = {line.text}" for line in self.lines]
        head = f"def {name}({', '.join(one.name for one in self.inputs)}):"
        return "\n".join([head, *body, f"    return {', '.join(self.outputs)}{',' if len(self.outputs) == 1 else ''}"])

    def __str__(self) -> str:
        """The program as a script that shows what ``fa.apply`` makes of it."""
        makes = [f"{one.name} = {one}" for one in self.inputs]
        names = "".join(f"{one.name}, " for one in self.inputs)
        method = self.function().replace("(", "(self, ", 1).replace("\n", "\n    ")
        return "\n".join(
            [
                f"# seed {self.seed}", "import torch", "from torch.nn import functional", "", "import fusion_advisor as fa",
                "from fusion_advisor.library.philox_dropout import seeded_dropout",
                "from tests.hostile.programs import tensor", "", "",
                "class Model(torch.nn.Module):", f"    {method}", "", "", *makes, f"inputs = ({names})",
                "fused = fa.apply(Model().eval(), inputs, keep=\"verified\", min_share=0.0)", "print(fused(*inputs))",
            ]
        )  # fmt: skip

    def make_inputs(self, device: str, *, shift: int = 0) -> tuple[torch.Tensor, ...]:
        """Make the inputs; the same ones every time.

        Args:
            device: where they lie.
            shift: of the seeds: another one makes other numbers of the same layout.
        """
        made: dict[str, torch.Tensor] = {}
        for one in self.inputs:
            if one.shows:
                made[one.name] = eval(one.shows, dict(_NAMES), made)
            else:
                made[one.name] = tensor(
                    one.shape, one.dtype, layout=one.layout, values=one.values, below=one.below, seed=one.seed + shift,
                    device=device,
                )  # fmt: skip
        return tuple(made.values())

    def varies_on(self, device: str) -> bool:
        """Whether eager itself may give other bits at each call: on a GPU atomic sums are added up in the order of their arrival.

        Args:
            device: ``cpu`` or ``cuda``.
        """
        return device == "cuda" and any(_IN_ANY_ORDER.search(line.text) for line in self.lines)

    def writes_inputs(self, device: str = "cpu") -> bool:
        """Whether a call writes into an input's memory."""
        inputs = self.make_inputs(device)
        before = [value._version for value in inputs]
        with torch.no_grad():
            compiled(self)(*inputs)
        return [value._version for value in inputs] != before


def tensor(
    shape: Sequence[int], dtype: torch.dtype, *, layout: str = "dense", values: str = "normal", below: int = 0, seed: int = 0,
    device: str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Make one tensor.

    Args:
        shape: of the result.
        dtype: any; complex numbers are normal.
        layout: one of :data:`LAYOUTS`; what a shape cannot have is dense.
        values: one of :data:`VALUES`, or :data:`SUMMED`.
        below: make integers in ``[0, below)`` instead.
        seed: of the numbers.
        device: where it lies.
    """
    shape = tuple(shape)
    wide, take = _memory(shape, layout)
    generator = torch.Generator().manual_seed(seed)
    return take(_numbers_of(wide, dtype, values, below, generator).to(device))


def _memory(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """What is filled, and how the tensor is taken out of it."""
    if layout == "transposed" and len(shape) > 1:
        return (*shape[:-2], shape[-1], shape[-2]), lambda made: made.transpose(-1, -2)
    if layout == "stepped" and shape:
        return (*shape[:-1], 2 * shape[-1]), lambda made: made[..., ::2]
    if layout == "offset" and shape:
        return (shape[0] + 1, *shape[1:]), lambda made: made[1:]
    if layout == "expanded" and shape and shape[0] > 1:
        return (1, *shape[1:]), lambda made: made.expand(shape)
    if layout == "channels_last" and len(shape) == 4:
        return shape, lambda made: made.to(memory_format=torch.channels_last)
    return shape, lambda made: made


_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 65504.0, 2e19, 3e38, -3e38)
SUMMED = "special, summed"
"""Special values without the largest numbers: sums of those or of their squares overflow in one order and not in another."""


def _numbers_of(shape: tuple[int, ...], dtype: torch.dtype, values: str, below: int, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        if below:
            return torch.randint(0, below, shape, generator=generator).to(dtype)
        if values in ("special", SUMMED):
            ends = torch.tensor([info.min, info.max, 0, 1, max(info.min, -1), info.max // 2], dtype=dtype)
            return ends[torch.randint(0, 6, shape, generator=generator)]
        return torch.randint(max(info.min, -9), 10, shape, generator=generator).to(dtype)
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    if values in ("special", SUMMED):
        among = _SPECIAL if values == "special" else [value for value in _SPECIAL if not 1e15 < abs(value) < math.inf]
        chosen = torch.tensor(among, dtype=torch.float64)[torch.randint(0, len(among), shape, generator=generator)]
        made = torch.where(torch.rand(shape, generator=generator) < 0.2, chosen, made)
    scaled = {"large": made * 32, "small": made * 1e-3, "whole": (made * 3).round(), "zeros": made * 0}
    return scaled.get(values, made).to(dtype)


class Graph(torch.nn.Module):
    """A program as a module."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.run = compiled(program)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the program."""
        return self.run(*inputs)


class SideBySide(torch.nn.Module):
    """Several programs in one model: one capture and one report serve them all."""

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__()
        self.graphs = torch.nn.ModuleList([Graph(program) for program in programs])
        self.counts = [len(program.inputs) for program in programs]

    def forward(self, *inputs: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Run each program on its own inputs."""
        results, start = [], 0
        for graph, count in zip(self.graphs, self.counts, strict=True):
            results.append(graph(*inputs[start : start + count]))
            start += count
        return tuple(results)


def compiled(program: Program) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Compile a program's function, under a file name of its own so that a traceback shows its lines."""
    source, file = program.function(), f"<program {program.seed}.{next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = dict(_NAMES)
    exec(compile(source, file, "exec"), names)
    return names["forward"]


@dataclass(slots=True)
class Noise:
    """Rounding errors that could have been made: each computed float is moved by up to a unit of the dtype it had in eager.

    An op that sums has rounding errors on the way too. They are those of moved operands: what a normalisation subtracts from a
    number is as uncertain as the number's last digit.
    """

    units: Mapping[str, float]
    generator: random.Random = field(default_factory=lambda: random.Random(0))


def run_wide(
    program: Program, inputs: Sequence[torch.Tensor], noise: Noise | None = None
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Run a program with every float in fp64.

    Args:
        program: its casts between floats do nothing.
        inputs: as eager gets them; they are copied.
        noise: what to move each computed float by.

    Returns:
        The outputs, and the inputs after the call.
    """
    values = dict(zip((one.name for one in program.inputs), widened(program, inputs), strict=True))
    given = tuple(values.values())
    known = {value.untyped_storage().data_ptr() for value in given}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            for line in program.lines:
                unit = 0.0 if noise is None else noise.units.get(line.name, 0.0)
                result = eval(wide_text(line.text), dict(_NAMES), _moved_operands(line, values, noise, unit))
                values[line.name] = result
                if not isinstance(result, torch.Tensor):
                    continue
                is_new = result.untyped_storage().data_ptr() not in known
                known.add(result.untyped_storage().data_ptr())
                if noise is not None and (is_new or line.writes) and result.is_floating_point():
                    _move(result, unit, noise.generator)
    finally:
        torch.set_default_dtype(before)
    return tuple(values[name] for name in program.outputs), given


def _moved_operands(
    line: Line, values: Mapping[str, torch.Tensor], noise: Noise | None, unit: float
) -> Mapping[str, torch.Tensor]:
    """The values, with copies that are moved by up to a unit in place of those that a sum reads."""
    if noise is None or unit == 0 or line.writes or not line.sums:
        return values
    moved = {name: values[name].clone() for name in line.reads if values[name].is_floating_point()}
    for value in moved.values():
        _move(value, unit, noise.generator)
    return {**values, **moved}


def widened(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copy the inputs with floats in fp64; those that lie in another one's memory do so again."""
    made: dict[str, torch.Tensor] = {}
    for one, value in zip(program.inputs, inputs, strict=True):
        if one.shows:
            made[one.name] = eval(one.shows, dict(_NAMES), made)
            continue
        dtype = torch.float64 if value.is_floating_point() else torch.complex128 if value.is_complex() else value.dtype
        copy = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)
        made[one.name] = value.to(dtype) if 0 in value.stride() else copy.copy_(value)
    return tuple(made.values())


def wide_text(text: str) -> str:
    """Return an expression with fp64 in place of every other float."""
    return _FLOATS.sub("torch.float64", text).replace("torch.complex64", "torch.complex128")


def _move(value: torch.Tensor, unit: float, generator: random.Random) -> None:
    if unit == 0 or any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return
    own = torch.Generator().manual_seed(generator.getrandbits(32))
    value.mul_(1 + unit * (2 * torch.rand(value.shape, generator=own, dtype=torch.float64) - 1).to(value.device))
    # As eager rounds it: between numbers that no rounding has touched none is ever equal to another.
    narrow = next((dtype for dtype in (torch.float16, torch.bfloat16, torch.float32) if torch.finfo(dtype).eps == unit), None)
    if narrow is not None:
        value.copy_(value.to(narrow))


def units_of(program: Program, inputs: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the unit of each computed value's dtype in eager; the inputs are written to where the program writes to them."""
    values = dict(zip((one.name for one in program.inputs), inputs, strict=True))
    units = {}
    with torch.no_grad():
        for line in program.lines:
            values[line.name] = result = eval(line.text, dict(_NAMES), values)
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                units[line.name] = torch.finfo(result.dtype).eps
    return units


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """Evaluate one expression eagerly."""
    with torch.no_grad():
        return eval(text, dict(_NAMES), dict(values))
