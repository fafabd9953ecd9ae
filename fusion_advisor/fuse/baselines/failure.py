"""Says in one sentence why a way to run the step could not be run."""

from __future__ import annotations

import traceback
from pathlib import Path

from fusion_advisor.errors import AdvisorError
from fusion_advisor.fuse.baselines.liger import NotAvailable
from fusion_advisor.timing import interleaving


def sentence_of(error: Exception) -> str:
    """Return what went wrong, in one line; who raised it, and where, unless the words are ours or the driver's.

    Args:
        error: of a compiler or of a peer, which raise what they like.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    has_heading = bool(lines) and lines[0].endswith(":")  # "backend='inductor' raised:"
    text = " ".join(lines[: 2 if has_heading else 1]).rstrip(":")
    if text and isinstance(error, NotAvailable | AdvisorError | interleaving.CannotRecord):
        return text
    raised: BaseException = error
    while raised.__cause__ is not None:
        raised = raised.__cause__
    frames = traceback.extract_tb(raised.__traceback__)
    where = f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{where}: {text}" if text else f"{type(error).__name__}{where}, without a message"
