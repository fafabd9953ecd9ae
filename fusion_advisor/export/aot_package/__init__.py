"""A run as an AOTInductor package: the fused model compiled ahead of time, with its kernels in it or in a C++ op library.

The forward is the Python package's. torch.export traces it and AOTInductor compiles it, Triton kernels included. C++ kernels stay
as they were checked: the library registers them by torch's stable ABI. No Python runs in a call.
"""
