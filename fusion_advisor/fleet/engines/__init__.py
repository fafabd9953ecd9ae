"""Engines that run one function over many traces: this machine's cores, or a Ray cluster.

In: tasks. Out: a result for each, in the order in which they end; a task whose worker dies twice gives a result that says so.
Retries, scheduling and memory limits are the engines' own (``concurrent.futures``, Ray).
"""
