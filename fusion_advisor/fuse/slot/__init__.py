"""The slot of a module's call: what stands in it and gives it back exactly, and what it counts.

In: a live model. Out: ``InPlace``, the base of every model whose call is replaced.
"""
