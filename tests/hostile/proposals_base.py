"""What the modules of proposals share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.hostile.draw import Draw

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INF = "float('inf')"


class Nothing(Exception):
    """No operand of the kind that a proposal wants."""


Proposal = Callable[["Draw"], str]
