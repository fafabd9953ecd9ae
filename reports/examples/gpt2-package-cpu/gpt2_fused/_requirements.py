"""What this package asks of torch, checked before anything of it is used."""

import torch

MADE_WITH = "2.13.0+cpu"
ATEN_OPS = (
    "aten.addmm.default",
    "aten.alias.default",
    "aten.linear.default",
    "aten.reshape.default",
    "aten.scaled_dot_product_attention.default",
    "aten.split.Tensor",
    "aten.transpose.int",
    "aten.view.default",
)
"""Ops that the forward calls by name."""


def check() -> None:
    """Raise ImportError where this torch lacks something."""
    missing = [] if hasattr(torch.library, "register_fake") else ["torch.library.register_fake (torch 2.4)"]
    for name in ATEN_OPS:
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(f"op {name}")
    if missing:
        needed = ", ".join(missing)
        raise ImportError(f"{__package__} was exported with torch {MADE_WITH}; torch {torch.__version__} has no {needed}")
