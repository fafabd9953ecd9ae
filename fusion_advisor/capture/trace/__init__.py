"""Runs torch.profiler and reads its traces.

In: a callable, or a Chrome trace on disk. Out: kernels and launches, each joined to its op.
"""
