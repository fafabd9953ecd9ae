"""The model in the user's hands: dispatch, guards, other shapes, saved plans, the check of the whole model.

In: rewritten regions. Out: ``FusedModel``.
"""
