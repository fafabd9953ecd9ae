"""Random programs: from a seed to lines that run.

A line is proposed as text, run on the real values, and kept if it runs; so no rule of shapes or dtypes is written twice. Names of
ops come from the lowering's own table: an op that got a lowering and has no proposal here is called with arguments made from
its schema.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import torch

from fusion_advisor.library.rules import LOWERABLE
from tests.hostile.programs import LAYOUTS, VALUES, Input, Line, Program, evaluate

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 65, 130)
_MOST_ELEMENTS = 5000
_INF = "float('inf')"
_SCALARS = ("0.5", "2", "-1.25", "3", "0.0", "-0.0", "1e-3", "100.0", "7", "-1", "1", "float('inf')")
_SCALAR_WEIGHTS = (6, 6, 6, 4, 2, 1, 3, 1, 2, 3, 3, 0.3)


class Nothing(Exception):
    """No operand of the kind that a proposal wants."""


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
        made = Input(name=name, shape=shape, dtype=dtype, layout=layout, values=values, below=below, seed=self.random.randrange(10**6))
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
        op = op or self.random.choices(list(table), _weights())[0]
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
        return Program(inputs=tuple(self.inputs), lines=tuple(self.lines), outputs=tuple(outputs), seed=self.seed)


def draw(seed: int, *, most_lines: int = 12, device: str = "cpu") -> Program:
    """Return the program of a seed."""
    made = Draw(seed, device)
    program = made.grow(most_lines)
    while not program.outputs or not program.lines:
        program = made.grow(most_lines)
    return program


def _broadcasts(one: torch.Size, other: torch.Size) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))


# ---------------------------------------------------------------------- proposals

Proposal = Callable[[Draw], str]


def _unary(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        return f"torch.{name}({d.number() if name in ('abs', 'neg', 'sign', 'square') else d.float()})"

    return propose


def _guarded(name: str) -> Proposal:
    """An op that is defined for positive numbers: most often it gets some."""

    def propose(d: Draw) -> str:
        x = d.float()
        return f"torch.{name}({x})" if d.chance(0.2) else f"torch.{name}({x}.abs() + 0.1)"

    return propose


def _binary(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        alpha = f", alpha={d.pick('2', '-1', '3')}" if name in ("add", "sub") and d.chance(0.1) else ""
        return f"torch.{name}({x}, {d.partner_or_scalar(x)}{alpha})"

    return propose


def _operator(sign: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        y = d.partner_or_scalar(x)
        return f"{y} {sign} {x}" if d.chance(0.3) else f"{x} {sign} {y}"

    return propose


def _tensors(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        return f"torch.{name}({x}, {d.partner(x, dtype=d.values[x].dtype)})"

    return propose


def _logical(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.bool() if d.chance(0.8) else d.integer()
        return f"torch.{name}({x}, {d.partner(x, dtype=d.values[x].dtype)})"

    return propose


def _activation(text: str) -> Proposal:
    return lambda d: f"functional.{text}".replace("X", d.float())


def _reduction(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.float(1) if name in ("mean", "var", "std", "logsumexp", "norm", "linalg.vector_norm") else d.number(1)
        keep = d.pick("True", "False")
        extra = {"var": f", correction={d.pick('0', '1')}", "std": f", correction={d.pick('0', '1')}"}.get(name, "")
        extra += ", dtype=torch.float32" if name in ("sum", "mean") and d.chance(0.1) else ""
        if name == "linalg.vector_norm":
            return f"torch.linalg.vector_norm({x}, {d.pick('2', '1', _INF)}, dim={d.dims(x)}, keepdim={keep})"
        if name in ("sum", "mean", "amax", "amin") and d.chance(0.06):
            return f"torch.{name}({x})"
        return f"torch.{name}({x}, dim={d.dims(x)}, keepdim={keep}{extra})"

    return propose


def _softmax(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.float(1)
        dtype = ", dtype=torch.float32" if d.chance(0.2) else ""
        return f"functional.{name}({x}, dim={-1 if d.chance(0.7) else d.dim(x)}{dtype})"

    return propose


def _layer_norm(d: Draw) -> str:
    x = d.float(1)
    shape = tuple(d.values[x].shape[-(2 if d.values[x].dim() > 2 and d.chance(0.2) else 1) :])
    parts = [d.input(shape, d.values[x].dtype, layout="dense") if d.chance(0.6) else "None" for _ in range(2)]
    return f"functional.layer_norm({x}, {shape}, {parts[0]}, {parts[1]}, {d.pick('1e-5', '1e-6', '1e-3')})"


def _rms_norm(d: Draw) -> str:
    x = d.float(1)
    shape = tuple(d.values[x].shape[-1:])
    weight = d.input(shape, d.values[x].dtype, layout="dense") if d.chance(0.6) else "None"
    return f"functional.rms_norm({x}, {shape}, {weight}{d.pick('', ', 1e-6')})"


def _group_norm(d: Draw) -> str:
    x = d.any(lambda value: value.is_floating_point() and value.dim() >= 2 and value.shape[1] > 0)
    channels = d.values[x].shape[1]
    groups = d.random.choice([count for count in range(1, channels + 1) if channels % count == 0][:4])
    parts = [d.input((channels,), d.values[x].dtype, layout="dense") if d.chance(0.6) else "None" for _ in range(2)]
    return f"functional.group_norm({x}, {groups}, {parts[0]}, {parts[1]})"


def _batch_norm(d: Draw) -> str:
    x = d.float(2)
    channels = (d.values[x].shape[1],)
    mean, weight, bias = (d.input(channels, d.values[x].dtype, layout="dense") for _ in range(3))
    return f"functional.batch_norm({x}, {mean}, {weight}.abs() + 0.5, {weight}, {bias}, False)"


def _cast(d: Draw) -> str:
    x = d.any(lambda value: not value.is_complex())
    wanted = d.random.choices((*FLOATS, *INTEGERS, torch.bool), (5, 4, 4, 1, 2, 2, 1, 1, 1, 1))[0]
    have = d.values[x].dtype
    if have.is_floating_point and wanted in INTEGERS:  # a number out of an integer's range becomes whatever the machine gives
        return f"torch.nan_to_num({x}).clamp({0 if wanted == torch.uint8 else -100}, 100).to({wanted})"
    return f"{x}.to({wanted})"


def _type_as(d: Draw) -> str:
    x = d.float()
    return f"{x}.type_as({d.any(lambda value: value.is_floating_point())})"


def _where(d: Draw) -> str:
    x = d.number()
    condition = f"({x} > {d.scalar(x)})" if d.chance(0.4) else d.partner(x, dtype=torch.bool)
    other = d.partner_or_scalar(x)
    return f"torch.where({condition}, {x}, {other})" if d.chance(0.6) else f"torch.where({condition}, {other}, {x})"


def _masked_fill(d: Draw) -> str:
    x = d.number()
    return f"{x}.masked_fill({d.partner(x, dtype=torch.bool)}, {d.scalar(x)})"


def _clamp(d: Draw) -> str:
    x = d.number()
    low, high = d.pick("-1", "0", "-0.5", "None"), d.pick("1", "2", "0.75")
    return f"torch.clamp({x}, {low}, {high})" if d.chance(0.8) else f"torch.clamp({x}, {d.partner(x)}, {d.partner(x)})"


def _clamp_side(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        return f"torch.{name}({x}, {d.scalar(x) if d.chance(0.7) else d.partner(x)})"

    return propose


def _three(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.float()
        dtype = d.values[x].dtype
        y, z = d.partner(x, dtype=dtype), d.partner(x, dtype=dtype)
        if name == "lerp":
            return f"torch.lerp({x}, {y}, {d.pick('0.25', '0.75', z)})"
        z = f"({z}.abs() + 0.5)" if name == "addcdiv" else z
        value = f", value={d.pick('2', '-0.5')}" if d.chance(0.4) else ""
        return f"torch.{name}({x}, {y}, {z}{value})"

    return propose


def _pow(d: Draw) -> str:
    x = d.number()
    if d.chance(0.15):
        return f"torch.pow({x}.abs() + 0.5, {d.partner(x)})"
    return f"torch.pow({x}, {d.pick('2', '3', '0.5', '-1', '4', '2.0', '-0.5', '1', '0', '1.5')})"


def _remainder(d: Draw) -> str:
    return f"torch.remainder({d.integer()}, {d.pick('3', '-3', '7', '2')})"


def _prelu(d: Draw) -> str:
    x = d.float()
    count = d.values[x].shape[1] if d.values[x].dim() > 1 and d.chance(0.7) else 1
    return f"functional.prelu({x}, {d.input((count,), d.values[x].dtype, layout='dense')})"


def _view(text: str, least_rank: int) -> Proposal:
    """A view with dims D and E."""

    def propose(d: Draw) -> str:
        x = d.rank(least_rank)
        return text.replace("X", x).replace("D", str(d.dim(x))).replace("E", str(d.dim(x)))

    return propose


def _permute(d: Draw) -> str:
    x = d.rank(2)
    dims = list(range(d.values[x].dim()))
    d.random.shuffle(dims)
    return f"{x}.permute({', '.join(map(str, dims))})"


def _reshape(d: Draw) -> str:
    x = d.rank(0)
    shape, count = list(d.values[x].shape), d.values[x].numel()
    kind = d.random.random()
    if kind < 0.3 or not shape:
        wanted = "-1"
    elif kind < 0.6 and len(shape) > 1:  # two dims become one
        place = d.random.randrange(len(shape) - 1)
        wanted = ", ".join(map(str, (*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])))
    else:  # one becomes two
        place = d.random.randrange(len(shape))
        factors = [n for n in (2, 3, 4, 8) if shape[place] % n == 0 and shape[place]] or [1]
        factor = d.random.choice(factors)
        pair = (factor, shape[place] // factor)
        wanted = ", ".join(map(str, (*shape[:place], *(pair if d.chance(0.5) else pair[::-1]), *shape[place + 1 :])))
    del count
    return f"{x}.{d.pick('reshape', 'reshape', 'view')}({wanted})"


def _slice(d: Draw) -> str:
    x = d.rank(1)
    place = d.random.randrange(d.values[x].dim())
    size = d.values[x].shape[place]
    cut = d.pick(f"{size // 4}:", f":{size - size // 3}", "1:-1", "::2", "1::3", ":1", f"{size // 2}:{size // 2 + 2}", "0:0" if d.chance(0.1) else ":")
    return f"{x}[{':, ' * place}{cut}]"


def _select(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.random.randrange(d.values[x].dim())
    return f"{x}.select({place}, {d.random.randrange(-d.values[x].shape[place], d.values[x].shape[place])})"


def _narrow(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.random.randrange(d.values[x].dim())
    start = d.random.randrange(d.values[x].shape[place])
    return f"{x}.narrow({place}, {start}, {d.random.randint(1, d.values[x].shape[place] - start)})"


def _expand(d: Draw) -> str:
    x = d.any()
    shape = tuple(3 if size == 1 and d.chance(0.5) else -1 for size in d.values[x].shape)
    lead = "2, " if d.chance(0.5) else ""
    return f"{x}.expand({lead}{', '.join(map(str, shape))})"


def _pieces(text: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.rank(1)
        place = d.dim(x)
        size = d.values[x].shape[place]
        return text.replace("X", x).replace("D", str(place)).replace("S", str(max(1, size // 2))).replace("N", d.pick("0", "1", "-1"))

    return propose


def _cat(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.rank(1)
        value = d.values[x]
        same = [n for n, other in d.values.items() if other.shape == value.shape and other.dtype == value.dtype]
        pieces = [x, *(d.random.choice(same) for _ in range(d.random.randint(1, 3)))]
        if d.chance(0.2):
            pieces[-1] = f"-{pieces[-1]}" if value.dtype != torch.bool else pieces[-1]
        return f"torch.{name}([{', '.join(pieces)}], dim={d.dim(x)})"

    return propose


def _embedding(d: Draw) -> str:
    rows, width = d.random.choice((5, 11, 40)), d.shape[-1] if d.shape else 8
    table = d.input((rows, width), d.dtype, layout="dense")
    shape = d.shape[:-1]
    return f"functional.embedding({d.input(shape, d.random.choice((torch.int64, torch.int32)), below=rows)}, {table})"


def _index_select(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.dim(x)
    ids = d.input((d.random.choice((1, 3, 6)),), torch.int64, below=d.values[x].shape[place])
    return f"torch.index_select({x}, {place}, {ids})"


def _gather(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.dim(x)
    return f"torch.gather({x}, {place}, {d.input(tuple(d.values[x].shape), torch.int64, below=d.values[x].shape[place])})"


def _index(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.random.randrange(d.values[x].dim())
    ids = d.input((d.random.choice((1, 4)),), torch.int64, below=d.values[x].shape[place])
    ids = f"({ids} - {d.values[x].shape[place]})" if d.chance(0.2) else ids
    return f"{x}[{':, ' * place}{ids}]"


def _losses(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.any(lambda value: value.is_floating_point() and value.dim() == 2 and 0 not in value.shape)
        rows, classes = d.values[x].shape
        target = d.input((rows,), torch.int64, below=classes, layout="dense")
        reduction = d.pick("none", "mean", "sum")
        first = x if name == "cross_entropy" else f"functional.log_softmax({x}, -1)"
        return f"functional.{name}({first}, {target}, reduction={reduction!r})"

    return propose


def _made(text: str) -> Proposal:
    """A tensor made from a shape or another one's likeness."""

    def propose(d: Draw) -> str:
        x = d.number()
        dtype = d.random.choice((*FLOATS, torch.int64, torch.bool))
        made = text.replace("X", x).replace("DTYPE", str(dtype)).replace("SHAPE", str(tuple(d.values[x].shape)))
        made = made.replace("DEVICE", f"{x}.device").replace("NUMBER", d.scalar(x))
        return made if d.chance(0.3) else f"{x} + {made}"

    return propose


