"""The page of what was tried: records come together, failures show, and the command says so."""

from __future__ import annotations

import json
import re

import pytest

from tools import trust

CPU = {"machine": "CPU X", "versions": "Python 3.11, torch 2.13", "date": "2026-01-02"}
GRAPHS = {
    "name": "random graphs", "tried": 1000, "failed": 0, "refused": 12, "kernels": 3400, "launches": 51000, "machine": "GPU H",
    "torch": "2.11", "python": "3.12", "seconds": 200.4, "refused_by_reason": {"FA601": 12},
}  # fmt: skip
SANITIZED = {
    "name": "C++ | sanitized",
    "tried": 50,
    "failed": 0,
    "planted": 6,
    "kernels": 20,
    "seconds": 9.6,
    "details": [],
    **CPU,
}
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.hostile.test_trained" name="test_a" time="1.5"/>
<testcase classname="tests.hostile.test_trained" name="test_b" time="2.0"><failure message="no">wrong</failure></testcase>
<testcase classname="tests.hostile.test_trained.TestMore" name="test_c" time="0.1"><skipped/></testcase>
<testcase classname="tests.tools.test_trust" name="test_d[cpu]" time="0.1"/>
<testcase classname="" name="tests.hostile.test_broken" time="0.0"><error message="no import">x</error></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def write(tmp_path):
    def write(name, *records):
        path = tmp_path / name
        path.write_text(json.dumps(records[0] if len(records) == 1 else records))
        return str(path)

    return write


def rows(page):
    """Cells by name of what was tried."""
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {cells[0]: dict(zip(found[0], cells, strict=True)) for cells in found[1:]}


def test_records_become_rows(tmp_path, write):
    out = tmp_path / "page" / "trust.md"
    assert trust.main(["--out", str(out), write("a.json", GRAPHS), write("b.json", SANITIZED)]) == 0
    found = rows(out.read_text())
    assert found["random graphs"] == {
        "What": "random graphs", "Tried": "1,000", "Failed": "0", "Refused": "12", "Planted": "", "Kernels": "3,400",
        "Launches": "51,000", "Machine": "GPU H", "Versions": "Python 3.12, torch 2.11",
        "Date": found["random graphs"]["Date"], "Seconds": "200",
    }  # fmt: skip
    assert found["C++ \\| sanitized"]["Planted"] == "6"
    assert "None failed." in out.read_text() and "## Failures" not in out.read_text()
    assert {"What is not covered", "How to run it again"} <= set(re.findall(r"^## (.*)$", out.read_text(), re.MULTILINE))


def test_records_of_two_machines_come_together_and_a_new_one_replaces_the_old(tmp_path, write):
    out = tmp_path / "trust.md"
    assert trust.main(["--out", str(out), write("a.json", GRAPHS, SANITIZED)]) == 0
    again = [{**GRAPHS, "tried": 2000}, {**GRAPHS, **CPU, "tried": 30}]
    assert trust.main(["--out", str(out), write("b.json", *again)]) == 0
    kept = {(one["name"], one["machine"]): one["tried"] for one in json.loads((tmp_path / "trust.json").read_text())}
    assert kept == {("random graphs", "GPU H"): 2000, ("random graphs", "CPU X"): 30, ("C++ | sanitized", "CPU X"): 50}


@pytest.mark.parametrize("change", [{"failed": 2, "details": ["seed 7: off by 3", "seed 9: a `tick`"]}, {"tried": 0}])
def test_a_failing_record_shows_and_the_command_fails(tmp_path, write, capsys, change):
    out = tmp_path / "trust.md"
    assert trust.main(["--out", str(out), write("a.json", {**GRAPHS, **change}), write("b.json", SANITIZED)]) == 1
    page = out.read_text()
    assert "**1 of them failed.**" in page and "**random graphs**, GPU H: " in page
    assert "FAILED random graphs" in capsys.readouterr().out
    if "details" in change:
        assert rows(page)["random graphs"]["Failed"] == "**2**"
        assert "- `seed 7: off by 3`\n- `seed 9: a tick`\n" in page
    else:
        assert rows(page)["random graphs"]["Tried"] == "**0**" and "nothing was tried." in page
    # A failure stays until a record of the same name and machine takes its place.
    assert trust.main(["--out", str(out), write("c.json", SANITIZED)]) == 1
    assert trust.main(["--out", str(out), write("d.json", GRAPHS)]) == 0


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"name": "x", "tried": 1}', '{"name": "x", "tried": "many", "failed": 0, "machine": "m"}']
)
def test_a_file_that_is_no_record_is_refused(tmp_path, capsys, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert trust.main(["--out", str(tmp_path / "trust.md"), str(path)]) == 2
    assert "bad.json" in capsys.readouterr().err and not (tmp_path / "trust.md").exists()


def test_tests_are_counted_by_module(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text(JUNIT)
    found = {record.name: record for record in trust.tests_of(path, CPU, 4.0)}
    trained = found[trust.NAMES["test_trained"]]
    assert (trained.tried, trained.failed, trained.refused, trained.seconds) == (2, 1, 1, 3.6)
    assert trained.details == ("test_trained: test_b",) and trained.machine == "CPU X"
    assert found["tests: The page of what was tried: records come together, failures show, and the command says so"].tried == 1
    assert [record.failed for record in found.values()] == [1, 0, 1]  # a module that cannot be imported fails


def test_no_tests_is_a_failure(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text("<testsuites/>")
    (record,) = trust.tests_of(path, CPU, 4.0)
    assert record.is_failing


def test_a_part_that_this_machine_lacks_is_named(tmp_path, capsys):
    assert trust.main(["--out", str(tmp_path / "trust.md"), "--run", "graphs-quantum"]) == 2
    assert "graphs-quantum" in capsys.readouterr().err
