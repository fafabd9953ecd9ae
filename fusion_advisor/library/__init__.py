"""The kernel library: manifests and references, and the match of a chain with one of them.

In: ``kernels/<name>/`` folders and lowered chains. Out: ``KernelSpec`` and ``PatternMatch``.
"""
