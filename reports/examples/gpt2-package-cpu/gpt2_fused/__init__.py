"""Fused kernels for `GPT2LMHeadModel`, exported from a run of fusion-advisor; needs torch and no fusion_advisor.

    import gpt2_fused

    gpt2_fused.apply(model)   # this instance; calls of the shapes in the README are fused, all others run its own forward
    gpt2_fused.revert(model)  # exactly as before
"""

from . import _requirements

_requirements.check()

from ._adapter import ModelDiffers, apply, fallbacks, revert  # noqa: E402

__all__ = ["ModelDiffers", "apply", "fallbacks", "revert"]
__version__ = "0.1.0"
