"""How the committed bench is measured again: its rows, who takes which, and how parts become one run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.evaluate.bench.records import read_run
from fusion_advisor.library.discover import load_references
from fusion_advisor.records import Bandwidth
from tools.rerun_bench import COMMITTED, jobs, merged, take


@pytest.fixture(scope="module")
def run():
    return read_run(COMMITTED / "bench.json")


def test_every_committed_row_can_be_measured_again(run):
    found = jobs(run)
    assert len(found) == len(run.rows) > 300
    for (spec, variant, case, dtype), row in zip(found, run.rows, strict=True):
        assert (spec.name, case.sizes, dtype) == (row.kernel, row.sizes, row.dtype)
        assert variant in dict(load_references(spec).references)


def test_each_number_is_taken_once(tmp_path):
    assert [take(tmp_path / "count") for _ in range(12)] == list(range(12))


def test_parts_become_one_run_in_the_order_of_the_rows(run):
    rows = run.rows[:5]
    other = Bandwidth(copy_bytes_per_s=4_000 * 10**9, launch_ns=1_250)
    parts = [
        (replace(run, rows=(rows[0], rows[3], rows[4]), method=("how",)), [0, 3, 4]),
        (replace(run, rows=(rows[1], rows[2]), bandwidth=other), [1, 2]),
    ]
    whole = merged(parts, 5)
    assert whole.rows == rows
    assert whole.method[0] == "how" and len(whole.method) == 2
    assert "2 GPUs" in whole.method[1] and "and 4.000 TB/s" in whole.method[1] and "and 1.25 µs" in whole.method[1]
    assert merged([(replace(run, rows=rows, method=("how",)), range(5))], 5).method == ("how",)


@pytest.mark.parametrize("numbers", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_a_missing_row_and_one_measured_twice_are_refused(run, numbers):
    with pytest.raises(ValueError, match="of 3 rows were measured"):
        merged([(replace(run, rows=run.rows[: len(numbers)]), numbers)], 3)
