"""Kernels: their specification, the IR, matching, rendering and building."""

from __future__ import annotations
