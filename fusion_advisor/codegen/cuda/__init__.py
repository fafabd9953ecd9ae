"""Prints programs as CUDA C++ and compiles them with NVRTC."""
