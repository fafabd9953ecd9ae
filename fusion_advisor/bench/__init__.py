"""``kernels bench``: every kernel against its peers and the memory limit."""

from __future__ import annotations
