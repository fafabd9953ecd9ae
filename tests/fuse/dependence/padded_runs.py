"""Captures functions with open sizes, and runs their graphs at larger ones with junk in the padding."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.dependence.prove import why_padding_counts
from fusion_advisor.fuse.shapes.decide_at import example_args
from fusion_advisor.fuse.shapes.padding import pad_form
from tests.tiny import Calling

SIZES = ({"batch": 2, "seq": 3}, {"batch": 3, "seq": 6}, {"batch": 5, "seq": 9})
LARGER = ({"batch": 4, "seq": 8}, {"batch": 8, "seq": 8}, {"batch": 6, "seq": 16})


def opened(model, make, dims, kwargs=None):
    """Capture a model at sizes of its own; ``make`` gives inputs for sizes."""
    torch.compiler.reset()
    model = model if isinstance(model, torch.nn.Module) else Calling(model)
    with torch.no_grad():
        return capture_open(model.eval(), make({"batch": 4, "seq": 7}), {}, dims, with_lines=True)


def junk(scale):
    """Fill padding with large floats, and with whole rows that occur in another order."""

    def fill(like, dim, count):
        numbers = torch.Generator().manual_seed(3)
        shape = (*like.shape[:dim], count, *like.shape[dim + 1 :])
        if like.is_floating_point() and scale:
            return torch.randn(shape, generator=numbers) * scale
        return like.index_select(dim, torch.randint(like.shape[dim], (count,), generator=numbers))

    return fill


def worst(found, make, name, zeroed=(), scale=50.0):
    """The largest difference that padding a size makes to what is kept, relative to the results; three sizes."""
    form = replace(pad_form(found), masks=frozenset(zeroed), masked=frozenset([name] if zeroed else []))
    return worst_of(found, form, lambda sizes: (make(sizes), {}), name, scale)


def worst_of(found, form, call_at, name, scale=50.0):
    """The same for a form of padding, and a call with names."""
    graph, most = found.region.graph, 0.0
    for sizes, most_sizes in zip(SIZES, LARGER, strict=True):
        own = {one: sizes[one] for one in set(found.names.values())}
        larger = {one: most_sizes[one] if one == name else size for one, size in own.items()}
        if not (found.holds(own) and found.holds(larger)):  # nothing is padded to sizes at which the graph is another
            continue
        args = example_args(found, *call_at(own if len(own) > 1 else sizes))
        with torch.no_grad():
            expected = graph.forward(*args)
            for fill in (None, junk(0), junk(scale), junk(-scale)):
                given = form.pad(args, larger, fill)
                for one, other in zip(form.cut(graph.forward(*given), own), expected, strict=True):
                    assert one.shape == other.shape
                    most = max(most, _apart(one.double(), other.double()))
    return most


def _apart(one, other):
    """The largest difference, relative to the largest number; infinite where just one is no number."""
    if other.numel() == 0:
        return 0.0
    is_same = (one == other) | (one.isnan() & other.isnan())
    scale = 1 + other[other.isfinite()].abs().amax() if other.isfinite().any() else 1
    return float(torch.where(is_same, 0.0, ((one - other).abs() / scale).nan_to_num(torch.inf, torch.inf)).max())


def mask_slots(found):
    """The places of a graph's inputs that hold ones and zeros."""
    given = enumerate(found.region.example_args)
    return [slot for slot, one in given if isinstance(one, torch.Tensor) and one.dtype == torch.int64 and bool((one < 2).all())]


def reason(found, name, zeroed=()):
    """Why padding counts; empty where it is proved not to."""
    return why_padding_counts(found, name, zeroed)
