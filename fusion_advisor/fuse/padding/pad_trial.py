"""Whether a pass is faster with padded products: decided before its chains are found, for the padding becomes part of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_advisor import units
from fusion_advisor.capture.graph.tracer import LiveCapture, Region
from fusion_advisor.capture.layout_trial import time_difference
from fusion_advisor.fuse.padding.pad_products import LEAST_PRODUCTS, pad_products
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.rewrite.record import StepRewrite
from fusion_advisor.records import GraphRewrite, Status
from fusion_advisor.runtime.torch_internals import fx_trace
from fusion_advisor.timing.host_timer import step_timer
from fusion_advisor.timing.interleaving import Difference

PAD_PRODUCTS = StepRewrite(id="pad-products", title="padded products")


@dataclass(frozen=True, slots=True)
class PadTrial:
    """A pass after the trial.

    Attributes:
        region: the pass, with padded products where they stay.
        row: of the report; None where the pass has no product with odd rows.
    """

    region: Region
    row: GraphRewrite | None = None

    @property
    def is_kept(self) -> bool:
        """Whether products are padded."""
        return self.row is not None and self.row.status is Status.KEPT


def try_padded_products(
    region: Region,
    options: ApplyOptions,
    *,
    on_cuda: bool,
    difference: Callable[..., Difference] = time_difference,
    least_products: int | None = None,
) -> PadTrial:
    """Pad the products of a pass if it is measurably faster so, with torch's own copies.

    Chains that take the copies in make it faster still; they are found afterwards.

    Args:
        region: a pass with the tensors of a call; it stays as it is.
        options: of the run. With ``exact`` nothing is padded, for another kernel makes sums in another order.
        on_cuda: whether the tensors are on a GPU.
        difference: times two ways to run the pass against each other.
        least_products: multiplications of a product that is padded; None: what pays, or with ``keep="verified"`` any number.
    """
    if options.exact or not region.training_pass or not options.wants(PAD_PRODUCTS.id):
        return PadTrial(region)
    module = fx_trace.copied_graph(region.graph)
    least = least_products if least_products is not None else LEAST_PRODUCTS if options.is_timed else 0
    padding = pad_products(module, least_products=least)
    if not padding.products:
        return PadTrial(region)
    row = GraphRewrite(
        id=PAD_PRODUCTS.id, name=PAD_PRODUCTS.title, stage=PAD_PRODUCTS.stage, status=Status.KEPT, sites=padding.products,
        reason=f"copies that no chain takes in write {units.size(padding.copied_bytes)} at most",
    )  # fmt: skip
    changed = replace(region, graph=module)
    if not options.is_timed:
        return PadTrial(changed, row)
    live = LiveCapture(regions=[changed])
    change = difference(
        _runner(region.graph, region), _runner(module, region), live=live, on_cuda=on_cuda, timer=step_timer(on_cuda=on_cuda)
    )
    span = (change.low_ns, change.high_ns)
    timed = replace(row, step_delta_ns=change.median_ns, step_delta_ci_ns=span)
    if change.high_ns < 0:
        return PadTrial(changed, timed)
    status = Status.SLOWER if change.low_ns > 0 else Status.WITHIN_NOISE
    return PadTrial(region, replace(timed, status=status, reason=f"with {row.reason}, the pass is not measurably faster"))


def _runner(module: torch.fx.GraphModule, region: Region) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            module(*region.example_args)

    return run
