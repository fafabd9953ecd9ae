"""Checks that need not be made twice: a range of sizes meets the same kernel at many points and in many pieces.

Rows of special numbers are tried once for a kernel. Whether a NaN, an infinity or a subnormal number comes out right follows from
what the kernel computes for an element, not from how many rows there are. So they are known by all that may make a difference:
the program but for its sizes, from which the source is printed, the launch parameters, what a compiler may assume of each size
(that it is 1, or a multiple of 16, 8, 4 or 2), the width of rows that are reduced, the original ops with what each is given, and
the user's limits.
All else is checked at every size: random numbers of several magnitudes, the site's own tensors, NaN in the last element of each
operand, masks, indices, two equal calls, and the memory around the outputs.

Where the sizes and all layouts are equal as well, as at one point of a prefill and of a padded one, the check has one answer but
for the site's own tensors: these alone are looked at, and the times of both ways alone are those that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from fusion_advisor.ir.program import Program, layout_key, nests
from fusion_advisor.records import Numerics, Timing, Tolerance
from fusion_advisor.verify.check_chain import check_calls, check_chain, layout_of
from fusion_advisor.verify.subgraph_oracle import OriginalChain

_MOST_INTEGERS = 1 << 16
"""Of one root that are compared: places in a cache are far fewer."""
_VECTOR = 16
"""No compiler assumes more of a number than that it is a multiple of this."""


@dataclass(slots=True)
class PassedChecks:
    """What kernels have passed in a run.

    Attributes:
        keys: of kernels that have passed rows of special numbers, in all classes.
        alike: sites of which an equal one has passed.
        times: by site, of the original ops and of the kernel.
    """

    keys: set[Hashable] = field(default_factory=set)
    alike: set[Hashable] = field(default_factory=set)
    times: dict[Hashable, tuple[Timing, Timing]] = field(default_factory=dict)

    def check(
        self, site: CheckedSite, call: Callable[..., object], *, seed: int, fast_math: bool, tolerance: Tolerance | None
    ) -> Numerics:
        """Check a kernel's numbers at a site.

        Args:
            site: where it stands.
            call: the kernel.
            seed: of random inputs.
            fast_math: allow what --fast-math costs.
            tolerance: the user's limit.
        """
        special, exact = (fast_math, tolerance, site.form()), (fast_math, tolerance, site.exact())
        if exact in self.alike:
            inputs = "the first site's own tensors; an equal site has passed all else"
            own = check_calls([(site.chain, call, site.roots)], inputs=inputs, fast_math=fast_math, tolerance=tolerance)
            if own.is_passed:
                return own
        found = check_chain(
            site.chain, call, site.roots, seed=seed, fast_math=fast_math, tolerance=tolerance, passed=self.keys, key=special
        )
        if found.is_passed:
            self.alike.add(exact)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSite:
    """A kernel at a site.

    Attributes:
        chain: the original ops.
        roots: the site's own tensors.
        program: what the kernel computes, with its sizes.
        entry: the kernel's name, which holds its title, its options and a digest of the rest.
        tuning: its launch parameters, as bound for these sizes.
    """

    chain: OriginalChain
    roots: Sequence[torch.Tensor]
    program: Program
    entry: str
    tuning: str

    def form(self) -> Hashable:
        """Return what is equal where special numbers must come out alike, whatever the sizes."""
        parts = [part.program for part in nests(self.program)]
        widths = tuple(part.dims[-1] for part in parts if part.is_reduced)
        assumed = tuple(tuple(map(_assumed, numbers)) for part in parts for numbers in _sizes_of(part))
        names = _names_of(self.chain)
        ops = tuple(_form(node, names) for node in self.chain.nodes)
        ends = tuple(names[node] for node in self.chain.outputs), self.chain.written, self.chain.in_place
        return self.entry, self.tuning, layout_key(self.program), widths, assumed, ops, ends

    def exact(self) -> Hashable:
        """Return what is equal where all but the numbers in the site's tensors is.

        Integers that no trial changes are compared too.
        """
        chain = self.chain
        read = tuple((number, *layouts) for _, number, *layouts in chain.outer), tuple(layout for _, layout in chain.unread)
        return (
            self.form(), self.program, tuple(map(layout_of, self.roots)), read, tuple(map(_whole_form, chain.nodes)),
            tuple(map(_integers, self.roots)) if chain.in_place or chain.keeps_indices else (),
        )  # fmt: skip


def _sizes_of(program: Program) -> Iterator[tuple[int, ...]]:
    yield program.dims
    yield from ((*one.strides, *one.steps, one.offset) for one in program.values)
    yield from ((*one.strides, *one.steps, one.offset) for one in program.stores)
    yield tuple(int(value.constant or 0) for value in program.values if value.op == "extent")


def _assumed(number: int) -> int:
    """Return what a compiler may know of a size: that it is 0 or 1, or its largest divisor among 16, 8, 4 and 2."""
    return number if number in (0, 1) else 100 + math.gcd(number, _VECTOR)


def _whole_form(node: Node) -> Hashable:
    """Return an op with its sizes, and the layout of its result."""
    value = node.meta.get("val")
    numbers = tuple(repr(one) for one in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(one, Node))
    layout = (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else ()
    return numbers, layout


def _names_of(chain: OriginalChain) -> dict[Node, str]:
    """Name each value by its place: ``a - b`` and ``b - a`` are other ops of the same tensors."""
    outside = {node: f"root {number}" for node, number, *_ in chain.outer} | {node: "unread" for node, _ in chain.unread}
    return outside | {node: f"op {place}" for place, node in enumerate(chain.nodes)}


def _form(node: Node, names: Mapping[Node, str]) -> Hashable:
    """Return an op and what it is given, but for sizes."""

    def plain(value: Any) -> str:
        return names[value] if isinstance(value, Node) else "" if type(value) is int else repr(value)

    value = node.meta.get("val")
    return str(node.target), repr(pytree.tree_map(plain, (node.args, node.kwargs))), str(getattr(value, "dtype", ""))


def _integers(root: torch.Tensor) -> Hashable:
    """Return what a root of integers or booleans holds; nothing equals a large one."""
    if root.is_floating_point():
        return None
    return tuple(root.flatten().tolist()) if root.numel() <= _MOST_INTEGERS else object()
