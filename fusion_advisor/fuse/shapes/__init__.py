"""One plan for a range of sizes.

In: a model, an example call and the ranges of its dims. Out: pieces of the ranges, each with one graph that was traced once, the
rewrites that pay near its points, and kernels whose sizes are arguments. A size inside is never traced, lowered or compiled.
"""
