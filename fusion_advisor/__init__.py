"""Profile, fuse, check, keep what pays: the public API."""

from __future__ import annotations
