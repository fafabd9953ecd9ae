"""Parquet: one file for each trace, named by the digest of its content, written whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from fusion_advisor.records.trace import ClassTime, FleetChain, TracePart

FORMAT = "fusion-advisor/fleet/1"
_CLASS = pa.struct([("category", pa.string()), ("kernels", pa.int64()), ("device_ns", pa.int64())])
_CHAIN = pa.struct(
    [
        ("ops", pa.string()),
        ("kernel", pa.string()),
        ("sites", pa.int64()),
        ("launches", pa.int64()),
        ("device_ns", pa.int64()),
        ("saving_low_ns", pa.int64()),
        ("saving_ns", pa.int64()),
        ("saving_high_ns", pa.int64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("digest", pa.string()),
        ("url", pa.string()),
        ("size_bytes", pa.int64()),
        ("version", pa.string()),
        ("json_bytes", pa.int64()),
        ("error_code", pa.string()),
        ("error", pa.string()),
        ("job", pa.string()),
        ("model", pa.string()),
        ("rank", pa.int64()),
        ("world_size", pa.int64()),
        ("gpu", pa.string()),
        ("versions", pa.string()),
        ("taken_at_ns", pa.int64()),
        ("steps", pa.int64()),
        ("read_share", pa.float64()),
        ("launches", pa.int64()),
        ("span_ns", pa.int64()),
        ("compute_ns", pa.int64()),
        ("communication_ns", pa.int64()),
        ("collectives_ns", pa.list_(pa.int64())),
        ("has_shapes", pa.bool_()),
        ("classes", pa.list_(_CLASS)),
        ("chains", pa.list_(_CHAIN)),
    ],
    metadata={"format": FORMAT},
)


def part_path(folder: Path, digest: str) -> Path:
    """Return where the part of a trace lies."""
    return folder / f"{digest}.parquet"


def write_part(folder: Path, part: TracePart) -> None:
    """Write a part under a name of its own, then rename it: an interrupted run leaves no half of one.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    table = _table(part)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
    os.close(handle)
    try:
        # One row: neither dictionaries nor statistics help, and they take more than half of the time to write it.
        pq.write_table(table, name, compression="zstd", use_dictionary=False, write_statistics=False)
        Path(name).replace(part_path(folder, part.digest))
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _table(part: TracePart) -> pa.Table:
    """Return a part as a table, by way of JSON: any list that Arrow takes makes it import pandas, a quarter of a second."""
    text = msgspec.json.encode(part)
    table = pyarrow.json.read_json(
        io.BytesIO(text),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="error"),
    )
    return table.replace_schema_metadata(SCHEMA.metadata)


def read_part(folder: Path, digest: str) -> TracePart:
    """Return a part as it was written.

    Raises:
        OSError: it is missing.
        pyarrow.ArrowInvalid: it is damaged.
    """
    row = pq.read_table(part_path(folder, digest), schema=SCHEMA).to_pylist()[0]
    row["classes"] = tuple(ClassTime(**each) for each in row["classes"])
    row["chains"] = tuple(FleetChain(**each) for each in row["chains"])
    row["collectives_ns"] = tuple(row["collectives_ns"])
    return TracePart(**row)


def whole_parts(folder: Path) -> Iterator[tuple[str, str, int, str]]:
    """Yield (digest, url, size, version) of each part; a damaged part is deleted, so that its trace is read again."""
    for path in sorted(folder.glob("*.parquet")):
        try:
            table = pq.read_table(path, columns=["digest", "url", "size_bytes", "version"])
            rows = table.to_pylist()
            is_ours = len(rows) == 1 and rows[0]["digest"] == path.stem
            is_ours = is_ours and (table.schema.metadata or {}).get(b"format") == FORMAT.encode()
        except (pa.ArrowInvalid, KeyError, OSError):
            is_ours = False
        if not is_ours:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            continue
        yield rows[0]["digest"], rows[0]["url"], rows[0]["size_bytes"], rows[0]["version"]
