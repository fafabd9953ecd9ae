"""Kernels in which the GPUs of one host talk to each other.

In: a process group, sizes of a call. Out: launchers that every rank calls in the same order, on buffers that all ranks map.
Figures of two H200s: ``docs/measurements/ranks.md``.
"""
