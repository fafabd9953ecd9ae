"""What can be drawn: for each op, text that calls it on values that a program has.

Names of ops come from the lowering's own table: an op that got a lowering and has no proposal here is called with arguments made
from its schema.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fusion_advisor.lowering.rules.tables import LOWERABLE

if TYPE_CHECKING:
    from tests.hostile.draw import Draw

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INF = "float('inf')"


class Nothing(Exception):
    """No operand of the kind that a proposal wants."""


Proposal = Callable[["Draw"], str]


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
    cut = d.pick(
        f"{size // 4}:",
        f":{size - size // 3}",
        "1:-1",
        "::2",
        "1::3",
        ":1",
        f"{size // 2}:{size // 2 + 2}",
        "0:0" if d.chance(0.1) else ":",
    )
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
        return (
            text.replace("X", x)
            .replace("D", str(place))
            .replace("S", str(max(1, size // 2)))
            .replace("N", d.pick("0", "1", "-1"))
        )

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
            write = f"{x}.index_put{d.pick('', '_')}"
            return f"{write}(({ids},), torch.full((), {d.pick('1.5', '0.0')}, dtype={value.dtype}, device={x}.device))"
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


def _of_bool(name: str) -> Proposal:
    return lambda d: f"torch.{name}({d.bool()})"


def _of_bools(sign: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.bool()
        return f"{x} {sign} {d.partner(x, dtype=torch.bool)}"

    return propose


def _expand_as(d: Draw) -> str:
    x = d.any()
    return f"{d.partner(x)}.expand_as({x})"


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
    **{name: (0.5, _logical(name)) for name in (
        "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    )},
    **{name: (0.5, _of_bool(name)) for name in ("logical_not", "bitwise_not")},
    "__and__": (0.4, _of_bools("&")),
    "__or__": (0.4, _of_bools("|")),
    "__xor__": (0.4, _of_bools("^")),
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
    **{name: (1.5, _reduction(name)) for name in (
        "mean", "sum", "amax", "amin", "var", "std", "logsumexp", "norm", "linalg.vector_norm",
    )},
    "softmax": (3.0, _softmax("softmax")), "log_softmax": (1.5, _softmax("log_softmax")), "layer_norm": (3.0, _layer_norm),
    "rms_norm": (2.0, _rms_norm), "group_norm": (1.0, _group_norm), "batch_norm": (0.7, _batch_norm),
    "transpose": (1.5, _view("X.transpose(D, E)", 2)), "swapaxes": (0.4, _view("X.swapaxes(D, E)", 2)),
    "mT": (0.5, _view("X.mT", 2)), "t": (0.5, lambda d: f"{d.any(lambda value: value.dim() == 2)}.t()"),
    "permute": (1.5, _permute),
    "unsqueeze": (1.0, _view("X.unsqueeze(D)", 1)), "squeeze": (0.7, _view("X.squeeze(D)", 1)),
    "flip": (0.5, _view("X.flip(D)", 1)),
    "flatten": (0.7, _view("X.flatten(0)", 1)), "reshape": (2.0, _reshape), "slice": (2.0, _slice), "select": (1.0, _select),
    "narrow": (0.5, _narrow), "expand": (1.0, _expand),
    "expand_as": (0.4, _expand_as),
    "unflatten": (0.4, _unflatten), "contiguous": (0.7, _view("X.contiguous()", 1)), "clone": (0.7, _view("X.clone()", 0)),
    "detach": (0.2, _view("X.detach()", 0)), "movedim": (0.4, _view("X.movedim(D, E)", 2)),
    "roll": (0.3, _view("X.roll(1, D)", 1)),
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
def weights() -> list[float]:
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
