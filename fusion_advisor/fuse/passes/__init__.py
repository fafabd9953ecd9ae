"""One file per graph rewrite; the order they run in is in ``fuse.bench`` and, for merged GEMMs, ``fuse.merging``."""

from __future__ import annotations
