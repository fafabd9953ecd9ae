"""Times launch parameters and algorithms of one kernel and remembers the fastest.

In: a program or a linear layer. Out: a tuning; results are cached on disk by GPU, kernel and sizes.
"""
