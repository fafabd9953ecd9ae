"""The loop: profile, plan, try each fusion, keep what pays, install, check the whole model, report.

In: a loaded workload and options. Out: a ``Report`` and the live ``FusedModel``.
"""
