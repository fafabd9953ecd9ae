"""Lines of a run's log."""

from __future__ import annotations

import time

from fusion_advisor.cli.common import console


def test_lines_of_the_log_say_when_they_were_written(tmp_path):
    settings = console.Settings()
    settings.write_log("== load")
    settings.open_log(tmp_path / "log.txt")
    time.sleep(0.02)
    settings.write_log("two\nlines")
    first, *rest = (tmp_path / "log.txt").read_text().splitlines()
    assert first.endswith("  == load") and rest[0].endswith("  two") and rest[1] == "lines"
    assert 0 <= float(first.split()[0]) < float(rest[0].split()[0])
