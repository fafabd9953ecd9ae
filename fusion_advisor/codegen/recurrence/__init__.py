"""Recurrences over time as one kernel, in Triton and C++."""

from __future__ import annotations
