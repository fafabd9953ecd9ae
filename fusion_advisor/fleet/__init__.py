"""A fleet: which chains cost the most GPU-hours over thousands of traces.

In: trace files, by patterns that fsspec opens. Each is reduced where it is read to one row of chains and times, and stored as one
Parquet file named by the trace's digest. Engines (this machine's cores, Ray) run one function over the traces; retries and
scheduling are theirs. Out: a :class:`fusion_advisor.records.trace.FleetReport`, made by DuckDB from those files.
Figures: ``docs/measurements/fleet.md``.
"""
