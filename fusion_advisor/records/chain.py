"""Chains of ops, where they stand in the model, and the kernel that matches them or the reason against it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place where a chain occurs."""

    op_indices: tuple[int, ...]
    """In topological order; views that only glue the chain together are included."""
    module_path: str
    source_file: str
    source_line: int
    source_text: str
    device_ns: int
    """Of all its runs in a step."""
    runs: int = 1
    """Runs in one step: layers with a graph break in them share one graph, and so this site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Equal op chains of different layers, folded into one row."""

    id: str
    """``C1`` … in rank order."""
    ops: tuple[str, ...]
    """Short op names of one site: ``mul``, ``pow``, ``tanh`` …, views left out."""
    sites: tuple[Site, ...]
    launches: int
    """Kernels of all runs of all sites together."""
    device_ns: int
    share: float
    """Of the captured step's device time."""
    moved_bytes: int
    """Bytes that the unfused ops read and write, all runs of all sites together."""
    floor_bytes: int
    """Each outer input read once, each outer output written once, all runs of all sites together."""
    floor_ns: int
    """floor_bytes over the measured copy bandwidth, plus one smallest launch for each run of each site."""
    saving_bound_ns: int
    """device_ns − floor_ns: an upper bound, not additive between chains."""
    is_reduction: bool
    dtype: str
    shape: tuple[int, ...]
    """Iteration shape of one site."""
    training_pass: str = ""
    """``forward`` or ``backward`` in a training step; empty in any other."""

    @property
    def runs(self) -> int:
        """How often a step runs the chain, at all sites together."""
        return sum(site.runs for site in self.sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A kernel for a chain."""

    chain_id: str
    kernel: str
    """Library kernel's name, or ``generated`` name derived from the chain (``mul_pow_tanh_1a2b``)."""
    is_library: bool
    variant: str = ""
    """Which reference of the kernel matched."""
    constants: tuple[tuple[str, float], ...] = ()
    """Constants bound from the graph, e.g. ``("eps", 1e-06)``."""
    operands: tuple[str, ...] = ()
    """The kernel's names for the chain's operands, in launch order; empty for generated kernels."""
    named_values: tuple[tuple[int, str], ...] = ()
    """The chain's values that are constants of the kernel, counted through its loop nests, and their names."""
    source: str = ""
    """Source of the kernel's idea."""
    license: str = ""
    """SPDX name of the licence that the kernel's manifest names; empty for this project's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMatch:
    """Why a chain gets no kernel; the reason reaches the report."""

    chain_id: str
    code: str
    """``FA6xx``, explained by ``fusion-advisor explain``."""
    reason: str
