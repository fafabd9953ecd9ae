"""What every error shares: the facts, and a message, a note and a hint that name them."""

from __future__ import annotations

from typing import ClassVar


class AdvisorError(Exception):
    """Base class of every mistake that a user can fix.

    Class attributes:
        code: ``FA101`` …; ``fusion-advisor explain CODE`` prints the long text.
        message: one sentence with ``{facts}`` in it.
        note: further facts; not printed when empty.
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
        for line in filter(None, (self.note_text, self.hint_text)):
            self.add_note(line)  # Python's own traceback ends with them; the command line prints its own view

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the facts: an error of a worker process is raised again in this one."""
        return _again, (type(self), self.facts)

    @property
    def note_text(self) -> str:
        """The note with its facts filled in."""
        return self.note.format(**self.facts).strip()

    @property
    def hint_text(self) -> str:
        """The hint with its facts filled in."""
        return self.hint.format(**self.facts).strip()


def _again(cls: type[AdvisorError], facts: dict[str, object]) -> AdvisorError:
    return cls(**facts)
