"""Find maximal pointwise/reduction chains on the data-flow graph (not on neighbouring kernel names).

Ops are visited in order; each tries to join the groups of its producers, looking through views. Two groups may become one when

- one kernel can compute the result: the caller's ``judge`` lowers it and answers with the bytes it must move, or a reason;
- no path leaves the group and comes back (such a kernel would wait for itself);
- every input exists before the first outside reader of any output, so one launch can stand for the whole group;
- nothing that the group reads is written to in between: a chain never moves across a mutation.

Needs no torch: it works on the records of ``capture.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fusion_advisor.records import Arg, OpClass, OpNode, Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What ``judge`` says of a candidate group."""

    is_fusible: bool
    floor_bytes: int = 0
    """Each outer input read once, each outer output written once."""
    key: str = ""
    """Equal for groups that one kernel serves on equal layouts: they are folded into one row."""
    code: str = ""
    reason: str = ""


Judge = Callable[[tuple[int, ...], tuple[int, ...]], Verdict]
"""Called with a group's members (in order) and outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A chain at one place, before equal ones are folded."""

    members: tuple[int, ...]
    """In order; views that only glue the chain together included."""
    outputs: tuple[int, ...]
    verdict: Verdict


def find_groups(ops: Sequence[OpNode], judge: Judge) -> list[Group]:
    """Return the maximal groups of ``ops``, each op in at most one.

    Args:
        ops: all ops of a capture; ``index`` is the position.
        judge: says whether one kernel can compute a group.
    """
    return _Finder(ops, judge).run()


def references(argument: Arg) -> Iterable[int]:
    """Yield the op indices that an argument reads."""
    if isinstance(argument, Ref):
        yield argument.index
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def inputs_of(op: OpNode) -> tuple[int, ...]:
    """Return the indices of the ops whose values ``op`` reads, without repeats."""
    found: dict[int, None] = {}
    for argument in (*op.args, *(value for _, value in op.kwargs)):
        found.update(dict.fromkeys(references(argument)))
    return tuple(found)


def depends_on_inputs(ops: Sequence[OpNode]) -> list[bool]:
    """For each op, whether its value can change between calls; what depends on no input at all is folded, not fused."""
    depends: list[bool] = []
    for op in ops:
        own = op.op_class is OpClass.INPUT and op.role != "constant"
        depends.append(own or bool(op.mutates) or any(depends[index] for index in inputs_of(op)))
    return depends


def is_candidate(op: OpNode) -> bool:
    """Whether an op may stand in a chain: arithmetic, reductions, ``cat`` (a choice by index); nothing that writes in place."""
    arithmetic = op.op_class in (OpClass.POINTWISE, OpClass.REDUCTION) or op.target.startswith("aten.cat.")
    return arithmetic and not op.mutates and len(op.outputs) == 1 and op.outputs[0].shape != ()


