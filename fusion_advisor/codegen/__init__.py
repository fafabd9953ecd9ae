"""Turns IR programs into kernels that can be launched.

In: a ``Program`` and a backend's name. Out: ``Rendered`` source and the ``BuiltKernel`` compiled from it.
"""
