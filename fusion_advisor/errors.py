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


# cli and report


class UnreadableReport(AdvisorError):
    """A report or capture that is truncated, damaged, or not one of ours."""

    code = "FA501"
    message = "`{name}` is not readable as a report: {detail}"
    note = "nothing was changed"
    hint = "pass a run directory or its report.json; if the file was cut short, run the same command again"
    exit_code = 9


class UnknownSchema(AdvisorError):
    """A report of another version of the program."""

    code = "FA503"
    message = "`{name}` follows the schema `{found}`; this version reads `{expected}`"
    note = "a figure read under the wrong schema would be wrong without looking wrong, so nothing was read"
    hint = "read it with the version that wrote it, or run again with this one"
    exit_code = 9


class UnknownRun(AdvisorError):
    """A run that does not exist, or a prefix that fits none or several."""

    code = "FA504"
    message = "no run `{name}`: {detail}"
    hint = "{known}"
    exit_code = 9


class RunExists(AdvisorError):
    """The output directory already holds a run."""

    code = "FA505"
    message = "`{path}` already holds a run"
    hint = "choose another directory with -o, or pass --force to overwrite its report"
    exit_code = 2


class CannotWrite(AdvisorError):
    """The run directory cannot be written."""

    code = "FA306"
    message = "cannot write `{path}`: {detail}"
    hint = "free some space, or choose another directory with -o"
    exit_code = 5


class NumericsFailed(AdvisorError):
    """A rewrite changed results and --strict was given."""

    code = "FA402"
    message = "numbers changed: {detail}"
    note = "every rewrite that failed its check was removed; the model computes what it did before"
    hint = "the report shows each error beside the original's own; without --strict this is a warning"
    exit_code = 7


class CompileFailed(AdvisorError):
    """A kernel did not compile and --strict was given."""

    code = "FA401"
    message = "a kernel did not compile: {detail}"
    note = "the ops it would have replaced still run as they were"
    hint = "the compiler's own words are in the run's log.txt; without --strict this is a warning"
    exit_code = 8


class NothingReplaced(AdvisorError):
    """A fusion was planned, replaced nothing, and --strict was given."""

    code = "FA403"
    message = "a fusion replaced nothing: {detail}"
    note = "a rewrite that silently does nothing is a bug in the rewrite, not a slow one"
    hint = "the report's receipt says why each site was left; without --strict this is a warning"
    exit_code = 6


class KernelCheckFailed(AdvisorError):
    """A library kernel broke its own contract in `kernels check`."""

    code = "FA404"
    message = "`{name}` failed {failed} of {total} cases"
    hint = "the rows marked `failed` say which case, backend and dtype"
    exit_code = 10


class UnknownCode(AdvisorError):
    """`explain` was asked for a code that no error has."""

    code = "FA002"
    message = "no error has the code `{asked}`"
    hint = "{near}"
    exit_code = 2
