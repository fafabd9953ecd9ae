"""Which checks of a kernel have one answer at several sizes, so that a run makes them once.

In: a chain, its kernel and the sizes. Out: a key, equal where special values must come out alike.
"""
