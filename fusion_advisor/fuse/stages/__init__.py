"""Rewrites that change layouts, each tried on top of the decision before it.

In: what was kept so far. Out: what is kept now, on a new capture.
"""
