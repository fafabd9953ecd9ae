"""What follows a sum over ranks: the bias of its linear, a residual add and a norm.

The chain is found on the data-flow graph by what it computes, as chains of a plan are. It need not be one that a kernel of ours
was kept for: with the sum it is another kernel, which is timed by itself. The bias is left out of the chain that is compared with
the library, because each rank's kernel adds it once to the whole sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.group import Group
from fusion_advisor.chains.op_inputs import inputs_of
from fusion_advisor.collectives.launch_shape import Norm
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.program import ROUNDINGS
from fusion_advisor.library.discover import list_kernels
from fusion_advisor.library.match import Found, Pattern, find_match
from fusion_advisor.library.patterns import kernel_patterns
from fusion_advisor.lowering.lower import lower
from fusion_advisor.records import OpClass, Ref

_ADD, _WAIT = "aten.add.Tensor", "_c10d_functional.wait_tensor.default"
_KERNELS = ("add_rmsnorm", "add_layernorm")


class Left(Exception):
    """A sum that stays; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows a sum, by op indices.

    Attributes:
        members: ops that the call computes beside the sum, in order.
        norm: the norm.
        eps: of it.
        inputs: what the call reads beside the sum, in its order: residual, weight, a LayerNorm's shift, the linear's bias.
        has_offset: whether the last of them is such a bias.
        outputs: ops whose results it makes, by the kernel's name: ``out``, and ``total`` where somebody reads it.
    """

    members: tuple[int, ...]
    norm: Norm
    eps: float
    inputs: tuple[int, ...]
    has_offset: bool
    outputs: tuple[tuple[str, int], ...]


class Followers:
    """Finds what follows each sum of a bench's graphs.

    Args:
        bench: over the graphs as they are now.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._node_at: dict[int, Node] = {index: node for one in bench.index_of for node, index in one.items()}
        groups = find_groups(bench.ops, lambda members, outputs: judge_with(bench.ops, members, outputs))
        self._group_of = {member: group for group in groups if group.verdict.is_fusible for member in group.members}

    def node(self, index: int) -> Node:
        """Return an op's node."""
        return self._node_at[index]

    def readers(self, index: int) -> list[int]:
        """Return the ops that read a value, by index; -1 for the region's results.

        Args:
            index: of the op that computes it.
        """
        index_of = self._bench.index_of[self._bench.ops[index].region]
        return [index_of.get(user, -1) for user in self._node_at[index].users]

    def tail(self, waited: int) -> Tail:
        """Return what follows a sum.

        Args:
            waited: the op that waits for it.

        Raises:
            Left: nothing that the kernel computes.
        """
        views, start = self._behind_views(waited)
        offset = None
        if start is not None and (offset := self._offset(start, {waited, *views})) is not None:
            more, after = self._behind_views(start)
            views, waited, start = (*views, start, *more), start, after
        group = None if start is None else self._group_of.get(start)
        if group is None:
            raise Left("no residual add and norm follow it that one kernel computes")
        return self._matched(group, waited, views, offset)

    def _behind_views(self, index: int) -> tuple[tuple[int, ...], int | None]:
        """Return the views of a value, and the one op that reads it through them; None where there is no such op.

        Raises:
            Left: several read it.
        """
        views: list[int] = []
        readers: set[int] = set()
        waiting = [index]
        while waiting:
            for reader in self.readers(waiting.pop()):
                op = self._bench.ops[reader]
                if reader >= 0 and op.alias_of == index and not op.mutates:
                    views.append(reader)
                    waiting.append(reader)
                else:
                    readers.add(reader)
        if len(readers) > 1:
            raise Left("other ops read the sum before the residual is added")
        first = min(readers, default=-1)
        return tuple(sorted(views)), first if first >= 0 else None

    def _offset(self, add: int, sums: set[int]) -> int | None:
        """Return the bias that an op adds to a sum, or to a view of it; None where it adds something else."""
        op = self._bench.ops[add]
        if op.target != _ADD or op.kwargs or len(op.args) != 2:
            return None
        left, right = op.args
        if not isinstance(left, Ref) or not isinstance(right, Ref) or (left.index in sums) == (right.index in sums):
            return None
        other = right.index if left.index in sums else left.index
        return other if len(self._bench.ops[other].outputs[0].shape) == 1 else None

    def _matched(self, group: Group, summed: int, views: tuple[int, ...], offset: int | None) -> Tail:
        members = [member for member in group.members if member not in views]
        try:
            lowered = lower(self._bench.ops, members, group.outputs)
        except CannotLower as refusal:
            raise Left(f"what follows is no one kernel: {refusal.reason}") from refusal
        found = find_match(lowered.program, _patterns())
        if found is None:
            raise Left(self._why_none(members))
        norm = _norm_of(found)
        operands = found.program.operands
        names = [operand.name for operand in operands if not operand.is_output]
        given = dict(zip(names, lowered.given, strict=True))
        outputs = tuple(zip((operand.name for operand in operands if operand.is_output), lowered.outputs, strict=True))
        residuals = [at for name, at in given.items() if name in ("x", "residual") and at != summed]
        if len(residuals) != 1:
            raise Left("what is added is the sum itself")
        shift = (given["bias"],) if norm == "layer" else ()
        offsets = () if offset is None else (offset,)
        return Tail(
            members=tuple(sorted({*members, *views})), norm=norm, eps=dict(found.constants).get("eps", 0.0),
            inputs=(residuals[0], given["weight"], *shift, *offsets), has_offset=offset is not None,
            outputs=outputs,
        )  # fmt: skip

    def _why_none(self, members: Sequence[int]) -> str:
        """Say what follows a sum instead of one residual add and a norm."""
        ops, sums = self._bench.ops, set()
        waiting, seen = list(members), set(members)
        while waiting:  # back through what adds biases, and not to the layer before, whose sum the norm there reads too
            op = ops[waiting.pop()]
            is_own = op.op_class in (OpClass.POINTWISE, OpClass.VIEW) and len(self.readers(op.index)) == 1
            if op.target == _WAIT:
                sums.add(op.index)
            elif is_own or op.index in members:
                more = set(inputs_of(op)) - seen
                seen |= more
                waiting += more
        if len(sums) > 1:
            return f"{len(sums)} sums over ranks are added before the norm, and the kernel sums once"
        return "what follows is not one residual add and an RMSNorm or LayerNorm with a weight"


def _norm_of(found: Found) -> Norm:
    """Return the norm that a chain computes. Llama's and torch's RMSNorm are one variant where no value is rounded in between."""
    if found.kernel == "add_layernorm":
        return "layer"
    rounds = any(value.op in ROUNDINGS.values() for value in found.program.values)
    return "rms" if rounds else "rms-once"


@functools.cache
def _patterns() -> tuple[Pattern, ...]:
    """The library's forms of a residual add and a norm."""
    return tuple(pattern for spec in list_kernels() if spec.name in _KERNELS for pattern in kernel_patterns(spec))
