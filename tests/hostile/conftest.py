"""The helpers of tests/library serve here too."""

from __future__ import annotations
