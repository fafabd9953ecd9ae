"""Lines that read or write by index, and lines that write in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.hostile.proposals_base import Nothing, Proposal

if TYPE_CHECKING:
    from tests.hostile.draw import Draw


def embedding(d: Draw) -> str:
    rows, width = d.random.choice((5, 11, 40)), d.shape[-1] if d.shape else 8
    table = d.input((rows, width), d.dtype, layout="dense")
    shape = d.shape[:-1]
    return f"functional.embedding({d.input(shape, d.random.choice((torch.int64, torch.int32)), below=rows)}, {table})"


def index_select(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.dim(x)
    ids = d.input((d.random.choice((1, 3, 6)),), torch.int64, below=d.values[x].shape[place])
    return f"torch.index_select({x}, {place}, {ids})"


def gather(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.dim(x)
    return f"torch.gather({x}, {place}, {d.input(tuple(d.values[x].shape), torch.int64, below=d.values[x].shape[place])})"


def index(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.random.randrange(d.values[x].dim())
    ids = d.input((d.random.choice((1, 4)),), torch.int64, below=d.values[x].shape[place])
    ids = f"({ids} - {d.values[x].shape[place]})" if d.chance(0.2) else ids
    return f"{x}[{':, ' * place}{ids}]"


def in_place(text: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.number()
        return text.replace("X", x).replace("Y", d.partner_or_scalar(x))

    return propose


def write_part(d: Draw) -> str:
    x = d.number(1)
    part = d.pick(f"{x}[..., ::2]", f"{x}[:1]", f"{x}.select(0, 0)", f"{x}.transpose(0, -1)", f"{x}.view(-1)")
    return f"{part}.{d.pick('add_', 'mul_', 'fill_', 'sub_')}({d.scalar(x)})"


def copy_in(d: Draw) -> str:
    x = d.number(1)
    source = d.partner(x)
    if source == x:  # does nothing in eager, whatever the strides; fake tensors ask whether elements share memory
        raise Nothing
    return f"{x}.copy_({source})"


def put(name: str) -> Proposal:
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
