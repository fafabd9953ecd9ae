"""From a capture to ranked chains; needs no GPU and no torch."""

from __future__ import annotations
