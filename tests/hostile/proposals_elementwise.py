"""Lines that compute each element from the elements in its place: arithmetic, activations, casts, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.hostile.proposals_base import FLOATS, INTEGERS, Proposal

if TYPE_CHECKING:
    from tests.hostile.draw import Draw


def unary(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        return f"torch.{name}({d.number() if name in ('abs', 'neg', 'sign', 'square') else d.float()})"

    return propose


def guarded(name: str) -> Proposal:
    """An op that is defined for positive numbers: most often it gets some."""

    def propose(d: Draw) -> str:
        x = d.float()
        return f"torch.{name}({x})" if d.chance(0.2) else f"torch.{name}({x}.abs() + 0.1)"

    return propose


def binary(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        alpha = f", alpha={d.pick('2', '-1', '3')}" if name in ("add", "sub") and d.chance(0.1) else ""
        return f"torch.{name}({x}, {d.partner_or_scalar(x)}{alpha})"

    return propose


def operator(sign: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        y = d.partner_or_scalar(x)
        return f"{y} {sign} {x}" if d.chance(0.3) else f"{x} {sign} {y}"

    return propose


def tensors(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        return f"torch.{name}({x}, {d.partner(x, dtype=d.values[x].dtype)})"

    return propose


def logical(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.bool() if d.chance(0.8) else d.integer()
        return f"torch.{name}({x}, {d.partner(x, dtype=d.values[x].dtype)})"

    return propose


def of_bool(name: str) -> Proposal:
    return lambda d: f"torch.{name}({d.bool()})"


def of_bools(sign: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.bool()
        return f"{x} {sign} {d.partner(x, dtype=torch.bool)}"

    return propose


def activation(text: str) -> Proposal:
    return lambda d: f"functional.{text}".replace("X", d.float())


def cast(d: Draw) -> str:
    x = d.any(lambda value: not value.is_complex())
    wanted = d.random.choices((*FLOATS, *INTEGERS, torch.bool), (5, 4, 4, 1, 2, 2, 1, 1, 1, 1))[0]
    have = d.values[x].dtype
    if have.is_floating_point and wanted in INTEGERS:  # a number out of an integer's range becomes whatever the machine gives
        return f"torch.nan_to_num({x}).clamp({0 if wanted == torch.uint8 else -100}, 100).to({wanted})"
    return f"{x}.to({wanted})"


def type_as(d: Draw) -> str:
    x = d.float()
    return f"{x}.type_as({d.any(lambda value: value.is_floating_point())})"


def where(d: Draw) -> str:
    x = d.number()
    condition = f"({x} > {d.scalar(x)})" if d.chance(0.4) else d.partner(x, dtype=torch.bool)
    other = d.partner_or_scalar(x)
    return f"torch.where({condition}, {x}, {other})" if d.chance(0.6) else f"torch.where({condition}, {other}, {x})"


def masked_fill(d: Draw) -> str:
    x = d.number()
    return f"{x}.masked_fill({d.partner(x, dtype=torch.bool)}, {d.scalar(x)})"


def clamp(d: Draw) -> str:
    x = d.number()
    low, high = d.pick("-1", "0", "-0.5", "None"), d.pick("1", "2", "0.75")
    return f"torch.clamp({x}, {low}, {high})" if d.chance(0.8) else f"torch.clamp({x}, {d.partner(x)}, {d.partner(x)})"


def clamp_side(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        return f"torch.{name}({x}, {d.scalar(x) if d.chance(0.7) else d.partner(x)})"

    return propose


def three(name: str) -> Proposal:
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


def power(d: Draw) -> str:
    x = d.number()
    if d.chance(0.15):
        return f"torch.pow({x}.abs() + 0.5, {d.partner(x)})"
    return f"torch.pow({x}, {d.pick('2', '3', '0.5', '-1', '4', '2.0', '-0.5', '1', '0', '1.5')})"


def remainder(d: Draw) -> str:
    return f"torch.remainder({d.integer()}, {d.pick('3', '-3', '7', '2')})"


def prelu(d: Draw) -> str:
    x = d.float()
    count = d.values[x].shape[1] if d.values[x].dim() > 1 and d.chance(0.7) else 1
    return f"functional.prelu({x}, {d.input((count,), d.values[x].dtype, layout='dense')})"


def seeded_dropout(d: Draw) -> str:
    return f"seeded_dropout({d.float()}, {d.input((), torch.int64, below=1000, layout='dense')}, {d.pick('0.1', '0.5', '0.0')})"


def complex_part(d: Draw) -> str:
    x = d.input(d.shape, torch.complex64, layout="dense")
    return d.pick(f"({x} * 2).real", f"{x}.abs()", f"torch.view_as_real({x})", f"{x} + 1")
