"""One rule for each ATen op: which IR values compute the wanted element.

In: an op and an index. Out: the number of an IR value. A new op is one entry in one table.
"""
