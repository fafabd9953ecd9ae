"""A run's kernels as a repository for Hugging Face's ``kernels`` library: functions, and layers that ``kernelize`` puts in.

A chain is a layer where it is all that some module's ``forward`` computes, as for an activation or a norm.
"""
