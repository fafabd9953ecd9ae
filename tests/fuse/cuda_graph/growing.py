"""Models that serve decode steps on a growing cache, with a graph of their own ops and no kernels: made in seconds."""

from __future__ import annotations

import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.cuda_graph.replay import MOST_BYTES, Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.shapes.pieces import Served
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls
from fusion_advisor.fuse.shapes.serve import ShapeTable, serving
from fusion_advisor.workload.load import describe_live
from tests.tiny import cache_in

RANGES = "batch=2..4,seq=2..16,cached=2..48"


def serving_decode(made, recorder, limit=4, name="decode", most_bytes=MOST_BYTES):
    """A model that serves growing decode steps in segments, and the call that is resized; applied."""
    torch.compiler.reset()
    model, kwargs = made
    device = next(model.parameters()).device
    kwargs = {**kwargs, "input_ids": kwargs["input_ids"].to(device)}
    live = capture_regions(model, (), kwargs)
    graphs = Graphs(recorder, limit=limit, most_bytes=most_bytes)
    modules = Bench(live, on_cuda=device.type == "cuda").build((), ()).modules
    fused = FusedModel(model, live.regions, modules, (), kwargs, graphs=graphs, live=live)
    calls = {one.name: one for one in ranged_calls(describe_live(model, (), kwargs), read_shapes(RANGES))}
    call = calls.get(name, calls["decode"])  # transformers 5.17 passes a mask at every step

    def capture(sizes):
        args, kwargs = call.at(sizes)
        return capture_open(model, args, kwargs, call.dims)

    pieces = []
    for piece in call.pieces(capture):
        sizes = {one.name: one.least for one in piece.box}
        points = [Served(sizes=sizes, module=piece.opened.region.graph, in_segments=True)] if piece.opened is not None else []
        pieces.append(serving(piece, points))
    fused.serve([ShapeTable(call.ranges, call.dims, pieces, (call.args, call.kwargs), may_record=call.may_record)])
    return fused.apply(), call


class Decoding:
    """A cache that grows, and the steps on it.

    Attributes:
        results: logits of each step.
    """

    def __init__(self, fused, call, batch, cached=3, seed=0):
        self.fused, self.results = fused, []
        self._random = torch.Generator().manual_seed(seed)
        _, self.kwargs = call.at({"batch": batch, "cached": cached})
        self.cache = cache_in(self.kwargs)
        for layer in self.cache.layers:
            layer.keys.copy_(torch.randn(layer.keys.shape, generator=self._random))
            layer.values.copy_(torch.randn(layer.values.shape, generator=self._random))
        self.batch, self.cached = batch, cached

    def step(self, count=1):
        """Take steps; returns itself."""
        for _ in range(count):
            ids = torch.randint(1, 200, (self.batch, 1), generator=self._random).to(self.kwargs["input_ids"].device)
            given = {**self.kwargs, "input_ids": ids}
            if "position_ids" in given:
                given["position_ids"] = torch.full_like(given["position_ids"], self.cached)
            if given.get("attention_mask") is not None:
                given["attention_mask"] = ids.new_ones((self.batch, self.cached + 1))
            self.results.append(self.fused.model(**given).logits)
            self.cached += 1
        return self

    def all_bits(self):
        """Every step's logits, and what the cache holds now."""
        return [*self.results, *(tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values))]


def launched(fused, call, *args, steps=20, **kwargs):
    """The same steps launch by launch."""
    fused.graphs.is_on = False
    try:
        return Decoding(fused, call, *args, **kwargs).step(steps).all_bits()
    finally:
        fused.graphs.is_on = True


def same(found, expected):
    """Whether all bits are equal."""
    return len(found) == len(expected) and all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
