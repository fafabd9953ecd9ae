"""The kernel IR: a program of scalar values over a loop nest, with affine indices.

In: nothing but records. Out: ``Program``, which lowering makes and codegen prints.
"""
