"""Tries rewrites, times them against each other and keeps what pays.

In: a plan and a live capture. Out: a ``Decision`` with one verdict for each rewrite.
"""
