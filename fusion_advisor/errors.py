"""One class per user mistake: the code, the sentence, the hint and the exit code live on the class.

Raise sites give only the facts (``raise UnknownModel(model_id=..., near=...)``); the CLI catches :class:`AdvisorError` once and
prints it in rustc's shape. Exit codes: 2 usage, 3 environment, 4 model, 5 memory or disk, 6 measurement unusable, 7 numerics
with --strict, 8 compile with --strict, 9 bad input file, 10 gate failed, 130 interrupted.
"""

from __future__ import annotations

from typing import ClassVar


class AdvisorError(Exception):
    """Base of every mistake a user can mend.

    Class attributes:
        code: ``FA101`` …; ``fusion-advisor explain CODE`` tells more.
        message: one sentence with ``{facts}`` in it.
        note: what else is known; left out when empty after formatting.
        hint: what to do next.
        exit_code: the process's exit code.
    """

    code: ClassVar[str] = "FA000"
    message: ClassVar[str] = "{detail}"
    note: ClassVar[str] = ""
    hint: ClassVar[str] = ""
    exit_code: ClassVar[int] = 1

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        super().__init__(self.message.format(**facts))

    @property
    def note_text(self) -> str:
        """The note with its facts filled in."""
        return self.note.format(**self.facts).strip()

    @property
    def hint_text(self) -> str:
        """The hint with its facts filled in."""
        return self.hint.format(**self.facts).strip()


class UsageError(AdvisorError):
    """Options that contradict each other or name something that does not exist."""

    code = "FA001"
    message = "{detail}"
    hint = "{help}"
    exit_code = 2


class CannotCapture(AdvisorError):
    """Dynamo could not capture any part of the model."""

    code = "FA303"
    message = "`{model_id}` could not be captured: {detail}"
    note = "TorchDynamo captured no graph at all, so there is nothing to rank"
    hint = "pass a factory that returns the part of the model that is plain PyTorch, or run with -vv for dynamo's own words"
    exit_code = 4
