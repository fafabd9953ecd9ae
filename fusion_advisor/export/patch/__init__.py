"""A run's kernels as a unified diff against the model's own source files.

A chain whose ops are all that some statements of one function compute is expressed there: the patched function asks the kernels'
package first, and runs its own statements where that has no kernel for the call. Everything else is listed with its reason.
"""
