"""From a plan to a faster model: apply, verify, measure, keep or revert."""

from __future__ import annotations
