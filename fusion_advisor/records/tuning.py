"""Launch parameters of a tile kernel."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch parameters of a tile kernel; None leaves the backend's own choice."""

    block_cols: int | None = None
    """Columns of a tile; in CUDA kernels, of a pack at most."""
    block_rows: int | None = None
    """Rows of a tile; in CUDA kernels that walk rows in parts, rows under way on a multiprocessor."""
    num_warps: int | None = None
    packs: int | None = None
    """CUDA only: 16-byte packs of a thread; unlike a number of warps it suits rows of any width."""
    cluster: int | None = field(default=None, repr=False)  # kernels without clusters are named after the rest of the repr
    """CUDA only, from compute capability 9.0 on: blocks that share a row; the row then stays in their registers."""
