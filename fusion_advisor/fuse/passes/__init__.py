"""One file per graph rewrite; the order they run in is in fuse/apply.py."""

from __future__ import annotations
