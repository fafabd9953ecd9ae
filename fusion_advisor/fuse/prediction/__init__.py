"""Predicted savings and their intervals.

In: a report's rewrites with the times of their kernels. Out: what each was expected to save, and between which ends nine of ten
measurements should lie. Read from records alone, so an older report can be predicted again.
"""
