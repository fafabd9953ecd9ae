"""Compare predicted with measured savings of the runs in folders.

``python -m tools.predictions FOLDER …`` prints the tables; ``--out`` writes them with JSON and a picture. By default each run is
judged with the intervals that all other runs give, so that none is judged by a factor that it gave itself. ``--recorded`` judges
the intervals that the reports hold. ``--calibrate`` prints the factors of all runs, for ``CALIBRATION`` in
``fusion_advisor/fuse/prediction/interval.py``. What came out: ``docs/measurements/predictions.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.predictions import forms
from tools.predictions.calibrate import calibrate, graph_call_ns, left_out
from tools.predictions.observations import observe_all, read_runs
from tools.predictions.records import SUFFIX, write_records
from tools.predictions.table import markdown, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; left out, the process's own.

    Returns:
        The exit code: 1 where no run was found.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.predictions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, or a folder with runs in it")
    parser.add_argument("--records", type=Path, help=f"write what predictions need of all runs into this file (*{SUFFIX})")
    parser.add_argument("--out", type=Path, help="write predictions.md, predictions.json and predictions.svg here")
    parser.add_argument("--recorded", action="store_true", help="judge the intervals that the reports hold")
    parser.add_argument("--calibrate", action="store_true", help="print the factors that these runs give")
    parser.add_argument("--forms", action="store_true", help="compare ways to predict a chain's saving")
    asked = parser.parse_args(arguments)
    reports, refused = read_runs(asked.folders)
    for line in refused:
        print(line, file=sys.stderr)
    if not reports:
        print("no report.json in these folders", file=sys.stderr)
        return 1
    if asked.forms:
        print(forms.markdown(reports))
        return 0
    if asked.records:
        write_records(asked.records, reports)
    found = calibrate(reports)
    if asked.calibrate:
        for kind, factor in found.factors.items():
            print(f"Kind.{kind.name}: {factor}")
        print(f"graph_call_ns={graph_call_ns(reports)} in these runs; {found.graph_call_ns} in the code")
        return 0
    observations = observe_all(reports) if asked.recorded or len(reports) == 1 else left_out(reports)
    print(markdown(observations, found))
    if asked.out:
        write(asked.out, observations, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
