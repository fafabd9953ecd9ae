"""The command line under torchrun: each process runs the command, rank 0 alone speaks and writes the report.

A process that torchrun did not start imports nothing of :mod:`fusion_advisor.ranks`.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from fusion_advisor.cli.common import core
from fusion_advisor.cli.common.console import Settings

_GROUP = "fusion_advisor.ranks.group"


class Split(enum.StrEnum):
    """How a model is split over the ranks."""

    AUTO = "auto"


TpOpt = Annotated[
    Split | None,
    typer.Option(
        "--tp", help="Under torchrun: split the model over the ranks by its own plan (tensor parallel).", rich_help_panel="Input"
    ),
]


def is_several(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in environ and environ.get("WORLD_SIZE", "1") != "1"


def is_first(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks: it is alone, or rank 0."""
    return not is_several(environ) or environ.get("RANK") == "0"


def quiet_unless_first(settings: Settings) -> None:
    """Let ranks other than 0 show no progress.

    Args:
        settings: changed.
    """
    if not is_first():
        settings.progress = "none"


def ended(code: int) -> int:
    """Return the exit code of a program that is done; end it at once where NCCL still waits for the other ranks.

    Args:
        code: of the program.
    """
    if is_several() and any(thread.name == import_module(_GROUP).TAKING_APART for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at a usual exit the C++ library would wait as that thread does
    return code


@contextlib.contextmanager
def joined(request: Any) -> Iterator[Any]:
    """Join the other ranks for the time of a run; yields None where there are none.

    Args:
        request: of this process.

    Raises:
        NotUnderTorchrun: ``--tp`` in a process that torchrun did not start.
        RanksDiffer: the ranks were not started alike.
        RankFailed: another rank failed, hung or died.
    """
    if not is_several() and getattr(request, "tp", None) is None:
        yield None
        return
    ranks = import_module(_GROUP).join()
    try:
        with ranks.ending_together():
            import_module("fusion_advisor.ranks.run").check_start(ranks, request)
            yield ranks
            ranks.leave()
    except BaseException:
        ranks.abandon()
        raise


def placed(loaded: core.Loaded, ranks: Any) -> core.Loaded:
    """Return this rank's part of a loaded model.

    Args:
        loaded: the whole model.
        ranks: from :func:`joined`; None: it stays whole.
    """
    return loaded if ranks is None else import_module("fusion_advisor.ranks.run").placed(loaded, ranks)


def folder_of(ranks: Any, run_id: str, directory: Path | None, default: Path) -> tuple[str, Path | None]:
    """Return the run's id and folder: rank 0's own, for the others a folder inside.

    Args:
        ranks: from :func:`joined`; None: as given.
        run_id: of this process.
        directory: asked for.
        default: of all runs.
    """
    if ranks is None:
        return run_id, directory
    first_id: str = ranks.first("run id", run_id)
    home = directory if directory is not None else default / first_id
    return first_id, directory if ranks.is_first else home / f"rank{ranks.rank}"
