"""Profiles a workload: its op graph joined to the kernels that each op launched.

In: a loaded workload. Out: a ``Capture`` record and the live regions that ``fuse`` rewrites.
"""
