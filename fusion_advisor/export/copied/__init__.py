"""Modules of which each exported package has a copy: they import the standard library, torch and each other alone.

Where cuda-bindings are installed, a recorded CUDA graph is changed by them.
"""
