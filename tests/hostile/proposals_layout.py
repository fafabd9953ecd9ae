"""Lines that move, cut, join or make tensors: views, concatenations, fresh tensors, triangles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.hostile.proposals_base import FLOATS, INF, Proposal

if TYPE_CHECKING:
    from tests.hostile.draw import Draw


def view(text: str, least_rank: int) -> Proposal:
    """A view with dims D and E."""

    def propose(d: Draw) -> str:
        x = d.rank(least_rank)
        return text.replace("X", x).replace("D", str(d.dim(x))).replace("E", str(d.dim(x)))

    return propose


def permute(d: Draw) -> str:
    x = d.rank(2)
    dims = list(range(d.values[x].dim()))
    d.random.shuffle(dims)
    return f"{x}.permute({', '.join(map(str, dims))})"


def reshape(d: Draw) -> str:
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


def cut(d: Draw) -> str:
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


def select(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.random.randrange(d.values[x].dim())
    return f"{x}.select({place}, {d.random.randrange(-d.values[x].shape[place], d.values[x].shape[place])})"


def narrow(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and 0 not in value.shape)
    place = d.random.randrange(d.values[x].dim())
    start = d.random.randrange(d.values[x].shape[place])
    return f"{x}.narrow({place}, {start}, {d.random.randint(1, d.values[x].shape[place] - start)})"


def expand(d: Draw) -> str:
    x = d.any()
    shape = tuple(3 if size == 1 and d.chance(0.5) else -1 for size in d.values[x].shape)
    lead = "2, " if d.chance(0.5) else ""
    return f"{x}.expand({lead}{', '.join(map(str, shape))})"


def expand_as(d: Draw) -> str:
    x = d.any()
    return f"{d.partner(x)}.expand_as({x})"


def pieces(text: str) -> Proposal:
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


def cat(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.rank(1)
        value = d.values[x]
        same = [n for n, other in d.values.items() if other.shape == value.shape and other.dtype == value.dtype]
        pieces = [x, *(d.random.choice(same) for _ in range(d.random.randint(1, 3)))]
        if d.chance(0.2):
            pieces[-1] = f"-{pieces[-1]}" if value.dtype != torch.bool else pieces[-1]
        return f"torch.{name}([{', '.join(pieces)}], dim={d.dim(x)})"

    return propose


def repeat_interleave(d: Draw) -> str:
    x = d.rank(1)
    return f"{x}.repeat_interleave({d.pick('2', '3')}, dim={d.dim(x)})"


def repeat(d: Draw) -> str:
    """Copies along any dims, further dims ahead of them at times."""
    x = d.rank(1)
    counts = [d.random.choice((1, 1, 2, 3)) for _ in range(d.values[x].dim() + d.chance(0.3))]
    return f"{x}.repeat({counts})"


def unflatten(d: Draw) -> str:
    x = d.any(lambda value: value.dim() > 0 and value.shape[-1] % 2 == 0)
    return f"{x}.unflatten(-1, (2, -1))"


def made(text: str) -> Proposal:
    """A tensor made from a shape or another one's likeness."""

    def propose(d: Draw) -> str:
        x = d.number()
        dtype = d.random.choice((*FLOATS, torch.int64, torch.bool))
        made = text.replace("X", x).replace("DTYPE", str(dtype)).replace("SHAPE", str(tuple(d.values[x].shape)))
        made = made.replace("DEVICE", f"{x}.device").replace("NUMBER", d.scalar(x))
        return made if d.chance(0.3) else f"{x} + {made}"

    return propose


def arange(d: Draw) -> str:
    x = d.number(1)
    size = d.values[x].shape[-1]
    start, step = d.random.choice(((0, 1), (0, 1), (2, 1), (1, 3), (0, -2)))
    made = f"torch.arange({start}, {start + size * step}, {step}, device={x}.device)" if size else "torch.arange(3)"
    return f"{x} {d.pick('+', '*', '<', '>=')} {made}"


def triangle(name: str) -> Proposal:
    def propose(d: Draw) -> str:
        x = d.rank(2)
        if d.chance(0.3):
            rows, columns = d.values[x].shape[-2:]
            mask = f"torch.ones({rows}, {columns}, dtype=torch.bool, device={x}.device).{name}({d.random.randint(-2, 2)})"
            return f"{x}.masked_fill({mask}, {d.pick('0', '-1e4', '-' + INF)})"
        return f"torch.{name}({x}, {d.random.randint(-2, 2)})"

    return propose


