"""A saved plan without a second trace: the captured graph in a file, and what the trace had read of the model.

In: a live capture. Out: a file; in another process the same capture, or the reason why the model is traced again.
"""
