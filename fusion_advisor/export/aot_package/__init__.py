"""A run as an AOTInductor package: the fused model compiled ahead of time, and its kernels as a C++ op library.

The forward is the Python package's. torch.export traces it and AOTInductor compiles all but the kernels. The kernels stay as
they were checked: the library registers them by torch's stable ABI, so that no Python runs in a call.
"""
