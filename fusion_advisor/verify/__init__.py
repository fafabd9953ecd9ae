"""Are the numbers right? A kernel and the ops that it replaces, each against the same ops in fp64.

In: the original ops of a site and a call. Out: ``Numerics`` with the error, eager's own error, and every fault found.
"""
