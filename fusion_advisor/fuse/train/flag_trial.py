"""Judges flags in place of attention's masks for both passes: the calls alone, with their gradients, on tensors of their layouts.

The trial needs no second pair of graphs of the whole step, and sees the same calls whatever they drop: attention with a mask and
without may draw other random numbers for its dropout, so that their gradients could not be compared. What is checked drops
nothing. The gradients of the whole step are compared afterwards, as for every rewrite.

The calls run in a thread of their own: in autograd's they would leave plans of cuDNN's attention to the caller's model, which
reads its gradients wrongly by them (:mod:`fusion_advisor.runtime.own_thread`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention

from fusion_advisor.capture.graph.fx_nodes import ATTENTION_ARGUMENTS, attention_argument
from fusion_advisor.capture.graph.side_effects import Numbers
from fusion_advisor.fuse.passes.attention import DROP_MASKS, GROUP_HEADS
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.rewrite.record import Rewrite
from fusion_advisor.fuse.train.attention_flags import FlagSite, find_flag_sites, with_flags
from fusion_advisor.fuse.train.judge.gradients import Rows, check_gradients
from fusion_advisor.records import GraphRewrite, ModelCheck, Status
from fusion_advisor.runtime.own_thread import in_own_thread
from fusion_advisor.timing.host_timer import step_timer
from fusion_advisor.timing.interleaving import interleave
from fusion_advisor.timing.paired import Comparison, compare_rounds
from fusion_advisor.verify.subgraph_oracle import extent

_ROUNDS, _BUDGET_S = 40, 1.0
_NAMES = ("query", "key", "value")
_HOW = "attention calls alone, both passes"

Times = Callable[[Sequence[Callable[[], object]]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class FlaggedGraph:
    """Dynamo's graph after the trial.

    Attributes:
        module: with flags where they stay; the graph as it was where they do not.
        rows: of the report.
    """

    module: GraphModule
    rows: tuple[GraphRewrite, ...]

    @property
    def is_changed(self) -> bool:
        """Whether flags stay."""
        return any(row.status is Status.KEPT for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """An attention call on random tensors; ``shared`` are the KV heads before they are repeated, if they are."""

    tensors: tuple[torch.Tensor, ...]
    of_result: torch.Tensor
    repeats: int
    mask: torch.Tensor
    is_causal: bool
    options: dict[str, Any]
    dropout: float

    @classmethod
    def of(cls, site: FlagSite) -> _Call:
        op = site.traced
        operands = [attention_argument(op, name) for name in _NAMES]
        if site.traced_shared is not None:
            operands[1:] = site.traced_shared
        values = [one.meta["val"] for one in operands]
        generator = torch.Generator(values[0].device).manual_seed(0)
        tensors = tuple(_drawn(value, generator) for value in values)
        repeats = values[0].shape[1] // values[1].shape[1] if site.traced_shared is not None else 1
        options = {name: one for name, one in op.kwargs.items() if name not in ATTENTION_ARGUMENTS}
        # A gradient has its tensor's layout where elementwise ops and views follow.
        of_result = _drawn(op.meta["val"], generator).detach()
        mask = site.mask
        if mask.dtype == torch.bool:  # both passes of all layers read one mask that is made of it
            mask = torch.zeros_like(mask, dtype=values[0].dtype).masked_fill_(~mask, -torch.inf)
        return cls(
            tensors=tensors, of_result=of_result, repeats=repeats, mask=mask, is_causal=site.meaning == "causal",
            options=options, dropout=attention_argument(op, "dropout_p") or 0.0,
        )  # fmt: skip

    def one_head(self, wide: torch.dtype | None = None) -> _Call:
        """Return the call for one row of the batch and one KV head, in a wider dtype if one is given; it drops nothing."""
        heads = (self.repeats, 1, 1)

        def narrow(one: torch.Tensor, count: int) -> torch.Tensor:
            part = one.detach()[:1, :count]
            return part.to(wide, copy=True) if wide else part.clone()

        tensors = tuple(narrow(one, count).requires_grad_() for one, count in zip(self.tensors, heads, strict=True))
        mask = self.mask.reshape(-1, *self.mask.shape[-2:])[0]
        return replace(
            self, tensors=tensors, of_result=narrow(self.of_result, self.repeats), mask=mask.to(wide) if wide else mask,
            dropout=0.0,
        )  # fmt: skip

    def run(self, *, is_flagged: bool, is_shared: bool) -> Rows:
        """Run both passes, and return the result and the gradients."""
        query, key, value = self.tensors
        with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
            if self.repeats > 1 and not is_shared:
                key, value = (_repeat(one, self.repeats) for one in (key, value))
            how = {**self.options, "enable_gqa": True} if self.repeats > 1 and is_shared else self.options
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=None if is_flagged else self.mask, dropout_p=self.dropout,
                is_causal=is_flagged and self.is_causal, **how,
            )  # fmt: skip
            gradients = torch.autograd.grad(out, self.tensors, self.of_result)
        return [("result", out.detach()), *zip(_NAMES, gradients, strict=True)]


def try_flags(
    graph_module: GraphModule, traced: GraphModule | None, options: ApplyOptions, *,
    check: Callable[..., ModelCheck] = check_gradients, times: Times | None = None,
) -> FlaggedGraph:  # fmt: skip
    """Put flags in place of attention's masks, and shared KV heads in place of copies, where both passes are faster so.

    Args:
        graph_module: dynamo's.
        traced: the same in ATen ops; None where there is none, then nothing changes.
        options: of the run.
        check: compares the results and gradients of a call.
        times: times calls in turn; None: by the clock of the device.
    """
    if traced is None or options.dry_run or not options.wants(DROP_MASKS.id):
        return FlaggedGraph(graph_module, ())
    sites = find_flag_sites(graph_module, traced)
    if not sites:
        return FlaggedGraph(graph_module, ())
    numbers = Numbers.now()
    try:
        rows = in_own_thread(lambda: _judged(sites, options, check, times))
    except torch.cuda.OutOfMemoryError:
        rows = (_row(DROP_MASKS, sites, Status.NOT_REPLACED, "no memory is left to try the calls"),)
    finally:
        numbers.restore()
    kept = {row.id for row in rows if row.status is Status.KEPT}
    if DROP_MASKS.id not in kept:
        return FlaggedGraph(graph_module, rows)
    return FlaggedGraph(with_flags(graph_module, sites, shares_heads=GROUP_HEADS.id in kept), rows)


def _judged(
    sites: Sequence[FlagSite], options: ApplyOptions, check: Callable[..., ModelCheck], times: Times | None
) -> tuple[GraphRewrite, ...]:  # fmt: skip
    often = Counter(map(_kind, sites))
    calls = [(_Call.of(site), often[_kind(site)]) for site in {_kind(site): site for site in sites}.values()]
    shared = [site for site in sites if site.shared is not None] if options.wants(GROUP_HEADS.id) else []
    ways = [{"is_flagged": False, "is_shared": False}, {"is_flagged": True, "is_shared": False}]
    if shared:
        ways.append({"is_flagged": True, "is_shared": True})
    wrong = [_why_wrong([call for call, _ in calls], way, check) for way in ways[1:]]

    def runner(way: dict[str, bool]) -> Callable[[], None]:
        def run() -> None:
            for call, count in calls:
                for _ in range(count):
                    call.run(**way)

        return run

    changes: list[Comparison | None] = [None] * len(wrong)
    if options.is_timed and not wrong[0]:
        taken = (times or _timed(on_cuda=sites[0].mask.is_cuda))([runner(way) for way in ways])
        changes = [compare_rounds(before, after, options.confidence) for before, after in itertools.pairwise(taken)]
    rows = [_verdict(_row(DROP_MASKS, sites), wrong[0], changes[0])]
    if shared and rows[0].status is Status.KEPT:
        rows.append(_verdict(_row(GROUP_HEADS, shared), wrong[1], changes[1]))
    return tuple(rows)


def _kind(site: FlagSite) -> tuple[Any, ...]:
    """Calls of one kind take the same time."""
    op, values = site.traced, [attention_argument(site.traced, name).meta["val"] for name in _NAMES]
    layouts = tuple((value.shape, value.stride(), value.dtype) for value in values)
    return (
        layouts, attention_argument(op, "dropout_p"), op.kwargs.get("scale"), site.meaning, site.mask.shape, site.shared is None,
    )  # fmt: skip


def _why_wrong(calls: Sequence[_Call], way: dict[str, bool], check: Callable[..., ModelCheck]) -> str:
    before = {"is_flagged": False, "is_shared": False}
    for call in calls:
        own = call.one_head()

        def wider(dtype: torch.dtype | None, _seed: int | None = None, *, call: _Call = call) -> Rows:
            return call.one_head(dtype).run(**before)

        found = check(own.run(**way), own.run(**before), wider)
        if not found.is_passed:
            return (
                f"a call's result and gradients are too far from {found.oracle}: relative error {found.fused_rel_l2:.2e}, "
                f"with the mask {found.eager_rel_l2:.2e}; the limit is: {found.limit}"
            )
    return ""


def _verdict(row: GraphRewrite, wrong: str, change: Comparison | None) -> GraphRewrite:
    if wrong:
        return replace(row, status=Status.WRONG_NUMBERS, reason=wrong)
    if change is None:
        return row
    timed = replace(row, step_delta_ns=change.delta_ns, step_delta_ci_ns=(change.low_ns, change.high_ns))
    if change.high_ns < 0:
        return timed
    status = Status.SLOWER if change.low_ns > 0 else Status.WITHIN_NOISE
    return replace(timed, status=status, reason=f"{_HOW}, are not measurably faster")


def _row(rewrite: Rewrite, sites: Sequence[FlagSite], status: Status = Status.KEPT, reason: str = _HOW) -> GraphRewrite:
    return GraphRewrite(
        id=rewrite.id, name=rewrite.title, stage=rewrite.stage, status=status, reason=reason, sites=len(sites)
    )  # fmt: skip


def _timed(*, on_cuda: bool) -> Times:
    def times(candidates: Sequence[Callable[[], object]]) -> list[list[int]]:
        for candidate in candidates:  # the first call of a kernel loads it
            candidate()
        return interleave(
            candidates, rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=on_cuda, timer=step_timer(on_cuda=on_cuda)
        )  # fmt: skip

    return times


def _drawn(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers in the layout of a fake tensor."""
    memory = torch.randn(extent(value), dtype=value.dtype, device=value.device, generator=generator)
    return memory.as_strided(value.shape, value.stride()).requires_grad_()


def _repeat(heads: torch.Tensor, times: int) -> torch.Tensor:
    batch, count, length, width = heads.shape
    return heads[:, :, None].expand(batch, count, times, length, width).reshape(batch, count * times, length, width)
