"""What the backward pass may compute again without a memory budget: options with the names of the field's training kernels.

Torch's partitioner keeps what a product reads, though the ops that made it may be computed again of values that are kept anyway.
``gelu-checkpoint`` is that of an activation. GPT-2 keeps the input of its GELU and its result, 0.2 GB each in a layer at 32 x
1,024 tokens. ``attn-dropout-checkpoint`` is that of the dropout of attention's probabilities, where attention is a formula. Mask
and probabilities are kept for their own gradients, and the result is a product of both.

Each option has a row in the report: what it spares, and what it costs. It stays where the step is not measurably slower with it.
Where the step's peak would be above eager's, or it spares much of the peak, it may cost a little time
(``fuse.train.judge.recompute_choice``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fusion_advisor import units
from fusion_advisor.fuse.rewrite.record import StepRewrite
from fusion_advisor.records import GraphRewrite, Status
from fusion_advisor.runtime.torch_internals import fake_mode
from fusion_advisor.timing.paired import Comparison

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)
_VIEWS = (
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.t.default, _ATEN.transpose.int,
    _ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.permute.default,
)  # fmt: skip
_ACTIVATIONS = (
    _ATEN.gelu.default, _ATEN.tanh.default, _ATEN.silu.default, _ATEN.sigmoid.default, _ATEN.relu.default, _ATEN.erf.default,
    _ATEN.leaky_relu.default, _ATEN.hardswish.default, _ATEN.mish.default,
)  # fmt: skip
_DROPOUT = _ATEN.native_dropout.default


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOption:
    """One option.

    Attributes:
        rewrite: its id and title.
        is_in: whether a forward pass has something for it.
        put: tags, in a joint graph, what the backward pass computes again; returns at how many sites.
    """

    rewrite: StepRewrite
    is_in: Callable[[GraphModule], bool]
    put: Callable[[GraphModule], int]


def _activations(graph: Graph) -> set[Node]:
    """Results of activations and their gates that products read."""
    backward = _of_backward(graph)
    operands = {one for node in graph.nodes if node.target in _PRODUCTS for one in _read(node)}
    return {one for one in operands - backward if _is_pointwise(one) and _has_activation(one)}


def _is_dropped(value: Node) -> bool:
    """Whether a value is the result of a dropout."""
    source = value.args[0] if value.target is operator.getitem and value.args[1] == 0 else None
    return isinstance(source, Node) and source.target is _DROPOUT


def _has_dropouts(module: GraphModule) -> bool:
    return any(_is_dropped(one) for node in module.graph.nodes if node.target in _PRODUCTS for one in _read(node))


def _put_dropouts(joint: GraphModule) -> int:
    """Give the backward pass a product of mask and probabilities in place of a dropout's result that products read."""
    backward, found = _of_backward(joint.graph), list[Node]()
    for node in joint.graph.find_nodes(op="call_function", target=_DROPOUT):
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if 0 in parts and 1 in parts and node not in backward and node.args[2] is True:
            path = [parts[0], *_views_of(parts[0])]
            if any(user in backward and user.target in _PRODUCTS for one in path for user in one.users):
                found.append(_again(joint, node, parts[0], parts[1], backward))
    return _tagged(found)


def _again(joint: GraphModule, node: Node, result: Node, mask: Node, backward: set[Node]) -> Node:
    source, share, _ = node.args
    assert isinstance(share, int | float)
    place = next(one for one in reversed(joint.graph.nodes) if one in (result, mask))
    with joint.graph.inserting_after(place):
        kept = joint.graph.call_function(_ATEN.mul.Tensor, (source, mask))
    with joint.graph.inserting_after(kept):
        again = joint.graph.call_function(_ATEN.mul.Tensor, (kept, 0.0 if share == 1 else 1 / (1 - share)))
    for made in (kept, again):
        made.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        made.meta["val"] = fake_mode.fake_result(joint, made)
    _move_views(joint.graph, result, again, backward)
    return again


def _move_views(graph: Graph, result: Node, again: Node, backward: set[Node]) -> None:
    """Let the backward pass read the value that is made again, through views of its own."""
    for user in list(result.users):
        if user in backward:
            user.replace_input_with(result, again)
        elif user.target in _VIEWS and any(one in backward for view in (user, *_views_of(user)) for one in view.users):
            with graph.inserting_after(again):
                copied = graph.node_copy(user, lambda one: again if one is result else one)
            _move_views(graph, user, copied, backward)


