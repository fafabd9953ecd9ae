"""What ``kernel.toml`` says about a kernel; ``manifest`` reads it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_advisor.codegen.common.interface import Tuning

CHAIN, LINEAR = "chain", "linear"
"""Kinds of kernels. A chain of pointwise ops and reductions is found by its pattern, a linear layer by the pass of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One tensor parameter of the references."""

    name: str
    shape: tuple[str | int, ...]
    """Letters that cases give sizes to, or numbers: ``("R", "C")``, ``("B", 1, "S", "D")``."""
    order: tuple[str | int, ...]
    """The same dims, as they lie in memory, outermost first."""
    dtype: str = ""
    """Fixed dtype; empty: the case's."""
    below: str | int = ""
    """Of integers: they lie in ``range(below)``, a letter of a case or a number; ids lie below their table's length."""
    planted: tuple[int, ...] = ()
    """Values outside that range which mean something and are checked too, as -100 says that a target does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes and dtypes to check or bench."""

    sizes: tuple[tuple[str, int], ...]
    dtypes: tuple[str, ...]
    orders: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    """Inputs that lie in memory in another order than the manifest's; only in ``[[check]]``."""

    def __str__(self) -> str:
        moved = [f"{name}[{' '.join(map(str, order))}]" for name, order in self.orders]
        return " ".join([*(f"{letter}={size}" for letter, size in self.sizes), *moved])


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A sweep to bench: every combination of its sizes. Several of one name add up."""

    name: str
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: tuple[str, ...]

    def cases(self) -> tuple[Case, ...]:
        """One case per combination; the last letter varies fastest."""
        letters = [letter for letter, _ in self.sizes]
        combinations = itertools.product(*(choices for _, choices in self.sizes))
        return tuple(Case(sizes=tuple(zip(letters, chosen, strict=True)), dtypes=self.dtypes) for chosen in combinations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemv:
    """A kernel that is written by hand: a linear layer, see ``codegen.gemm.problem``."""

    is_gated: bool
    """The weight holds gate and up rows; the result is ``silu(gate) * up``."""
    norm_offsets: tuple[tuple[str, float], ...]
    """(reference's variant, what it adds to the norm's weight)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """A kernel's manifest."""

    name: str
    summary: str
    source: str
    """Paper or URL of the idea."""
    backends: tuple[str, ...]
    dtypes: tuple[str, ...]
    constraints: tuple[str, ...]
    """Sentences for the reader; what they say is enforced by the match."""
    has_backward: bool
    inputs: tuple[Input, ...]
    """In the order of the references' parameters."""
    outputs: tuple[str, ...]
    """Names, in the order in which references return them; a reference that returns fewer returns the last ones."""
    constants: tuple[tuple[str, float], ...]
    """Keyword floats of the references with their defaults; a match binds them from the graph."""
    tunables: tuple[Tuning, ...]
    check: tuple[Case, ...]
    bench: tuple[Case, ...]
    folder: Path
    presets: tuple[Preset, ...] = ()
    gemv: Gemv | None = None
    """Set where the kernel comes from the GEMV templates, not from its reference's ops."""
    license: str = ""
    """SPDX name of the licence; empty: this project's own."""

    @property
    def kind(self) -> str:
        """``chain`` or ``linear``; ``evaluate.kinds`` says what each means."""
        return CHAIN if self.gemv is None else LINEAR

    def is_contracted(self, tensor: Input) -> bool:
        """Whether an input's last dim is summed over: random values are then scaled so that results keep the inputs' size."""
        return self.kind == LINEAR and tensor.name == "weight"

    def shape_of(self, tensor: Input, case: Case) -> tuple[int, ...]:
        """An input's shape in a case."""
        sizes = dict(case.sizes)
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape)

    def laid_out(self, case: Case) -> KernelSpec:
        """The manifest with its inputs in the memory orders of a case."""
        orders = dict(case.orders)
        return replace(self, inputs=tuple(replace(tensor, order=orders.get(tensor.name, tensor.order)) for tensor in self.inputs))


def below_of(tensor: Input, sizes: Mapping[str, int]) -> int:
    """What the elements of an integer input lie below; at least 1, so that a table without rows can still be written down."""
    return max(1, sizes[tensor.below] if isinstance(tensor.below, str) else tensor.below)
