"""Repeated timing without a profiler: of calls, of CUDA graphs, of candidates against each other."""

from __future__ import annotations
