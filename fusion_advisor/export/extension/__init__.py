"""A run's CUDA C++ kernels as a C++ extension on torch's stable ABI, which several versions of torch load from one build."""
