"""Times calls and kernels and watches the clocks meanwhile.

In: callables. Out: ``Timing`` records in nanoseconds with their confidence interval.
"""