def roll(d: Draw) -> str:
    x = d.rank(1)
    dims = sorted({d.dim(x), d.dim(x)})
    shifts = [d.random.randint(-3, 3) for _ in dims]
    return f"{x}.roll({shifts}, {dims})"


def pad(d: Draw) -> str:
    x = d.rank(1)
    sizes = list(d.values[x].shape)
    amounts: list[int] = []
    for size in reversed(sizes[-d.random.randint(1, len(sizes)) :]):
        amounts += [d.random.randint(-1 if size > 2 else 0, 2), d.random.randint(-1 if size > 2 else 0, 2)]
    return f"functional.pad({x}, {amounts}{d.pick('', ', value=1')})"


def slice_gradient(d: Draw) -> str:
    """Call the gradient of a slice that has elements ahead of it, behind it or neither."""
    x = d.rank(1)
    shape = list(d.values[x].shape)
    dim = d.random.randrange(len(shape))
    start, end = d.random.randint(0, 3), d.random.randint(0, 3)
    size, cut = start + shape[dim] + end, start + shape[dim]
    whole = [*shape[:dim], size, *shape[dim + 1 :]]
    first = start - size if start and d.chance(0.3) else start
    last = 2**63 - 1 if end == 0 and d.chance(0.5) else cut
    return f"torch.ops.aten.slice_backward.default({x}, {whole}, {d.random.choice((dim, dim - len(shape)))}, {first}, {last}, 1)"


def select_gradient(d: Draw) -> str:
    """Call the gradient of one place of a dim."""
    x = d.rank(0)
    shape = list(d.values[x].shape)
    dim, size = d.random.randint(0, len(shape)), d.random.randint(1, 4)
    whole = [*shape[:dim], size, *shape[dim:]]
    return f"torch.ops.aten.select_backward.default({x}, {whole}, {dim}, {d.random.randrange(-size, size)})"


def resample(rank: int, mode: str) -> Proposal:
    """Read images at another resolution; a value of fewer dims is given some of size 1."""

    def propose(d: Draw) -> str:
        x = d.any(lambda value: value.is_floating_point() and 1 <= value.dim() <= rank and value.numel() > 0)
        lead = rank - d.values[x].dim()
        images = f"{x}[{', '.join(['None'] * lead)}]" if lead else x
        count = rank - 2
        if d.chance(0.5):
            how = f"size={[d.random.randint(1, 6) for _ in range(count)]}"
        else:
            how = f"scale_factor={d.pick('2', '1.5', '3', '0.5') if min((1, *d.values[x].shape)[-count:]) > 1 else '2'}"
        aligned = ", align_corners=True" if mode != "nearest" and d.chance(0.3) else ""
        return f"functional.interpolate({images}, {how}, mode={mode!r}{aligned})"

    return propose


def mean_pool(d: Draw) -> str:
    """Means over windows of images, up to windows wider than a kernel takes."""
    images, windows = _images_and_windows(d)
    counts = d.pick("", ", count_include_pad=False", ", divisor_override=3", ", ceil_mode=True, count_include_pad=False")
    return f"functional.avg_pool2d({images}, {windows}{counts})"


def max_pool(d: Draw) -> str:
    images, windows = _images_and_windows(d)
    return f"functional.max_pool2d({images}, {windows}{d.pick('', ', ceil_mode=True', ', dilation=2')})"


def _images_and_windows(d: Draw) -> tuple[str, str]:
    """A value of two to four dims as images, and windows with strides and pads that torch takes for them or not."""
    x = d.any(lambda value: value.is_floating_point() and 2 <= value.dim() <= 4 and value.numel() > 0)
    lead = max(0, 3 - d.values[x].dim())
    images = f"{x}[{', '.join(['None'] * lead)}]" if lead else x
    size = d.random.choice((1, 2, 3, 3, 5, 6))
    how = f"{size}, {d.random.choice((1, 1, 2, size))}, {d.random.randint(0, size // 2)}"
    return images, how
