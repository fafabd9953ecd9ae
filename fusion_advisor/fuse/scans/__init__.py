"""Unrolled recurrences as one kernel each: found, lowered, built, checked, timed."""

from __future__ import annotations
