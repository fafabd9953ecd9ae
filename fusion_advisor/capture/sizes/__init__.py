"""Captures whose sizes are open.

In: a call and the names of its dims. Out: one graph for all sizes of a range, with what dynamo took for granted of them, and the
same graph at one size, node for node.
"""
