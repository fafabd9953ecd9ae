"""Puts kernels into copies of captured graphs.

In: a region and the calls that replace its ops. Out: a rewritten ``GraphModule``.
"""
