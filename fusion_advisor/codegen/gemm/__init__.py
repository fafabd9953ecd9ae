"""Kernels of linear layers with a norm, a gate or an activation around the product.

In: a ``GemvProblem``. Out: rendered kernels, as for programs.
"""