def _views_of(value: Node) -> list[Node]:
    found = [user for user in value.users if user.target in _VIEWS]
    return [*found, *(deeper for one in found for deeper in _views_of(one))]


def _tagged(nodes: Sequence[Node] | set[Node]) -> int:
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return len(nodes)


def _of_backward(graph: Graph) -> set[Node]:
    """What depends on a gradient of an output."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_given = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_given or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _read(product: Node) -> Iterator[Node]:
    """The operands of a product behind their views."""
    for operand in product.all_input_nodes:
        source = operand
        while source.target in _VIEWS and isinstance(source.args[0], Node):
            source = source.args[0]
        yield source


def _is_pointwise(node: Node) -> bool:
    is_cast = node.target is _ATEN._to_copy.default
    return is_cast or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _has_activation(node: Node) -> bool:
    """Whether an activation is among the pointwise ops that make a value."""
    seen, waiting = set[Node](), [node]
    while waiting:
        one = waiting.pop()
        if one in seen or not (_is_pointwise(one) or one.target in _VIEWS):
            continue
        if one.target in _ACTIVATIONS:
            return True
        seen.add(one)
        waiting.extend(one.all_input_nodes)
    return False


GELU_CHECKPOINT = StepRewrite(id="gelu-checkpoint", title="activations again")
ATTN_DROPOUT_CHECKPOINT = StepRewrite(id="attn-dropout-checkpoint", title="attention's dropout again")
RECOMPUTE_OPTIONS = (
    RecomputeOption(
        rewrite=GELU_CHECKPOINT, is_in=lambda forward: bool(_activations(forward.graph)),
        put=lambda joint: _tagged(_activations(joint.graph)),
    ),
    RecomputeOption(rewrite=ATTN_DROPOUT_CHECKPOINT, is_in=_has_dropouts, put=_put_dropouts),
)  # fmt: skip


def row_of_option(option: RecomputeOption, sites: int, kept: tuple[int, int], peaks: tuple[int, int]) -> GraphRewrite:
    """Return the report's row of an option that was not timed.

    Args:
        option: tried.
        sites: values that are computed again.
        kept: bytes that the forward pass keeps for the backward pass, without it and with it.
        peaks: of the step, by the lifetimes of its tensors, likewise.
    """
    words = f"the forward pass keeps {units.size(kept[1])} in place of {units.size(kept[0])}"
    saved = max(0, peaks[0] - peaks[1])
    reason = f"{words}; the step's peak does not fall" if not saved else f"{words}; its time was not taken"
    return GraphRewrite(
        id=option.rewrite.id, name=option.rewrite.title, stage=option.rewrite.stage, status=Status.NOT_REPLACED, reason=reason,
        sites=sites, saved_bytes=saved,
    )  # fmt: skip


def is_too_slow(change: Comparison, most_share: float) -> bool:
    """Whether a step with an option takes too long: measurably longer, and more than a share longer with confidence.

    Args:
        change: of the step's time.
        most_share: of it that the option may cost.
    """
    return change.low_ns > 0 and (not most_share or change.ratio_high < 1 - most_share)


def verdict_on_option(
    row: GraphRewrite, wrong: str, change: Comparison, *, most_share: float = 0.0, why: str = ""
) -> GraphRewrite:  # fmt: skip
    """Return the row of an option that was timed: it stays if its numbers pass and the step is not too slow with it.

    Args:
        row: of :func:`row_of_option`.
        wrong: what is wrong with the numbers; empty where they pass.
        change: of the step's time.
        most_share: of the step's time that it may cost with confidence; 0: it must not be measurably slower.
        why: it was tried; ends the reason.
    """
    timed = replace(row, step_delta_ns=change.delta_ns, step_delta_ci_ns=(change.low_ns, change.high_ns))
    words = row.reason.partition(";")[0]
    if wrong:
        return replace(row, status=Status.WRONG_NUMBERS, reason=wrong, saved_bytes=0)
    if is_too_slow(change, most_share):
        more = f" by more than {most_share:.0%}" if most_share else ""
        reason = f"{words}, and the step is slower{more}; a --memory-budget below 1 chooses among such values, the cheapest first"
        return replace(timed, status=Status.SLOWER, reason=f"{reason}{why}")
    more = f" by more than {most_share:.0%}" if change.low_ns > 0 else ""
    cost = f"and the step is not measurably slower{more}"
    return replace(timed, status=Status.KEPT, reason=f"{words}, {cost}{why}")
