"""Find maximal pointwise/reduction chains on the data-flow graph (not on neighbouring kernel names).

Ops are visited in order; each tries to join the groups of its producers, looking through views. Sums of columns come last, with
what only they read: a norm's gradient keeps the ops that its rows and its columns share. Two groups may become one when

- one kernel can compute the result: the caller's ``judge`` lowers it and answers with the bytes it must move, or a reason;
- no path leaves the group and comes back (such a kernel would wait for itself);
- every input exists before the first outside reader of any output, so one launch can stand for the whole group;
- no read moves across a write to the storage that it reads, through whatever view or in-place result it reads it;
- of two groups that feed each other, the feeding one is launched first.

The launch of a group stands right before its first outside reader. A merge may take away the reader that stopped an earlier one,
so a grown group tries its other producers again: a norm whose result a rotation reads three times joins when the last read does.

Then groups that do not feed each other may become one where both read the same large values (``chains.shared_reads``).

At the end, neighbouring groups of equal ops that read one value (queries and keys, turned by the same tables) may share a launch
though neither feeds the other, where the caller says that it has a kernel for the two. Likewise a group may take in the op that
copies its result into rows of a tensor which the call was given (a KV cache), and a second op that copies another value to
the same rows. Only there does a write join a group: nobody else may read or write that tensor between the group's first op and
its launch, in the ops' order or in that of the launches.

If the caller leaves a group's kernel out, the group may be split again: a part that has a kernel becomes a group of its own.

Needs no torch: it works on the records of ``capture.json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusion_advisor.chains.group import Group, HasKernel, Judge, Verdict, is_convex
from fusion_advisor.chains.op_inputs import (
    behind_views,
    depends_on_inputs,
    for_columns_alone,
    inputs_of,
    is_candidate,
    reduces_columns,
    references,
    relaid_norm,
    returns_several,
    storages_of,
    viewed,
    writes_by_number,
)
from fusion_advisor.chains.shared_reads import Part, is_near, large_reads, offers, saves_bytes
from fusion_advisor.records import Arg, OpClass, OpNode, Ref

MOST_MEMBERS = 96
"""A group is lowered again for each op that joins it, so the time to find an unbounded one grows with the square of its size.

