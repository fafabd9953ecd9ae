"""A model id or a live module becomes a workload: the model on its device and the inputs of one call.

In: a request (model, phase, dtype, shapes). Out: ``LoadedWorkload``, which ``capture`` runs.
"""
