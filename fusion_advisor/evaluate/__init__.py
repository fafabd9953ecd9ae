"""Checks kernels of the library by themselves, without a model.

In: kernel names, backends and dtypes. Out: one row for each case with its error and eager's.
"""
