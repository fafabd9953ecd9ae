"""Which Programs become several launches: the question that a backend asks of every Program."""

from __future__ import annotations

from fusion_advisor.codegen.split.channel_groups import split_groups
from fusion_advisor.codegen.split.column_sums import split_columns
from fusion_advisor.codegen.split.parts import Parts
from fusion_advisor.ir.program import Program


def split_program(program: Program) -> Parts | None:
    """Return the launches that a Program becomes; None where it is one.

    Args:
        program: any.
    """
    return split_groups(program) or split_columns(program)