The largest chain in the committed reports has 14 members, views included.
A scan of 64 steps made a group of 392 in 10 s of CPU time; bounded, 1.8 s.
"""


def find_groups(
    ops: Sequence[OpNode], judge: Judge, has_kernel: HasKernel | None = None, is_left_out: HasKernel | None = None,
    may_join: HasKernel = lambda _members, _outputs: True,
) -> list[Group]:  # fmt: skip
    """Return the maximal groups of ``ops``, each op in at most one.

    Args:
        ops: all ops of a capture; ``index`` is the position.
        judge: says whether one kernel can compute a group.
        has_kernel: says whether two groups that do not feed each other should share a launch, or a group end in writes; by
            default none do.
        is_left_out: says whether a group's own kernel may not be used, so that a part of the group for which there is one should
            stand by itself; by default all may.
        may_join: says whether two groups that read the same large values may be one; by default all may.
    """
    finder = _Finder(ops, judge)
    finder.grow()
    if has_kernel is not None:
        finder.pair(has_kernel)
        finder.end_in_writes(has_kernel)
    finder.join(may_join)
    if has_kernel is not None and is_left_out is not None and finder.split(has_kernel, is_left_out):
        finder.pair(has_kernel)
        finder.end_in_writes(has_kernel)
    return finder.groups()


def outputs_of(ops: Sequence[OpNode], groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the outputs of groups whose members are known: what is read outside of each."""
    finder = _Finder(ops, lambda _members, _outputs: Verdict(is_fusible=True))
    return [finder.outputs(frozenset(members)) for members in groups]


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
        self.refused: set[frozenset[int]] = set()
        self.verdict_of: dict[frozenset[int], tuple[tuple[int, ...], Verdict]] = {}

    def grow(self) -> None:
        """Let every op join the groups of its producers; sums of columns, and what only they read, once all others have."""
        depends, late = depends_on_inputs(self.ops), for_columns_alone(self.ops)
        for op in sorted(self.ops, key=lambda op: op.index in late):
            alone = self._alone(op)
            if alone is None or not depends[op.index]:
                continue
            judged = self._judge(alone)
            is_late = judged[1].is_fusible and not self._is_in_order(alone)  # for a group that grew before this op's turn
            if is_late or (len(alone) > 1 and not judged[1].is_fusible):
                continue
            self._accept(alone, judged)
            if not judged[1].is_fusible or (op.index in late and not reduces_columns(op, self.ops)):
                continue
            for producer, glue in self._producers(alone):
                self._try_merge(op.index, producer, glue)
            self._grow(op.index)

    def _alone(self, op: OpNode) -> frozenset[int] | None:
        """What an op begins as a group of: itself, or the copy that lays a norm out and the norm; None where it begins none."""
        norm = relaid_norm(op, self.ops)
        if norm is not None and norm in self.group_of:
            return self.group_of[norm] | {op.index}
        if not is_candidate(op, self.ops):
            return None
        return frozenset({op.index, *self.users[op.index]}) if returns_several(op) else frozenset({op.index})

    def pair(self, has_kernel: HasKernel) -> None:
        """Let a group share the launch of the one before it that has equal ops, where both read a value and there is a kernel."""
        before: dict[tuple[str, ...], frozenset[int]] = {}
        for members in dict.fromkeys(self.group_of.values()):
            if not self.verdict_of[members][1].is_fusible:
                continue
            computing = tuple(self.ops[n].target for n in sorted(members) if self.ops[n].op_class is not OpClass.VIEW)
            other = before.pop(computing, None)
            if other is None or not self._share_launch(other, members, has_kernel):
                before[computing] = members

    def end_in_writes(self, has_kernel: HasKernel) -> None:
        """Let a group take in the write of its result, together with a neighbouring write at the same positions where it can."""
        at: dict[Arg, list[int]] = {}
        for op in self.ops:
            if writes_by_number(op):
                at.setdefault(op.args[2], []).append(op.index)
        for same in at.values():
            for number, write in enumerate(same):
                neighbours = [*same[number + 1 : number + 2], *same[max(number - 1, 0) : number]]
                pairs = [frozenset({write, other}) for other in neighbours if other not in self.group_of]
                if write not in self.group_of:
                    any(self._end(write, writes, has_kernel) for writes in (*pairs, frozenset({write})))

    def _end(self, write: int, writes: frozenset[int], has_kernel: HasKernel) -> bool:
        """Let the group that computes what ``write`` copies take in some writes; whether it did."""
        rows = self.ops[write].args[3]
        assert isinstance(rows, Ref)
        producer, glue = behind_views(rows.index, self.ops)
        group = self.group_of.get(producer)
        if group is None or not self.verdict_of[group][1].is_fusible:
            return False
        members = group | glue | writes
        if not is_convex(members, self.ancestors) or not self._may_write(members):
            return False
        judged = self._judge(members)
        if not judged[1].is_fusible or not self._is_in_order(members) or not has_kernel(tuple(sorted(members)), judged[0]):
            return False
        self._accept(members, judged)
        return True

    def _may_write(self, members: frozenset[int]) -> bool:
        """Whether nobody else sees, or changes, what a group writes to between its first op and its launch (or last op)."""
        place = self._place(members)
        first, end = min(members), max(place, *members)
        targets = [set(self.ops[member].mutates) for member in members]
        written = set().union(*targets)
        if place == len(self.ops) or len(written) != sum(map(len, targets)):
            return False
        for member in members:
            op = self.ops[member]
            read = references(op.args[1:]) if op.mutates else inputs_of(op)
            if any(not written.isdisjoint(storages_of(source, self.ops)) for source in read):
                return False
        between = (self.ops[index] for index in range(first, min(end, len(self.ops))) if index not in members)
        if any(self._touches(op, written) for op in between):
            return False
        others = {group for group in self._launched(set(self.group_of)) if not group <= members}
        return not any(
            min(group) < end and first < max(self._place(group), *group)
            for group in others
            if any(self._touches(self.ops[member], written) for member in group)
        )

    def _touches(self, op: OpNode, written: set[int]) -> bool:
        return not written.isdisjoint(op.mutates) or any(
            not written.isdisjoint(storages_of(source, self.ops)) for source in inputs_of(op)
        )

    def _share_launch(self, one: frozenset[int], other: frozenset[int], has_kernel: HasKernel) -> bool:
        reads = [{self._computed(source) for source in self._read_by(group)} for group in (one, other)]
        both = one | other
        if reads[0].isdisjoint(reads[1]) or not is_convex(both, self.ancestors):
            return False
        judged = self._judge(both)
        if not judged[1].is_fusible or not self._is_in_order(both) or not has_kernel(tuple(sorted(both)), judged[0]):
            return False
        self._accept(both, judged)
        return True

    def join(self, may_join: HasKernel) -> None:
        """Let two groups become one where both read the same large values and one kernel moves clearly fewer bytes."""
        groups = sorted(self._launched(set(self.group_of)), key=min)
        for member, other in offers([(min(group), self._large_reads(group)) for group in groups]):
            self._join(self.group_of[member], self.group_of[other], may_join)

    def _join(self, one: frozenset[int], other: frozenset[int], may_join: HasKernel) -> None:
        both = one | other
        if one is other or len(both) > MOST_MEMBERS or not is_near(one, other, self.ops) or not is_convex(both, self.ancestors):
            return
        judged, parts = self._judge(both), [(self.verdict_of[group][1], self._large_reads(group)) for group in (one, other)]
        if saves_bytes(judged[1], *parts) and self._is_in_order(both) and may_join(tuple(sorted(both)), judged[0]):
            self._accept(both, judged)

    def _large_reads(self, members: frozenset[int]) -> dict[Part, int]:
        return large_reads(members, self.verdict_of[members][0], self.ops)

    def split(self, has_kernel: HasKernel, is_left_out: HasKernel) -> bool:
        """Take the largest part that has a kernel out of each group that is left out; whether there was any."""
        waiting = list(dict.fromkeys(self.group_of.values()))
        left_out: dict[str, bool] = {}
        whole: set[str] = set()
        count = len(waiting)
        for members in waiting:  # what remains of a group is looked at in its turn
            outputs, verdict = self.verdict_of[members]
            if not verdict.is_fusible or any(self.ops[member].mutates for member in members):
                continue
            if verdict.key not in left_out:
                left_out[verdict.key] = is_left_out(tuple(sorted(members)), outputs)
            if not left_out[verdict.key] or verdict.key in whole:
                continue
            rest = next((rest for part in self._parts(members) if (rest := self._take_out(members, part, has_kernel))), None)
            if rest is None:
                whole.add(verdict.key)
            else:
                waiting += rest
        return len(waiting) > count

    def _parts(self, members: frozenset[int]) -> Iterable[frozenset[int]]:
        """The last ops of a group, and the first ones, largest parts first: no path leaves such a part and comes back."""
        computing = sorted(member for member in members if self.ops[member].op_class is not OpClass.VIEW)
        for size in range(len(computing) - 1, 0, -1):
            for ops in (computing[-size:], computing[:size]):
                yield self._with_views(frozenset(ops), members)

    def _with_views(self, computing: frozenset[int], members: frozenset[int]) -> frozenset[int]:
        glue = {
            member
            for member in members - computing
            if self.ops[member].op_class is OpClass.VIEW
            and self._computed(member) in computing
            and not computing.isdisjoint(self._readers(member))
        }
        return computing | glue

    def _take_out(self, members: frozenset[int], part: frozenset[int], has_kernel: HasKernel) -> list[frozenset[int]] | None:
        """Let a part of a group stand by itself; returns the groups that the others become, None where it may not."""
        judged = self._judge(part)
        if not judged[1].is_fusible or not has_kernel(tuple(sorted(part)), judged[0]):
            return None
        others = frozenset(member for member in members - part if self.ops[member].op_class is not OpClass.VIEW)
        together = self._with_views(others, members)
        pieces = [together] if self._judge(together)[1].is_fusible else [frozenset({other}) for other in sorted(others)]
        before = {member: self.group_of[member] for member in members if member in self.group_of}
        self._accept(part, judged)
        for piece in pieces:
            self._accept(piece, self._judge(piece))
        if all(self._is_in_order(group) for group in (part, *pieces) if self.verdict_of[group][1].is_fusible):
            return pieces
        self.group_of.update(before)
        return None

    def groups(self) -> list[Group]:
        """The groups as they are now, in the order of their first op."""
        groups = []
        for members in dict.fromkeys(self.group_of.values()):
            outputs, verdict = self.verdict_of[members]
            groups.append(Group(members=tuple(sorted(members)), outputs=outputs, verdict=verdict))
        return groups

    def _grow(self, index: int) -> None:
        """Offer a group that has grown to the producers of its older members again, until none joins."""
        while len(self.group_of[index]) > 1:
            before = self.group_of[index]
            for producer, glue in self._producers(before):
                self._try_merge(index, producer, glue)
                if self.group_of[index] is not before:
                    break
            else:
                return

    def _producers(self, members: frozenset[int]) -> list[tuple[int, frozenset[int]]]:
        """The grouped ops outside that ``members`` read, latest first, each with the views in between."""
        found: dict[int, frozenset[int]] = {}
        for source in {source for member in members for source in inputs_of(self.ops[member])}:
            producer, glue = behind_views(source, self.ops)
            if producer in self.group_of and producer not in members:
                found[producer] = found.get(producer, frozenset()) | glue
        return sorted(found.items(), reverse=True)

    def _try_merge(self, index: int, producer: int, glue: frozenset[int]) -> None:
        mine, theirs = self.group_of[index], self.group_of[producer]
        if mine is theirs or not self.verdict_of[theirs][1].is_fusible:
            return
        merged = mine | theirs | glue
        if len(merged) > MOST_MEMBERS or merged in self.refused or not is_convex(merged, self.ancestors):
            return
        judged = self._judge(merged)
        if judged[1].is_fusible and self._is_in_order(merged):
            self._accept(merged, judged)
        else:
            self.refused.add(merged)

    def _accept(self, members: frozenset[int], judged: tuple[tuple[int, ...], Verdict]) -> None:
        self.verdict_of[members] = judged
        for member in members:
            if viewed(self.ops[member], self.ops) is None:
                self.group_of[member] = members

    def outputs(self, members: frozenset[int]) -> tuple[int, ...]:
        """Members whose values are read outside, a view standing for the member whose storage it shows."""
        needed: set[int] = set()
        for member in members:
            if not self.ops[member].mutates and all(user in members for user in self.users[member]):
                continue
            needed.add(behind_views(member, self.ops)[0])
        return tuple(sorted(needed & members))

    def _judge(self, members: frozenset[int]) -> tuple[tuple[int, ...], Verdict]:
        outputs = self.outputs(members)
        if not outputs:
            return outputs, Verdict(is_fusible=False, code="FA601", reason="its value is never read")
        place = self._place(members)
        outside = {self._computed(source) for source in self._read_by(members) if source not in members}
        if outside and max(outside) >= place:
            return outputs, Verdict(
                is_fusible=False, code="FA602", reason="an input is only ready after an output is already read"
            )
        write = self._crossed_write(members, place)
        if write is not None:
            reason = f"{self.ops[write].target} writes to what the chain reads"
            return outputs, Verdict(is_fusible=False, code="FA602", reason=reason)
        return outputs, self.judge(tuple(sorted(members)), outputs)

    def _read_by(self, members: frozenset[int]) -> set[int]:
        return {source for member in members for source in inputs_of(self.ops[member])}

    def _place(self, members: frozenset[int]) -> int:
        """The op that the group's launch stands right before: the first outside reader of any member."""
        readers = (user for member in members for user in self.users[member] if user not in members)
        return min(readers, default=len(self.ops))

    def _crossed_write(self, members: frozenset[int], place: int) -> int | None:
        """An op between the group's first member and its launch (or last member) that writes to what the group reads or makes."""
        end = max(place, *members)
        between = [write for write in self.writes if min(members) < write < end and write not in members]
        if not between:
            return None
        touched = {storage for source in self._read_by(members) for storage in storages_of(source, self.ops)} | members
        return next((write for write in between if not touched.isdisjoint(self.ops[write].mutates)), None)

    def _is_in_order(self, members: frozenset[int]) -> bool:
        """Whether every group that feeds ``members`` is launched before it, and every group that it feeds after it."""
        place = self._place(members)
        feeding = {self._computed(source) for source in self._read_by(members)} - members
        fed = {user for member in members for user in self._readers(member)} - members
        return all(self._place(group) < place for group in self._launched(feeding)) and all(
            place < self._place(group) for group in self._launched(fed)
        )

    def _launched(self, indices: set[int]) -> set[frozenset[int]]:
        """The groups of some ops that may become a kernel."""
        groups = {self.group_of[index] for index in indices if index in self.group_of}
        return {group for group in groups if self.verdict_of[group][1].is_fusible}

    def _readers(self, index: int) -> Iterable[int]:
        """The ops that read a value, through views too."""
        for user in self.users[index]:
            if self.ops[user].op_class is OpClass.VIEW:
                yield from self._readers(user)
            else:
                yield user

    def _computed(self, index: int) -> int:
        """The op that made the value a view shows (an in-place op makes a value: the one after its write)."""
        return behind_views(index, self.ops)[0]
