"""Kernels in which the GPUs of one host talk to each other.

In: a buffer of each rank that all ranks map, sizes of a call. Out: launchers that every rank calls in the same order.
Figures of two H200s: ``docs/measurements/ranks.md``.
"""