def _arange(d: Draw) -> str:
    x = d.number(1)
    size = d.values[x].shape[-1]
    start, step = d.random.choice(((0, 1), (0, 1), (2, 1), (1, 3), (0, -2)))
    made = f"torch.arange({start}, {start + size * step}, {step}, device={x}.device)" if size else "torch.arange(3)"
    return f"{x} {d.pick('+', '*', '<', '>=')} {made}"


def _triangle(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.rank(2)
        if d.chance(0.3):
            rows, columns = d.values[x].shape[-2:]
            mask = f"torch.ones({rows}, {columns}, dtype=torch.bool, device={x}.device).{name}({d.random.randint(-2, 2)})"
            return f"{x}.masked_fill({mask}, {d.pick('0', '-1e4', '-' + _INF)})"
        return f"torch.{name}({x}, {d.random.randint(-2, 2)})"

    return propose


def _seeded_dropout(d: Draw) -> str:
    return f"seeded_dropout({d.float()}, {d.input((), torch.int64, below=1000, layout='dense')}, {d.pick('0.1', '0.5', '0.0')})"


def _repeat_interleave(d: Draw) -> str:
    x = d.rank(1)
    return f"{x}.repeat_interleave({d.pick('2', '3')}, dim={d.dim(x)})"


def _unflatten(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and value.shape[-1] % 2 == 0)
    return f"{x}.unflatten(-1, (2, -1))"


def _in_place(text: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        return text.replace("X", x).replace("Y", d.partner_or_scalar(x))

    return propose


def _write_part(d: Draw) -> str:
    x = d.number(1)
    part = d.pick(f"{x}[..., ::2]", f"{x}[:1]", f"{x}.select(0, 0)", f"{x}.transpose(0, -1)", f"{x}.view(-1)")
    return f"{part}.{d.pick('add_', 'mul_', 'fill_', 'sub_')}({d.scalar(x)})"


def _copy_in(d: Draw) -> str:
    x = d.number(1)
    return f"{x}.copy_({d.partner(x)})"


def _put(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape and value.is_floating_point())
        value = d.values[x]
        if name == "index_copy":
            ids = f"torch.arange({value.shape[0]}, device={x}.device)"
            return f"{x}.index_copy{d.pick('', '_')}(0, {ids}, {d.partner(x, dtype=value.dtype)})"
        if name == "index_put":
            ids = d.input((2,), torch.int64, below=1, layout="dense")
            return f"{x}.index_put{d.pick('', '_')}(({ids},), torch.full((), {d.pick('1.5', '0.0')}, dtype={value.dtype}, device={x}.device))"
        ids = d.input(tuple(value.shape), torch.int64, below=value.shape[0])
        return f"{x}.scatter_add(0, {ids}, {d.partner(x, dtype=value.dtype)})"

    return propose


def _matmul(d: Draw) -> str:
    x = d.float(2)
    width = d.values[x].shape[-1]
    kind = d.pick("matmul", "linear", "linear")
    weight = d.input((width, 8) if kind == "matmul" else (8, width), d.values[x].dtype, layout="dense", values="normal")
    if kind == "matmul":
        return f"torch.matmul({x}, {weight})"
    bias = f", {d.input((8,), d.values[x].dtype, layout='dense')}" if d.chance(0.5) else ""
    return f"functional.linear({x}, {weight}{bias})"


def _complex(d: Draw) -> str:
    x = d.input(d.shape, torch.complex64, layout="dense")
    return d.pick(f"({x} * 2).real", f"{x}.abs()", f"torch.view_as_real({x})", f"{x} + 1")


def _text(text: str) -> Proposal:
    return lambda d: text.replace("X", d.float(1)).replace("B", "v")


_OWN: dict[str, tuple[float, Proposal]] = {
    **{name: (1.0, _unary(name)) for name in (
        "neg", "abs", "exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "erfc", "sin", "cos", "floor", "ceil", "trunc", "round",
        "sign", "square", "reciprocal",
    )},
    **{name: (1.0, _guarded(name)) for name in ("log", "log1p", "sqrt", "rsqrt")},
    **{name: (3.0, _binary(name)) for name in ("add", "sub", "mul")},
    **{f"operator {sign}": (3.0, _operator(sign)) for sign in ("+", "-", "*")}, "operator /": (1.5, _operator("/")),
    "div": (2.0, _binary("div")), "true_divide": (0.5, _binary("true_divide")), "rsub": (0.5, _binary("rsub")),
    **{name: (1.0, _tensors(name)) for name in ("maximum", "minimum", "max", "min")},
    "remainder": (0.7, _remainder), "pow": (2.0, _pow),
    **{name: (0.8, _binary(name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: (0.5, _logical(name)) for name in ("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor")},
    **{name: (0.5, (lambda text: lambda d: f"torch.{text}({d.bool()})")(name)) for name in ("logical_not", "bitwise_not")},
    "__and__": (0.4, lambda d: (lambda x: f"{x} & {d.partner(x, dtype=torch.bool)}")(d.bool())),
    "__or__": (0.4, lambda d: (lambda x: f"{x} | {d.partner(x, dtype=torch.bool)}")(d.bool())),
    "__xor__": (0.4, lambda d: (lambda x: f"{x} ^ {d.partner(x, dtype=torch.bool)}")(d.bool())),
    "to": (5.0, _cast), "_to_copy": (0.0, _cast), "type_as": (0.5, _type_as), "where": (2.0, _where),
    "masked_fill": (1.5, _masked_fill), "clamp": (1.0, _clamp), "clip": (0.3, _clamp),
    "clamp_min": (0.5, _clamp_side("clamp_min")), "clamp_max": (0.5, _clamp_side("clamp_max")),
    **{name: (0.7, _three(name)) for name in ("addcmul", "addcdiv", "lerp")},
    **{name: (0.5, _unary(name)) for name in ("isnan", "isinf", "isfinite")},
    **{name: (0.8, _activation(text)) for name, text in (
        ("silu", "silu(X)"), ("gelu", "gelu(X)"), ("gelu tanh", "gelu(X, approximate='tanh')"), ("relu", "relu(X)"),
        ("leaky_relu", "leaky_relu(X, 0.2)"), ("softplus", "softplus(X)"), ("mish", "mish(X)"), ("elu", "elu(X, 0.7)"),
        ("log_sigmoid", "logsigmoid(X)"), ("selu", "selu(X)"), ("celu", "celu(X, 0.8)"), ("hardtanh", "hardtanh(X, -0.5, 2.0)"),
        ("relu6", "relu6(X)"), ("glu", "glu(X, -1)"), ("hardsigmoid", "hardsigmoid(X)"), ("hardswish", "hardswish(X)"),
        ("threshold", "threshold(X, 0.1, -2.0)"), ("dropout", "dropout(X, 0.5, False)"),
    )},
    "prelu": (0.6, _prelu),
    **{name: (1.5, _reduction(name)) for name in ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "norm", "linalg.vector_norm")},
    "softmax": (3.0, _softmax("softmax")), "log_softmax": (1.5, _softmax("log_softmax")), "layer_norm": (3.0, _layer_norm),
    "rms_norm": (2.0, _rms_norm), "group_norm": (1.0, _group_norm), "batch_norm": (0.7, _batch_norm),
    "transpose": (1.5, _view("X.transpose(D, E)", 2)), "swapaxes": (0.4, _view("X.swapaxes(D, E)", 2)),
    "mT": (0.5, _view("X.mT", 2)), "t": (0.5, lambda d: f"{d.any(lambda value: value.dim() == 2)}.t()"), "permute": (1.5, _permute),
    "unsqueeze": (1.0, _view("X.unsqueeze(D)", 1)), "squeeze": (0.7, _view("X.squeeze(D)", 1)), "flip": (0.5, _view("X.flip(D)", 1)),
    "flatten": (0.7, _view("X.flatten(0)", 1)), "reshape": (2.0, _reshape), "slice": (2.0, _slice), "select": (1.0, _select),
    "narrow": (0.5, _narrow), "expand": (1.0, _expand), "expand_as": (0.4, lambda d: (lambda x: f"{d.partner(x)}.expand_as({x})")(d.any())),
    "unflatten": (0.4, _unflatten), "contiguous": (0.7, _view("X.contiguous()", 1)), "clone": (0.7, _view("X.clone()", 0)),
    "detach": (0.2, _view("X.detach()", 0)), "movedim": (0.4, _view("X.movedim(D, E)", 2)), "roll": (0.3, _view("X.roll(1, D)", 1)),
    "chunk": (1.0, _pieces("X.chunk(2, dim=D)[N]")), "split": (0.7, _pieces("X.split(S, dim=D)[N]")),
    "unbind": (0.5, _pieces("X.unbind(D)[N]")), "tensor_split": (0.3, _pieces("X.tensor_split(2, dim=D)[N]")),
    "cat": (2.0, _cat("cat")), "stack": (1.0, _cat("stack")), "repeat_interleave": (0.5, _repeat_interleave),
    "repeat": (0.3, _view("X.repeat(2, *[1] * (X.dim() - 1))", 1)),
    "embedding": (0.8, _embedding), "index_select": (0.8, _index_select), "gather": (0.7, _gather), "index": (0.8, _index),
    "nll_loss": (0.4, _losses("nll_loss")), "cross_entropy_loss": (0.4, _losses("cross_entropy")),
    "arange": (0.8, _arange), "tril": (0.8, _triangle("tril")), "triu": (0.8, _triangle("triu")),
    "zeros_like": (0.2, _made("torch.zeros_like(X)")), "ones_like": (0.2, _made("torch.ones_like(X)")),
    "full_like": (0.3, _made("torch.full_like(X, NUMBER)")), "full": (0.3, _made("torch.full(SHAPE, NUMBER, device=DEVICE)")),
    "zeros": (0.2, _made("torch.zeros(SHAPE, dtype=DTYPE, device=DEVICE)")),
    "ones": (0.2, _made("torch.ones(SHAPE, dtype=DTYPE, device=DEVICE)")),
    "new_full": (0.2, _made("X.new_full(SHAPE, NUMBER)")), "new_zeros": (0.2, _made("X.new_zeros(SHAPE)")),
    "new_ones": (0.2, _made("X.new_ones(SHAPE)")),
    "seeded_dropout": (0.4, _seeded_dropout),
    "in place": (1.2, _in_place("X.add_(Y)")), "in place mul": (0.8, _in_place("X.mul_(Y)")), "in place part": (0.8, _write_part),
    "in place relu": (0.3, _view("X.relu_()", 0)), "copy_": (0.4, _copy_in),
    "index_copy": (0.4, _put("index_copy")), "index_put": (0.4, _put("index_put")), "scatter_add": (0.3, _put("scatter_add")),
    "matmul": (2.0, _matmul), "cumsum": (0.4, _view("X.cumsum(D)", 1)), "complex": (0.3, _complex),
    "argmax": (0.3, _view("X.argmax(D)", 1)), "sort": (0.2, _view("X.sort(D)[0]", 1)), "any": (0.2, _view("X.any(D)", 1)),
    "max of a dim": (0.3, _view("X.max(D)[0]", 1)), "prod": (0.2, _view("X.prod(D)", 1)),
}  # fmt: skip
"""Weight and proposal of each op that is drawn with arguments of its own."""

_SPELT = {
    "_softmax": "softmax", "_log_softmax": "log_softmax", "linalg_vector_norm": "linalg.vector_norm", "hardswish": "hardswish",
    "view": "reshape", "_unsafe_view": "reshape", "_reshape_alias": "reshape", "view_as": "reshape", "alias": "detach",
    "lift_fresh": "detach", "nll_loss_nd": "nll_loss", "adaptive_avg_pool2d": "softmax", "avg_pool2d": "softmax",
    "max_pool2d": "softmax", "argmin": "argmax",
}  # fmt: skip
"""Names in the lowering's table that torch makes out of another op, or that are there to be refused by name."""


@functools.cache
def proposals() -> dict[str, Proposal]:
    """Return every op that can be drawn: those above, and what else has a lowering."""
    others = {name: _from_schema(name) for name in sorted(LOWERABLE) if name not in _OWN and name not in _SPELT}
    return {**{name: proposal for name, (_, proposal) in _OWN.items()}, **others}


@functools.cache
def _weights() -> list[float]:
    return [_OWN[name][0] if name in _OWN else 1.5 for name in proposals()]


def _from_schema(name: str) -> Proposal:
    """Call an op that nothing above knows, with arguments made from the schema of one of its overloads."""

    def propose(d: Draw) -> str:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            raise Nothing
        overload = d.random.choice([one for one in packet.overloads() if "out" not in one and "dim" not in one.lower()[:0]])
        schema = getattr(packet, overload)._schema
        x = d.number()
        arguments = []
        for position, argument in enumerate(schema.arguments):
            kind = str(argument.type)
            if argument.has_default_value() and d.chance(0.7):
                continue
            if "Optional" in kind:
                continue
            if kind == "Tensor":
                text = x if position == 0 else d.partner(x)
            elif kind in ("number", "float"):
                text = d.scalar(x)
            elif kind == "int":
                text = str(d.dim(x)) if "dim" in argument.name and d.values[x].dim() else d.pick("0", "1", "2")
            elif kind == "bool":
                text = d.pick("True", "False")
            elif kind == "List[int]":
                text = f"[{d.dim(x)}]" if "dim" in argument.name else str(list(d.values[x].shape))
            elif kind == "List[Tensor]":
                text = f"[{x}, {d.partner(x)}]"
            else:
                raise Nothing
            arguments.append(f"{argument.name}={text}" if argument.kwarg_only else text)
        return f"torch.ops.aten.{name}.{overload}({', '.join(arguments)})"

    return propose
