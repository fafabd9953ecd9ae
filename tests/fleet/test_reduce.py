"""One trace becomes one part: the numbers of ``profile --trace``, or the reason why there are none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.errors import CannotWrite
from fusion_advisor.fleet.find import find_traces
from fusion_advisor.fleet.parts import part_path, read_part, whole_parts
from fusion_advisor.fleet.reduce import LEAST_SHARE, Task, reduce_trace
from fusion_advisor.fuse.modes.trace_profile import profile_trace
from fusion_advisor.library.trace_hints import library_sequences


@pytest.fixture(scope="module")
def reduced(traces, tmp_path_factory):
    parts = tmp_path_factory.mktemp("parts")
    sequences = library_sequences()
    sources = find_traces([f"{traces}/**/*.json.gz"])
    results = [reduce_trace(Task(source=source, parts=parts, sequences=sequences)) for source in sources]
    return parts, {result.source.url: result for result in results}


def test_a_part_holds_what_the_trace_alone_tells(traces, reduced):
    parts, results = reduced
    url = next(url for url in sorted(results) if "qwen" in url and "bad" not in url)
    part = read_part(parts, results[url].digest)
    alone = profile_trace(Path(url), min_share=LEAST_SHARE, top=1000)
    assert [(chain.ops, chain.device_ns, chain.launches) for chain in part.chains] == [
        (" → ".join(chain.ops), chain.device_ns, chain.launches) for chain in alone.chains
    ]
    assert [chain.saving_high_ns for chain in part.chains] == [chain.saving_bound_ns for chain in alone.chains]
    assert (part.span_ns, part.steps, part.launches) == (alone.span_ns, alone.steps, alone.launches)
    assert sum(row.device_ns for row in part.classes) == alone.busy_ns
    assert part.compute_ns + part.communication_ns == alone.busy_ns
    assert (part.job, part.model) == (Path(url).parent.name, "qwen2.5-7b")


def test_bounds_of_a_saving_are_ordered(reduced):
    parts, results = reduced
    seen = 0
    for result in results.values():
        for chain in read_part(parts, result.digest).chains:
            if chain.saving_ns is not None:
                seen += 1
                assert 0 <= chain.saving_low_ns <= chain.saving_ns <= chain.saving_high_ns <= chain.device_ns
                assert chain.kernel or chain.saving_low_ns == 0
    assert seen > 20


CODES = {
    "cut": "FA501",
    "empty": "FA501",
    "no-json": "FA501",
    "no-events": "FA501",
    "lost-kernels": "FA502",
    "bomb": "FA501",
    "nested": "FA501",
    "numbers": "FA501",
    "endless-string": "FA501",
    "names": "",
}


@pytest.mark.parametrize("kind", CODES)
def test_a_broken_trace_is_a_row_with_its_code(reduced, kind):
    parts, results = reduced
    (result,) = (result for url, result in results.items() if url.endswith(f"-{kind}.json.gz"))
    part = read_part(parts, result.digest)
    assert part.error_code == result.error_code == CODES[kind]
    assert bool(part.error) == bool(CODES[kind])
    assert part.job.isprintable()


def test_a_known_trace_is_not_read_again(reduced):
    parts, results = reduced
    result = next(iter(results.values()))
    again = reduce_trace(Task(source=result.source, parts=parts, sequences={}))
    assert again.is_known and again.json_bytes == 0 and again.digest == result.digest


def test_a_missing_file_leaves_no_part(tmp_path, reduced):
    _, results = reduced
    source = replace(next(iter(results.values())).source, url=str(tmp_path / "gone.json.gz"))
    result = reduce_trace(Task(source=source, parts=tmp_path, sequences={}))
    assert result.error_code == "FA501" and not result.digest and not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_half_written(tmp_path, reduced, monkeypatch):
    import pyarrow.parquet as pq

    def full(table, name, **_):
        Path(name).write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    _, results = reduced
    with pytest.raises(CannotWrite, match="No space left"):
        reduce_trace(Task(source=next(iter(results.values())).source, parts=tmp_path, sequences={}))
    assert not list(tmp_path.iterdir())


def test_a_damaged_part_is_dropped(tmp_path, reduced):
    parts, results = reduced
    digests = sorted(result.digest for result in results.values())[:3]
    for digest in digests:
        part_path(tmp_path, digest).write_bytes(part_path(parts, digest).read_bytes())
    damaged = part_path(tmp_path, digests[1])
    damaged.write_bytes(damaged.read_bytes()[:-100])
    part_path(tmp_path, "f" * 64).write_bytes(part_path(parts, digests[0]).read_bytes())
    assert [digest for digest, *_ in whole_parts(tmp_path)] == [digests[0], digests[2]]
    assert not damaged.exists()


def test_damaged_gzip_is_a_row_too(traces, tmp_path):
    whole = next(path for path in sorted(traces.rglob("*.json.gz")) if "bad" not in str(path)).read_bytes()
    middle = len(whole) // 2
    (tmp_path / "flipped.json.gz").write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    (source,) = find_traces([str(tmp_path / "flipped.json.gz")])
    result = reduce_trace(Task(source=source, parts=tmp_path, sequences={}))
    assert result.error_code == "FA501" and "gzip" in result.error


def test_a_part_is_written_without_pandas(traces, tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom fusion_advisor.fleet.find import find_traces\n"
        "from fusion_advisor.fleet.reduce import Task, reduce_trace\n"
        f"source = next(one for one in find_traces(['{traces}/**/*.json.gz']) if 'bad' not in one.url)\n"
        f"assert not reduce_trace(Task(source=source, parts=Path('{tmp_path}'), sequences={{}})).error\n"
        "assert 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
