"""``--weights jobs.csv``: the GPU-hours that each job really burns."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.errors import BadWeights
from fusion_advisor.files.regular_file import read_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One job."""

    job: str
    gpu_hours: float
    model: str = ""


def read_weights(path: Path) -> tuple[Weight, ...]:
    """Return the jobs of a CSV file with the columns ``job``, ``gpu_hours`` and, if you like, ``model``.

    Raises:
        BadWeights: a column is missing, a job stands twice, or its hours are no number above 0.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadWeights(name=path, detail=str(getattr(error, "strerror", "") or error)) from error
    rows = csv.DictReader(text.splitlines())
    if missing := {"job", "gpu_hours"} - set(rows.fieldnames or ()):
        raise BadWeights(name=path, detail=f"the column {sorted(missing)[0]} is missing")
    found: dict[str, Weight] = {}
    for number, row in enumerate(rows, start=2):
        try:
            hours = float(row["gpu_hours"])
        except (TypeError, ValueError):
            hours = math.nan
        if not (0 < hours < math.inf):
            raise BadWeights(name=path, detail=f"line {number}: `{row['gpu_hours']}` is no number of hours above 0")
        if row["job"] in found:
            raise BadWeights(name=path, detail=f"line {number}: the job `{row['job']}` stands twice")
        found[row["job"]] = Weight(job=row["job"], gpu_hours=hours, model=row.get("model") or "")
    return tuple(found.values())
