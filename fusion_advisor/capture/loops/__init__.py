"""Loops over time that Python unrolled into a graph: recognised, and left as one op each."""

from __future__ import annotations
