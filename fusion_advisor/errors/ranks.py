"""FA8xx: several processes that run one model."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


class NotUnderTorchrun(AdvisorError):
    """--tp was asked for in a process that knows no others."""

    code = "FA801"
    message = "--tp needs several processes, and {detail}"
    hint = "start it with: torchrun --nproc-per-node N -m fusion_advisor …"
    exit_code = 2


class RanksDiffer(AdvisorError):
    """Ranks with different versions, models, inputs or decisions."""

    code = "FA802"
    message = "rank {rank} differs from rank 0 in {what}: {detail}"
    note = "nothing was left in any rank's model"
    hint = "start all ranks with the same command, versions, model and inputs"
    exit_code = 4


class UnsupportedPlan(AdvisorError):
    """A model that cannot be split over the ranks as asked."""

    code = "FA803"
    message = "`{model_id}` cannot be split over {ranks} ranks: {detail}"
    hint = "pass another number of processes, or FILE.py:factory that returns a model which is parallel already"
    exit_code = 4


class RankFailed(AdvisorError):
    """Another rank failed, hung or died."""

    code = "FA804"
    message = "rank {rank} ended the run: {reason}"
    note = "the run ended on all ranks; nothing was left in their models"
    hint = "rank {rank}'s own message is above, or in its log"
    exit_code = 3
