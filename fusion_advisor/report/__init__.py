"""From records to a Report, and from a Report to its views."""

from __future__ import annotations
