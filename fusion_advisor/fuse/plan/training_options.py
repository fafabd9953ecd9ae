"""Options of ``apply`` that a training step cannot serve, read before anything heavy is loaded."""

from __future__ import annotations

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.options import ApplyOptions


def check_options_of_other_phases(options: ApplyOptions) -> None:
    """Refuse what only a training step can serve.

    Args:
        options: of the run.

    Raises:
        UsageError: names the option.
    """
    for name, is_asked in (("--drop-logits", options.drop_logits), ("--memory-budget", options.memory_budget < 1)):
        if is_asked:
            raise UsageError(detail=f"{name} needs --phase train: only there is a loss", help="leave it out")


def check_training_options(options: ApplyOptions) -> None:
    """Refuse what contradicts a training step.

    Args:
        options: of the run.

    Raises:
        UsageError: names the option, the reason and what to do.
    """
    refused = {
        "--freeze": (options.freeze, "every step of an optimizer writes the weights", "leave it out"),
        "--shapes": (options.shapes is not None, "a training step is verified for the sizes of its example", "leave it out"),
        "--dynamic": (
            options.dynamic != "off", "a training step is verified for the sizes of its example",
            "leave it out; calls of other sizes run the original ops",
        ),
        "--rtol and --atol": (
            options.tolerance is not None, "gradients have no scale of their own, and eager's own error is their limit",
            "leave them out",
        ),
    }  # fmt: skip
    for name, (is_asked, reason, help_text) in refused.items():
        if is_asked:
            raise UsageError(detail=f"{name} cannot be used with --phase train: {reason}", help=help_text)
