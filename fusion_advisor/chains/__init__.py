"""Finds and ranks op chains that could become one kernel.

In: a ``Capture``. Out: ``Chain`` records ordered by their share of device time; no torch is needed.
"""
