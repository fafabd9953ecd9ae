"""What the model did: the op graph, the device's timeline, and the join of both."""

from __future__ import annotations
