"""FA0xx: the command line and configuration."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


class UsageError(AdvisorError):
    """Options that contradict each other or name something that does not exist."""

    code = "FA001"
    message = "{detail}"
    hint = "{help}"
    exit_code = 2


class UnknownCode(AdvisorError):
    """`explain` was asked for a code that no error has."""

    code = "FA002"
    message = "no error has the code `{asked}`"
    hint = "{near}"
    exit_code = 2


class BadConfig(AdvisorError):
    """A configuration file or an environment variable that names no option, or gives it no value that fits."""

    code = "FA003"
    message = "{source}: {detail}"
    note = "nothing was run"
    hint = "{hint}"
    exit_code = 2
