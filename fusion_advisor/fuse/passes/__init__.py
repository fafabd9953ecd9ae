"""One file per graph rewrite; the order they run in is in ``fuse.bench``; unread rows and merged GEMMs come last."""

from __future__ import annotations
