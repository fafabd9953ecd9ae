"""Wrong passes, planted: each is refused, and the model trains with its own ops.

Plants of a loss in chunks, a z-loss that is left out among them, are in ``test_chunked_losses.py``.
"""

from __future__ import annotations

import copy

import pytest
import torch

from fusion_advisor.fuse.dynamo_backend import fuse_graph, optimise
from tests.fuse.train.test_trained_graph import OPTIONS, WIDTH, Block, Repeated, gradients, step


def place_of(region, shape):
    """The first result of a pass with this shape."""
    (output,) = region.graph.graph.find_nodes(op="output")
    return next(n for n, node in enumerate(output.args[0]) if node is not None and tuple(node.meta["val"].shape) == shape)


def changed(shape, change):
    """Plant ``change`` in the first gradient of this shape."""

    def plant(region, call):
        place = place_of(region, shape)

        def wrong(*args):
            found = list(call(*args))
            found[place] = change(found[place])
            return tuple(found)

        return wrong

    return plant


def nothing_for_a_weight(region, call):
    place = place_of(region, (WIDTH,))
    return lambda *args: tuple(None if n == place else one for n, one in enumerate(call(*args)))


def swapped(region, call):
    (output,) = region.graph.graph.find_nodes(op="output")
    same = [
        n for n, node in enumerate(output.args[0]) if node is not None and tuple(node.meta["val"].shape) == (2 * WIDTH, WIDTH)
    ]

    def wrong(*args):
        found = list(call(*args))
        found[same[0]], found[same[1]] = found[same[1]], found[same[0]]
        return tuple(found)

    return wrong


def stale_mask(region, call):
    """The mask of the first step for ever."""
    masks = {}

    def wrong(*args):
        kept = [masks.setdefault(n, one.clone()) if one.dtype == torch.bool else one for n, one in enumerate(args)]
        return call(*kept)

    return wrong


def overwritten(region, call):
    """The pass changes what it was given."""

    def wrong(*args):
        found = call(*args)
        args[0].data.mul_(1.01)  # as a kernel does: autograd does not see it
        return found

    return wrong


PLANTS = {
    "a weight gets no gradient": nothing_for_a_weight,
    "a weight's gradient is zero": changed((WIDTH,), torch.zeros_like),
    "a sum runs over half of the rows": changed((2 * WIDTH,), lambda gradient: gradient / 2),
    "one element is wrong": changed((WIDTH,), lambda gradient: gradient.index_fill(0, torch.tensor([7]), 1.0)),
    "wrong axis": changed((2 * WIDTH, WIDTH), lambda gradient: gradient.t().reshape(2 * WIDTH, WIDTH)),
    "columns are exchanged": changed((2 * WIDTH, WIDTH), lambda gradient: gradient.flip(0)),
    "a sum runs over the wrong dim and is broadcast": changed((2 * WIDTH,), lambda gradient: gradient.mean().expand(2 * WIDTH)),
    "two weights' gradients are exchanged": swapped,
    "a thousandth too much": changed((WIDTH, 2 * WIDTH), lambda gradient: gradient * 1.001),
    "double count": changed((2 * WIDTH, WIDTH), lambda gradient: 2 * gradient),
    "not a number": changed((WIDTH,), lambda gradient: gradient.index_fill(0, torch.tensor([0]), float("nan"))),
    "a saved tensor is overwritten": overwritten,
}


def trained(model, plant, x):
    """One step with a plant in the backward pass; returns the plain model's gradients too, and whether a pass was planted."""
    planted = []

    def optimiser(region, options, check=None):
        call = optimise(region, options, check=check)
        is_backward = any("tangents" in str(node.target) for node in region.graph.graph.find_nodes(op="placeholder"))
        if not is_backward:
            return call
        planted.append(region)
        return plant(region, call)

    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=lambda gm, inputs: fuse_graph(gm, inputs, OPTIONS, optimiser), dynamic=False)
    torch.manual_seed(3)
    step(compiled, x)
    torch.manual_seed(3)
    step(plain, x)
    assert len(planted) == 1
    torch.compiler.reset()
    return gradients(model), gradients(plain)


@pytest.mark.parametrize("name", PLANTS)
def test_a_wrong_backward_pass_is_refused(name):
    torch.manual_seed(0)
    x = torch.randn(8, 5, WIDTH)
    with pytest.warns(UserWarning, match="fusion-advisor runs the original ops: the step's"):
        ours, theirs = trained(Block(), PLANTS[name], x)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_stale_mask_is_refused():
    torch.manual_seed(0)
    x = torch.randn(8, 5, WIDTH)
    with pytest.warns(UserWarning, match="the step's outputs and gradients are too far"):
        trained(Block(dropout=0.5), stale_mask, x)


def test_a_double_count_in_a_shared_module_is_refused():
    torch.manual_seed(0)
    plant = changed((WIDTH,), lambda gradient: gradient * 1.5)
    with pytest.warns(UserWarning, match="the step's outputs and gradients are too far"):
        trained(Repeated(is_checkpointed=False), plant, torch.randn(4, 5, WIDTH))
