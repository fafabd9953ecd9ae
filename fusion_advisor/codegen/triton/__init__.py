"""Prints programs as Triton kernels and compiles them."""
