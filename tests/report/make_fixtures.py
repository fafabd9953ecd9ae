"""Write tests/data/reports/*.json again: python -m tests.report.make_fixtures."""

from __future__ import annotations

from pathlib import Path

from fusion_advisor.records.serialize import write_report
from tests.report.fixtures import ALL

DIRECTORY = Path(__file__).parent.parent / "data" / "reports"

if __name__ == "__main__":
    for name, build in ALL.items():
        write_report(build(), DIRECTORY / f"{name}.json")
