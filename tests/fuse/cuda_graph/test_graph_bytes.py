"""What a CUDA graph would hold is told from its ops: what lives at once, and what stays."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.cuda_graph.graph_bytes import GraphBytes, graph_bytes, symbols_given
from fusion_advisor.fuse.cuda_graph.segments import split
from fusion_advisor.fuse.passes.merge_gemms import merge_linears
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.shapes.decide_at import example_args
from fusion_advisor.fuse.shapes.pieces import PieceFinder
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.weight_packing import lay_out_weights
from tests.tiny import gpt2, qwen2


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)).unflatten(1, (2, 32)).flatten(1)) + x


class Holding(torch.fx.Interpreter):
    """Runs a graph, and sums up the memory that it made and still holds."""

    most = 0

    def run_node(self, n):
        result = super().run_node(n)
        if n.op == "get_attr":
            self.given = [*self.given, result]
        held = {one.untyped_storage().data_ptr(): one for one in tensors_in([*self.env.values(), result])}
        given = {one.untyped_storage().data_ptr() for one in tensors_in(self.given)}
        self.most = max(self.most, sum(one.untyped_storage().nbytes() for key, one in held.items() if key not in given))
        return result


def tensors_in(values):
    flat = (item for value in values for item in (value if isinstance(value, tuple | list) else [value]))
    return [item for item in flat if isinstance(item, torch.Tensor) and item.numel()]


def opened(made, name, shapes):
    """A capture with open sizes, and the way in which it is called."""
    torch.compiler.reset()
    model, args, kwargs = made
    call = next(one for one in ranged_calls(describe_live(model, args, kwargs), read_shapes(shapes)) if one.name == name)

    def capture(sizes):
        args, kwargs = call.at(sizes)
        return capture_open(model, args, kwargs, call.dims)

    return PieceFinder(call.ranges, capture).next().opened, call


def counted(found, given, left_out=()):
    module = found.region.graph
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return graph_bytes(module, symbols_given(placeholders, given), left_out)


@pytest.mark.parametrize("rows", [2, 48])
def test_what_lives_at_once_is_counted_at_every_size_and_views_make_nothing(rows):
    with torch.no_grad():
        found, call = opened((Mlp().eval(), (torch.randn(5, 32),), {}), "", "batch=2..64")
        given = example_args(found, *call.at({"batch": rows}))
    wide, narrow = rows * 64 * 4, rows * 32 * 4
    assert counted(found, given) == GraphBytes(kept=narrow, passing=2 * wide - narrow)  # GELU reads what it replaces


def test_what_runs_after_the_graph_makes_nothing_in_it():
    with torch.no_grad():
        found, call = opened((torch.nn.Linear(32, 64).eval(), (torch.randn(5, 32),), {}), "", "batch=2..64")
        given = example_args(found, *call.at({"batch": 4}))
    ops = [node for node in found.region.graph.graph.nodes if node.op == "call_function"]
    assert counted(found, given) == GraphBytes(kept=4 * 64 * 4, passing=0)
    assert counted(found, given, ops) == GraphBytes(kept=0, passing=0)


@pytest.mark.parametrize("may_copy", [False, True])
def test_weights_of_merged_gemms_are_held_by_no_graph(may_copy):
    model, kwargs = qwen2()
    if not may_copy:
        lay_out_weights(model)
    with torch.no_grad():
        found, call = opened((model, (), kwargs), "decode", "batch=2..4,seq=2..64,cached=2..64")
        given = example_args(found, *call.at({"batch": 3, "cached": 9}))
        changed = merge_linears(found.region, may_copy=may_copy)
    assert changed.changed > 0
    module = changed.region.graph
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    symbols = symbols_given(placeholders, given)
    # A merged result is as wide as the two that it replaces, which lived at once.
    assert graph_bytes(module, symbols).total <= 1.1 * counted(found, given).total
    segments = split(module, found.symbols_of("cached"))
    weights = sum(one.nbytes for one in given if isinstance(one, torch.nn.Parameter))
    assert sum(graph_bytes(part.module, symbols).kept for part in segments.parts) < 0.2 * weights


@pytest.mark.parametrize("maker", [gpt2, qwen2])
def test_the_count_is_what_a_run_holds(maker):
    model, kwargs = maker()
    with torch.no_grad():
        found, call = opened((model, (), kwargs), "prefill", "batch=2..4,seq=2..64,cached=2..64")
        given = example_args(found, *call.at({"batch": 3, "seq": 40}))
        run = Holding(found.region.graph)
        run.given = given
        run.run(*given)
    assert counted(found, given).total == run.most


def test_copied_inputs_are_kept():
    assert GraphBytes(1, 10).and_inputs(4) == GraphBytes(5, 10)
