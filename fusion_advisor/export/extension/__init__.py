"""A run's CUDA C++ kernels as a C++ extension on torch's stable ABI, which several versions of torch load from one build.

What it takes to build and to call: docs/measurements/stable_abi.md.
"""