class _Finder:
    def __init__(self, ops: Sequence[OpNode], judge: Judge) -> None:
        self.ops = ops
        self.judge = judge
        self.users: list[list[int]] = [[] for _ in ops]
        self.ancestors: list[int] = []
        for op in ops:
            mask = 1 << op.index
            for source in inputs_of(op):
                self.users[source].append(op.index)
                mask |= self.ancestors[source]
            self.ancestors.append(mask)
        self.writes = [op.index for op in ops if op.mutates]
        self.group_of: dict[int, frozenset[int]] = {}
        self.verdict_of: dict[frozenset[int], tuple[tuple[int, ...], Verdict]] = {}

    def run(self) -> list[Group]:
        depends = depends_on_inputs(self.ops)
        for op in self.ops:
            if not is_candidate(op) or not depends[op.index]:
                continue
            alone = frozenset({op.index})
            self._accept(alone, self._judge(alone))
            if not self.verdict_of[alone][1].is_fusible:
                continue
            for producer, glue in self._producers(op):
                self._try_merge(op.index, producer, glue)
        groups = []
        for members in dict.fromkeys(self.group_of.values()):
            outputs, verdict = self.verdict_of[members]
            groups.append(Group(members=tuple(sorted(members)), outputs=outputs, verdict=verdict))
        return groups

    def _producers(self, op: OpNode) -> list[tuple[int, frozenset[int]]]:
        """The grouped ops that ``op`` reads, latest first, each with the views in between."""
        found: dict[int, frozenset[int]] = {}
        for source in inputs_of(op):
            producer, glue = self._behind_views(source)
            if producer in self.group_of:
                found[producer] = found.get(producer, frozenset()) | glue
        return sorted(found.items(), reverse=True)

    def _behind_views(self, index: int) -> tuple[int, frozenset[int]]:
        """The op that computed what a view shows, and the views in between."""
        glue: set[int] = set()
        while (
            self.ops[index].op_class is OpClass.VIEW
            and self.ops[index].args
            and isinstance(viewed := self.ops[index].args[0], Ref)
        ):
            glue.add(index)
            index = viewed.index
        return index, frozenset(glue)

    def _try_merge(self, index: int, producer: int, glue: frozenset[int]) -> None:
        mine, theirs = self.group_of[index], self.group_of[producer]
        if mine is theirs or not self.verdict_of[theirs][1].is_fusible:
            return
        merged = mine | theirs | glue
        if not self._is_convex(merged):
            return
        judged = self._judge(merged)
        if judged[1].is_fusible:
            self._accept(merged, judged)

    def _accept(self, members: frozenset[int], judged: tuple[tuple[int, ...], Verdict]) -> None:
        self.verdict_of[members] = judged
        for member in members:
            if self.ops[member].op_class is not OpClass.VIEW:
                self.group_of[member] = members

    def _is_convex(self, members: frozenset[int]) -> bool:
        mask = sum(1 << member for member in members)
        above = 0
        for member in members:
            above |= self.ancestors[member]
        first = min(members)
        between = (above & ~mask) >> first
        while between:
            lowest = (between & -between).bit_length() - 1
            if self.ancestors[first + lowest] & mask:
                return False
            between &= between - 1
        return True

    def outputs(self, members: frozenset[int]) -> tuple[int, ...]:
        """Members whose values are read outside, a view standing for the member whose storage it shows."""
        needed: set[int] = set()
        for member in members:
            if all(user in members for user in self.users[member]):
                continue
            needed.add(self._behind_views(member)[0])
        return tuple(sorted(needed & members))

    def _judge(self, members: frozenset[int]) -> tuple[tuple[int, ...], Verdict]:
        outputs = self.outputs(members)
        if not outputs:
            return outputs, Verdict(is_fusible=False, code="FA601", reason="its value is never read")
        readers = [user for member in members for user in self.users[member] if user not in members]
        sources = {self._owner(source) for member in members for source in inputs_of(self.ops[member]) if source not in members}
        first_reader = min(readers)
        if sources and max(sources) >= first_reader:
            return outputs, Verdict(
                is_fusible=False, code="FA602", reason="an input is only ready after an output is already read"
            )
        # A view's writes reach every value of its storage, so what counts is the storage that is read, not the op that is named.
        # Between the first member and the kernel's place, or the last member if that is later, nobody may write to what the
        # group reads or makes.
        touched = {storage for source in sources for storage in self._storages(source)} | members
        first, end = min(members), max(first_reader, *members)
        for write in self.writes:
            if first < write < end and touched & set(self.ops[write].mutates):
                reason = f"{self.ops[write].target} writes to what the chain reads"
                return outputs, Verdict(is_fusible=False, code="FA602", reason=reason)
        return outputs, self.judge(tuple(sorted(members)), outputs)

    def _owner(self, index: int) -> int:
        while (owner := self.ops[index].alias_of) is not None:
            index = owner
        return index

    def _storages(self, index: int) -> tuple[int, ...]:
        """The ops that own the storage of a value; an op that writes in place returns what it wrote to."""
        owner = self._owner(index)
        return self.ops[owner].mutates or (owner,)
