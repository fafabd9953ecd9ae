"""Proves of a captured graph that padding a size changes no element that is kept; else names the op that stands in the way.

In: a graph with open sizes and the name of one of them. Out: nothing, or why results at a larger size, cut back, may be others.
``kept.py`` says what is known of a value; the other modules hold one rule for each op.
"""
