"""Builds a program while rules ask for elements of ops.

In: op records and the rule tables. Out: IR values, collapsed loops and their order.
"""
